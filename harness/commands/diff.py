"""`kvmatrix diff OLD NEW`: what a newer run has that an older one had not."""

from __future__ import annotations

import argparse
from typing import Any

from harness import diff
from harness.commands.show import compare, formats
from harness.report import differences


def add(commands: Any) -> None:
    """Its parser."""
    command = commands.add_parser(
        "diff",
        help="what changed between two runs",
        description="Compare two runs, cell by cell: new failures, what was fixed, what still "
        "fails, pages, backends and capacities that changed though nothing fails, cells that "
        "appeared and vanished.",
        epilog="example: kvmatrix diff nightly/matrix.json matrix/ --markdown; exit code: 0 no new "
        "failure (known ones are none), 1 new failures, 2 usage, 75 cells without a result",
    )
    command.add_argument("old", metavar="OLD", help="matrix.json of the older run, or its folder")
    command.add_argument("new", metavar="NEW", help="the newer run's")
    formats(command)
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print the differences. The exit code of the epilog."""
    return compare(options, options.old, options.new, diff.diff, differences.sheet)
