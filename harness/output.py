"""Files of a run: records.jsonl, flushed per cell, and files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from harness.errors import InfraError
from harness.record import Record, dumps


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never half of it.

    InfraError names the file where the disk does not take it; the old one stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InfraError(f"cannot write {path}: {error.strerror or error}") from None


class Records:
    """records.jsonl of a run: one line per cell, on disk before the next cell reports."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "records.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise InfraError(f"cannot write {self._path}: {error.strerror or error}") from None

    def add(self, record: Record) -> None:
        """Append one record. InfraError where the disk does not take it."""
        try:
            self._file.write(dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise InfraError(f"cannot write {self._path}: {error.strerror or error}") from None

    def close(self) -> None:
        """No more records will come."""
        self._file.close()
