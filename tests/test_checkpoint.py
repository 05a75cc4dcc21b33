from __future__ import annotations

from typing import Any

import pytest

from harness import plan
from harness.checkpoint import differences, kv_bits
from harness.record import Record, Resolved

FLOAT8 = {"num_bits": 8, "type": "float"}


def seen(asked: str, became: str, storage: str | None = None) -> Record:
    return Record(
        id=f"m-default-{asked}",
        model="m",
        backend="default",
        kv_cache_dtype=asked,
        device="virtual:h200",
        device_kind="virtual",
        capability=(9, 0),
        engine="0.33.0",
        depth="allocate",
        stage="allocate",
        resolved=Resolved(kv_cache_dtype=became, storage_dtype=storage),
    )


@pytest.mark.parametrize(
    ("bits", "quantization"),
    [
        (8, {"quant_method": "compressed-tensors", "kv_cache_scheme": FLOAT8}),
        (8, {"quant_method": "modelopt", "kv_cache_scheme": FLOAT8}),
        (8, {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}),
        (8, {"quant_method": "fp8", "kv_cache_scheme": "static"}),
        (None, {"quant_method": "fp8", "kv_cache_scheme": None}),
        (None, {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}),
        (None, {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "int"}}),
        (None, None),
    ],
)
def test_the_forms_of_a_checkpoints_kv_quantisation(bits: int | None, quantization: Any) -> None:
    assert bits == kv_bits({"quantization_config": quantization})


@pytest.mark.parametrize("asked", ["unset", "auto"])
def test_14221_a_checkpoints_fp8_kv_cache_that_is_ignored_is_a_disagreement(asked: str) -> None:
    config = {"quantization_config": {"kv_cache_scheme": FLOAT8}}
    assert ["the checkpoint's own KV cache is fp8, yet auto (bfloat16) is stored"] == differences(
        config, seen(asked, "auto", "bfloat16")
    )
    assert [] == differences(config, seen(asked, "fp8_e4m3", "uint8"))
    assert [] == differences({}, seen(asked, "auto", "bfloat16"))


def test_fp8_that_the_checkpoint_does_not_have_is_a_disagreement() -> None:
    """A scheme that is not fp8, or not understood, vouches for no fp8."""
    for scheme in ({"num_bits": 8, "type": "int"}, {"num_bits": 4, "type": "float"}, "NVFP4"):
        config = {"quantization_config": {"kv_cache_scheme": scheme}}
        [line] = differences(config, seen("unset", "fp8", "uint8"))
        assert line.startswith(f"the checkpoint's own KV cache is {scheme} and not fp8, yet fp8 ")
        assert [] == differences(config, seen("unset", "auto", "bfloat16"))


def test_what_was_asked_for_comes_before_the_checkpoint() -> None:
    config = {"quantization_config": {"kv_cache_scheme": FLOAT8}}
    assert [] == differences(config, seen("bfloat16", "bfloat16", "bfloat16"))


def test_the_shipped_checkpoints_say_fp8() -> None:
    told = {model.key: kv_bits(model.config) for model in plan.models()}
    eight = {"llama3-fp8kv", "llama3-fp8kv-ct", "llama3-fp8kv-fp8"}
    assert eight == {key for key, bits in told.items() if bits}
