"""Who gets which cell: every cell once, to a worker that may run it, the longest first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.backlog import WARM_UP, Backlog, Place, Task, Worker

A: Place = ("python", "GPU-a")
B: Place = ("python", "GPU-b")
V: Place = ("python", "virtual:h200")
W: Place = ("other", "virtual:h200")


def tasks(seconds: Sequence[float], place: Place = V, devices: str = "") -> list[Task]:
    allowed = frozenset(devices.split()) or None
    return [Task(item, s, place, allowed) for item, s in enumerate(seconds)]


def play(tasks: Sequence[Task], workers: Sequence[Worker]) -> list[list[tuple[float, Task]]]:
    """Run everything as xdist would, estimates being exact: each worker is given its next task
    when it starts the one before. Per worker: when each of its tasks started."""
    backlog = Backlog(tasks)
    hands: list[Worker] = list(workers)
    given: list[list[tuple[float, Task]]] = [[] for _ in workers]
    asks = [(0.0, 0, i) for i in range(len(workers))]
    ended: set[int] = set()
    while asks:
        asks.sort()
        now, _, i = asks.pop(0)
        open_ = [j for j in range(len(workers)) if j not in ended]
        seen = [replace(hands[j], ready=max(0.0, hands[j].ready - now)) for j in open_]
        task = backlog.take(seen, open_.index(i))
        if task is None:
            ended.add(i)
            continue
        free = hands[i].ready
        hands[i] = replace(hands[i], ready=max(free, now)).after(task)
        given[i].append((hands[i].ready - task.seconds, task))
        # It asks again when this one starts to be what it works on, the first time at once.
        asks.append((free if given[i][1:] else 0.0, len(given[i]), i))
    assert 0 == len(backlog)
    return given


places = st.sampled_from([(A, "GPU-a"), (B, "GPU-b GPU-c"), (V, ""), (W, ""), (None, "")])
seconds = st.floats(0.0, 400.0) | st.integers(0, 3).map(float)


@given(
    st.lists(st.tuples(places, seconds), max_size=40),
    st.lists(st.sampled_from([None, "GPU-a", "GPU-b", "GPU-c"]), max_size=3),
)
def test_every_task_is_given_once_and_to_a_worker_that_may_run_it(
    rows: list[tuple[tuple[Place | None, str], float]], more: list[str | None]
) -> None:
    all_tasks = [
        Task(item, s, place, frozenset(devices.split()) or None)
        for item, ((place, devices), s) in enumerate(rows)
    ]
    workers = [Worker(device) for device in ("GPU-a", "GPU-b", *more)]
    played = play(all_tasks, workers)
    items = [task.item for row in played for _, task in row]
    assert list(range(len(all_tasks))) == sorted(items)
    for worker, row in zip(workers, played, strict=True):
        assert all(task.devices is None or worker.device in task.devices for _, task in row)


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 4))
def test_longer_cells_of_a_place_start_first(lengths: list[int], count: int) -> None:
    played = play(tasks([float(n) for n in lengths]), [Worker(None)] * count)
    started = sorted(
        ((start, -task.seconds) for row in played for start, task in row),
    )
    assert sorted(-n for n in lengths) == [length for _, length in started]


def best_makespan(lengths: Sequence[int], count: int) -> int:
    """By trying every way to share them out."""
    return min(
        max(
            sum(n for n, who in zip(lengths, shares, strict=True) if who == worker)
            for worker in range(count)
        )
        for shares in itertools.product(range(count), repeat=len(lengths))
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_one_place_ends_within_four_thirds_of_the_best(lengths: list[int], count: int) -> None:
    # Graham 1969: longest first ends within 4/3 - 1/(3 workers) of the best way. All are warm.
    workers = [Worker(None, V)] * count
    played = play(tasks([float(n) for n in lengths]), workers)
    end = max(start + task.seconds for row in played for start, task in row)
    assert end <= (4 / 3 - 1 / (3 * count)) * best_makespan(lengths, count) + 1e-6


def test_the_last_long_cell_does_not_wait_behind_a_long_one() -> None:
    # Two workers hold a cell each, of 100 and 10 seconds; the one that is left, of 50, is for
    # the one that is free first, whoever asks first.
    workers = [Worker(None, V, 100.0), Worker(None, V, 10.0)]
    backlog = Backlog(tasks([50.0]))
    assert backlog.take(workers, 0) is None
    assert Task(0, 50.0, V) == backlog.take(workers, 1)


def test_a_worker_stays_at_its_place() -> None:
    backlog = Backlog([Task(0, 500.0, V), Task(1, 1.0, W), Task(2, 2.0, W)])
    assert Task(2, 2.0, W) == backlog.take([Worker(None, W)], 0)
    assert Task(1, 1.0, W) == backlog.take([Worker(None, W)], 0)
    assert Task(0, 500.0, V) == backlog.take([Worker(None, W)], 0)


@pytest.mark.parametrize("order", [1, -1])
def test_workers_spread_by_the_work_that_is_left_a_head(order: int) -> None:
    # 300 s here, 100 s there: three workers and one.
    work = [Task(n, 20.0, V) for n in range(15)] + [Task(15 + n, 20.0, W) for n in range(5)]
    played = play(work[::order], [Worker(None)] * 4)
    first = [row[0][1].place for row in played]
    assert 3 == first.count(V)
    assert 1 == first.count(W)


def test_nobody_warms_up_for_what_others_have_done_before() -> None:
    busy = Worker(None, V, ready=1.0)
    idle = Worker(None, W)
    few = Backlog(tasks([5.0, 5.0]))
    assert few.take([busy, idle], 1) is None
    assert Task(0, 5.0, V) == few.take([busy, idle], 0)
    much = Backlog(tasks([WARM_UP, WARM_UP, WARM_UP]))
    assert Task(0, WARM_UP, V) == much.take([busy, idle], 1)


def test_at_the_start_all_warm_up_together() -> None:
    played = play(tasks([1.0] * 8), [Worker(None)] * 4)
    assert [2, 2, 2, 2] == [len(row) for row in played]


def test_a_bound_worker_helps_only_when_its_device_is_not_needed() -> None:
    backlog = Backlog([Task(0, 900.0, V), Task(1, 1.0, A, frozenset({"GPU-a"}))])
    bound = Worker("GPU-a", V)
    assert Task(1, 1.0, A, frozenset({"GPU-a"})) == backlog.take([bound], 0)
    assert Task(0, 900.0, V) == backlog.take([bound], 0)


def test_an_item_that_is_no_cell_leaves_the_warm_child_where_it_is() -> None:
    worker = Worker(None, V, 2.0)
    assert Worker(None, V, 5.0) == worker.after(Task(0, 3.0))
    assert Worker(None, W, 5.0 + WARM_UP) == worker.after(Task(0, 3.0, W))


def test_what_comes_back_is_given_again_in_its_turn() -> None:
    backlog = Backlog(tasks([5.0, 9.0]))
    worker = Worker(None, V)
    first = backlog.take([worker], 0)
    assert Task(1, 9.0, V) == first
    backlog.add(first)
    assert first == backlog.take([worker], 0)


@pytest.mark.parametrize(("here", "lost"), [([None], [1]), (["GPU-a"], []), ([], [0, 1])])
def test_what_nobody_can_run_is_dropped(here: list[str | None], lost: list[int]) -> None:
    backlog = Backlog([Task(0, 1.0, V), Task(1, 1.0, A, frozenset({"GPU-a"}))])
    assert lost == [task.item for task in backlog.drop(here)]
    assert 2 - len(lost) == len(backlog)
