"""The oracle on DeepSeek-V4.1: numbers worked out by hand, and wrong records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.layout import NoLayout, UnknownLayout, compare, expected_pages, layout_of
from harness.layouts import deepseek_v41
from harness.layouts.page import Blocks
from harness.record import KVCache, Resolved

SM90, SM100, SM120 = (9, 0), (10, 0), (12, 0)

SWA, MAIN, KEY = "attn.swa_cache", "attn", "attn.indexer.k_cache"
RING = "attn.compressor.state_cache"

TEXT: dict[str, Any] = {
    "num_hidden_layers": 40,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
}
V41: dict[str, Any] = {"model_type": "deepseek_v41", "text_config": TEXT}


def v41(**change: Any) -> dict[str, Any]:
    return V41 | {"text_config": TEXT | change}


def numbers(
    config: dict[str, Any], layout: str, capability: tuple[int, int], *backends: str
) -> dict[tuple[str, int, int], tuple[int, int, int]]:
    pages = expected_pages(config, layout, capability, Blocks(32, 0, backends))
    return {
        (p.role, p.compress_ratio, p.block_size): (p.layers, p.content_bytes, p.page_size_bytes)
        for p in pages
    }


def test_the_records_of_deepseek_v4_on_hopper() -> None:
    latent = 448 + 64 * 2 + 8
    assert {
        (SWA, 1, 32): (40, 32 * latent, 33 * 576),
        (MAIN, 2, 64): (3, 32 * latent, 33 * 576),
        (MAIN, 1, 64): (1, 64 * latent, 65 * 576),
        (KEY, 2, 64): (3, 32 * 132, 8 * 576),
        (KEY, 1, 64): (1, 64 * 132, 15 * 576),
        (RING, 1, 8): (3, 8 * 2 * 512 * 4, 32768),
    } == numbers(V41, "packed", SM90)


def test_other_devices_than_hopper_have_blocks_of_128() -> None:
    latent = 448 + 64 * 2 + 8
    assert (1, 128 * latent, 130 * 576) == numbers(V41, "packed", SM120)[MAIN, 1, 128]


def test_its_own_records_on_blackwell() -> None:
    latent = 512 + 512 // 32
    assert {
        (SWA, 1, 32): (40, 32 * latent, 33 * 512),
        (MAIN, 2, 128): (3, 64 * latent, 66 * 512),
        (MAIN, 1, 128): (1, 128 * latent, 132 * 512),
        (KEY, 2, 128): (3, 64 * 132, 17 * 512),
        (KEY, 1, 128): (1, 128 * 132, 33 * 512),
        (RING, 1, 8): (3, 32768, 32768),
    } == numbers(V41, "packed_mxfp8", SM100)


def test_nvfp4_is_for_compressed_states_alone() -> None:
    latent = 512 // 2 + 512 // 16
    assert {
        (SWA, 1, 32): (40, 32 * 528, 33 * 512),
        (MAIN, 2, 128): (3, 64 * latent, 36 * 512),
        (MAIN, 1, 128): (1, 128 * latent, 72 * 512),
        (KEY, 2, 128): (3, 8448, 8704),
        (KEY, 1, 128): (1, 16896, 16896),
        (RING, 1, 8): (3, 32768, 32768),
    } == numbers(V41, "packed_nvfp4", SM100)


@pytest.mark.parametrize(("layout", "element"), [("plain_fp8", 1), ("plain_bf16", 2)])
def test_plain_rows(layout: str, element: int) -> None:
    pages = numbers(V41, layout, SM100)
    assert (40, 32 * 512 * element, 32 * 512 * element) == pages[SWA, 1, 32]
    assert (3, 64 * 512 * element, 64 * 512 * element) == pages[MAIN, 2, 128]


def test_flashinfer_has_blocks_of_128_on_hopper_too() -> None:
    pages = numbers(V41, "plain_bf16", SM90, "FLASHINFER_MLA_SPARSE_DSV41")
    assert (MAIN, 2, 128) in pages


@pytest.mark.parametrize(
    ("layout", "name", "storage", "capability"),
    [
        ("packed", "fp8_ds_mla", "uint8", SM90),
        ("packed", "fp8_ds_mla", "uint8", SM120),
        ("packed_mxfp8", "fp8_ds_mla", "uint8", SM100),
        ("packed_mxfp8", "fp8_ds_mla", "uint8", (10, 3)),
        ("packed_nvfp4", "nvfp4_ds_mla", "uint8", SM100),
        ("plain_bf16", "bfloat16", "bfloat16", SM100),
        ("plain_fp8", "fp8", "float8_e4m3fn", SM100),
    ],
)
def test_one_name_is_two_records(
    layout: str, name: str, storage: str, capability: tuple[int, int]
) -> None:
    assert layout == layout_of(V41, name, storage, capability)


@pytest.mark.parametrize(
    ("name", "storage", "capability"),
    [
        ("nvfp4_ds_mla", "uint8", SM90),
        ("nvfp4_ds_mla", "bfloat16", SM100),
        ("fp8_ds_mla", "bfloat16", SM100),
        ("fp8_e5m2", "float8_e4m3fn", SM100),
        ("auto", "uint8", SM90),
    ],
)
def test_a_name_that_does_not_say_what_is_stored(
    name: str, storage: str, capability: tuple[int, int]
) -> None:
    with pytest.raises(NoLayout, match=f"kv_cache_dtype {name} stored as {storage}"):
        layout_of(V41, name, storage, capability)


def seen(kind: str, role: str, ratio: int, layers: int, block: int, *bytes_: int) -> KVCache:
    """`bytes_`: of a state, of a page."""
    state, page = bytes_
    dtype = "float32" if role == RING else "uint8"
    states = block // ratio
    return KVCache(
        kind=kind,
        role=role,
        layers=layers,
        block_size=block,
        page_size_bytes=page,
        content_bytes=states * state,
        dtype=dtype,
        compress_ratio=ratio,
        shape=(-1, 1, states, state // 4 if role == RING else state),
        tensor_dtype=dtype,
        window=128 if role == SWA else None,
    )


MEGA = Resolved("nvfp4_ds_mla", "uint8", selected="FLASHMLA_MEGA_ATTN_DSV41")
RIGHT = [
    seen("SlidingWindowMLASpec", SWA, 1, 40, 32, 528, 33 * 512),
    seen("MLAAttentionSpec", MAIN, 2, 3, 128, 288, 64 * 288),
    seen("MLAAttentionSpec", KEY, 2, 3, 128, 132, 17 * 512),
    seen("CircularBufferSpec", RING, 1, 3, 8, 2 * 512 * 4, 32768),
    seen("MLAAttentionSpec", MAIN, 1, 1, 128, 288, 128 * 288),
    seen("MLAAttentionSpec", KEY, 1, 1, 128, 132, 128 * 132),
]
every_cache = pytest.mark.parametrize("at", range(len(RIGHT)))


def test_a_right_record_is_confirmed_in_any_order() -> None:
    assert [] == compare(V41, RIGHT, MEGA, SM100)
    assert [] == compare(V41, RIGHT[::-1], MEGA, SM100)


@every_cache
@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize(
    "field", ["page_size_bytes", "content_bytes", "block_size", "layers", "compress_ratio"]
)
def test_one_off_is_reported(at: int, by: int, field: str) -> None:
    wrong = replace(RIGHT[at], **{field: getattr(RIGHT[at], field) + by})
    assert compare(V41, [*RIGHT[:at], wrong, *RIGHT[at + 1 :]], MEGA, SM100)


@every_cache
@pytest.mark.parametrize("window", [64, 4096])
def test_another_window_is_reported(at: int, window: int) -> None:
    wrong = replace(RIGHT[at], window=window)
    [line] = compare(V41, [*RIGHT[:at], wrong, *RIGHT[at + 1 :]], MEGA, SM100)
    assert f"window of {window} tokens, must be of" in line


@every_cache
@pytest.mark.parametrize("change", [{"kind": "FullAttentionSpec"}, {"tensor_dtype": "int8"}])
def test_another_kind_or_element_is_reported(at: int, change: dict[str, str]) -> None:
    wrong = replace(RIGHT[at], **change)
    assert compare(V41, [*RIGHT[:at], wrong, *RIGHT[at + 1 :]], MEGA, SM100)


@every_cache
def test_a_cache_that_is_missing_is_reported(at: int) -> None:
    lines = compare(V41, RIGHT[:at] + RIGHT[at + 1 :], MEGA, SM100)
    assert any("missing" in line for line in lines)


def test_every_indexer_keeping_keys_of_its_own_is_reported() -> None:
    """Eight layers have an indexer, and four of them keep keys."""
    wrong = replace(RIGHT[5], layers=5)
    assert compare(V41, [*RIGHT[:5], wrong], MEGA, SM100)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 39},
        {"head_dim": 256},
        {"index_head_dim": 256},
        {"kv_source_layer_ids": [2, 8, 20]},
        {"compress_ratios": [0, 0] + [1] * 38},
    ],
)
def test_a_wrong_fact_in_the_config_is_reported(change: dict[str, Any]) -> None:
    assert compare(v41(**change), RIGHT, MEGA, SM100)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_MXFP8_PER_SCALE", 64),
        ("_NVFP4_PER_SCALE", 32),
        ("_NVFP4_PER_BYTE", 1),
        ("_SWA_BLOCK", 64),
        ("_RING_BLOCK", 16),
        ("_VECTORS", 2),
    ],
)
def test_a_wrong_number_in_the_oracle_is_reported(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: int
) -> None:
    monkeypatch.setattr(deepseek_v41, name, wrong)
    assert compare(V41, RIGHT, MEGA, SM100)


def test_sources_behind_the_last_layer_are_drafts() -> None:
    pages = expected_pages(v41(num_hidden_layers=10), "packed", SM90)
    assert {SWA: 10, MAIN: 2, KEY: 2, RING: 2} == {page.role: page.layers for page in pages}


def test_without_pooling_there_is_no_ring() -> None:
    config = v41(kv_source_layer_ids=[20])
    assert {SWA, MAIN, KEY} == {page.role for page in expected_pages(config, "packed", SM90)}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"compress_ratios": [0]}, "at least 40 ratios"),
        ({"kv_source_layer_ids": None}, "kv_source_layer_ids must be a list"),
        ({"head_dim": None}, "head_dim must be a positive integer"),
    ],
)
def test_a_config_that_does_not_say_what_it_must(change: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        expected_pages(v41(**change), "packed", SM90)


def test_a_config_without_its_text_part_is_not_one() -> None:
    with pytest.raises(UsageError, match="text_config must be an object"):
        expected_pages(V41 | {"text_config": None}, "packed", SM90)


def test_no_opinion_on_what_is_not_written_down() -> None:
    with pytest.raises(UnknownLayout, match="compress ratio 4 of a source"):
        expected_pages(v41(compress_ratios=[4] * 40), "packed", SM90)
    with pytest.raises(UnknownLayout, match="has no layout 'fp8'"):
        expected_pages(V41, "fp8", SM90)
    with pytest.raises(UnknownLayout, match="on a CPU"):
        expected_pages(V41, "packed", None)


@pytest.mark.parametrize(("block", "asked"), [(64, 0), (128, 128), (64, 48)])
def test_a_larger_block_may_be_asked_for(block: int, asked: int) -> None:
    pages = expected_pages(V41, "packed", SM90, Blocks(32, asked))
    assert {block} == {page.block_size for page in pages if page.role == MAIN}


layouts = st.sampled_from(["packed", "packed_mxfp8", "packed_nvfp4", "plain_fp8", "plain_bf16"])


@given(layouts, st.integers(1, 8), st.sampled_from([SM90, SM100, SM120]))
def test_pages_are_aligned_and_depth_changes_none(
    layout: str, times: int, capability: tuple[int, int]
) -> None:
    align = 576 if layout == "packed" else 512
    deep = v41(
        num_hidden_layers=40 * times,
        compress_ratios=TEXT["compress_ratios"] * times,
        kv_source_layer_ids=[40 * n + at for n in range(times) for at in (2, 8, 14, 20)],
    )
    pages = expected_pages(V41, layout, capability)
    for page, other in zip(pages, expected_pages(deep, layout, capability), strict=True):
        assert replace(page, layers=page.layers * times) == other
        assert page.role == RING or page.page_size_bytes % align == 0
        assert 0 <= page.page_size_bytes - page.content_bytes < align
