"""`kvmatrix explain CELL`: one cell run outside of pytest, or read from records.jsonl."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import device, plan, proof, reproduce, session, story
from harness.case import RUNNERS
from harness.engine import arguments
from harness.errors import EXIT_INFRA, UsageError, near, unknown
from harness.layout import Match, NoLayout, UnknownLayout
from harness.matrix import Outcome
from harness.options import options
from harness.plan import Axes, Cell
from harness.proof import Reductions
from harness.record import Record, RecordError, loads
from harness.rejudge import Rejudge
from harness.session import Run
from harness.story import Story

FALLBACK_WIDTH = 100
"""Columns, where there is no terminal."""

_ENGINE = re.compile(r"-(\d+\.\d+\.\d+\w*(?:\.\w+)*)$")
_AXES = re.compile(rf"^(.+?)(?:-block(\d+))?(?:-tp(\d+))?(?:-({'|'.join(RUNNERS)}))?$")


@dataclass(frozen=True)
class Asked:
    """What a cell's id says."""

    case: str
    """The id without device and engine."""
    axes: Axes
    device: str | None
    """SPEC of the virtual device that it names."""
    engine: str | None


def parse(text: str) -> Asked:
    """Read an id as pytest shows it: also `test_cell[...]`, and with device and engine behind, as
    where there are several."""
    text = text.rpartition("[")[2].rstrip("]").strip()
    found = _ENGINE.search(text)
    text = _ENGINE.sub("", text)
    on = next((d for d in device.virtual_devices() if text.endswith(f"-{d.id}")), None)
    if on is not None:
        text = text.removesuffix(f"-{on.id}")
    axes = _AXES.match(text)
    _, block, ranks, runner = axes.groups() if axes else (text, None, None, None)
    return Asked(
        text,
        Axes((int(block or 0),), (int(ranks or 1),), (runner or "",)),
        on.spec if on else None,
        found[1] if found else None,
    )


def find(cells: Iterable[Cell], name: str) -> Cell:
    """The cell of a case id. UsageError offers what is near."""
    by_id = {cell.case.id: cell for cell in cells}
    if name in by_id:
        return by_id[name]
    raise unknown("cell", name, by_id, "`pytest --collect-only -q -k ...` lists them")


def run(
    name: str,
    *,
    devices: Sequence[str] = (),
    engines: Sequence[str] = (),
    max_model_len: str | None = None,
    gpu_memory_utilization: str | None = None,
    models: Path | None = None,
) -> Story:
    """Run the cell now. UsageError where there is none; InfraError where the host is not usable.

    `auto` means the first kind of device that it finds.
    """
    this, cell = prepare(
        name,
        devices=devices,
        engines=engines,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        models=models,
    )
    return told(this, launch(this, cell))


def prepare(
    name: str,
    *,
    devices: Sequence[str] = (),
    engines: Sequence[str] = (),
    max_model_len: str | None = None,
    gpu_memory_utilization: str | None = None,
    models: Path | None = None,
) -> tuple[Run, Cell]:
    """The cell, and a run of it. Nothing but the engine's facts is read; errors as `run`."""
    asked = parse(name)
    chosen = options(
        devices or [asked.device or "auto"],
        engines or ([asked.engine] if asked.engine else ()),
        block_sizes=[str(size) for size in asked.axes.block_sizes if size],
        tensor_parallel_sizes=[str(n) for n in asked.axes.tensor_parallel_sizes if n > 1],
        model_runners=[runner for runner in asked.axes.model_runners if runner],
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    chosen = replace(chosen, pools=chosen.pools[:1])
    this = session.resolve(chosen, models or plan.MODELS)
    return this, find(this.cells, asked.case)


def launch(this: Run, cell: Cell) -> Outcome:
    """Run the cell now, in a process of its own."""
    _say(f"starting {cell.case.id} on {cell.device.spec} with vLLM {cell.engine.version}")
    launcher = session.launcher(this)
    try:
        return this.outcome(cell, launcher, Reductions(this.cache, launcher.record, _say))
    finally:
        launcher.close()


def _say(text: str) -> None:
    print(f"kvmatrix: {text}", file=sys.stderr, flush=True)


# ---- A record that was kept ----------------------------------------------------------------------


def read(
    path: Path,
    name: str,
    *,
    devices: Sequence[str] = (),
    engines: Sequence[str] = (),
    models: Path | None = None,
) -> Story:
    """The cell's record in a records.jsonl, judged as of now; no engine is needed. UsageError where
    the file cannot be read, has no such cell, or has it more than once."""
    asked = parse(name)
    records = list(_records(path))
    wanted = {
        "device": devices or ([asked.device] if asked.device else ()),
        "engine": engines or ([asked.engine] if asked.engine else ()),
    }
    found = [
        record
        for record in records
        if record.id == asked.case
        and all(not values or getattr(record, key) in values for key, values in wanted.items())
    ]
    if not found:
        ids = {record.id for record in records}
        close = [] if asked.case in ids else near(asked.case, ids)
        hint = f": did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise UsageError(f"{path} has no record of {name!r}{hint}")
    places = list(dict.fromkeys((record.device, record.engine) for record in found))
    if len(places) > 1:
        several = " or ".join(f"--device {place} --engine {engine}" for place, engine in places[:4])
        several += f" or {len(places) - 4} more" if len(places) > 4 else ""
        raise UsageError(f"{path} has {name!r} more than once: say which with {several}")
    # A file may have been written to by more than one run: the last one counts.
    record = found[-1]
    this = Rejudge(models or plan.MODELS).run(record)
    return told(this, this.judge(this.cells[0], record))


def _records(path: Path) -> Iterable[Record]:
    if path.is_dir():
        path /= "records.jsonl"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {why}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield loads(line)
            except RecordError as error:
                raise UsageError(f"{path} line {number}: {error}") from None


# ---- Both ----------------------------------------------------------------------------------------


def told(run: Run, outcome: Outcome) -> Story:
    """The story of a judged cell."""
    cell, record = outcome.cell, outcome.record
    engine_args = run.options.engine_args(cell.model.start.engine_args)
    path = proof.reduced_folder(run.cache, cell.model) if cell.device.real else cell.model.path
    passed = arguments.options(path, cell.case, engine_args)
    matches, why = _matches(run, cell, record)
    return Story(
        outcome, run.expectation(cell), passed, matches, why, _reproduction(run, outcome, passed)
    )


def _matches(run: Run, cell: Cell, record: Record | None) -> tuple[tuple[Match, ...], str]:
    if record is None or not record.kv:
        return (), "there is no KV cache to look at"
    try:
        return run.oracle(cell).matches(record), ""
    except (UnknownLayout, NoLayout, UsageError) as error:
        return (), str(error)


def _reproduction(run: Run, outcome: Outcome, passed: dict[str, Any]) -> reproduce.Reproduction:
    cell, record = outcome.cell, outcome.record
    config_only = record is not None and record.error is not None and record.stage == "config"
    note, given = "the folder holds nothing but config.json", dict(passed)
    if not config_only:
        # A model at its full size fits few devices; it is shown as it would run on a real one.
        try:
            given["model"] = str(proof.reduced_folder(run.cache, cell.model))
            note = "the model reduced to a layer of every KV kind: the folder is its config.json"
        except UsageError:
            pass
    if not cell.device.real and cell.device.capability is not None:
        note += ", the device one of SM{}{}".format(*cell.device.capability)
    length = run.options.max_model_len
    more = {
        "max-model-len": None if length == arguments.MAX_MODEL_LEN else length,
        "gpu-memory-utilization": run.options.gpu_memory_utilization,
    }
    engine = next((spec for spec in run.options.engines if spec != "current"), None)
    return reproduce.Reproduction(
        note,
        reproduce.model_runner(cell.case),
        reproduce.python(given, config_only=config_only),
        reproduce.pytest(cell.case, cell.device.spec, engine, more),
    )


def show(found: Story, *, as_json: bool) -> int:
    """Print a story. 0 where the cell is as expected, 75 where its device or host was not usable,
    else 1."""
    if as_json:
        print(json.dumps(story.to_json(found), indent=1))
    else:
        width = shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns
        for line in story.render(found, width):
            print(line)
    judgement = found.outcome.judgement
    if judgement.verdict == "infra":
        return EXIT_INFRA
    return 0 if judgement.passes or judgement.verdict == "skipped" else 1
