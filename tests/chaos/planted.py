"""An interpreter that is our own engine: `engine.py` behind the name `python`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ENGINE = Path(__file__).with_name("engine.py")

WRAPPER = """#!/bin/sh
case "$1" in
-I) echo '["0.29.0", "{folder}/vllm/__init__.py"]' ;;
*) shift; {variables} exec {python} {engine} "$@" ;;
esac
"""


def plant(folder: Path, **variables: str) -> Path:
    """The interpreter, in `folder`, with these variables in its environment."""
    python = folder / "python"
    python.write_text(
        WRAPPER.format(
            folder=folder,
            variables=" ".join(f"{k}={shlex.quote(v)}" for k, v in variables.items()),
            python=sys.executable,
            engine=ENGINE,
        )
    )
    python.chmod(0o755)
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    return python
