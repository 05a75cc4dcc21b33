"""A folder that a run, or one shard of it, has left: its matrix.json and records.jsonl, as read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import result
from harness.errors import UsageError
from harness.record import Record, RecordError, loads


@dataclass(frozen=True)
class Part:
    """One shard."""

    name: str
    """The folder, as it was named."""
    matrix: dict[str, Any] | None
    """None where the run was cut off before it wrote one."""
    records: tuple[Record, ...]
    faults: tuple[str, ...] = ()
    """What could not be read, each named by file and line."""


def read(folder: Path) -> Part:
    """The folder's matrix.json and records.jsonl, either of which may be missing.

    UsageError where both are, or where matrix.json is none. Lines of records.jsonl that are no
    record are faults, and the others are kept.
    """
    if folder.is_file():
        folder = folder.parent
    whole, lines = folder / "matrix.json", folder / "records.jsonl"
    if not whole.exists() and not lines.exists():
        raise UsageError(f"{folder} has neither matrix.json nor records.jsonl: name a run's folder")
    matrix = result.load(whole) if whole.exists() else None
    records: list[Record] = []
    faults: list[str] = [] if matrix is not None else [f"{whole}: missing, the run was cut off"]
    if not lines.exists():
        faults.append(f"{lines}: missing")
    else:
        for number, found in _lines(lines):
            if isinstance(found, Record):
                records.append(found)
            else:
                faults.append(f"{lines} line {number}: {found}")
    return Part(str(folder), matrix, tuple(records), tuple(faults))


def _lines(path: Path) -> Iterator[tuple[int, Record | str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                yield number, "not UTF-8 text"
            except RecordError as error:
                yield number, str(error)
            except RecursionError:
                yield number, "nested too deeply"
