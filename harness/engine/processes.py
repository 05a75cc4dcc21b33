"""Processes on Linux: whose child is whose, and ending all that came from one of them.

Standard library only: the keeper of a cell uses it before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
"""`PR_SET_PDEATHSIG` and `PR_SET_CHILD_SUBREAPER` of linux/prctl.h."""

SWEEP_SECONDS = 10.0
"""How long a sweep goes on where processes keep coming back."""


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel for signal `number` when the parent is gone."""
    _prctl(_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, wherever it has put itself."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _parents() -> dict[int, int]:
    """Process id -> its parent's, of all processes that are not zombies."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The name in brackets may hold anything, brackets too.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != b"Z":
            found[int(entry)] = int(parent)
    return found


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """All living processes below `pid`, parents first, those at or below `spared` left out."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    queue = [pid]
    while queue:
        below = [child for child in children.get(queue.pop(0), ()) if child not in spared]
        found += below
        queue += below
    return found


def sweep(spared: Collection[int] = ()) -> int:
    """Kill and reap everything below this process, `spared` and what is below them left out; how
    many there were. Processes that left their group or session are found too, once this process
    adopts orphans."""
    seen: set[int] = set()
    until = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < until:
        found = descendants(os.getpid(), spared)
        if not found:
            break
        # Stopped first: what forks as fast as it is killed would be missed again and again.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        seen |= set(found)
        for pid in found:
            # Only our own children can be reaped here; the others become ours, or their
            # parent's, who is about to end.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return len(seen)
