"""Commands that compare two runs: their formats, and what they do."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from harness import result
from harness.report import changes
from harness.report.changes import Sheet
from harness.view import MIN_WIDTH, Screen

FALLBACK_WIDTH = 100
"""Columns where there is no terminal that could tell."""


def formats(command: argparse.ArgumentParser) -> Any:
    """The options that choose one; the group that more of them belong in."""
    chosen = command.add_mutually_exclusive_group()
    chosen.add_argument("--markdown", action="store_true", help="print Markdown, for a comment")
    chosen.add_argument("--json", action="store_true", help="print a JSON object with all of it")
    return chosen


class Compared(Protocol):
    """What a comparison of two runs gives."""

    @property
    def exit_code(self) -> int:
        """That of the command."""

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain JSON data."""


C = TypeVar("C", bound=Compared)


def compare(
    options: argparse.Namespace,
    first: str,
    second: str,
    of: Callable[[dict[str, Any], dict[str, Any]], C],
    sheet: Callable[[C, dict[str, Any], dict[str, Any]], Sheet],
) -> int:
    """Compare the runs at `first` and `second`, and print what `of` finds in the format that was
    chosen; its exit code. UsageError where one cannot be read."""
    runs = result.load(Path(first)), result.load(Path(second))
    found = of(*runs)
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        show(sheet(found, *runs), markdown=options.markdown)
    return found.exit_code


def show(sheet: Sheet, *, markdown: bool) -> None:
    """Print a sheet for people."""
    if markdown:
        print(changes.markdown(sheet), end="")
        return
    print("\n".join(changes.terminal(screen(), sheet)))


def screen() -> Screen:
    """What this terminal, or the file in its place, can show."""
    columns = shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns
    return Screen(
        max(columns, MIN_WIDTH),
        color=sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
        unicode=(sys.stdout.encoding or "").lower().startswith("utf"),
    )
