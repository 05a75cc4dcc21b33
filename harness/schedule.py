"""The schedule: a scheduler of pytest-xdist that gives cells to the workers that may run them.

A thin shell around `backlog.py`, in the controller. xdist calls it for each event of a worker and
ends the session when `tests_finished` is true and every worker has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from harness.backlog import Backlog, Task, Worker

BOUND = "KVMATRIX_BOUND_DEVICE"
"""Environment variable of a worker: SPEC of its device; empty or absent for an unbound one."""

HELD = 2
"""Items that a worker holds: xdist starts one when the next is there, or when told of the end."""


def bound(environ: Mapping[str, str] = os.environ) -> str | None:
    """SPEC of the device that a worker with this environment is bound to; None where to none."""
    return environ.get(BOUND) or None


@dataclass
class _Hand:
    """What one worker holds."""

    worker: Worker
    """`ready` is not kept here: `as_of` tells it."""
    collection: list[str] | None = None
    held: list[tuple[Task, float]] = field(default_factory=list)
    """Tasks with what they cost this worker in seconds; the first is running."""
    began: float = 0.0
    """When it was."""
    ended: bool = False
    """It was told that nothing more will come."""
    gone: bool = False
    """It cannot be reached, and xdist is about to say so."""

    def as_of(self, now: float) -> Worker:
        """The worker with the seconds until it has run what it holds."""
        costs = [cost for _, cost in self.held]
        if costs:
            costs[0] = max(0.0, costs[0] - (now - self.began))
        return replace(self.worker, ready=sum(costs))


class Schedule:
    """Gives each worker what `Backlog` says, two items at a time.

    `task` makes a task of an item's index and node id; `count` workers are waited for at the
    start. What no worker is left for is never run, and so never reported; the run ends all the
    same.
    """

    def __init__(
        self,
        config: pytest.Config,
        count: int,
        task: Callable[[int, str], Task],
        log: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._count = count
        self._task = task
        self._log = log
        self._clock = clock
        self._hands: dict[Any, _Hand] = {}
        self._collection: list[str] | None = None
        self._backlog = Backlog()
        self._awaited: list[str | None] = []

    @property
    def nodes(self) -> list[Any]:
        """The workers that are there."""
        return list(self._hands)

    @property
    def collection_is_completed(self) -> bool:
        """True once every worker of the start has collected."""
        collected = sum(hand.collection is not None for hand in self._hands.values())
        return self._collection is not None or collected >= self._count

    @property
    def tests_finished(self) -> bool:
        """True where no worker will be given anything more, unless one crashes."""
        return (
            self._collection is not None
            and not self._backlog
            and all(len(hand.held) < HELD for hand in self._hands.values())
        )

    @property
    def has_pending(self) -> bool:
        """True while items are left to run."""
        return bool(self._backlog) or any(hand.held for hand in self._hands.values())

    def add_node(self, node: Any) -> None:
        """A worker is up, and collects."""
        device = bound(node.gateway.spec.env)
        if device in self._awaited:
            self._awaited.remove(device)
        self._hands[node] = _Hand(Worker(device))

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """A worker has collected. A replacement that found other items than the first is sent
        home, and the run goes on without it."""
        hand = self._hands[node]
        if self._collection is None or self._collection == list(collection):
            hand.collection = list(collection)
            return
        self._complain(node, self._collection, collection)
        self._end(node)
        devices = [other.worker.device for other in self._open().values()]
        lost = self._backlog.drop([*devices, *self._awaited])
        self._log(f"{len(lost)} items will not be run")

    def schedule(self) -> None:
        """Every worker of the start has collected, or a replacement has."""
        if self._collection is None:
            first, *others = self._hands
            self._collection = self._hands[first].collection or []
            for node in others:
                collection = self._hands[node].collection or []
                if collection != self._collection:
                    # Nothing is run: whose items would be the right ones?
                    self._complain(node, self._collection, collection)
                    break
            else:
                for item, nodeid in enumerate(self._collection):
                    self._backlog.add(self._task(item, nodeid))
        self._deal()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:  # noqa: ARG002
        """A worker has run an item, and goes on with the next that it holds."""
        hand = self._hands[node]
        hand.held = [(task, cost) for task, cost in hand.held if task.item != item_index]
        hand.began = self._clock()
        self._deal()

    def mark_test_pending(self, item: str) -> None:
        """An item is to be run once more."""
        assert self._collection is not None
        self._backlog.add(self._task(self._collection.index(item), item))
        self._deal()

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        """Items came back that were asked back, which never happens here."""
        raise NotImplementedError

    def remove_node(self, node: Any) -> str | None:
        """A worker has ended. Gives the node id of the item that it crashed at, None where it held
        nothing; what else it held goes to others, or to its replacement.

        KeyError where the worker never came up.
        """
        hand = self._hands.pop(node)
        if hand.held or not hand.ended:
            # xdist replaces it, or else ends the session by itself.
            self._awaited.append(hand.worker.device)
        if not hand.held:
            return None
        (crashed, _), *others = hand.held
        for task, _ in others:
            self._backlog.add(task)
        self._deal()
        assert self._collection is not None
        return self._collection[crashed.item]

    def _open(self) -> dict[Any, _Hand]:
        """The workers that can be given something."""
        return {
            node: hand
            for node, hand in self._hands.items()
            if hand.collection is not None and not (hand.ended or hand.gone or node.shutting_down)
        }

    def _deal(self) -> None:
        """Fill every hand; who gets nothing is told that this is the end, or else it would not
        start the last item that it holds."""
        for size in range(1, HELD + 1):
            for node, hand in self._open().items():
                if len(hand.held) < size:
                    self._give(node, hand)

    def _give(self, node: Any, hand: _Hand) -> None:
        now, hands = self._clock(), self._open()
        workers = [other.as_of(now) for other in hands.values()]
        task = self._backlog.take(workers, list(hands).index(node))
        if task is None:
            self._end(node)
            return
        try:
            node.send_runtest_some([task.item])
        except OSError:
            hand.gone = True
            self._backlog.add(task)
            return
        if not hand.held:
            hand.began = now
        hand.held.append((task, hand.worker.cost(task)))
        hand.worker = hand.worker.after(task)

    def _end(self, node: Any) -> None:
        self._hands[node].ended = True
        node.shutdown()

    def _complain(self, node: Any, wanted: Sequence[str], found: Sequence[str]) -> None:
        """A failed collection in the report, with the first item that differs."""
        differ = [*(set(wanted) ^ set(found))]
        where = f"such as {min(differ)}" if differ else "in another order"
        text = (
            f"worker {node.gateway.id} collected {len(found)} items, the first one {len(wanted)}, "
            f"{where}: did files or devices change during the run?"
        )
        report = pytest.CollectReport(node.gateway.id, "failed", text, [])
        self._config.hook.pytest_collectreport(report=report)
