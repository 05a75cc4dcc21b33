"""The history folder: one file for each run, written whole and read with what is wrong named."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from harness import history, output
from harness.diff import Key
from harness.errors import UsageError
from harness.history import History, HistoryError, Night

READ = 60
"""Newest files that are read: a strip shows fewer, but some may be of other cells."""


def check(folder: Path) -> Path:
    """The folder, which may be yet to come. UsageError where it is something else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--history {folder} is a file; name a folder")
    return folder


def read(folder: Path, most: int = READ) -> tuple[list[Night], list[str]]:
    """The newest runs of the folder, oldest first, and a line about each file, or line of one, that
    cannot be read and is left out. UsageError where the folder cannot be read."""
    nights, faults = [], []
    try:
        paths = sorted(check(folder).glob("*.jsonl"))[-most:]
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror or error}") from None
    for path in paths:
        try:
            night, wrong = history.parse(path.stem, path.read_text(encoding="utf-8"))
        except OSError as error:
            faults.append(f"{path}: {error.strerror or error}; it is left out")
        except (UnicodeDecodeError, HistoryError) as error:
            why = error if isinstance(error, HistoryError) else "not UTF-8 text"
            faults.append(f"{path} is no history of a run: {why}; it is left out")
        else:
            nights.append(night)
            faults += [f"{path} {each}; the rest is kept" for each in wrong]
    return nights, faults


def append(folder: Path, data: Mapping[str, Any]) -> Path:
    """Add the run of a matrix.json, once however often it is added. InfraError where the disk does
    not take it."""
    text = history.lines(data)
    path = folder / f"{history.name(text)}.jsonl"
    output.write_whole(path, text)
    return path


def tell(
    folder: Path, data: Mapping[str, Any], unselected: Collection[Key] = ()
) -> tuple[History, list[str]]:
    """What the folder tells of a run, and what of it cannot be read. Errors as `read`."""
    nights, faults = read(folder)
    return history.history(data, nights, unselected), faults
