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
        description="For each cell of a history folder (`pytest --history=DIR`): a sign for each "
        "of its last runs, oldest first, and since when it is what it is; flaky cells, which one "
        "engine gave both ways, come first, and those that the newest run lacks last. A run "
        f"without the cell is {strips.ABSENT[0]} (or {strips.ABSENT[1]}), never a pass.",
        epilog="example: kvmatrix history nightly-history 'dsv4-default-*'; exit code: 0 shown, "
        "1 shown, but some of it could not be read, 2 usage",
    )
    command.add_argument("folder", metavar="DIR", help="the history folder")
    # The default: without one, argparse says that it is required.
    command.add_argument(
        "cells", nargs="*", default=[], metavar="CELL", help="ids of cells, also with * and ?"
    )
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
        raise UsageError(f"{folder} is no history folder: `pytest --history=DIR` makes one")
    found, faults = nights.read(folder, max(nights.READ, options.runs))
    for fault in faults:
        print(f"kvmatrix: {safe.printable(fault)}", file=sys.stderr)
    if not found:
        raise UsageError(f"{folder} has no run: `pytest --history {folder}` adds one")
    *earlier, newest = sorted(found, key=lambda night: night.when)
    data = {**newest.about, "cells": list(newest.cells)}
    told = history.history(data, earlier, last=options.runs).to_json()
    named = _named([*told["cells"], *told["missing"]], options.cells)
    for part in ("cells", "missing"):
        told[part] = [cell for cell in told[part] if cell["id"] in named]
    if options.json:
        print(json.dumps(told, indent=1))
    else:
        shown = screen()
        ordered = sorted([*told["cells"], *told["missing"]], key=lambda cell: not cell["flaky"])
        print("\n".join(strips.table(shown, told, ordered)))
    return 1 if faults else 0


def _named(cells: Sequence[dict[str, Any]], patterns: Sequence[str]) -> set[str]:
    """The ids that any pattern names, all where there is none. UsageError for a pattern that names
    none."""
    ids = {cell["id"] for cell in cells}
    found = set() if patterns else ids
    for pattern in patterns:
        matching = {each for each in ids if fnmatch.fnmatchcase(each, pattern)}
        if not matching:
            raise unknown("cell", pattern, ids, "`kvmatrix history DIR` lists all")
        found |= matching
    return found
