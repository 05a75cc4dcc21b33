"""`kvmatrix agree VIRTUAL MEASURED`: where a real device contradicts the virtual one."""

from __future__ import annotations

import argparse
from typing import Any

from harness import agree
from harness.commands.show import compare, formats
from harness.report import agreement


def add(commands: Any) -> None:
    """Its parser."""
    command = commands.add_parser(
        "agree",
        help="where a real device contradicts the virtual one",
        description="Compare the cells of a real device with those of the virtual device of its "
        "kind and the same vLLM: resolved dtype, backends, pages, tensor shapes, verdict.",
        epilog="example: kvmatrix agree virtual-h200/matrix.json h200/ --json; exit code: 0 no "
        "contradiction, 1 contradictions, 2 usage, or nothing to compare",
    )
    command.add_argument(
        "virtual", metavar="VIRTUAL", help="matrix.json of a run on virtual devices, or its folder"
    )
    command.add_argument("measured", metavar="MEASURED", help="that of a run on real devices")
    formats(command)
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print the contradictions. The exit code of the epilog."""
    return compare(options, options.virtual, options.measured, agree.agree, agreement.sheet)
