"""A real start: `vllm.LLM` in this process, nothing patched, observed by vLLM's own seams."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.device import Device
from harness.engine import arguments, compat, observe
from harness.engine.observe import Observed
from harness.engine.stages import Watcher, stage_of_traceback
from harness.record import Memory

EXTENSION = "harness.engine.extension.Extension"

CPU_KV_BYTES = 256 << 20
"""KV cache on a CPU: its zeroing is real work there, and pages do not depend on it."""

PROMPT = (1, 2, 3)
"""Token ids; every vocabulary has them."""


class _Meter(Watcher):
    """A watcher that also measures memory when the weights and the KV cache have come."""

    def __init__(self, device: Device, tell: Callable[[str], None]) -> None:
        super().__init__(tell)
        self._device = device
        self.used: dict[str, int | None] = {}

    def began(self, stage: str) -> None:
        self.used[stage] = used_bytes(self._device)


def used_bytes(device: Device) -> int | None:
    """Bytes in use: on a GPU or slice by all that is on it, on a CPU by this process. None where
    that cannot be told, as before CUDA has been started: asking must not start it."""
    if device.kind == "cpu":
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        return pages * compat.PAGE_BYTES
    return compat.cuda_used_bytes()


def start(
    case: Case,
    model_path: Path,
    engine_args: Mapping[str, Any],
    device: Device,
    depth: str,
    seen: Observed,
    tell: Callable[[str], None],
) -> None:
    """Start `case` up to stage `depth`, filling `seen`. Raises what vLLM raises."""
    with _Meter(device, tell) as watcher:
        watcher.enter("config")
        try:
            options = arguments.options(model_path, case, engine_args)
            _go(options, case, device, depth, seen, watcher)
        except BaseException as error:
            watcher.enter(stage_of_traceback(error.__traceback__))
            observe.recover(seen, error)
            raise
        finally:
            seen.stage = watcher.stage
            seen.seconds.update(watcher.seconds())


def _go(
    options: dict[str, Any],
    case: Case,
    device: Device,
    depth: str,
    seen: Observed,
    watcher: _Meter,
) -> None:
    from vllm import LLM

    if device.kind == "cpu":
        options["kv_cache_memory_bytes"] = CPU_KV_BYTES
    llm = LLM(worker_extension_cls=EXTENSION, **options)
    # Initialisation has gone through: a stage too short to be seen has been passed, too.
    watcher.enter("warmup")
    seen.vllm_config = llm.llm_engine.vllm_config
    (text,) = llm.collective_rpc("kvmatrix_observe", args=(json.dumps(asdict(case)),))
    seen.told = json.loads(text)
    used = watcher.used
    seen.memory = Memory(
        total_bytes=device.memory_bytes,
        weights_bytes=seen.told["weights_bytes"],
        available_bytes=compat.available_bytes(llm) or seen.told["planned_bytes"],
        weights_fit=True,
        used_before_bytes=used.get("config"),
        # The first of the stages behind the weights that lasted long enough to be seen.
        used_after_weights_bytes=used.get("spec") or used.get("plan") or used.get("allocate"),
        used_after_kv_bytes=used.get("warmup"),
    )
    if depth == "generate":
        watcher.enter("generate")
        seen.logits_finite = _generate(llm)


def _generate(llm: Any) -> bool:
    """Decode one token; True where its log-probabilities are finite numbers."""
    from vllm import SamplingParams

    (output,) = llm.generate(
        {"prompt_token_ids": list(PROMPT)},
        SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, detokenize=False),
        use_tqdm=False,
    )
    (decoded,) = output.outputs
    values = [entry.logprob for entry in decoded.logprobs[0].values()]
    # One logit that is not finite leaves no log-probability that is.
    return len(decoded.token_ids) == 1 and bool(values) and all(map(math.isfinite, values))
