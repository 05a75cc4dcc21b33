"""Live progress of a run as one line of text. Pure: the caller owns the clock and the terminal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from harness.safe import columns, printable
from harness.verdict import PASSING

_ROOM_FOR_ID = 12
"""Columns. In less, the start of an id says nothing."""

_MINUTE, _HOUR = 60, 3600


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    total: int
    """Cells planned."""
    began: float
    """Seconds on the clock that `line` is given too."""
    ok: int = 0
    rejected: int = 0
    known: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    """Sum of what the cells took themselves; above the wall time where they run side by side."""
    latest: str = ""
    """Id of the cell that finished last."""

    @classmethod
    def start(cls, total: int, now: float) -> Progress:
        """Nothing done yet of `total` cells at the time `now`, in seconds."""
        return cls(total=total, began=now)

    @property
    def done(self) -> int:
        """Cells finished."""
        return self.ok + self.rejected + self.known + self.failed + self.skipped

    def after(self, verdict: str, seconds: float, latest: str = "") -> Progress:
        """With one more cell of `verdict` (or `known`), which took `seconds`."""
        name = verdict if verdict in PASSING | {"known", "skipped"} else "failed"
        return dataclasses.replace(
            self,
            **{name: getattr(self, name) + 1},
            seconds=self.seconds + seconds,
            latest=latest,
        )


def duration(seconds: float) -> str:
    """`21 s`, `2 min 05 s` or `1 h 02 min`."""
    whole = round(max(0.0, seconds))
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    minutes = round(whole / _MINUTE)
    return f"{minutes // 60} h {minutes % 60:02} min"


def line(progress: Progress, now: float, width: int, *, unicode: bool = True) -> str:
    """The progress at the time `now` (seconds) in at most `width` columns, without a newline.

    `s/cell` is what a cell takes by itself; the time left comes from the wall time per cell.
    """
    dot = " · " if unicode else ", "
    done, total = progress.done, progress.total
    head = f"[{done:>{len(str(total))}}/{total}]"
    counts = [
        f"{progress.ok} ok",
        f"{progress.rejected} rejected",
        f"{progress.known} known",
        f"{progress.failed} failed",
    ]
    if progress.skipped:
        counts.append(f"{progress.skipped} skipped")
    elapsed = max(0.0, now - progress.began)
    pace, left = "", ""
    if done:
        pace = f"{progress.seconds / done:.2f} s/cell"
        if done < total:
            left = f"{duration(elapsed / done * (total - done))} left"
    if not left:
        left = duration(elapsed)
    # What can be done without goes first; failures and the time left stay longest.
    for parts in (
        [*counts, pace, left],
        [*counts, left],
        [counts[3], left],
        [counts[3]],
    ):
        text = f"{head} {dot.join(part for part in parts if part)}"
        if len(text) <= width:
            return text + _latest(progress.latest, width - len(text), unicode)
    return head[: max(0, width)]


def _latest(name: str, room: int, unicode: bool) -> str:
    """The id behind the numbers, cut to `room` columns; empty where that is too few."""
    name, dots = printable(name), "…" if unicode else "..."
    room -= 2
    if not name or room < min(columns(name), _ROOM_FOR_ID):
        return ""
    if columns(name) > room:
        while columns(name) > room - len(dots):
            name = name[:-1]
        name += dots
    return f"  {name}"
