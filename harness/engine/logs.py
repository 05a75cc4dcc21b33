"""vLLM's log on a virtual device, configured once rather than by each config."""

from __future__ import annotations

import logging


def configure() -> None:
    """Let the `vllm` loggers speak from INFO on, to stderr.

    The environment tells vLLM to leave its loggers alone (`VLLM_CONFIGURE_LOGGING`): it would
    configure all of them anew with each config that it makes, for 40 ms a cell.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s [%(filename)s:%(lineno)d] %(message)s"))
    logger = logging.getLogger("vllm")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
