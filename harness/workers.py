"""Workers of pytest-xdist: how many there are, and which device each is bound to.

All of it happens in the controller. A worker that is bound to a GPU or MIG slice finds the
device's SPEC in its environment (`BOUND`); a replacement has the same spec, and so the same device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from harness import host
from harness.backlog import Place, Task
from harness.device import GIB, Device, Pool
from harness.errors import UsageError
from harness.plan import Cell
from harness.schedule import BOUND, Schedule

WORKER_BYTES = {"virtual": 4 * GIB, "cpu": 6 * GIB, "gpu": 4 * GIB, "mig": 4 * GIB}
"""Host memory of a worker by kind of device: a warm child holds 1.5 - 2.5 GiB, each cell that it
forks adds to it, and on a CPU the KV cache lies there as well."""

OTHER_SECONDS = 1.0
"""What an item that is no cell is taken to need."""


def binds(device: Device) -> bool:
    """True for a device that one worker at a time can have."""
    return device.kind in ("gpu", "mig")


def auto_workers(pools: Sequence[Pool], cores: int, memory_bytes: int) -> int:
    """How many workers `-n auto` starts: one for each GPU and MIG slice, and where there are
    virtual or CPU facets as well one for each core beyond those, one at least.

    Fewer where `memory_bytes` of the host (0: not known) is less than they need (`WORKER_BYTES`).
    """
    devices = [member for pool in pools if binds(pool.device) for member in pool.members]
    rest = {pool.device.kind for pool in pools if not binds(pool.device)}
    if not rest:
        return max(1, len(devices))
    room = cores - len(devices)
    if memory_bytes:
        left = memory_bytes - sum(WORKER_BYTES[device.kind] for device in devices)
        room = min(room, left // max(WORKER_BYTES[kind] for kind in rest))
    return len(devices) + max(1, room)


def bindings(pools: Sequence[Pool], workers: int) -> tuple[str | None, ...]:
    """SPEC of the device that each of `workers` is bound to, None for those that run virtual and
    CPU cells; every facet gets a worker before any gets a second.

    UsageError where a worker would have no device, or a facet no worker.
    """
    facets = [pool for pool in pools if binds(pool.device)]
    rest = len(facets) < len(pools)
    if workers < len(facets):
        raise UsageError(
            f"-n {workers}: each of the {len(facets)} kinds of device needs a worker of its own; "
            "use -n auto, or name one with --device"
        )
    specs = list(_in_turn([[member.spec for member in pool.members] for pool in facets]))
    if facets and workers > len(specs) and not rest:
        there = "is 1 device" if len(specs) == 1 else f"are {len(specs)} devices"
        raise UsageError(f"-n {workers}: there {there}; -n auto starts one worker for each")
    return (*specs[:workers], *[None] * (workers - len(specs)))


def _in_turn(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first of each row, then the second of each, and so on."""
    for column in range(max(map(len, rows), default=0)):
        yield from (row[column] for row in rows if column < len(row))


def asked(option: Any, auto: Callable[[], int]) -> int:
    """How many workers the options of xdist ask for, 0 for none; `auto` says it for `-n auto`."""
    count = getattr(option, "numprocesses", None)
    if count is None:
        off = getattr(option, "dist", "no") == "no" and not getattr(option, "distload", False)
        return 0 if off else sum(map(_times, getattr(option, "tx", None) or ()))
    if isinstance(count, str):
        count = 0 if getattr(option, "usepdb", False) else auto()
    return max(0, min(count, getattr(option, "maxprocesses", None) or count))


def _times(tx: str) -> int:
    """How many workers one `--tx` stands for: `3*popen` for three."""
    head, star, _ = tx.partition("*")
    return int(head) if star and head.isdecimal() else 1


@dataclass(frozen=True)
class Job:
    """A cell as the scheduler sees it."""

    place: Place
    """The engine's Python and the SPEC of the facet's device."""
    seconds: float
    """Estimated."""


def jobs(cells: Iterable[Cell], estimate: Callable[[Cell], float]) -> dict[str, Job]:
    """The jobs of cells by their ids; `estimate` gives seconds (`Durations.estimate`)."""
    return {cell.id: Job((cell.engine.python, cell.device.spec), estimate(cell)) for cell in cells}


class Workers:
    """The plugin of the controller."""

    def __init__(
        self,
        pools: Sequence[Pool],
        jobs: Mapping[str, Job],
        cores: Callable[[], int] = host.cores,
        memory_bytes: Callable[[], int] = host.memory_bytes,
    ) -> None:
        self._pools = tuple(pools)
        self._jobs = jobs
        self._cores = cores
        self._memory_bytes = memory_bytes

    def check(self, config: pytest.Config) -> None:
        """UsageError where the options of xdist do not go with the devices of the run."""
        count = asked(
            config.option, lambda: config.hook.pytest_xdist_auto_num_workers(config=config)
        )
        if not count:
            return
        bindings(self._pools, count)
        mode = config.option.dist
        if mode not in ("no", "load") and any(binds(pool.device) for pool in self._pools):
            raise UsageError(
                f"--dist {mode} does not keep cells to the devices of their workers; "
                "leave --dist out"
            )

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_xdist_auto_num_workers(self) -> int | None:
        """As `auto_workers`, but for xdist's own variable, which says how many."""
        if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
            return None
        return auto_workers(self._pools, self._cores(), self._memory_bytes())

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Binds workers: xdist keeps the spec, its environment with it, for a replacement."""
        for spec, name in zip(specs, bindings(self._pools, len(specs)), strict=True):
            # Empty hides what this process may have inherited from a worker of another run.
            spec.env[BOUND] = name or ""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Schedule | None:
        """Ours where there are cells, unless another way to distribute was asked for."""
        if not self._jobs or config.option.dist != "load":
            return None
        devices = {
            pool.device.spec: frozenset(member.spec for member in pool.members)
            for pool in self._pools
            if binds(pool.device)
        }
        count = sum(map(_times, config.option.tx))

        def task(item: int, nodeid: str) -> Task:
            job = self._jobs.get(_cell_id(nodeid))
            if job is None:
                return Task(item, OTHER_SECONDS)
            return Task(item, job.seconds, job.place, devices.get(job.place[1]))

        return Schedule(config, count, task, log)


def _cell_id(nodeid: str) -> str:
    """The cell's id in a node id such as `cases/test_matrix.py::test_cell[dsv4-default-unset]`."""
    return nodeid.rpartition("[")[2].partition("]")[0]
