"""One cell on its way to a child, and what comes back: always a Record, whatever became of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import safe
from harness.case import Case
from harness.device import Device
from harness.facts import EngineFacts
from harness.record import Record, RecordError, loads

TAIL_BYTES = 8_000
"""How much of a child's output its record keeps."""


Place = tuple[str, str, str]
"""What a warm child serves: an engine's Python, a device's SPEC, and a model runner (or none)."""


@dataclass(frozen=True)
class Request:
    """A case on a device with an engine."""

    case: Case
    device: Device
    engine: EngineFacts
    depth: str
    timeout: float
    """Seconds that the cell may take."""
    model_path: Path
    """Folder of the model's config.json."""
    engine_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of vLLM's `EngineArgs` beyond those that the case names."""

    @property
    def key(self) -> tuple[str, ...]:
        """What tells this request from all others of a run."""
        return (self.case.id, *self.place, self.depth, str(self.model_path))

    @property
    def place(self) -> Place:
        """The place that it needs."""
        return (self.engine.python, self.device.spec, self.case.model_runner)


@dataclass(frozen=True)
class Ended:
    """How a child ended, before its record is looked at."""

    end: str
    """One of `record.ENDS`."""
    code: int | None = None
    stage: str | None = None
    """The last stage that it told of."""
    seconds: float = 0.0
    retried: bool = False
    leaked_bytes: int | None = None
    """Device memory that stayed in use after it."""


def end_of(code: int) -> str:
    """The `record.ENDS` word for an exit status."""
    return "signal" if code < 0 else "exit" if code > 0 else "finished"


def observed(request: Request, ended: Ended, record: Path, log: Path) -> Record:
    """The child's own record where there is a whole one of this very cell; else one that tells
    how the child ended, with the last of its output."""
    complaint = ""
    if ended.end in ("finished", "exit", "signal") and record.is_file():
        try:
            found = loads(record.read_text(encoding="utf-8"))
            if found.id == request.case.id and ended.end == "finished":
                return _own(request, ended, found, log)
            if found.id != request.case.id:
                complaint = f"\n[the child wrote a record of {found.id!r} instead of its own]"
        except (RecordError, UnicodeDecodeError) as error:
            complaint = f"\n[the child's record cannot be read: {error}]"
        except OSError as error:
            complaint = f"\n[the child's record cannot be read: {error.strerror}]"
    return Record(
        id=request.case.id,
        model=request.case.model,
        backend=request.case.backend,
        kv_cache_dtype=request.case.kv_cache_dtype,
        block_size=request.case.block_size,
        tensor_parallel_size=request.case.tensor_parallel_size,
        device=request.device.spec,
        device_kind=request.device.kind,
        capability=request.device.capability,
        engine=request.engine.version,
        depth=request.depth,
        stage=ended.stage or "import",
        end="silent" if ended.end == "finished" else ended.end,
        tail=_cut(_mask(tail(log)) + _mask(complaint)),
        exit_code=ended.code,
        retried=ended.retried,
        leaked_bytes=ended.leaked_bytes,
        seconds={"total": ended.seconds},
    )


def _own(request: Request, ended: Ended, found: Record, log: Path) -> Record:
    error = found.error
    if error is not None:
        error = dataclasses.replace(error, message=_mask(error.message))
    return dataclasses.replace(
        found,
        error=error,
        log=tuple(_mask(line) for line in found.log),
        # What a virtual engine prints may differ from host to host, and is not kept.
        tail=_cut(_mask(tail(log))) if request.device.real else "",
        retried=ended.retried,
        leaked_bytes=ended.leaked_bytes,
    )


def infra(request: Request, reason: str) -> Record:
    """The record of a cell that was not run because its device or host was not usable."""
    ended = Ended("infra")
    record = observed(request, ended, Path(os.devnull), Path(os.devnull))
    return dataclasses.replace(record, tail=_cut(_mask(reason)))


def tail(log: Path) -> str:
    """The end of a log as text, more than TAIL_BYTES of it; empty where there is none."""
    try:
        with open(log, "rb") as file:
            # Twice what is kept: a secret that straddles the cut must be whole to be masked.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _cut(text: str) -> str:
    return text[-TAIL_BYTES:].strip()


def _mask(text: str) -> str:
    return safe.mask(text, os.environ)
