"""A checkpoint's own KV-cache quantisation: what `auto` must follow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.case import UNSET
from harness.record import Record

FP8 = 8
"""Bits of a value; the only width that the formats below have for a KV cache besides NVFP4."""

_NAMED = {"fp8": FP8, "static": FP8}
"""Schemes written as a word: ModelOpt's algorithm, and AutoFP8's flag for its only format."""


def kv_bits(config: Mapping[str, Any]) -> int | None:
    """Bits of a KV-cache value in the checkpoint's `quantization_config`; None where it says
    nothing of the KV cache, or nothing that is written down here.

    compressed-tensors and ModelOpt write `kv_cache_scheme` as `{"num_bits": 8, "type": "float"}`,
    ModelOpt also `kv_cache_quant_algo: "FP8"`, AutoFP8 `kv_cache_scheme: "static"`.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        scheme = quantization.get(key)
        if isinstance(scheme, str):
            return _NAMED.get(scheme.lower())
        if isinstance(scheme, Mapping) and scheme.get("type") == "float":
            bits = scheme.get("num_bits")
            return bits if isinstance(bits, int) else None
    return None


def differences(config: Mapping[str, Any], record: Record) -> list[str]:
    """One line where nothing was asked and the checkpoint's own quantisation is not what is stored;
    [] where it is, where it says nothing, or where a kv_cache_dtype was asked for."""
    stored = record.resolved.kv_cache_dtype
    if record.kv_cache_dtype not in (UNSET, "auto") or kv_bits(config) != FP8 or stored is None:
        return []
    if all(name.startswith("fp8") for name in stored.split("+")):
        return []
    element = f" ({record.resolved.storage_dtype})" if record.resolved.storage_dtype else ""
    return [f"the checkpoint's own KV cache is fp8, yet {stored}{element} is stored"]
