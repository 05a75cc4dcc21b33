"""Records that were kept, judged by what is expected today. No engine is needed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from harness import device, host, install, known, plan, session
from harness.change import case_of
from harness.device import Device, Pool
from harness.errors import unknown
from harness.facts import EngineFacts
from harness.matrix import Outcome
from harness.options import Options
from harness.plan import Cell
from harness.record import Record
from harness.session import Run


class Rejudge:
    """What is expected, read once, for any number of records."""

    def __init__(self, folder: Path = plan.MODELS) -> None:
        self._models = {model.key: model for model in plan.models(folder)}
        source = folder.parent / "known.yaml"
        self._known = known.load(source.read_text(encoding="utf-8")) if source.is_file() else ()
        self._explicit = session.explicit_cases(folder.parent)
        self._devices: dict[tuple[object, ...], Device] = {}

    def run(self, record: Record) -> Run:
        """A run of this one cell. UsageError where no such model or device is known."""
        if record.model not in self._models:
            raise unknown("model", record.model, self._models, "`kvmatrix models` lists them")
        names = ("id", "model", "backend", "kv_cache_dtype", "block_size", "tensor_parallel_size")
        case = case_of({name: getattr(record, name) for name in names})
        model, place = self._models[record.model], self._place(record)
        engine = EngineFacts("", record.engine, None, "", None, None, None, "", (), (), {})
        length = record.capacity.max_model_len if record.capacity else None
        chosen = Options((Pool(place, (place,)),), (record.engine,), None, None, Path())
        return Run(
            replace(chosen, max_model_len=length),
            (engine,),
            tuple(self._models.values()),
            (Cell(record.id, case, model, place, engine),),
            self._explicit,
            known.relevant(self._known, {(record.engine, place.spec, place.capability)}),
            install.cache_folder(os.environ),
        )

    def outcome(self, record: Record) -> Outcome:
        """The record's outcome. UsageError as `run`."""
        run = self.run(record)
        return run.judge(run.cells[0], record)

    def _place(self, record: Record) -> Device:
        memory = record.memory.total_bytes if record.memory else 0
        key = (record.device, record.device_kind, record.capability, memory)
        if key not in self._devices:
            self._devices[key] = _device(record, memory)
        return self._devices[key]


def _device(record: Record, memory: int) -> Device:
    """The device of a record. Of a real one no more is known than the record says."""
    if record.device_kind == "virtual":
        return device.parse(record.device)
    return replace(
        # Records of a CPU seldom leave their machine.
        device.cpu(record.device, memory, host.features()),
        spec=record.device,
        kind=record.device_kind,
        capability=record.capability,
    )
