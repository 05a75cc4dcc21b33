"""The oracle on what a CPU keeps otherwise than a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.oracle import Oracle
from harness.record import KVCache
from tests.test_layouts_state_space import (
    CODESTRAL_STATE,
    FALCON,
    JAMBA,
    JAMBA_STATE,
    MAMBA2,
    NEMOTRON,
    NEMOTRON_STATE,
    QWEN,
    QWEN_STATE,
    held,
    hybrid,
)
from tests.test_oracle import LLAMA, SHARE, seen

WIDE = ("avx512_bf16",)

# The matrix in 4 B a value, the inputs of the convolution in the model's own 2 B.
FALCON_WIDE = 3 * (24 * 128 + 2 * 256) * 2 + 24 * 128 * 256 * 4
JAMBA_WIDE = 3 * 8192 * 2 + 8192 * 16 * 4
QWEN_WIDE = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 4
CODESTRAL_WIDE = 3 * (128 * 64 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4


def on_cpu(kv: list[KVCache], config: dict[str, Any], features: tuple[str, ...]) -> list[str]:
    resolved = replace(seen().resolved, selected="CPU_ATTN", backends=("CPU_ATTN",))
    record = replace(seen(*kv), device="cpu", device_kind="cpu", capability=None, resolved=resolved)
    return Oracle(config, features=features)(record)


@pytest.mark.parametrize(
    ("config", "wide", "narrow"),
    [
        (
            FALCON,
            # 128 x 1024 B a step: 24.2 of them hold the wide state.
            hybrid("model.N.mixer", 44, "attn", 44, 25 * 128, FALCON_WIDE, 1024),
            None,
        ),
        (
            JAMBA,
            hybrid("mixer", 28, "attn", 4, 2 * 128, JAMBA_WIDE, 4096),
            hybrid("mixer", 28, "attn", 4, 128, JAMBA_STATE, 4096),
        ),
        (
            QWEN,
            hybrid("linear_attn", 36, "self_attn.attn", 12, 9 * 128, QWEN_WIDE, 2048),
            hybrid("linear_attn", 36, "self_attn.attn", 12, 5 * 128, QWEN_STATE, 2048),
        ),
        (
            MAMBA2,
            [held("mixer", 64, 4096, CODESTRAL_WIDE, CODESTRAL_WIDE)],
            [held("mixer", 64, 4096, CODESTRAL_STATE, CODESTRAL_STATE)],
        ),
    ],
)
def test_states_are_kept_in_float32_where_the_cpu_has_bf16_arithmetic(
    config: dict[str, Any], wide: list[KVCache], narrow: list[KVCache] | None
) -> None:
    assert [] == on_cpu(wide, config, WIDE)
    assert on_cpu(wide, config, ())
    assert on_cpu(wide, config, ("amx_tile",))
    if narrow is not None:
        assert [] == on_cpu(narrow, config, ())
        assert on_cpu(narrow, config, WIDE)


def test_states_that_are_in_float32_anyway_stay_so() -> None:
    kv = hybrid("mixer", 24, "mixer.attn", 4, 9 * 128, NEMOTRON_STATE, 4096)
    assert [] == on_cpu(kv, NEMOTRON, WIDE) == on_cpu(kv, NEMOTRON, ())


def test_keys_and_values_are_kept_as_on_a_gpu() -> None:
    whole = replace(SHARE, page_size_bytes=65536, content_bytes=65536, shape=(-1, 2, 16, 8, 128))
    assert [] == Oracle(LLAMA, features=WIDE)(seen(whole)) == Oracle(LLAMA)(seen(whole))
