"""A `buildkite-agent` of our own: it records its calls, and keeps artifacts in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

SCRIPT = '''#!{python}
"""Records a call, and answers as a store of artifacts in a folder would."""
import fnmatch, json, pathlib, shutil, sys

store = pathlib.Path({store!r})
arguments, body = sys.argv[1:], "" if sys.stdin.isatty() else sys.stdin.read()
with open(store / "calls.jsonl", "a") as log:
    log.write(json.dumps([arguments, body]) + "\\n")
if arguments[:2] == ["artifact", "upload"]:
    for path in pathlib.Path().glob(arguments[2].lstrip("./")):
        if path.is_file():
            place = store / "artifacts" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
if arguments[:2] == ["artifact", "download"]:
    root = store / "artifacts"
    found = [p for p in root.rglob("*") if fnmatch.fnmatch(str(p.relative_to(root)), arguments[2])]
    for path in found:
        place = pathlib.Path(arguments[3]) / path.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    sys.exit(0 if found else 1)
'''


def install(folder: Path, store: Path) -> Path:
    """The binary, in `folder`; what it keeps and records goes to `store`."""
    folder.mkdir(parents=True, exist_ok=True)
    store.mkdir(parents=True, exist_ok=True)
    binary = folder / "buildkite-agent"
    binary.write_text(SCRIPT.format(python=sys.executable, store=str(store)))
    binary.chmod(0o755)
    return binary


def calls(store: Path) -> list[tuple[list[str], str]]:
    """Arguments and stdin of each call."""
    path = store / "calls.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(arguments, body) for arguments, body in map(json.loads, lines)]
