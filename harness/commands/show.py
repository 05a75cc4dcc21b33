"""The formats of commands that compare runs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from harness.report import changes
from harness.report.changes import Sheet
from harness.view import MIN_WIDTH, Screen

FALLBACK_WIDTH = 100
"""Columns where there is no terminal that could tell."""


def formats(command: argparse.ArgumentParser) -> None:
    """The options that choose one."""
    chosen = command.add_mutually_exclusive_group()
    chosen.add_argument("--markdown", action="store_true", help="print Markdown, for a comment")
    chosen.add_argument("--json", action="store_true", help="print a JSON object with all of it")


def show(sheet: Sheet, *, markdown: bool) -> None:
    """Print a sheet for people."""
    if markdown:
        print(changes.markdown(sheet), end="")
        return
    columns = shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns
    screen = Screen(
        max(columns, MIN_WIDTH),
        color=sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
        unicode=(sys.stdout.encoding or "").lower().startswith("utf"),
    )
    print("\n".join(changes.terminal(screen, sheet)))
