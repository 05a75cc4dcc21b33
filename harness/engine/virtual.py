"""A start on the virtual device: vLLM's own initialisation, stage by stage, without a forward pass.

On vLLM's CPU build the same plans a model at its full depth: no weights, no memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.device import Device
from harness.engine import arguments, compat, ranks, seams, tokenizer
from harness.engine.observe import Observed
from harness.engine.runner_v1 import Runner
from harness.record import VIRTUAL_STAGES, Memory


class _Reached(Exception):  # noqa: N818 - no error: the depth asked for is done
    """The stage that was asked for has been passed."""


class _Executor:
    """Stands where vLLM's model executor stands while EngineCore plans the KV cache."""

    def __init__(self, start: _Start) -> None:
        self._start = start

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        # A group's planning may replace specs; what the layers asked for is kept.
        return [dict(self._start.seen.specs)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [compat.supported_kv_cache_layouts(self._start.seen.vllm_config)]

    def set_kv_cache_layout(self, *args: Any) -> None:
        compat.set_kv_cache_layout(self._start.seen.vllm_config, *args)

    def determine_available_memory(self) -> list[int]:
        return [self._start.available_memory()]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self._start.allocate(kv_cache_configs[0])

    def compile_or_warm_up_model(self, *args: Any) -> Any:
        # There is no forward pass on a virtual device.
        raise _Reached


class _Start:
    def __init__(
        self,
        model_path: Path,
        case: Case,
        engine_args: Mapping[str, Any],
        device: Device,
        depth: str,
        seen: Observed,
    ) -> None:
        self.model_path = model_path
        self.case = case
        self.engine_args = engine_args
        self.device = device
        self.depth = depth
        self.seen = seen
        self._since = time.perf_counter()
        self._model: Any = None
        self._drafter: Any = None
        self._runner_v1: Runner | None = None
        self._tell: Callable[[str], None] = lambda stage: None

    def enter(self, stage: str) -> None:
        """Leave the running stage for `stage`; _Reached where the depth asked for lies behind."""
        now = time.perf_counter()
        if self.seen.stage != "import":
            self.seen.seconds[self.seen.stage] = round(now - self._since, 3)
        self._since = now
        if VIRTUAL_STAGES.index(stage) > VIRTUAL_STAGES.index(self.depth):
            raise _Reached
        self.seen.stage = stage
        self._tell(stage)

    def go(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        seams.repeat(self.case.tensor_parallel_size)
        self.enter("config")
        self.seen.vllm_config = config = arguments.config(
            self.model_path, self.case, self.engine_args
        )
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with ExitStack() as stack:
            stack.enter_context(set_current_vllm_config(config))
            self.enter("model")
            # Before meta becomes the default place: the group exchanges real tensors on the host.
            ranks.start(self.case.tensor_parallel_size)
            stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
            stack.enter_context(seams.META)
            stack.enter_context(seams.OnMeta())
            compat.init_workspace(seams.META)
            with tokenizer.answered(config.model_config.hf_config):
                self._model = compat.initialize_model(config)
                self._drafter = compat.initialize_drafter(config)
            self.seen.built = True
            # The executor does this between loading and the KV cache.
            from vllm.platforms import current_platform

            current_platform.update_block_size_for_backend(config)
            self.enter("spec")
            if self.case.model_runner == "v1":
                self._runner_v1 = Runner(config, seams.META)
                self.seen.specs = self._runner_v1.kv_cache_specs()
            else:
                self.seen.specs = compat.kv_cache_specs(config)
            self.enter("plan")
            compat.plan(_Executor(self), config)

    def leave(self) -> None:
        """Keep the time of the stage that was running at the end."""
        self.seen.seconds.setdefault(self.seen.stage, round(time.perf_counter() - self._since, 3))

    def available_memory(self) -> int:
        """Bytes for the KV cache: utilisation x memory less weights, as if the weights lay
        elsewhere (other ranks) where they leave no room for one request on the device."""
        weights = compat.weights_bytes(self._model, self._drafter)
        request = compat.request_bytes(self.seen.vllm_config, self.seen.specs)
        share = self.seen.vllm_config.cache_config.gpu_memory_utilization
        budget = int(self.device.memory_bytes * share)
        # Twice: groups are rounded up to whole pages of each other.
        fits = weights + 2 * request <= budget
        self.seen.memory = Memory(
            total_bytes=self.device.memory_bytes,
            weights_bytes=weights,
            available_bytes=budget - weights if fits else budget,
            weights_fit=fits,
        )
        return budget - weights if fits else budget

    def allocate(self, kv_cache_config: Any) -> None:
        self.seen.kv_cache_config = kv_cache_config
        self.enter("allocate")
        if self._runner_v1 is not None:
            self.seen.tensors = self._runner_v1.allocate(kv_cache_config)
            return
        config = self.seen.vllm_config
        groups, kernel_block_sizes = compat.attention_groups(config, kv_cache_config, seams.META)
        self.seen.tensors = compat.allocate(
            config, kv_cache_config, groups, kernel_block_sizes, seams.META
        )


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
    if device.kind == "cpu":
        seams.without_cuda()
    this = _Start(model_path, case, engine_args, device, depth, seen)
    try:
        this.go(tell)
    except _Reached:
        pass
    finally:
        this.leave()
