"""How to run a cell of a matrix.json again. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness import reproduce
from harness.change import case_of
from harness.engine import arguments

_RELEASE = re.compile(r"\d+\.\d+\.\d+(?:\.post\d+)?")


def command(cell: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """The command line for one cell, of an entry of `cells` and its entry of `engines`. An engine
    that is no release is the one that is installed: nothing else could give it."""
    version = str(cell["engine"])
    spec = None
    if _RELEASE.fullmatch(version):
        spec = f"cpu:{version}" if engine.get("platform") == "cpu" else version
    length = (cell.get("capacity") or {}).get("max_model_len")
    more = {"max-model-len": None if length == arguments.MAX_MODEL_LEN else length}
    return reproduce.pytest(case_of(cell), cell["device"], spec, more)
