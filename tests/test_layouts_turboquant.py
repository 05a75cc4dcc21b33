"""The oracle on TurboQuant: a key and its value in one slot, beside layers that are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.layout import NoLayout, compare, expected_pages, layout_of
from harness.layouts import full_attention
from harness.layouts.formats import FORMATS, PACKED, Packed
from harness.record import KVCache, Resolved

SM80, SM90 = (8, 0), (9, 0)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "torch_dtype": "bfloat16",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}

BF16 = 2 * 128 * 2
SLOTS = {
    "turboquant_k8v4": 128 + 128 // 2 + 2 * 2,  # fp8 keys; values, scale and zero in fp16
    "turboquant_4bit_nc": (128 // 2 + 2) + (128 // 2 + 2 * 2),  # the norm of a key in fp16
    "turboquant_k3v4_nc": (128 * 3 // 8 + 2) + (128 // 2 + 2 * 2),
    "turboquant_3bit_nc": (128 * 3 // 8 + 2) + (128 * 3 // 8 + 2 * 2),
}
"""Bytes of a key and its value, of one token and head of 128."""

every_preset = pytest.mark.parametrize("preset", SLOTS)


def attention(
    layers: int, block: int, size: int, dtype: str, role: str = "self_attn.attn"
) -> KVCache:
    """`size` bytes of a key and its value, 8 heads."""
    page = block * 8 * size
    last = size if dtype == "uint8" else size // 2
    return KVCache(
        kind="FullAttentionSpec",
        role=role,
        layers=layers,
        block_size=block,
        page_size_bytes=page,
        content_bytes=page,
        dtype=dtype,
        shape=(-1, 8, block, last),
        tensor_dtype=dtype,
    )


def mixed(preset: str, kept: int = 4, packed: int = 28) -> tuple[list[KVCache], Resolved]:
    kv = [attention(kept, 16, BF16, "bfloat16"), attention(packed, 16, SLOTS[preset], "uint8")]
    return kv, Resolved(f"auto+{preset}", "bfloat16+uint8")


@pytest.mark.parametrize(
    ("page", "layout"),
    [
        (25088, "turboquant_k8v4"),  # 16 x 8 x 196
        (17152, "turboquant_4bit_nc"),  # 16 x 8 x 134
        (15104, "turboquant_k3v4_nc"),  # 16 x 8 x 118
        (13056, "turboquant_3bit_nc"),  # 16 x 8 x 102
    ],
)
def test_llama_3_by_preset(page: int, layout: str) -> None:
    own, packed = expected_pages(LLAMA, f"bfloat16+{layout}", SM90)
    assert (4, 65536, 28, page) == (
        own.layers,
        own.content_bytes,
        packed.layers,
        packed.content_bytes,
    )


def test_arithmetic_can_be_read() -> None:
    _, packed = expected_pages(LLAMA, "bfloat16+turboquant_k3v4_nc", SM90)
    assert (
        "16 tokens x 8 heads x 118 B (K 128 x 3 bit + 2 norm + V 128 x 4 bit + "
        "2 x 2 scale and zero) = 15104, bfloat16 in 4 layers at the ends"
    ) == packed.arithmetic


@every_preset
def test_a_right_record_is_confirmed_in_any_order(preset: str) -> None:
    kv, resolved = mixed(preset)
    assert [] == compare(LLAMA, kv, resolved, SM90)
    assert [] == compare(LLAMA, kv[::-1], resolved, SM90)


def test_its_kind_had_a_name_of_its_own_once() -> None:
    """vLLM 0.27.1."""
    kv, resolved = mixed("turboquant_k8v4")
    assert [] == compare(LLAMA, [kv[0], replace(kv[1], kind="TQFullAttentionSpec")], resolved, SM90)
    assert compare(LLAMA, [kv[0], replace(kv[1], kind="TQSlidingWindowSpec")], resolved, SM90)


def test_as_many_layers_kept_as_packed_are_told_apart() -> None:
    kv, resolved = mixed("turboquant_k8v4", 4, 4)
    assert [] == compare(LLAMA | {"num_hidden_layers": 8}, kv[::-1], resolved, SM90)


@every_preset
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("field", ["page_size_bytes", "content_bytes", "block_size", "layers"])
def test_one_off_is_reported(preset: str, at: int, by: int, field: str) -> None:
    kv, resolved = mixed(preset)
    kv[at] = replace(kv[at], **{field: getattr(kv[at], field) + by})
    assert compare(LLAMA, kv, resolved, SM90)


@every_preset
def test_a_slot_is_in_one_piece(preset: str) -> None:
    kv, resolved = mixed(preset)
    kv[1] = replace(kv[1], shape=(-1, 2, 8, 16, SLOTS[preset] // 2))
    [line] = compare(LLAMA, kv, resolved, SM90)
    assert f"last dimension of the tensor {SLOTS[preset] // 2}, must be {SLOTS[preset]}" in line


@pytest.mark.parametrize(("kept", "packed"), [(3, 29), (5, 27), (2, 30), (8, 24)])
def test_two_layers_at_each_end_are_kept(kept: int, packed: int) -> None:
    kv, resolved = mixed("turboquant_4bit_nc", kept, packed)
    assert compare(LLAMA, kv, resolved, SM90)


@pytest.mark.parametrize(("layers", "kept"), [(5, 4), (4, 4), (3, 2), (2, 2)])
def test_a_shallow_model_keeps_half_from_each_end_at_most(layers: int, kept: int) -> None:
    pages = expected_pages(LLAMA | {"num_hidden_layers": layers}, "bfloat16+turboquant_k8v4", SM90)
    assert [kept, layers - kept][: len(pages)] == [page.layers for page in pages]


def test_a_model_of_one_layer_keeps_none() -> None:
    config = LLAMA | {"num_hidden_layers": 1}
    assert "turboquant_k8v4" == layout_of(config, "turboquant_k8v4", "uint8", SM90)


@every_preset
@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("{}", "uint8"),  # nothing is kept
        ("auto+{}", "float16+uint8"),
        ("auto+{}", "bfloat16"),
        ("auto+fp8+{}", "bfloat16+uint8"),
        ("fp8+{}", "uint8"),
    ],
)
def test_what_is_kept_is_the_models_own(preset: str, name: str, storage: str) -> None:
    with pytest.raises(NoLayout, match=f"4 layers are kept in bfloat16 beside {preset}"):
        layout_of(LLAMA, name.format(preset), storage, SM90)


@every_preset
def test_hybrids_keep_no_layer(preset: str) -> None:
    """Jamba: a state of 3 x 8192 x 2 + 8192 x 16 x 2 = 311296 B, in the least multiple of 16."""
    state, token = 311296, 8 * SLOTS[preset]
    block = -(-state // (16 * token)) * 16
    held = KVCache(
        kind="MambaSpec",
        role="mixer",
        layers=28,
        block_size=block,
        page_size_bytes=block * token,
        content_bytes=state,
        dtype="",
        compress_ratio=-1,
    )
    attn = attention(4, block, SLOTS[preset], "uint8", role="attn")
    assert [] == compare(JAMBA, [held, attn], Resolved(preset, "uint8"), SM90)
    with pytest.raises(NoLayout, match="in all layers"):
        layout_of(JAMBA, f"auto+{preset}", "bfloat16+uint8", SM90)


@pytest.mark.parametrize(
    ("block", "preset"),
    [
        (208, "turboquant_k8v4"),  # 311296 / (16 x 8 x 196) = 12.4
        (304, "turboquant_4bit_nc"),  # 311296 / (16 x 8 x 134) = 18.1
        (336, "turboquant_k3v4_nc"),  # 311296 / (16 x 8 x 118) = 20.6
        (384, "turboquant_3bit_nc"),  # 311296 / (16 x 8 x 102) = 23.8
    ],
)
def test_jamba_by_preset(block: int, preset: str) -> None:
    assert {block} == {page.block_size for page in expected_pages(JAMBA, preset, SM90)}


@every_preset
@pytest.mark.parametrize("change", [{"key_bits": 2}, {"value_bits": 2}, {"key_bits": 5}])
def test_a_wrong_number_in_the_oracle_is_reported(
    monkeypatch: pytest.MonkeyPatch, preset: str, change: dict[str, int]
) -> None:
    kv, resolved = mixed(preset)
    wrong = {preset: replace(PACKED[preset], **change)}
    monkeypatch.setattr(full_attention, "FORMATS", FORMATS | wrong)
    assert compare(LLAMA, kv, resolved, SM90)


def test_a_slot_is_filled_up_to_whole_bytes_and_an_even_number_of_them() -> None:
    assert 104 == Packed(8, 4).pair(66)  # 66 + 33 + 4 = 103
    assert 56 == Packed(3, 3).pair(65)  # 195 bits are 25 bytes: 25 + 2 + 25 + 4


bits, dims = st.sampled_from([3, 4, 8]), st.integers(1, 512)


@given(bits, st.sampled_from([3, 4]), dims)
def test_a_slot_is_even_and_wider_for_more(key: int, value: int, dim: int) -> None:
    one = Packed(key, value)
    assert 0 == one.pair(dim) % 2
    assert one.pair(dim) <= one.pair(dim + 1)
    assert one.pair(dim) <= Packed(key, value + 1).pair(dim)
