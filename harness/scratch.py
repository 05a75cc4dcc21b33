"""Scratch: the folder of one process for what its children write, gone when it ends.

A process that is killed cannot remove its own; the next one does. Whether a folder is still in use
is told by a lock, which the kernel gives back with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "kvmatrix-"
LOCK = ".lock"

YOUNG_SECONDS = 60.0
"""A folder this young may be about to be locked."""


class Scratch:
    """A folder in the temporary one, until `close`."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = open(self.path / LOCK, "w", encoding="utf-8")  # noqa: SIM115 - held open
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that are gone."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime < YOUNG_SECONDS:
                continue
            with open(lock, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.access(lock.parent, os.W_OK):
                    shutil.rmtree(lock.parent, ignore_errors=True)
