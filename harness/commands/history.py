"""`kvmatrix history DIR [CELL...]`: what cells were, run after run."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import history, nights, safe
from harness.commands.show import screen
from harness.errors import UsageError, unknown
from harness.report import strips


def add(commands: Any) -> None:
    """Its parser."""
    command = commands.add_parser(
        "history",
        help="what cells were, run after run",
        description="For each cell of the newest run of a history folder (`pytest --history DIR`): "
        "a sign for each of its last runs, oldest first, and since when it is what it is; flaky "
        "cells, which one engine gave both ways, come first. A run without the cell is shown as "
        f"{strips.ABSENT[0]} (or {strips.ABSENT[1]}), never as a pass.",
        epilog="example: kvmatrix history nightly-history 'dsv4-default-*'; exit code: 0 shown, "
        "1 shown, but some of it could not be read, 2 usage",
    )
    command.add_argument("folder", metavar="DIR", help="the history folder")
    command.add_argument("cells", nargs="*", metavar="CELL", help="ids of cells, also with * and ?")
    command.add_argument(
        "--runs", type=int, default=history.LAST, metavar="N", help=f"most ({history.LAST})"
    )
    command.add_argument("--json", action="store_true", help="print a JSON object")
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print the strips. The exit code of the epilog."""
    folder = Path(options.folder)
    if options.runs < 1:
        raise UsageError(f"--runs {options.runs}: at least 1 is needed")
    if not folder.is_dir():
        raise UsageError(f"{folder} is no history folder: `pytest --history DIR` makes one")
    found, faults = nights.read(folder, max(nights.READ, options.runs))
    for fault in faults:
        print(f"kvmatrix: {safe.printable(fault)}", file=sys.stderr)
    if not found:
        raise UsageError(f"{folder} has no run: `pytest --history {folder}` adds one")
    newest = found[-1]
    data = {**newest.about, "cells": list(newest.cells)}
    told = history.history(data, found[:-1], last=options.runs).to_json()
    told["cells"] = _chosen(told["cells"], options.cells)
    if options.json:
        print(json.dumps(told, indent=1))
    else:
        shown = screen()
        ordered = sorted(told["cells"], key=lambda cell: not cell["flaky"])
        print("\n".join(strips.table(shown, told, ordered)))
        missing = [f"missing: {strips.named(cell)}" for cell in told["missing"]]
        print("".join(f"{shown.clean(each)}\n" for each in missing), end="")
    return 1 if faults else 0


def _chosen(cells: Sequence[dict[str, Any]], patterns: Sequence[str]) -> list[dict[str, Any]]:
    """The cells that any pattern names. UsageError for a pattern that names none."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(cell["id"], pattern) for cell in cells):
            ids = {cell["id"] for cell in cells}
            raise unknown("cell", pattern, ids, "`kvmatrix history DIR` lists all")
    return [
        cell
        for cell in cells
        if not patterns or any(fnmatch.fnmatchcase(cell["id"], each) for each in patterns)
    ]
