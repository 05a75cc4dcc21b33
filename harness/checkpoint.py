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
    scheme = _scheme(config)
    if isinstance(scheme, str):
        return _NAMED.get(scheme.lower())
    if isinstance(scheme, Mapping) and scheme.get("type") == "float":
        bits = scheme.get("num_bits")
        return bits if isinstance(bits, int) else None
    return None


def _scheme(config: Mapping[str, Any]) -> object:
    """What the checkpoint says of its KV cache; None where it says nothing."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    said = (quantization.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo"))
    return next((scheme for scheme in said if scheme is not None), None)


def differences(config: Mapping[str, Any], record: Record) -> list[str]:
    """One line where nothing was asked and the checkpoint's own quantisation is not what is stored;
    [] where it is, where it says nothing, or where a kv_cache_dtype was asked for."""
    stored, own = record.resolved.kv_cache_dtype, _scheme(config)
    if record.kv_cache_dtype not in (UNSET, "auto") or own is None or stored is None:
        return []
    is_fp8 = all(name.startswith("fp8") for name in stored.split("+"))
    if is_fp8 == (kv_bits(config) == FP8):
        return []
    element = f" ({record.resolved.storage_dtype})" if record.resolved.storage_dtype else ""
    must = f"{own} and not fp8" if is_fp8 else "fp8"
    return [f"the checkpoint's own KV cache is {must}, yet {stored}{element} is stored"]
