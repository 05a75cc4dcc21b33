"""The files of a report beside matrix.json, each made from its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness import output
from harness.errors import InfraError
from harness.report import junit, markdown

NAMES = ("matrix.html", "matrix.md", "junit.xml")


def write(
    folder: Path,
    data: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]] = (),
    budget: int = markdown.LIMIT,
) -> None:
    """Write all of them, matrix.md in at most `budget` bytes. `records` are lines of records.jsonl:
    what the page shows of a log. InfraError names a file that the disk does not take."""
    # Here: neither a worker nor a run without cells needs the template engine.
    from harness.report import page

    output.write_whole(folder / "matrix.html", page.render(data, records))
    output.write_whole(folder / "matrix.md", markdown.render(data, budget))
    output.write_whole(folder / "junit.xml", junit.render(data))


def remove(folder: Path) -> None:
    """Take those of an earlier run away: were this one cut off, they would be read as its own.
    InfraError names one that cannot be removed."""
    for name in NAMES:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise InfraError(f"cannot remove {folder / name}: {error.strerror or error}") from None
