"""Where a real start is: told from outside by looking at the main thread's stack, so that nothing
of vLLM need be patched.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Self

from harness.engine import compat
from harness.record import STAGES

SECONDS_BETWEEN_LOOKS = 0.02
"""How exact the seconds of a stage are; a look costs some 20 microseconds."""


def stage_of(functions: Iterable[str]) -> str | None:
    """The deepest stage that one of these functions of vLLM belongs to; None where none does."""
    stages = [stage for name in functions if (stage := compat.STAGE_FUNCTIONS.get(name))]
    return max(stages, key=STAGES.index, default=None)


def stage_of_traceback(trace: TracebackType | None) -> str | None:
    """The stage in which an exception was raised."""
    return stage_of(frame.f_code.co_name for frame, _ in traceback.walk_tb(trace))


def _functions(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


class Watcher:
    """Watches the thread that made it, telling each stage when it begins.

    `entered` holds the stages in order with the second at which each was first seen; stages only
    go forward.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.entered: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="kvmatrix-stages", daemon=True)

    @property
    def stage(self) -> str:
        """The stage entered last."""
        return next(reversed(self.entered), STAGES[0])

    def enter(self, stage: str | None) -> None:
        """Say that `stage` has begun; nothing for one that lies behind, or None."""
        with self._lock:
            if stage is None or STAGES.index(stage) <= STAGES.index(self.stage):
                return
            self.entered[stage] = time.perf_counter()
            self.began(stage)
        self._tell(stage)

    def began(self, stage: str) -> None:
        """For subclasses: called once for each stage that begins."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_LOOKS):
            self.enter(stage_of(_functions(sys._current_frames().get(self._main))))

    def seconds(self) -> dict[str, float]:
        """Wall seconds of each stage entered, the last one up to now."""
        times = [*self.entered.values(), time.perf_counter()]
        return {
            stage: round(end - begin, 3)
            for stage, begin, end in zip(self.entered, times, times[1:], strict=False)
        }
