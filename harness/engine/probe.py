"""One cell: vLLM's initialisation on a device, into a Record."""

from __future__ import annotations

import dataclasses
import logging
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.device import Device
from harness.engine import capacity, observe, selector
from harness.engine.observe import Observed
from harness.record import VIRTUAL_STAGES, Fault, Record, parts
from harness.safe import clip

LOG_LETTERS = 1000
"""Letters of a log line that are kept."""

_ABOUT_KV = re.compile(r"kv.?cache|cache.?dtype|fp8_ds_mla|attention backend", re.IGNORECASE)


@contextmanager
def _kept_log(into: list[str]) -> Iterator[None]:
    """Keep what vLLM says of the KV cache, level first.

    Records are caught where they are made: vLLM configures its handlers anew with each config.
    """
    make = logging.getLogRecordFactory()

    def keep(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith("vllm") and record.levelno >= logging.INFO and len(into) < 50:
            message = record.getMessage()
            if _ABOUT_KV.search(message):
                # vLLM prints its whole config in one line: what counts stands in the first part.
                into.append(f"{record.levelname} {clip(message, LOG_LETTERS)}")
        return record

    logging.setLogRecordFactory(keep)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def run(
    case: Case,
    model_path: Path,
    engine_args: Mapping[str, Any],
    device: Device,
    depth: str,
    engine: str,
    tell: Callable[[str], None] = lambda stage: None,
    settings: Mapping[str, str] | None = None,
) -> Record:
    """Start `case` on `device` up to stage `depth` and return what was seen. Never raises for
    anything that vLLM does; `tell` hears of each stage when it begins, and `settings` are the
    caller's, for the record of a real device.

    A depth that a virtual device reaches is planned on the meta device, on a CPU too.
    """
    if depth in VIRTUAL_STAGES:
        from harness.engine.virtual import start
    else:
        from harness.engine.real import start
    began = time.perf_counter()
    seen = Observed()
    fault: Fault | None = None
    try:
        with _kept_log(seen.log):
            start(case, model_path, engine_args, device, depth, seen, tell)
    except Exception as error:
        traceback.print_exc()
        fault, seen.error = _fault(error), error
        seen.failing_layer = observe.failing_layer(error)
    told = seen.told or {}
    observed = parts({name: told[name] for name in _TOLD if name in told}) or {
        "resolved": observe.resolved(seen),
        "kv": observe.kv(seen),
        "groups": observe.groups(seen),
        "num_blocks": observe.num_blocks(seen),
        "kv_bytes_per_token": observe.bytes_per_token(seen),
        "capacity": capacity.capacity(seen.vllm_config, seen.kv_cache_config, seen.specs),
        "candidates": selector.candidates(seen.vllm_config, seen.error),
        "declared": observe.declared(seen, case),
        "model_runner": case.model_runner or None,
    }
    seen.seconds["total"] = round(time.perf_counter() - began, 3)
    clean = _Cleaner(model_path)
    record = Record(
        id=case.id,
        model=case.model,
        backend=case.backend,
        kv_cache_dtype=case.kv_cache_dtype,
        block_size=case.block_size,
        tensor_parallel_size=case.tensor_parallel_size,
        device=device.spec,
        device_kind=device.kind,
        capability=device.capability,
        engine=engine,
        depth=depth,
        stage=seen.stage,
        error=None if fault is None else clean.fault(fault),
        memory=seen.memory,
        logits_finite=seen.logits_finite,
        settings=dict(settings or {}),
        log=tuple(clean(line) for line in seen.log),
        seconds=seen.seconds,
    )
    return dataclasses.replace(record, **observed)


_TOLD = (
    *("resolved", "kv", "groups", "num_blocks", "kv_bytes_per_token", "capacity", "candidates"),
    *("declared", "model_runner"),
)
"""Parts of a Record that the worker of a real engine tells."""


class _Cleaner:
    """Takes this machine's paths and addresses out of a text: two hosts must say the same."""

    def __init__(self, model_path: Path) -> None:
        import vllm

        packages = Path(vllm.__file__).resolve().parent.parent
        self._names = [
            (str(model_path), "<model>"),
            (str(packages), "<site-packages>"),
            (tempfile.gettempdir(), "<tmp>"),
        ]

    def __call__(self, text: str) -> str:
        for path, name in self._names:
            text = text.replace(path, name)
        return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)

    def fault(self, fault: Fault) -> Fault:
        return Fault(fault.type, fault.bases, self(fault.message), fault.where)


def _fault(error: BaseException) -> Fault:
    import vllm

    root = Path(vllm.__file__).resolve().parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).resolve().is_relative_to(root / "vllm")]
    last = (inside or list(frames))[-1]
    file = Path(last.filename).resolve()
    shown = file.relative_to(root) if file.is_relative_to(root) else Path(file.name)
    return Fault(
        type=type(error).__name__,
        bases=tuple(c.__name__ for c in type(error).__mro__ if issubclass(c, Exception)),
        message=str(error),
        where=f"{shown}:{last.name}",
    )
