"""`kvmatrix support RUN...`: since which release each model and kv_cache_dtype is supported."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import output, result, safe, support
from harness.commands.show import formats, screen
from harness.errors import unknown
from harness.report import support as shown


def add(commands: Any) -> None:
    """Its parser."""
    command = commands.add_parser(
        "support",
        help="since which release each model and kv_cache_dtype is supported",
        description="From runs of several releases (one run with several --engine, or several "
        "runs): for each model, kv_cache_dtype and compute capability the first release that "
        "supports it, gaps and losses. What was not run is shown as not examined, never as a no.",
        epilog="example: kvmatrix support nightly/ matrix/ --markdown; exit code: 0 shown, 2 "
        "usage, 75 the disk did not take the page",
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="matrix.json, or its folder")
    for name in ("model", "device", "backend"):
        command.add_argument(
            f"--{name}", action="append", metavar="NAME", help=f"this {name} alone; repeatable"
        )
    formats(command).add_argument("--html", metavar="FILE", help="write a page of its own")
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Show the table. The exit code of the epilog."""
    runs = [result.load(Path(name)) for name in options.runs]
    for name in ("model", "device", "backend"):
        _choose(runs, name, getattr(options, name))
    found = support.support(runs)
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    elif options.html is not None:
        # Here: nothing else needs the template engine.
        from harness.report import support_page

        output.write_whole(Path(options.html), support_page.render(found))
        print(f"wrote {safe.printable(options.html)}")
    elif found.examined:
        text = (
            shown.markdown(found) if options.markdown else _lines(shown.terminal(screen(), found))
        )
        print(text, end="")
    if not found.examined:
        told = shown.nothing(sum(len(data["cells"]) for data in runs))
        print(f"kvmatrix: {told}", file=sys.stderr)
    return 0


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _choose(runs: Sequence[dict[str, Any]], name: str, wanted: Sequence[str] | None) -> None:
    """Leave only the cells of these. UsageError names one that no run has."""
    if wanted is None:
        return
    there = {cell[name] for data in runs for cell in data["cells"]}
    for one in wanted:
        if one not in there:
            raise unknown(name, one, there, f"no cell of these runs has it; some: {_some(there)}")
    for data in runs:
        data["cells"] = [cell for cell in data["cells"] if cell[name] in wanted]


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:8]) or "none"
