"""One run: what was asked for on the command line, resolved, and the judging of its cells."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from harness import device, expect, install, known, layout, plan, verdict
from harness.device import Device
from harness.engine import environ
from harness.errors import UsageError, unknown
from harness.expect import Explicit
from harness.facts import EngineFacts
from harness.known import Known
from harness.launch import Request
from harness.matrix import Outcome
from harness.plan import Cell, Model
from harness.record import STAGES, VIRTUAL_STAGES, Record

DEFAULT_TIMEOUT = 120.0
"""Seconds a cell may take. On a virtual device it takes about one; the first of a family more."""


@dataclass(frozen=True)
class Options:
    """The command line, checked as far as it can be without an engine."""

    devices: tuple[Device, ...]
    engines: tuple[str, ...]
    depth: str
    timeout: float
    out: Path


def options(
    devices: Sequence[str], engines: Sequence[str], depth: str | None, timeout: str | None, out: str
) -> Options:
    """Check what was passed. UsageError names what is wrong, and what is near it."""
    found = tuple(dict.fromkeys(device.parse(spec) for spec in devices or ["auto"]))
    depth = depth or VIRTUAL_STAGES[-1]
    if depth not in STAGES:
        raise unknown("depth", depth, STAGES, f"one of {', '.join(VIRTUAL_STAGES[1:])}")
    if depth not in VIRTUAL_STAGES[1:]:
        raise UsageError(
            f"depth {depth!r} is not for a virtual device: there is no forward pass; "
            f"one of {', '.join(VIRTUAL_STAGES[1:])}"
        )
    try:
        seconds = DEFAULT_TIMEOUT if timeout is None else float(timeout)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise UsageError(f"--case-timeout {timeout!r} is not a number of seconds above 0")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--matrix-out {out!r} is a file; name a folder")
    return Options(found, tuple(dict.fromkeys(engines or ["current"])), depth, seconds, folder)


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

    def request(self, cell: Cell) -> Request:
        """What the launcher needs to run `cell`."""
        return Request(
            cell.case,
            cell.device,
            cell.engine,
            self.options.depth,
            self.options.timeout,
            cell.model.path,
        )

    def judge(self, cell: Cell, record: Record) -> Outcome:
        """The record of `cell` against everything that is expected of it."""

        def oracle(record: Record) -> list[str] | None:
            try:
                return layout.compare(
                    cell.model.config, record.kv, record.resolved, record.capability
                )
            except layout.UnknownLayout:
                return None

        expectation = self.expectation(cell)
        return Outcome(
            cell,
            verdict.judge(record, expectation, oracle),
            record,
            expect.expected_verdict(cell.case, expectation),
        )

    def notrun(self, cell: Cell) -> Outcome:
        """The outcome of a planned cell that never reported."""
        expected = expect.expected_verdict(cell.case, self.expectation(cell))
        return Outcome(cell, verdict.notrun(), None, expected)

    def expectation(self, cell: Cell) -> expect.Expectation:
        """What is expected of `cell`, by hand and by known.yaml."""
        capability = cell.device.capability
        return expect.Expectation(
            expect.find(self.explicit, cell.case.id, capability),
            known.find(self.known, cell.case.id, cell.engine.version, cell.device.spec, capability),
        )


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
    found = plan.models(models)
    cells = plan.cells(found, options.devices, engines)
    source = models.parent / "known.yaml"
    entries = known.load(source.read_text(encoding="utf-8")) if source.is_file() else ()
    # Another release has other dtypes and backends, and so other cells.
    entries = known.relevant(entries, (engine.version for engine in engines))
    problems = known.check(entries, {cell.case.id for cell in cells}, date.today())
    if problems:
        raise UsageError("cases/known.yaml: " + "; ".join(problems))
    return Run(options, engines, found, cells, explicit_cases(models.parent, found), entries, cache)


def explicit_cases(folder: Path, models: Sequence[Model]) -> tuple[Explicit, ...]:
    """`EXPLICIT` of `cases/<model>.py` for each model that has such a file."""
    found: list[Explicit] = []
    for model in models:
        path = folder / f"{model.key}.py"
        if not path.is_file():
            continue
        spec = importlib.util.spec_from_file_location(f"kvmatrix_cases_{model.key}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found += module.EXPLICIT
    return tuple(found)


def engine_folder(cache: Path, python: str) -> Path:
    """Where what children of one engine keep between runs lies."""
    return cache / "virtual" / hashlib.sha256(python.encode()).hexdigest()[:16]


def engine_environ(cache: Path, python: Path) -> Mapping[str, str]:
    """The environment in which an engine's facts are read: those of any virtual device."""
    anyone = device.parse("virtual:h200")
    return environ.virtual(anyone.to_json(), engine_folder(cache, str(python)))


def launch_environ(cache: Path, request: Request) -> Mapping[str, str]:
    """The environment of a cell's child."""
    return environ.virtual(request.device.to_json(), engine_folder(cache, request.engine.python))


def modules_file(cache: Path, request: Request) -> Path:
    """Where the modules that cells import are kept, by vLLM version, device and model."""
    folder = engine_folder(cache, request.engine.python)
    return folder / f"modules-{request.engine.version}-{request.device.id}-{request.case.model}"
