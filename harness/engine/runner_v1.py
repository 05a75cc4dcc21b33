"""vLLM's older model runner (v1), as far as it collects KV-cache specs and allocates.

Its own methods run, on an instance that was never initialised: that would need a device.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.engine import compat


class Runner:
    """The v1 runner of one start."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self._runner = runner = object.__new__(GPUModelRunner)
        cache = vllm_config.cache_config
        for name, value in {
            "vllm_config": vllm_config,
            "cache_config": cache,
            "model_config": vllm_config.model_config,
            "compilation_config": vllm_config.compilation_config,
            "parallel_config": vllm_config.parallel_config,
            "speculative_config": vllm_config.speculative_config,
            "device": device,
            "dtype": vllm_config.model_config.dtype,
            "drafter": None,
            "shared_kv_cache_layers": {},
            "kv_sharing_fast_prefill_eligible_layers": set(),
            "runner_only_attn_layers": set(),
            "attn_groups": [],
            "kv_caches": [],
            "use_hybrid_blocks": False,
            "cross_layers_kv_cache": None,
            "cross_layers_attn_backend": None,
            # Whether CUDA graphs can be captured: nothing is, here.
            "_check_and_update_cudagraph_mode": lambda *args, **kwargs: None,
        }.items():
            setattr(runner, name, value)

    def kv_cache_specs(self) -> dict[str, Any]:
        """Layer name -> KVCacheSpec."""
        specs: dict[str, Any] = self._runner.get_kv_cache_spec()
        return specs

    def allocate(self, kv_cache_config: Any) -> dict[str, Any]:
        """Layer name -> tensor (or list of tensors), allocated and reshaped by the runner."""
        runner = self._runner
        runner.kv_cache_config = kv_cache_config
        runner.initialize_attn_backend(kv_cache_config)
        sizes = compat.kernel_block_sizes(runner, kv_cache_config)
        caches: dict[str, Any] = compat.call(
            runner.initialize_kv_cache_tensors,
            kv_cache_config=kv_cache_config,
            kernel_block_sizes=sizes,
        )
        return caches
