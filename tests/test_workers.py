"""Workers: how many, what each is bound to, and real runs of xdist over made-up cells."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import device, workers
from harness.backlog import Task
from harness.device import GIB, Device, Pool
from harness.errors import UsageError
from harness.schedule import Schedule, bound

ROOT = Path(__file__).resolve().parent.parent


def gpu(uuid: str, name: str = "NVIDIA H200") -> Device:
    return Device(uuid, "gpu", name, (9, 0), 141 * GIB, 132, 0, uuid=uuid)


def pool(*members: Device) -> Pool:
    return Pool(members[0], members)


H200S = pool(*(gpu(f"GPU-{n}") for n in range(8)))
T4S = pool(gpu("GPU-t", "Tesla T4"), gpu("GPU-u", "Tesla T4"))
VIRTUAL = pool(device.parse("virtual:h200"))
CPU = pool(device.cpu())


@pytest.mark.parametrize(
    ("count", "pools", "cores", "memory"),
    [
        # A device needs its worker, however few cores there are.
        (8, [H200S], 2, 8 * GIB),
        (10, [H200S, T4S], 4, 0),
        # One a core; the memory is for 3 of 4 GiB, for 2 of 6 GiB.
        (16, [VIRTUAL], 16, 0),
        (3, [VIRTUAL], 16, 15 * GIB),
        (2, [CPU], 16, 15 * GIB),
        (2, [VIRTUAL, CPU], 16, 15 * GIB),
        (1, [VIRTUAL], 16, 1 * GIB),
        # What 8 devices leave: 16 - 8 cores, (48 - 8 * 4) // 4 by memory, one at least.
        (8 + 8, [H200S, VIRTUAL], 16, 0),
        (8 + 4, [H200S, VIRTUAL], 16, 48 * GIB),
        (8 + 1, [H200S, CPU], 4, 0),
    ],
)
def test_auto_is_one_worker_per_device_and_the_rest_by_cores_and_memory(
    count: int, pools: list[Pool], cores: int, memory: int
) -> None:
    assert count == workers.auto_workers(pools, cores, memory)


@pytest.mark.parametrize(
    ("specs", "pools", "count"),
    [
        (("GPU-0", "GPU-1"), [H200S], 2),
        # Each facet has one before any has a second.
        (("GPU-0", "GPU-t", "GPU-1", "GPU-u", "GPU-2"), [H200S, T4S], 5),
        (("GPU-t", "GPU-u", None), [VIRTUAL, T4S], 3),
        # All bound: they run the virtual cells as well.
        (("GPU-t", "GPU-u"), [VIRTUAL, T4S], 2),
        ((None, None, None), [VIRTUAL, CPU], 3),
    ],
)
def test_each_worker_has_a_device_of_its_own(
    specs: tuple[str | None, ...], pools: list[Pool], count: int
) -> None:
    assert specs == workers.bindings(pools, count)


@pytest.mark.parametrize(
    ("pools", "count", "words"),
    [
        ([H200S], 9, ["-n 9", "8 devices", "-n auto"]),
        ([pool(gpu("GPU-0"))], 2, ["-n 2", "1 device;"]),
        ([H200S, T4S], 1, ["-n 1", "2 kinds", "--device"]),
    ],
)
def test_workers_that_do_not_go_with_the_devices_are_a_usage_error(
    pools: list[Pool], count: int, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        workers.bindings(pools, count)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (0, {}),
        (0, {"numprocesses": 0, "tx": ["3*popen"], "dist": "load"}),
        (4, {"numprocesses": 4}),
        (3, {"numprocesses": 4, "maxprocesses": 3}),
        (7, {"numprocesses": "auto"}),
        (2, {"numprocesses": "logical", "maxprocesses": 2}),
        (0, {"numprocesses": "auto", "usepdb": True}),
        (0, {"tx": ["popen"], "dist": "no"}),
        (4, {"tx": ["3*popen", "popen//python=python3"], "dist": "load"}),
        (1, {"tx": ["popen"], "dist": "no", "distload": True}),
    ],
)
def test_how_many_workers_the_options_ask_for(count: int, options: dict[str, Any]) -> None:
    assert count == workers.asked(types.SimpleNamespace(**options), lambda: 7)


def test_an_unbound_worker_has_an_empty_variable_or_none() -> None:
    assert bound({}) is None
    assert bound({"KVMATRIX_BOUND_DEVICE": ""}) is None
    assert "GPU-0" == bound({"KVMATRIX_BOUND_DEVICE": "GPU-0"})


class Node:
    """A worker as the scheduler sees it."""

    def __init__(self, name: str, device: str = "") -> None:
        env = {"KVMATRIX_BOUND_DEVICE": device}
        self.gateway = types.SimpleNamespace(id=name, spec=types.SimpleNamespace(env=env))
        self.shutting_down = False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        assert not self.shutting_down
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


class Broken(Node):
    """A worker that has died, which xdist does not know yet."""

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        raise OSError("cannot send to closed channel")


def started(
    nodes: Sequence[Node],
    ids: Sequence[str],
    task: Callable[[int, str], Task] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> tuple[Schedule, list[str]]:
    """A schedule whose workers have collected `ids`, and where it puts its complaints."""
    complaints: list[str] = []

    def complain(report: pytest.CollectReport) -> None:
        complaints.append(str(report.longrepr))

    config: Any = types.SimpleNamespace(hook=types.SimpleNamespace(pytest_collectreport=complain))
    make = task or (lambda item, nodeid: Task(item, 1.0, ("python", "virtual:h200")))
    schedule = Schedule(config, len(nodes), make, lambda *_: None, clock)
    for node in nodes:
        schedule.add_node(node)
    for node in nodes:
        assert not schedule.collection_is_completed
        assert not schedule.tests_finished
        schedule.add_node_collection(node, ids)
    assert schedule.collection_is_completed
    schedule.schedule()
    return schedule, complaints


def test_the_items_of_a_crashed_worker_go_to_others_but_for_the_one_that_crashed_it() -> None:
    one, two = Node("gw0"), Node("gw1")
    schedule, _ = started([one, two], list("abcde"))
    crashed, waiting = one.sent
    assert "abcde"[crashed] == schedule.remove_node(one)
    assert not schedule.tests_finished
    for item in two.sent:  # grows
        schedule.mark_test_complete(two, item)
    assert {*range(5)} - {crashed} == {*two.sent}
    assert waiting in two.sent
    assert two.shutting_down
    assert schedule.tests_finished


def test_a_cell_of_a_lost_device_waits_for_the_replacement() -> None:
    one, two = Node("gw0", "GPU-0"), Node("gw1")
    only = frozenset({"GPU-0"})
    schedule, _ = started(
        [one, two], list("abc"), lambda item, nodeid: Task(item, 1.0, ("p", "GPU-0"), only)
    )
    assert two.shutting_down
    assert "a" == schedule.remove_node(one)
    assert not schedule.tests_finished
    three = Node("gw2", "GPU-0")
    schedule.add_node(three)
    assert [] == three.sent
    schedule.add_node_collection(three, list("abc"))
    schedule.schedule()
    assert [1, 2] == three.sent


def test_a_replacement_that_found_other_items_ends_what_it_alone_could_run() -> None:
    one, two = Node("gw0", "GPU-0"), Node("gw1")
    schedule, complaints = started(
        [one, two],
        list("abcdef"),
        lambda item, nodeid: (
            Task(item, 1.0, ("p", "GPU-0"), frozenset({"GPU-0"}))
            if nodeid in "abc"
            else Task(item, 1.0, ("p", "virtual:h200"))
        ),
    )
    schedule.remove_node(one)
    three = Node("gw2", "GPU-0")
    schedule.add_node(three)
    schedule.add_node_collection(three, list("abcdeX"))
    schedule.schedule()
    assert three.shutting_down
    assert [] == three.sent
    assert 1 == len(complaints)
    assert "gw2" in complaints[0]
    for item in two.sent:  # grows
        schedule.mark_test_complete(two, item)
    assert [3, 4, 5] == two.sent
    assert schedule.tests_finished


def test_a_lost_worker_that_is_awaited_keeps_its_cells_when_another_is_refused() -> None:
    nodes = [Node("gw0", "GPU-0"), Node("gw1", "GPU-1")]

    def own(item: int, nodeid: str) -> Task:
        device = f"GPU-{nodeid[0]}"
        return Task(item, 1.0, ("p", device), frozenset({device}))

    ids = ["0a", "0b", "0c", "1a", "1b", "1c"]
    schedule, _ = started(nodes, ids, own)
    assert ["0a", "1a"] == [schedule.remove_node(node) for node in nodes]
    again = [Node("gw2", "GPU-0"), Node("gw3", "GPU-1")]
    schedule.add_node(again[0])
    schedule.add_node_collection(again[0], ids[:-1])
    schedule.schedule()
    assert not schedule.tests_finished
    schedule.add_node(again[1])
    schedule.add_node_collection(again[1], ids)
    schedule.schedule()
    assert [[], [4, 5]] == [node.sent for node in again]


def test_the_time_that_the_running_cell_has_run_counts() -> None:
    now = [0.0]
    one, two = Node("gw0"), Node("gw1")
    seconds = [100.0, 99.0, 40.0, 30.0, 5.0, 4.0]
    schedule, _ = started(
        [one, two],
        [f"{s:.0f}" for s in seconds],
        lambda item, nodeid: Task(item, float(nodeid), ("p", "virtual:h200")),
        lambda: now[0],
    )
    assert [[0, 3], [1, 2]] == [one.sent, two.sent]
    # The second is through 90 s early, the first still has all of its own and 30 s to run.
    now[0] = 35.0
    schedule.mark_test_complete(two, 1)
    assert [0, 3] == one.sent
    assert [1, 2, 4] == two.sent
    # At 125 s (25 to warm up, 100) the first is as expected; the second, at its 40 s for 90 s now,
    # has 5 s left and no more, so that the last is for it.
    now[0] = 125.0
    schedule.mark_test_complete(one, 0)
    assert one.shutting_down
    assert not two.shutting_down


def test_two_items_in_hand_are_not_yet_the_end() -> None:
    one = Node("gw0")
    schedule, _ = started([one], list("ab"))
    assert [0, 1] == one.sent
    assert schedule.has_pending
    assert not schedule.tests_finished
    schedule.mark_test_complete(one, 0)
    assert schedule.tests_finished
    assert schedule.has_pending
    schedule.mark_test_complete(one, 1)
    assert not schedule.has_pending
    assert schedule.remove_node(one) is None


@pytest.mark.parametrize(
    ("ours", "dist", "cells"),
    [(True, "load", ["real"]), (False, "worksteal", ["real"]), (False, "load", [])],
)
def test_other_ways_to_distribute_are_left_to_xdist(
    ours: bool, dist: str, cells: list[str]
) -> None:
    job = workers.Job(("python", "virtual:h200"), 1.0)
    plugin = workers.Workers([VIRTUAL], dict.fromkeys(cells, job))
    config: Any = types.SimpleNamespace(option=types.SimpleNamespace(dist=dist, tx=["2*popen"]))
    made = plugin.pytest_xdist_make_scheduler(config, lambda *_: None)
    assert ours == isinstance(made, Schedule)


def test_workers_that_disagree_at_the_start_run_nothing() -> None:
    one, two = Node("gw0"), Node("gw1")
    schedule, complaints = started([one], list("ab"))
    assert [] == complaints
    schedule = Schedule(schedule._config, 2, schedule._task, schedule._log)
    one = Node("gw0")
    for node, ids in ((one, "ab"), (two, "ac")):
        schedule.add_node(node)
        schedule.add_node_collection(node, list(ids))
    schedule.schedule()
    assert [[], []] == [one.sent, two.sent]
    assert one.shutting_down and two.shutting_down
    assert schedule.tests_finished
    assert "such as b" in complaints[0]


def test_a_worker_that_cannot_be_reached_is_given_nothing() -> None:
    one, two = Broken("gw0"), Node("gw1")
    schedule, _ = started([one, two], list("abc"))
    assert schedule.remove_node(one) is None
    for item in two.sent:  # grows
        schedule.mark_test_complete(two, item)
    assert [0, 1, 2] == sorted(two.sent)


def test_an_item_that_is_to_run_again_is_given_out_again() -> None:
    one = Node("gw0")
    schedule, _ = started([one], list("abc"))
    schedule.mark_test_pending("a")
    for item in one.sent:  # grows
        schedule.mark_test_complete(one, item)
    assert Counter([0, 0, 1, 2]) == Counter(one.sent)


def test_a_worker_that_never_came_up_is_told_by_a_key_error() -> None:
    schedule, _ = started([Node("gw0")], ["a"])
    with pytest.raises(KeyError):
        schedule.remove_node(Node("gw1"))


# Real runs: a project of its own, whose cells write down where they ran.

CONFTEST = """
import os, sys
import pytest
from harness.device import Device, Pool, parse
from harness.errors import UsageError
from harness.workers import Job, Workers

def gpu(uuid):
    return Device(uuid, "gpu", "NVIDIA H200", (9, 0), 1, 1, 0, uuid=uuid)

POOLS = [Pool(gpu("GPU-0"), (gpu("GPU-0"), gpu("GPU-1"))), Pool(gpu("GPU-t"), (gpu("GPU-t"),))]
JOBS = {f"pair-{n}": Job(("python", "GPU-0"), float(n)) for n in range(6)}
JOBS |= {f"lone-{n}": Job(("python", "GPU-t"), float(n)) for n in range(4)}
if not os.environ.get("REAL_ONLY"):
    POOLS.append(Pool(parse("virtual:h200"), (parse("virtual:h200"),)))
    JOBS |= {f"virtual-{n}": Job(("python", "virtual:h200"), 1.0) for n in range(4)}

@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if hasattr(config, "workerinput"):
        return None
    plugin = Workers(POOLS, JOBS, lambda: 2, lambda: 0)
    config.pluginmanager.register(plugin, "kvmatrix-workers")
    try:
        plugin.check(config)
    except UsageError as error:
        print(f"kvmatrix: {error}", file=sys.stderr)
        return 2
"""

TESTS = """
import os, pathlib
import pytest
from conftest import JOBS

HERE = pathlib.Path(__file__).parent

@pytest.mark.parametrize("cell", JOBS, ids=str)
def test_cell(cell):
    device, worker = os.environ["KVMATRIX_BOUND_DEVICE"], os.environ["PYTEST_XDIST_WORKER"]
    with open(HERE / "log", "a") as log:
        log.write(f"{cell} {worker} {device or 'unbound'}\\n")
    if cell == os.environ.get("CRASHES"):
        os._exit(9)

def test_no_cell():
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], list[Any]]]:
    """Runs xdist over the made-up cells; gives what it said, and (cell, worker, device) as run."""
    (tmp_path / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    (tmp_path / "test_cells.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(*arguments: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments],
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": str(ROOT), "KVMATRIX_BOUND_DEVICE": "GPU-old", **environ},
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        log = tmp_path / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return done, [line.split() for line in lines]

    return run


REAL = [*(f"lone-{n}" for n in range(4)), *(f"pair-{n}" for n in range(6))]
VIRTUALS = [f"virtual-{n}" for n in range(4)]
DEVICES = {"gw0": "GPU-0", "gw1": "GPU-t", "gw2": "GPU-1"}


def test_auto_runs_every_cell_once_on_a_worker_that_may(project: Any) -> None:
    done, ran = project("-n", "auto")
    assert 0 == done.returncode, done.stdout + done.stderr
    # Three devices, and one worker at least for virtual cells.
    assert "4 workers" in done.stdout
    assert "15 passed" in done.stdout
    assert [*REAL, *VIRTUALS] == sorted(cell for cell, _, _ in ran)
    assert {**DEVICES, "gw3": "unbound"} == {w: d for _, w, d in ran}
    assert {"gw1"} == {worker for cell, worker, _ in ran if cell.startswith("lone")}
    assert {"gw0", "gw2"} >= {worker for cell, worker, _ in ran if cell.startswith("pair")}
    for name in ("lone", "pair"):
        mine = [cell for cell, worker, _ in ran if cell.startswith(name) and worker != "gw2"]
        assert sorted(mine, reverse=True) == mine


def test_a_replaced_worker_keeps_the_device_and_nothing_else_is_lost(project: Any) -> None:
    done, ran = project("-n", "auto", CRASHES="lone-3", REAL_ONLY="1")
    assert 1 == done.returncode, done.stdout + done.stderr
    assert "1 failed, 10 passed" in done.stdout
    assert "worker 'gw1' crashed while running 'test_cells.py::test_cell[lone-3]'" in done.stdout
    assert REAL == sorted(cell for cell, _, _ in ran)
    lone = [row for row in ran if row[0].startswith("lone")]
    assert [
        ["lone-3", "gw1", "GPU-t"],
        ["lone-2", "gw3", "GPU-t"],
        ["lone-1", "gw3", "GPU-t"],
        ["lone-0", "gw3", "GPU-t"],
    ] == lone


def test_without_restarts_the_run_ends_though_cells_are_left(project: Any) -> None:
    done, ran = project("-n", "3", "--max-worker-restart=0", CRASHES="lone-3", REAL_ONLY="1")
    assert 1 == done.returncode, done.stdout + done.stderr
    assert "worker restarting disabled" in done.stdout
    names = [cell for cell, _, _ in ran]
    assert ["lone-3"] == [name for name in names if name.startswith("lone")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["-n", "4"], "3 devices"), (["-n", "3", "--dist", "worksteal"], "--dist worksteal")],
)
def test_what_devices_do_not_allow_is_one_line_and_exit_2(
    project: Any, arguments: list[str], word: str
) -> None:
    done, ran = project(*arguments, REAL_ONLY="1")
    assert 2 == done.returncode
    [line] = done.stderr.splitlines()
    assert word in line
    assert [] == ran
