"""One run: what was asked for on the command line, resolved, and the judging of its cells."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from harness import (
    device,
    expect,
    host,
    install,
    known,
    plan,
    proof,
    schedule,
    verdict,
)
from harness.device import Device, Pool
from harness.engine import environ
from harness.errors import UsageError
from harness.expect import Explicit
from harness.facts import EngineFacts
from harness.known import Known
from harness.launch import Launcher
from harness.matrix import Outcome
from harness.options import Options
from harness.oracle import Oracle
from harness.plan import Cell, Model
from harness.proof import Need, Reductions
from harness.record import STAGES, Record
from harness.request import Request

CPU_CELL_BYTES = 6 * device.GIB
"""Most of a CPU cell's memory (3.4 GiB were seen for DeepSeek-V4), and its share of the parent."""


@dataclass(frozen=True)
class Run:
    """Everything that cells are planned and judged with."""

    options: Options
    engines: tuple[EngineFacts, ...]
    models: tuple[Model, ...]
    cells: tuple[Cell, ...]
    explicit: tuple[Explicit, ...]
    known: tuple[Known, ...]
    cache: Path
    bound: str | None = None
    """SPEC of the real device that this process is bound to."""

    def pool(self, cell: Cell) -> Pool:
        """The devices that may run `cell`."""
        return next(p for p in self.options.pools if p.device.spec == cell.device.spec)

    def request(self, cell: Cell) -> Request:
        """What the launcher needs to run `cell`. On a real device the model is the reduced one."""
        members = self.pool(cell).members
        place = next((d for d in members if d.spec == self.bound), members[0])
        path = proof.reduced_folder(self.cache, cell.model) if place.real else cell.model.path
        return Request(
            cell.case,
            place,
            cell.engine,
            self._depth(cell),
            self.options.timeout_on(place),
            path,
            self.options.engine_args(cell.model.start.engine_args),
        )

    def _depth(self, cell: Cell) -> str:
        depth = self.options.depth_on(cell.device)
        explicit = self.expectation(cell).explicit
        if not cell.device.real or explicit is None or explicit.depth is None:
            return depth
        return max(depth, explicit.depth, key=STAGES.index)

    def judge(self, cell: Cell, record: Record) -> Outcome:
        """The record of `cell` against everything that is expected of it."""
        oracle = self.oracle(cell)
        expectation = self.expectation(cell)
        return Outcome(
            cell,
            verdict.judge(record, expectation, oracle),
            record,
            expect.expected_verdict(cell.case, expectation),
        )

    def oracle(self, cell: Cell) -> Oracle:
        """The layout oracle of `cell`, for the config.json that it is started with: on a real
        device the reduced one."""
        config = proof.reduced(cell.model).config if cell.device.real else cell.model.config
        return Oracle(config, cell.model.start.drafts, cell.device.features)

    def outcome(self, cell: Cell, launcher: Launcher, reductions: Reductions) -> Outcome:
        """Run `cell`, or find that it cannot run here, and judge it."""
        if cell.lacks is not None:
            return self.skipped(cell, cell.lacks)
        try:
            wanted = self.need(cell, reductions)
        except UsageError as error:
            # Of this model alone: the others are judged.
            return self.notrun(cell, str(error))
        lacking = None if wanted is None else wanted.lacking(cell.device)
        if lacking is not None:
            result = self.skipped(cell, lacking)
        else:
            result = self.judge(cell, launcher.record(self.request(cell)))
        return result if wanted is None else replace(result, needs_bytes=wanted.total)

    def runs(self, cell: Cell, reductions: Reductions) -> bool:
        """True where `outcome` starts a child for `cell`."""
        if cell.lacks is not None:
            return False
        try:
            wanted = self.need(cell, reductions)
        except UsageError:
            return False
        return wanted is None or wanted.lacking(cell.device) is None

    def notrun(self, cell: Cell, reason: str = verdict.UNREPORTED) -> Outcome:
        """The outcome of a planned cell that left no record."""
        return Outcome(cell, verdict.notrun(reason), None, self._expected(cell))

    def skipped(self, cell: Cell, reason: str) -> Outcome:
        """The outcome of a cell that cannot run here."""
        return Outcome(cell, verdict.skipped(reason), None, self._expected(cell))

    def _expected(self, cell: Cell) -> str:
        return expect.expected_verdict(cell.case, self.expectation(cell))

    def expectation(self, cell: Cell) -> expect.Expectation:
        """What is expected of `cell`, by hand and by known.yaml."""
        capability = cell.device.capability
        # What is stored is the same under each model runner.
        case = replace(cell.case, model_runner="")
        return expect.Expectation(
            expect.find(self.explicit, case.id, capability),
            known.find(
                self.known,
                cell.case.base,
                cell.engine.version,
                cell.device.spec,
                capability,
                cell.engine.python_version,
                cell.device.features,
            ),
        )

    def need(self, cell: Cell, reductions: Reductions) -> Need | None:
        """The memory that `cell` needs on its device; None for a virtual one.

        UsageError where the model cannot be reduced, or is then not what the full one is.
        """
        if not cell.device.real:
            return None
        found = reductions.proof(cell)
        if found.problems:
            raise UsageError(
                f"the reduction of {cell.model.key} for {cell.device.spec} loses or changes a KV "
                f"kind: {'; '.join(found.problems)}"
            )
        return proof.need(found, cell.device)


def resolve(options: Options, models: Path = plan.MODELS) -> Run:
    """Find (or install) the engines, read their facts, plan the cells, check known.yaml.

    UsageError and InfraError as `install.resolve`; UsageError where known.yaml names cells that
    do not exist or has expired entries.
    """
    cache = install.cache_folder(os.environ)
    engines = tuple(
        install.resolve(spec, cache, lambda folder: engine_environ(cache, folder))
        for spec in options.engines
    )
    plan.check_pairs(options.devices, engines)
    found = plan.models(models)
    cells = plan.cells(found, options.devices, engines, options.axes)
    source = models.parent / "known.yaml"
    entries = known.load(source.read_text(encoding="utf-8")) if source.is_file() else ()
    starts = {(cell.engine.version, cell.device.spec, cell.device.capability) for cell in cells}
    entries = known.relevant(entries, starts)
    problems = known.check(entries, {cell.case.base for cell in cells}, date.today())
    if problems:
        raise UsageError("cases/known.yaml: " + "; ".join(problems))
    return Run(
        options,
        engines,
        found,
        cells,
        explicit_cases(models.parent),
        entries,
        cache,
        schedule.bound(),
    )


def launcher(run: Run, workers: int = 1) -> Launcher:
    """What runs the cells of `run`, for one of `workers` processes that share the host."""
    cores, memory = host.cores() // workers, host.memory_bytes() // workers
    return Launcher(
        lambda device: jobs(device, cores, memory),
        lambda request: launch_environ(run, request),
        lambda request: modules_file(run, request),
        isolation=run.options.isolation,
    )


def explicit_cases(folder: Path) -> tuple[Explicit, ...]:
    """`EXPLICIT` of every module in `folder` that has one, in the order of their names."""
    found: list[Explicit] = []
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith(("_", "test_")):
            continue
        name = f"kvmatrix_cases_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        found += getattr(module, "EXPLICIT", ())
    return tuple(found)


def engine_folder(cache: Path, python: str) -> Path:
    """Where what children of one engine keep between runs lies."""
    return cache / "virtual" / hashlib.sha256(python.encode()).hexdigest()[:16]


def engine_environ(cache: Path, python: Path) -> Mapping[str, str]:
    """The environment in which an engine's facts are read: those of any virtual device."""
    anyone = device.parse(device.DEFAULT)
    return environ.virtual(anyone.to_json(), engine_folder(cache, str(python)))


def launch_environ(run: Run, request: Request) -> Mapping[str, str]:
    """The environment of a cell's child."""
    runner = request.case.model_runner or None
    if request.device.real:
        return environ.real(request.device, os.environ, runner)
    folder = engine_folder(run.cache, request.engine.python)
    return {**environ.virtual(request.device.to_json(), folder), **environ.runner(runner)}


def modules_file(run: Run, request: Request) -> Path:
    """Where the modules that cells import are kept, by vLLM version, device and model."""
    folder = engine_folder(run.cache, request.engine.python)
    name = (request.engine.version, request.device.id, request.case.model)
    return folder / f"modules-{'-'.join(name)}"


def jobs(device: Device, cores: int, memory_bytes: int) -> int:
    """Cells at a time on `device`, for a process that may use so much of the host."""
    if device.kind == "cpu":
        return max(1, min(cores, memory_bytes // CPU_CELL_BYTES))
    # A cell measures the memory of its GPU or slice, and so must have it alone.
    return 1 if device.real else max(1, cores)
