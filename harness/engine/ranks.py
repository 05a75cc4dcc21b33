"""Rank 0 of a group whose other ranks are only named: what one GPU of several keeps.

Layers ask their group for its size and their rank, and take their share of the heads; nothing is
ever sent. torch's own `fake` backend says so for every collective.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch


def start(size: int) -> None:
    """Make this process rank 0 of a tensor-parallel group of `size`."""
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    backend = "gloo"
    if size > 1:
        backend = "fake"
        _without_others()
    rendezvous = Path(tempfile.mkdtemp()) / "store"
    init_distributed_environment(size, 0, f"file://{rendezvous}", 0, backend)
    ensure_model_parallel_initialized(size, 1)


def _without_others() -> None:
    """Let nothing wait for the ranks that are only named."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    make_group = torch.distributed.new_group

    def new_group(ranks: Any = None, **options: Any) -> Any:
        # Groups for coordination on the host would be real ones.
        return make_group(ranks, **{**options, "backend": "fake"})

    torch.distributed.new_group = new_group
    MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)
