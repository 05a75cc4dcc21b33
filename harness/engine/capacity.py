"""What a KV cache holds, and which of its layers cost more with each token, as vLLM has it.

The names used here are the same in vLLM 0.27.1 and 0.33.0.
"""

from __future__ import annotations

import math
from typing import Any

from harness.engine import compat
from harness.record import Capacity


def capacity(vllm_config: Any, kv_cache_config: Any, specs: dict[str, Any]) -> Capacity | None:
    """By vLLM's own function, the one behind the line that it logs. None where nothing was
    planned, and for a model without a KV cache, which vLLM does not ask either."""
    if kv_cache_config is None or not kv_cache_config.kv_cache_groups:
        return None
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    tokens, concurrency = compat.call(
        get_kv_cache_capacity, vllm_config=vllm_config, kv_cache_config=kv_cache_config
    )
    return Capacity(
        tokens=int(tokens),
        concurrency=float(concurrency),
        request_bytes=compat.request_bytes(vllm_config, specs),
        max_model_len=int(vllm_config.model_config.max_model_len),
        gpu_memory_utilization=float(vllm_config.cache_config.gpu_memory_utilization),
    )


def bytes_per_token(specs: dict[str, Any]) -> int:
    """`Record.kv_bytes_per_token`."""
    growing = [spec for spec in specs.values() if grows(spec)]
    return math.ceil(sum(int(spec.page_size_bytes) / int(spec.block_size) for spec in growing))


def grows(spec: Any) -> bool:
    """`KVCache.grows`."""
    from vllm.v1 import kv_cache_interface as interface

    if isinstance(spec, interface.MambaSpec):
        # A state for each block, where vLLM is told so (up to 0.32; 0.33.0 has no such mode).
        return bool(spec.mamba_cache_mode == "all")
    # R-SWA is a full-attention spec that frees what its window has passed.
    return isinstance(spec, interface.FullAttentionSpec) and not isinstance(
        spec, interface.RSWASpec
    )


def window(spec: Any) -> int | None:
    """`KVCache.window`. A full-attention spec names its layer's window too, where the hybrid
    manager is off and every token is kept all the same."""
    if grows(spec):
        return None
    names = ("sliding_window", "attention_chunk_size")
    found = (getattr(spec, name, None) for name in names)
    return next((int(value) for value in found if value is not None), None)
