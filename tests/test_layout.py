"""The layout oracle on DeepSeek-V4: numbers worked out by hand, and wrong records."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.layout import NoLayout, UnknownLayout, compare, expected_pages, layout_of
from harness.record import KVCache, Resolved

SM90, SM100 = (9, 0), (10, 0)
LAYOUTS = ["packed", "plain_fp8", "plain_bf16"]
PACKED = Resolved("fp8_ds_mla", "uint8")

SWA, MAIN, KEY = "attn.swa_cache", "attn", "attn.indexer.k_cache"
STATE, KEY_STATE = "attn.compressor.state_cache", "attn.indexer.compressor.state_cache"

FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    "sliding_window": 128,
}


def seen(
    role: str,
    ratio: int,
    layers: int,
    block: int,
    content: int,
    page: int,
    shape: tuple[int, ...],
    dtype: str,
    window: int | None = None,
) -> KVCache:
    return KVCache(
        kind="Spec",
        role=role,
        layers=layers,
        block_size=block,
        page_size_bytes=page,
        content_bytes=content,
        dtype=dtype,
        compress_ratio=ratio,
        shape=shape,
        tensor_dtype=dtype,
        window=window,
    )


LATENT = 448 + 64 * 2 + 8
FLASH_KV = (
    seen(SWA, 1, 43, 64, 64 * LATENT, 65 * 576, (-1, 1, 64, LATENT), "uint8", 128),
    seen(MAIN, 4, 21, 256, 64 * LATENT, 65 * 576, (-1, 1, 64, LATENT), "uint8"),
    seen(MAIN, 128, 20, 256, 2 * LATENT, 3 * 576, (-1, 1, 2, LATENT), "uint8"),
    seen(KEY, 4, 21, 256, 64 * 132, 15 * 576, (-1, 1, 64, 132), "uint8"),
    seen(STATE, 1, 21, 4, 4 * 2 * 2 * 512 * 4, 57 * 576, (-1, 1, 4, 2048), "float32", 2 * 4),
    seen(STATE, 1, 20, 8, 8 * 2 * 512 * 4, 57 * 576, (-1, 1, 8, 1024), "float32", 128),
    seen(KEY_STATE, 1, 21, 4, 4 * 2 * 2 * 128 * 4, 15 * 576, (-1, 1, 4, 512), "float32", 2 * 4),
)


def numbers(
    config: dict[str, Any], layout: str, capability: tuple[int, int]
) -> dict[tuple[str, int, int], tuple[int, int, int]]:
    return {
        (p.role, p.compress_ratio, p.block_size): (p.layers, p.content_bytes, p.page_size_bytes)
        for p in expected_pages(config, layout, capability)
    }


def test_flash_packed() -> None:
    assert {
        (SWA, 1, 64): (43, 37376, 37440),
        (MAIN, 4, 256): (21, 37376, 37440),
        (MAIN, 128, 256): (20, 1168, 1728),
        (KEY, 4, 256): (21, 8448, 8640),
        (STATE, 1, 4): (21, 32768, 32832),
        (STATE, 1, 8): (20, 32768, 32832),
        (KEY_STATE, 1, 4): (21, 8192, 8640),
    } == numbers(FLASH, "packed", SM90)


@pytest.mark.parametrize(("layout", "element"), [("plain_fp8", 1), ("plain_bf16", 2)])
def test_flash_plain(layout: str, element: int) -> None:
    assert {
        (SWA, 1, 64): (43, 64 * 512 * element, 32768 * element),
        (MAIN, 4, 256): (21, 64 * 512 * element, 32768 * element),
        (MAIN, 128, 256): (20, 2 * 512 * element, 1024 * element),
        (KEY, 4, 256): (21, 64 * 132, 17 * 512),
        (STATE, 1, 4): (21, 32768, 32768),
        (STATE, 1, 8): (20, 32768, 32768),
        (KEY_STATE, 1, 4): (21, 8192, 8192),
    } == numbers(FLASH, layout, SM100)


def test_pro_starts_with_two_compressed_layers() -> None:
    pro = FLASH | {"num_hidden_layers": 61, "compress_ratios": [128] + [128, 4] * 30 + [0]}
    assert {
        (SWA, 1, 64): 61,
        (MAIN, 4, 256): 30,
        (MAIN, 128, 256): 31,
        (KEY, 4, 256): 30,
        (STATE, 1, 4): 30,
        (STATE, 1, 8): 31,
        (KEY_STATE, 1, 4): 30,
    } == {key: layers for key, (layers, _, _) in numbers(pro, "packed", SM90).items()}


def test_ratio_0_has_the_sliding_window_only_and_the_mtp_layer_does_not_count() -> None:
    one = FLASH | {"num_hidden_layers": 1, "compress_ratios": [0, 4]}
    assert [(SWA, 1)] == [(p.role, p.layers) for p in expected_pages(one, "packed", SM90)]


def test_arithmetic_can_be_read() -> None:
    swa = expected_pages(FLASH, "packed", SM90)[0]
    assert (
        "64 states x 584 B (448 fp8 + 64 x 2 RoPE + 8 UE8M0 scales) = 37376, "
        "up to a multiple of 576 = 37440"
    ) == swa.arithmetic
    swa = expected_pages(FLASH, "plain_bf16", SM100)[0]
    assert "64 states x 1024 B (512 x 2) = 65536, a multiple of 512" == swa.arithmetic


@pytest.mark.parametrize(
    ("layout", "name", "storage"),
    [
        ("packed", "fp8_ds_mla", "uint8"),
        ("plain_fp8", "fp8", "float8_e4m3fn"),
        ("plain_fp8", "fp8_e4m3", "float8_e4m3fn"),
        ("plain_bf16", "auto", "bfloat16"),
        ("plain_bf16", "bfloat16", "bfloat16"),
    ],
)
def test_layout_of_name_and_storage(layout: str, name: str, storage: str) -> None:
    assert layout == layout_of(FLASH, name, storage, SM90)


@pytest.mark.parametrize(
    ("name", "storage"),
    [("auto", "uint8"), ("fp8", "bfloat16"), ("fp8_e5m2", "float8_e4m3fn"), (None, None)],
)
def test_a_name_that_does_not_say_what_is_stored(name: str | None, storage: str | None) -> None:
    with pytest.raises(NoLayout, match=f"kv_cache_dtype {name} stored as {storage}"):
        layout_of(FLASH, name, storage, SM90)
    [line] = compare(FLASH, FLASH_KV, Resolved(name, storage), SM90)
    assert f"kv_cache_dtype {name} stored as {storage} is no layout" in line


@pytest.mark.parametrize("model_type", ["deepseek_v5", "", None, ["deepseek_v4"]])
def test_no_opinion_on_an_unknown_model(model_type: Any) -> None:
    with pytest.raises(UnknownLayout, match="model_type"):
        compare(FLASH | {"model_type": model_type}, FLASH_KV, PACKED, SM90)


@pytest.mark.parametrize(
    "change",
    [
        {"compress_ratios": [3] * 43},
        {"compress_ratios": [[4]] * 43},
        {"head_dim": 500},
        {"head_dim": 64},
        {"index_head_dim": 100},
    ],
)
def test_no_opinion_on_a_geometry_without_a_definition(change: dict[str, Any]) -> None:
    with pytest.raises(UnknownLayout):
        expected_pages(FLASH | change, "packed", SM90)


def test_a_cpu_stores_the_packed_format_byte_for_byte() -> None:
    assert expected_pages(FLASH, "packed", SM90) == expected_pages(FLASH, "packed", None)
    assert [] == compare(FLASH, FLASH_KV, PACKED, None)


@pytest.mark.parametrize("layout", ["plain_fp8", "plain_bf16"])
def test_no_opinion_on_plain_rows_of_a_cpu(layout: str) -> None:
    with pytest.raises(UnknownLayout, match=f"{layout} cache of a CPU"):
        expected_pages(FLASH, layout, None)


def test_no_opinion_on_another_layout() -> None:
    with pytest.raises(UnknownLayout, match="plain_fp8"):
        expected_pages(FLASH, "plain_fp4", SM90)


@pytest.mark.parametrize("key", sorted(FLASH.keys() - {"model_type"}))
@pytest.mark.parametrize("value", [None, "64", 0, True, []])
def test_a_config_without_its_numbers(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=key):
        expected_pages(FLASH | {key: value}, "packed", SM90)


def test_a_misspelt_key_is_named() -> None:
    config = {("heads_dim" if key == "head_dim" else key): FLASH[key] for key in FLASH}
    with pytest.raises(UsageError, match="near: heads_dim"):
        expected_pages(config, "packed", SM90)


def test_the_record_of_a_right_cache_is_confirmed() -> None:
    assert [] == compare(FLASH, FLASH_KV, PACKED, SM90)


@pytest.mark.parametrize("at", range(len(FLASH_KV)))
def test_another_window_is_one_line(at: int) -> None:
    """What a window forgets too early is wrong, and what it keeps for too long costs memory."""
    right = FLASH_KV[at].window
    wrong = 8192 if right is None else right + 1
    kv = [*FLASH_KV[:at], replace(FLASH_KV[at], window=wrong), *FLASH_KV[at + 1 :]]
    [line] = compare(FLASH, kv, PACKED, SM90)
    must = "of all tokens" if right is None else f"of {right} tokens"
    assert f"window of {wrong} tokens, must be {must}" in line


def test_a_record_without_tensors_is_confirmed_by_its_bytes() -> None:
    kv = [replace(cache, shape=None, tensor_dtype=None) for cache in FLASH_KV]
    assert [] == compare(FLASH, kv, PACKED, SM90)


def test_layers_alike_in_bytes_may_be_recorded_apart() -> None:
    swa, *rest = FLASH_KV
    kv = [replace(swa, layers=1, backend="A"), replace(swa, layers=42, backend="B"), *rest]
    assert [] == compare(FLASH, kv, PACKED, SM90)


def test_one_wrong_layer_among_right_ones_is_one_line() -> None:
    swa, *rest = FLASH_KV
    kv = [replace(swa, layers=42), replace(swa, layers=1, page_size_bytes=37439), *rest]
    [line] = compare(FLASH, kv, PACKED, SM90)
    assert line.startswith(
        f"{SWA} (ratio 1, block 64, 1 layer): page size bytes 37439, must be 37440"
    )


@pytest.mark.parametrize("at", range(len(FLASH_KV)))
@pytest.mark.parametrize(
    ("field", "by", "what"),
    [
        ("page_size_bytes", 1, "page size bytes"),
        ("page_size_bytes", -1, "page size bytes"),
        ("content_bytes", 1, "content bytes"),
        ("content_bytes", -1, "content bytes"),
        ("block_size", 1, "block size"),
        ("compress_ratio", 1, "ratio"),
        ("layers", -1, "layer"),
        ("layers", 1, "layer"),
    ],
)
def test_one_off_is_one_line(at: int, field: str, by: int, what: str) -> None:
    right = FLASH_KV[at]
    wrong = replace(right, **{field: getattr(right, field) + by})
    [line] = compare(FLASH, [*FLASH_KV[:at], wrong, *FLASH_KV[at + 1 :]], PACKED, SM90)
    assert line.startswith(f"{right.role} (ratio {wrong.compress_ratio}, ")
    assert what in line
    assert f"{getattr(wrong, field)}" in line
    assert f"must be {getattr(right, field)}" in line
    assert f"= {right.content_bytes}, up to a multiple of 576 = {right.page_size_bytes}" in line


@pytest.mark.parametrize("at", range(len(FLASH_KV)))
def test_a_wrong_tensor_is_reported(at: int) -> None:
    right = FLASH_KV[at]
    assert right.shape is not None
    *front, tail = right.shape
    wrong = replace(right, shape=(*front, tail + 1), tensor_dtype="float16")
    kv = [*FLASH_KV[:at], wrong, *FLASH_KV[at + 1 :]]
    last, element, size = compare(FLASH, kv, PACKED, SM90)
    states = right.block_size // right.compress_ratio
    assert f"bytes of a block of the tensor {states * (tail + 1) * 2}, must be" in size
    assert f"last dimension of the tensor {tail + 1}, must be {tail}" in last
    assert f"element type of the tensor float16, must be {right.tensor_dtype}" in element


def test_a_tensor_with_half_the_rows_is_reported() -> None:
    swa, *rest = FLASH_KV
    half = replace(swa, shape=(-1, 1, 32, LATENT))
    [line] = compare(FLASH, [half, *rest], PACKED, SM90)
    assert f"bytes of a block of the tensor {32 * 584}, must be {64 * 584}" in line


def test_a_tensor_without_dimensions_is_reported() -> None:
    swa, *rest = FLASH_KV
    last, size = compare(FLASH, [replace(swa, shape=()), *rest], PACKED, SM90)
    assert "last dimension of the tensor None, must be 584" in last
    assert "bytes of a block of the tensor None, must be 37376" in size


@pytest.mark.parametrize("at", range(len(FLASH_KV)))
def test_a_missing_kind_is_reported(at: int) -> None:
    gone = FLASH_KV[at]
    [line] = compare(FLASH, [*FLASH_KV[:at], *FLASH_KV[at + 1 :]], PACKED, SM90)
    head = f"{gone.role} (ratio {gone.compress_ratio}, block {gone.block_size})"
    assert line.startswith(f"{head}: missing, must be {gone.layers} layers")


def test_nothing_seen_is_not_confirmed() -> None:
    assert len(FLASH_KV) == len(compare(FLASH, [], PACKED, SM90))


def test_an_extra_kind_is_reported() -> None:
    extra = replace(FLASH_KV[0], role="mtp.swa_cache", layers=1)
    [line] = compare(FLASH, [*FLASH_KV, extra], PACKED, SM90)
    assert "mtp.swa_cache (ratio 1): 1 layer of a kind that the model does not have" == line


def test_an_unresolved_auto_gives_a_page_that_is_too_small() -> None:
    """Bugs 47174, 45091, 55134: packed, but sized as plain fp8, "auto" not being written back."""
    swa = replace(FLASH_KV[0], content_bytes=64 * 512, page_size_bytes=32768)
    content, page = compare(FLASH, [swa, *FLASH_KV[1:]], PACKED, SM90)
    assert "content bytes 32768, must be 37376" in content
    assert "page size bytes 32768, must be 37440" in page


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    rope = draw(st.integers(1, 4)) * 32
    ratios = draw(st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=80))
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(ratios),
        "head_dim": rope + 64 * draw(st.integers(1, 40)),
        "qk_rope_head_dim": rope,
        "index_head_dim": 128 * draw(st.integers(1, 8)),
        "compress_ratios": [*ratios, 0],
        "sliding_window": draw(st.integers(1, 4096)),
    }


@given(geometries(), st.sampled_from(LAYOUTS))
def test_a_page_is_its_content_up_to_the_alignment(config: dict[str, Any], layout: str) -> None:
    align = 576 if layout == "packed" else 512
    for page in expected_pages(config, layout, SM100):
        assert 0 == page.page_size_bytes % align
        assert 0 <= page.page_size_bytes - page.content_bytes < align


@given(geometries(), st.sampled_from(LAYOUTS))
def test_content_is_whole_rows_of_the_tensor(config: dict[str, Any], layout: str) -> None:
    sizes = {"uint8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
    for page in expected_pages(config, layout, SM100):
        rows = page.block_size // page.compress_ratio
        assert page.content_bytes == rows * (page.tail or 0) * sizes[page.storage]


@given(geometries(), st.integers(2, 5), st.sampled_from(LAYOUTS))
def test_depth_changes_only_the_counts(config: dict[str, Any], times: int, layout: str) -> None:
    deep = config | {
        "num_hidden_layers": config["num_hidden_layers"] * times,
        "compress_ratios": config["compress_ratios"][:-1] * times + [0],
    }
    once = expected_pages(config, layout, SM100)
    want = tuple(dataclasses.replace(page, layers=page.layers * times) for page in once)
    assert want == expected_pages(deep, layout, SM100)


@given(geometries())
def test_a_wider_element_never_makes_a_page_smaller(config: dict[str, Any]) -> None:
    narrow = expected_pages(config, "plain_fp8", SM100)
    wide = expected_pages(config, "plain_bf16", SM100)
    for one, two in zip(narrow, wide, strict=True):
        assert one.page_size_bytes <= two.page_size_bytes
        times = 2 if one.role in (SWA, MAIN) else 1
        assert times * one.content_bytes == two.content_bytes


@given(geometries(), st.sampled_from(LAYOUTS))
def test_only_compressed_layers_have_more_than_a_sliding_window(
    config: dict[str, Any], layout: str
) -> None:
    ratios = config["compress_ratios"][:-1]
    counts: dict[str, int] = {}
    for page in expected_pages(config, layout, SM100):
        counts[page.role] = counts.get(page.role, 0) + page.layers
    compressed, indexed = sum(r > 0 for r in ratios), ratios.count(4)
    want = {SWA: len(ratios), MAIN: compressed, STATE: compressed}
    want |= {KEY: indexed, KEY_STATE: indexed}
    assert {role: n for role, n in want.items() if n} == counts
