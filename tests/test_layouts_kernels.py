"""Blocks of hybrids by the kernels that read them, as the backends document them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.layout import UnknownLayout, compare, expected_pages
from harness.layouts.kernels import Kernel, common, kernel_of
from harness.layouts.page import Blocks
from harness.record import KVCache, Resolved
from tests.test_layouts_state_space import JAMBA, KIMI, NEMOTRON, QWEN, hybrid

SM80, SM90, SM100, SM120 = (8, 0), (9, 0), (10, 0), (12, 0)

NANO = NEMOTRON | {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "mamba_num_heads": 64,
    "num_key_value_heads": 2,
}
# Bytes of a state: (taps - 1) x channels x 2 B, and the matrix.
NANO_STATE = 3 * (64 * 64 + 2 * 8 * 128) * 2 + 64 * 64 * 128 * 4
QWEN_STATE = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2
KIMI_STATE = 3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4


def block(
    config: dict[str, Any],
    layout: str,
    capability: tuple[int, int] | None,
    *backends: str,
    asked: int = 0,
) -> int:
    blocks = Blocks(16, asked, backends)
    [size] = {page.block_size for page in expected_pages(config, layout, capability, blocks)}
    return size


@pytest.mark.parametrize(
    ("tokens", "capability", "backend"),
    [
        # A state of 1097728 B in tokens of 2 x 2 x 256 x 2 = 2048 B: 536 of them.
        (544, SM80, "FLASH_ATTN"),  # 34 x 16
        (576, SM90, "TRITON_FLASH_ATTN"),
        (640, SM100, "TRITON_FLASH_ATTN"),
        (576, SM100, "TRITON_FLASHINFER"),
        (576, SM90, "HPC_ATTN"),
        (640, SM120, "B12X"),  # 5 x 128
        (576, SM90, "FLASH_ATTN"),  # 9 x 64, as states are had every 64 tokens
        (576, SM90, "FLASHINFER"),
        (640, SM100, "FLASH_ATTN"),  # 5 x 128: FlashAttention 4 for heads of 256
        (576, SM100, "FLASHINFER"),
        (576, SM100, "TRITON_ATTN"),
        (576, SM120, "FLASH_ATTN"),
        (544, (11, 0), "FLASHINFER"),
    ],
)
def test_qwen3_next_by_backend(tokens: int, capability: tuple[int, int], backend: str) -> None:
    assert tokens == block(QWEN, "bfloat16", capability, backend)


@pytest.mark.parametrize(
    ("tokens", "capability"), [(320, SM90), (288, SM100), (288, SM120), (288, SM80)]
)
def test_states_of_narrow_keys_are_had_in_chunks_on_hopper_only(
    tokens: int, capability: tuple[int, int]
) -> None:
    """3 x (2 x 16 x 64 + 32 x 128) x 2 + 32 x 128 x 64 x 2 = 561152 B are 274 tokens of 2048 B."""
    config = QWEN | {"linear_key_head_dim": 64}
    assert tokens == block(config, "bfloat16", capability, "FLASHINFER")


def test_flash_attention_4_asks_for_long_pages_for_heads_of_256_only() -> None:
    assert 1040 == block(NEMOTRON, "bfloat16", SM100, "FLASH_ATTN")  # 65 x 16


@pytest.mark.parametrize(("tokens", "asked"), [(80, 16), (96, 32), (128, 64), (128, 128)])
def test_a_block_is_a_multiple_of_what_was_asked_for(tokens: int, asked: int) -> None:
    """Jamba's state is 76 tokens of 4096 B."""
    assert tokens == block(JAMBA, "bfloat16", SM90, "FLASH_ATTN", asked=asked)


def test_a_cpu_prefers_long_blocks() -> None:
    assert 128 == block(JAMBA, "bfloat16", None, "CPU_ATTN")
    # The least of its multiples of 32 that hold 76 tokens.
    assert 96 == block(JAMBA, "bfloat16", None, "CPU_ATTN", asked=16)


@pytest.mark.parametrize(
    "backend", ["AMX_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA"]
)
def test_mla_beside_linear_attention_has_blocks_of_128(backend: str) -> None:
    assert 1920 == block(KIMI, "bfloat16", SM100, backend)  # 15 x 128


def parts(
    config: dict[str, Any],
    kv: list[KVCache],
    resolved: Resolved,
    capability: tuple[int, int],
    tokens: int,
) -> list[str]:
    """`kv` with the attention's tensor in blocks of `tokens`."""
    state, attn = kv
    size = attn.content_bytes // attn.block_size
    part = replace(
        attn, shape=(-1, 1, tokens, size), tensor_dtype="uint8", dtype=resolved.storage_dtype or ""
    )
    return compare(config, [state, part], resolved, capability)


def nano(backend: str) -> tuple[list[KVCache], Resolved]:
    """NVFP4: 2 x 2 x (64 + 8) = 288 B a token; 2134016 / (16 x 288) = 463.1 -> 464 x 16 = 7424."""
    kv = hybrid("mixer", 23, "mixer.attn", 6, 7424, NANO_STATE, 288)
    return kv, Resolved("nvfp4", "uint8", selected=backend)


@pytest.mark.parametrize(
    ("fits", "tokens", "capability"),
    [
        (True, 256, SM100),  # 7424 = 29 x 256
        (False, 64, SM100),  # the largest that they take of those that divide it
        (False, 512, SM100),  # it does not divide
        (False, 256, SM120),
        (False, 256, SM90),
        (True, 64, SM90),
    ],
)
def test_large_pages_are_for_blackwells_own_kernels(
    fits: bool, tokens: int, capability: tuple[int, int]
) -> None:
    kv, resolved = nano("FLASHINFER")
    assert fits == (parts(NANO, kv, resolved, capability, tokens) == [])


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_a_kernel_that_takes_any_block_is_handed_the_whole(tokens: int) -> None:
    kv, resolved = nano("TRITON_ATTN")
    assert parts(NANO, kv, resolved, SM100, tokens)
    assert [] == parts(NANO, kv, resolved, SM100, 7424)


def test_one_head_a_key_has_no_large_pages() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 8}
    small = Kernel((16, 32, 64))
    assert small == kernel_of(config, SM100, "FLASHINFER")
    assert small == kernel_of({"num_attention_heads": 8}, SM100, "FLASHINFER")
    assert small != kernel_of(config | {"num_key_value_heads": 4}, SM100, "FLASHINFER")


@pytest.mark.parametrize(
    ("fits", "tokens", "backend"),
    [
        (True, 128, "CUTLASS_MLA"),
        (False, 64, "CUTLASS_MLA"),
        (True, 64, "FLASHMLA"),
        (False, 128, "FLASHMLA"),
        (True, 64, "FLASHINFER_MLA"),
        (False, 32, "FLASHINFER_MLA"),
        (True, 1920, "TRITON_MLA"),
    ],
)
def test_kimi_by_backend(fits: bool, tokens: int, backend: str) -> None:
    kv = hybrid(*("self_attn", 20, "self_attn", 7, 1920, KIMI_STATE, 1152), kind="MLAAttentionSpec")
    state, attn = kv
    part = replace(attn, shape=(-1, 1, tokens, 576))
    resolved = Resolved("auto", "bfloat16", selected=backend)
    assert fits == (compare(KIMI, [state, part], resolved, SM100) == [])


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("fits", "tokens", "backend", "capability"),
    [
        (True, 64, "FLASHINFER", SM90),
        (False, 128, "FLASHINFER", SM90),
        (False, 32, "FLASHINFER", SM90),
        (False, 64, "FLASHINFER", SM100),
        (False, 64, "FLASH_ATTN", SM90),
        (True, 128, "FLASH_ATTN", SM90),
        (False, 8, "FLASHINFER", SM90),
        (True, 128, "FLASHINFER", SM100),
    ],
)
def test_a_long_block_that_was_asked_for_is_handed_out_in_parts(
    fits: bool, tokens: int, backend: str, capability: tuple[int, int]
) -> None:
    """FlashInfer on Hopper splits the 128 tokens of `--block-size 128` into two of its own."""
    page = 128 * 2 * 8 * 128 * 2
    cache = KVCache(
        kind="FullAttentionSpec",
        role="self_attn.attn",
        layers=32,
        block_size=128,
        page_size_bytes=page,
        content_bytes=page,
        dtype="bfloat16",
        shape=(-1, 8, tokens, 2 * 128),
        tensor_dtype="bfloat16",
    )
    resolved = Resolved("auto", "bfloat16", selected=backend)
    assert fits == (compare(LLAMA, [cache], resolved, capability, 128) == [])


def test_no_opinion_on_a_backend_that_is_not_written_down() -> None:
    with pytest.raises(UnknownLayout, match="what NEW_ATTN take is not written down"):
        block(JAMBA, "bfloat16", SM90, "NEW_ATTN")


sizes = st.sampled_from([16, 32, 48, 64, 128])


@given(st.lists(sizes, min_size=1, max_size=3), st.integers(0, 512))
def test_a_step_suits_every_kernel_and_the_caller(least: list[int], asked: int) -> None:
    step = common([Kernel((tokens,)) for tokens in least], asked)
    assert all(step % tokens == 0 for tokens in least)
    assert asked == 0 or step % asked == 0
