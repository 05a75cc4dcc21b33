"""The backlog: the cells that no worker has yet, and which of them a worker gets next.

Pure. xdist makes a worker hold its next item before it starts the one before, so a cell is given
out a whole cell too early. `Backlog.take` therefore plays the rest of the run through with the
estimated seconds and gives the worker the cell that it would get if it asked when it is free.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WARM_UP = 25.0
"""Seconds until a worker that changes its place runs a cell there: vLLM is imported anew. Measured
as 10-40 s on two cores."""

Place = tuple[str, str]
"""What a warm child serves: an engine's Python and a facet's device SPEC. `Request.place`."""


@dataclass(frozen=True)
class Task:
    """One item of the collection."""

    item: int
    """Its index."""
    seconds: float
    """Estimated."""
    place: Place | None = None
    """None for an item that is no cell, which needs no warm child."""
    devices: frozenset[str] | None = None
    """Only a worker that is bound to one of these may run it; None: any worker."""

    def allows(self, device: str | None) -> bool:
        """True where a worker bound to `device` (None: to none) may run it."""
        return self.devices is None or device in self.devices


@dataclass(frozen=True)
class Worker:
    """A worker that takes cells."""

    device: str | None
    """SPEC of the device that it is bound to."""
    place: Place | None = None
    """Place of the last cell that it was given."""
    ready: float = 0.0
    """Seconds until it has run what it was given."""

    def cost(self, task: Task) -> float:
        """Seconds that `task` would take it, a change of place included."""
        moves = task.place is not None and task.place != self.place
        return task.seconds + (WARM_UP if moves else 0.0)

    def after(self, task: Task) -> Worker:
        """The worker when it has run `task`, too."""
        return Worker(self.device, task.place or self.place, self.ready + self.cost(task))


class Backlog:
    """Tasks by place, the longest of each place first."""

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._piles: dict[Place | None, list[Task]] = {}
        for task in tasks:
            self.add(task)

    def __len__(self) -> int:
        return sum(map(len, self._piles.values()))

    def add(self, task: Task) -> None:
        """Put a task in, or back."""
        pile = self._piles.setdefault(task.place, [])
        bisect.insort(pile, task, key=lambda t: (-t.seconds, t.item))

    def drop(self, devices: Iterable[str | None]) -> list[Task]:
        """Give up, and return, what no worker bound to one of `devices` may run."""
        here = set(devices)
        lost = [
            task
            for pile in self._piles.values()
            for task in pile
            if not any(task.allows(device) for device in here)
        ]
        for task in lost:
            self._piles[task.place].remove(task)
        return lost

    def take(self, workers: Sequence[Worker], asking: int) -> Task | None:
        """The next task of `workers[asking]`, no longer in the backlog; None where the others will
        have run all that it may run before it could help.

        `workers` are all that still take tasks. While tasks are left and the asking worker is
        alone, or alone at being bound to a device they need, it gets one.
        """
        now = list(workers)
        taken: Counter[Place | None] = Counter()
        queue = [(worker.ready, i) for i, worker in enumerate(now)]
        heapq.heapify(queue)
        active = set(range(len(now)))
        while queue:
            _, i = heapq.heappop(queue)
            others = [now[other] for other in active if other != i]
            task = self._choose(now[i], others, taken)
            if i == asking:
                if task is not None:
                    self._piles[task.place].remove(task)
                return task
            if task is None:
                active.remove(i)
                continue
            taken[task.place] += 1
            now[i] = now[i].after(task)
            heapq.heappush(queue, (now[i].ready, i))
        return None

    def _choose(
        self, worker: Worker, others: Sequence[Worker], taken: Counter[Place | None]
    ) -> Task | None:
        """What `worker`, free now, takes: what needs its own device before anything that others
        could run, then what needs no change of place, then where most work is left a head."""
        heads = {
            place: pile[taken[place]]
            for place, pile in self._piles.items()
            if taken[place] < len(pile) and pile[0].allows(worker.device)
        }
        for own in (True, False):
            here = {p: task for p, task in heads.items() if (task.devices is not None) == own}
            if worker.place is not None and worker.place in here:
                return here[worker.place]
            best, most = None, -1.0
            for place, task in here.items():
                left = sum(t.seconds for t in self._piles[place][taken[place] :])
                ready = [other.ready for other in others if other.place == place]
                if place is not None and worker.ready + WARM_UP >= _level(ready, left):
                    continue
                if left / (len(ready) + 1) > most:
                    best, most = task, left / (len(ready) + 1)
            if best is not None:
                return best
        return None


def _level(ready: Iterable[float], seconds: float) -> float:
    """When those who are free at `ready` have shared out `seconds` of work; never, if nobody is."""
    level, total = float("inf"), seconds
    for count, free in enumerate(sorted(ready), start=1):
        total += free
        level = min(level, total / count)
    return level
