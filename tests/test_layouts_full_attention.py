"""The oracle on full attention: numbers worked out by hand, and records with one thing wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.layout import NoLayout, UnknownLayout, compare, expected_pages, layout_of
from harness.layouts import formats, full_attention
from harness.record import KVCache, Resolved

SM75, SM80, SM90 = (7, 5), (8, 0), (9, 0)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
HEADS, HEAD_DIM = 8, 4096 // 32

# Bytes of the keys, or the values, of one token and head.
BF16 = 128 * 2
FP8 = 128 * 1
SCALED = 128 * 1 + 4
NVFP4 = 128 // 2 + 128 // 16

STORED = [
    ("auto", "bfloat16", BF16),
    ("bfloat16", "bfloat16", BF16),
    ("float16", "float16", 128 * 2),
    ("float32", "float32", 128 * 4),
    ("fp8", "uint8", FP8),
    ("fp8_e4m3", "float8_e4m3fn", FP8),
    ("fp8_inc", "float8_e4m3fn", FP8),
    ("fp8_e5m2", "float8_e5m2", FP8),
    ("int8_per_token_head", "int8", SCALED),
    ("fp8_per_token_head", "uint8", SCALED),
    ("int4_per_token_head", "uint8", 128 // 2 + 4),
    ("nvfp4", "uint8", NVFP4),
    ("nvfp4_4over6", "uint8", NVFP4),
]
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def seen(block: int, vector: int, storage: str, layers: int = 32, heads: int = HEADS) -> KVCache:
    """A right cache whose tensor is (blocks, heads, tokens, K and V side by side)."""
    page = block * 2 * heads * vector
    return KVCache(
        kind="FullAttentionSpec",
        role="self_attn.attn",
        layers=layers,
        block_size=block,
        page_size_bytes=page,
        content_bytes=page,
        dtype=storage,
        shape=(-1, heads, block, 2 * vector // SIZES.get(storage, 1)),
        tensor_dtype=storage,
    )


RIGHT = seen(16, BF16, "bfloat16")
AUTO = Resolved("auto", "bfloat16")


@pytest.mark.parametrize(
    ("page", "layout"),
    [
        (65536, "bfloat16"),  # 16 x 2 x 8 x 128 x 2
        (65536, "float16"),
        (131072, "float32"),  # 16 x 2 x 8 x 128 x 4
        (32768, "fp8"),  # 16 x 2 x 8 x 128
        (32768, "fp8_e4m3"),
        (32768, "fp8_e5m2"),
        (32768, "fp8_inc"),
        (33792, "int8_per_token_head"),  # 16 x 2 x 8 x (128 + 4)
        (33792, "fp8_per_token_head"),
        (17408, "int4_per_token_head"),  # 16 x 2 x 8 x (64 + 4)
        (18432, "nvfp4"),  # 16 x 2 x 8 x (64 + 8)
        (18432, "nvfp4_4over6"),
    ],
)
def test_llama_3_by_format(page: int, layout: str) -> None:
    [one] = expected_pages(LLAMA, layout, SM90)
    assert (page, page, 16, 32, 1) == (
        one.page_size_bytes,
        one.content_bytes,
        one.block_size,
        one.layers,
        one.compress_ratio,
    )


@pytest.mark.parametrize(
    ("page", "model"),
    [
        # Qwen3-8B: 8 heads of 128, whatever 4096 / 32 is; Qwen3-30B-A3B: 4 of 128, not 2048 / 32.
        (16 * 2 * 8 * 128 * 2, {"model_type": "qwen3", "head_dim": 128}),
        (
            16 * 2 * 4 * 128 * 2,
            {
                "model_type": "qwen3_moe",
                "head_dim": 128,
                "hidden_size": 2048,
                "num_key_value_heads": 4,
            },
        ),
        # Qwen2.5-7B: 4 heads of 3584 / 28 = 128; the window is there, and switched off.
        (
            16 * 2 * 4 * 128 * 2,
            {
                "model_type": "qwen2",
                "hidden_size": 3584,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "sliding_window": 131072,
                "use_sliding_window": False,
            },
        ),
        # Llama 2 as it was written at first: every head has keys and values of its own.
        (16 * 2 * 32 * 128 * 2, {"num_key_value_heads": None}),
    ],
)
def test_its_kin(page: int, model: dict[str, Any]) -> None:
    assert [page] == [p.page_size_bytes for p in expected_pages(LLAMA | model, "bfloat16", SM90)]


def test_arithmetic_can_be_read() -> None:
    [one] = expected_pages(LLAMA, "bfloat16", SM90)
    assert "16 tokens x 2 (K and V) x 8 heads x 256 B (128 x 16 bit) = 65536" == one.arithmetic
    [one] = expected_pages(LLAMA, "nvfp4", SM90, 32)
    assert (
        "32 tokens x 2 (K and V) x 8 heads x 72 B (128 x 4 bit + 8 x 1 scale) = 36864"
        == one.arithmetic
    )


@pytest.mark.parametrize(("name", "storage", "vector"), STORED)
@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("capability", [SM90, None])
def test_a_right_record_is_confirmed_at_any_block_size(
    name: str, storage: str, vector: int, block: int, capability: tuple[int, int] | None
) -> None:
    kv = [seen(block, vector, storage)]
    assert [] == compare(LLAMA, kv, Resolved(name, storage), capability)


@pytest.mark.parametrize(("name", "storage", "vector"), STORED)
def test_another_number_of_heads_is_reported(name: str, storage: str, vector: int) -> None:
    lines = compare(LLAMA, [seen(16, vector, storage, heads=4)], Resolved(name, storage), SM90)
    half, whole = 16 * 2 * 4 * vector, 16 * 2 * 8 * vector
    assert ["content bytes", "page size bytes", "bytes of a block of the tensor"] == [
        line.partition("): ")[2].partition(f" {half}, must be {whole}: ")[0] for line in lines
    ]


@pytest.mark.parametrize(
    ("name", "storage", "vector"),
    [
        ("auto", "bfloat16", FP8),
        ("fp8", "uint8", BF16),
        ("fp8", "uint8", SCALED),
        ("nvfp4", "uint8", BF16),
        ("nvfp4", "uint8", FP8),
        ("nvfp4", "uint8", 128 // 2),  # no scales
        ("nvfp4", "uint8", 128 // 2 + 128 // 32),  # a scale for 32
        ("nvfp4", "uint8", 128 // 2 + 4),  # one fp32 scale
        ("int8_per_token_head", "int8", 128),  # no scale
        ("int8_per_token_head", "int8", 128 + 2),  # a bf16 scale
        ("int8_per_token_head", "int8", 128 + 3),
        ("fp8_per_token_head", "uint8", 128),
        ("fp8_per_token_head", "uint8", 128 + 1),
    ],
)
def test_another_element_or_scale_is_reported(name: str, storage: str, vector: int) -> None:
    lines = compare(LLAMA, [seen(16, vector, storage)], Resolved(name, storage), SM90)
    assert any(f"page size bytes {16 * 2 * 8 * vector}, must be" in line for line in lines)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 4},
        {"head_dim": 64},
        {"head_dim": 127},
        {"num_hidden_layers": 31},
        {"num_attention_heads": 16},
        {"hidden_size": 2048},
        {"torch_dtype": "float16"},
    ],
)
def test_a_wrong_number_in_the_config_is_reported(change: dict[str, Any]) -> None:
    assert [] == compare(LLAMA, [RIGHT], AUTO, SM90)
    assert compare(LLAMA | change, [RIGHT], AUTO, SM90)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("nvfp4", {"bits": 8}),
        ("nvfp4", {"scale_bytes": 2}),
        ("nvfp4", {"per_scale": 32}),
        ("int8_per_token_head", {"scale_bytes": 2}),
        ("fp8_per_token_head", {"scale_bytes": 0}),
        ("fp8", {"bits": 16}),
        ("bfloat16", {"bits": 8}),
        ("fp8_e5m2", {"elements": ("uint8",)}),
    ],
)
def test_a_wrong_number_in_the_oracle_is_reported(
    monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, Any]
) -> None:
    [(storage, vector)] = [(storage, vector) for n, storage, vector in STORED if n == name]
    kv, resolved = [seen(16, vector, storage)], Resolved(name, storage)
    assert [] == compare(LLAMA, kv, resolved, SM90)
    wrong = {name: replace(formats.ALIKE[name], **change)}
    monkeypatch.setattr(full_attention, "FORMATS", full_attention.FORMATS | wrong)
    assert compare(LLAMA, kv, resolved, SM90)


@pytest.mark.parametrize(
    "field", ["page_size_bytes", "content_bytes", "block_size", "compress_ratio", "layers"]
)
@pytest.mark.parametrize("by", [1, -1])
def test_one_off_is_reported(field: str, by: int) -> None:
    wrong = replace(RIGHT, **{field: getattr(RIGHT, field) + by})
    assert compare(LLAMA, [wrong], AUTO, SM90)


@pytest.mark.parametrize(
    "shape",
    [
        (2, -1, 16, 8, 128),
        (-1, 2, 16, 8, 128),
        (-1, 2, 8, 16, 128),
        (-1, 16, 8, 256),
    ],
)
def test_dimensions_may_come_in_any_order(shape: tuple[int, ...]) -> None:
    assert [] == compare(LLAMA, [replace(RIGHT, shape=shape)], AUTO, SM90)


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (16 * 8 * 128 * 2, (-1, 16, 8, 128)),  # K or V is missing
        (16 * 2 * 4 * 128 * 2, (-1, 2, 16, 4, 128)),
        (16 * 2 * 8 * 64 * 2, (-1, 2, 16, 8, 64)),
        (None, (100, 2, 16, 8, 128)),
        (None, (-1, -1, 16, 8, 128)),
        (None, ()),
    ],
)
def test_a_wrong_shape_is_reported(size: int | None, shape: tuple[int, ...]) -> None:
    [line] = compare(LLAMA, [replace(RIGHT, shape=shape)], AUTO, SM90)
    assert f"bytes of a block of the tensor {size}, must be 65536" in line


def test_a_tensor_may_see_fp8_as_bytes_or_as_fp8_but_not_as_another() -> None:
    fp8, resolved = seen(16, FP8, "uint8"), Resolved("fp8", "uint8")
    assert [] == compare(LLAMA, [replace(fp8, tensor_dtype="float8_e4m3fn")], resolved, SM90)
    [line] = compare(LLAMA, [replace(fp8, tensor_dtype="float8_e5m2")], resolved, SM90)
    assert "element type of the tensor float8_e5m2, must be uint8" in line


def test_a_record_without_tensors_is_confirmed_by_its_bytes() -> None:
    kv = [replace(RIGHT, shape=None, tensor_dtype=None)]
    assert [] == compare(LLAMA, kv, AUTO, SM90)


def test_layers_must_agree_on_the_block_size() -> None:
    kv = [seen(16, BF16, "bfloat16", layers=31), seen(32, BF16, "bfloat16", layers=1)]
    block, *_ = compare(LLAMA, kv, AUTO, SM90)
    assert "(ratio 1, block 32, 1 layer): block size 32, must be 16" in block


@pytest.mark.parametrize("block", [0, -16])
def test_a_block_holds_at_least_a_token(block: int) -> None:
    empty = replace(RIGHT, block_size=block, page_size_bytes=0, content_bytes=0, shape=None)
    assert [f"a block of {block} tokens holds nothing"] == compare(LLAMA, [empty], AUTO, SM90)


def test_nothing_seen_is_not_confirmed() -> None:
    [line] = compare(LLAMA, [], AUTO, SM90)
    assert line.startswith("self_attn.attn (ratio 1, block 16): missing, must be 32 layers")


def test_a_layer_of_another_kind_is_reported() -> None:
    [line] = compare(LLAMA, [RIGHT, replace(RIGHT, role="mixer", layers=1)], AUTO, SM90)
    assert "mixer (ratio 1): 1 layer of a kind that the model does not have" == line


@pytest.mark.parametrize(
    ("storage", "own", "capability"),
    [
        ("bfloat16", "bfloat16", SM90),
        ("bfloat16", "bfloat16", SM80),
        ("float16", "bfloat16", SM75),
        ("bfloat16", "bfloat16", None),
        ("float16", "float16", SM75),
        ("float16", "float16", SM90),
    ],
)
def test_auto_is_the_dtype_that_the_model_runs_in(
    storage: str, own: str, capability: tuple[int, int] | None
) -> None:
    for key in ("torch_dtype", "dtype"):
        config = {**LLAMA, "torch_dtype": None, key: own}
        assert storage == layout_of(config, "auto", storage, capability)
        with pytest.raises(NoLayout, match="kv_cache_dtype auto stored as uint8 is no layout"):
            layout_of(config, "auto", "uint8", capability)


@pytest.mark.parametrize("own", ["float32", None, "mxfp4"])
def test_no_opinion_on_auto_where_the_config_does_not_say_it(own: str | None) -> None:
    with pytest.raises(UnknownLayout, match="does not say what auto is"):
        layout_of(LLAMA | {"torch_dtype": own}, "auto", "float16", SM90)


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("nvfp4", "bfloat16"),
        ("fp8", "bfloat16"),
        ("fp8_e5m2", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e5m2"),
        ("int8_per_token_head", "bfloat16"),
        ("bfloat16", "float16"),
        ("auto", "float16"),
        ("fp8", "bfloat16+uint8"),
        ("auto+fp8", "bfloat16+uint8"),
        # Both are records of a latent vector, and these models have none.
        ("fp8_ds_mla", "uint8"),
        ("nvfp4_ds_mla", "uint8"),
        (None, None),
    ],
)
def test_a_name_that_does_not_say_what_is_stored(name: str | None, storage: str | None) -> None:
    [line] = compare(LLAMA, [RIGHT], Resolved(name, storage), SM90)
    assert line.startswith(f"kv_cache_dtype {name} stored as {storage} is no layout: ")


@pytest.mark.parametrize(
    "name",
    [
        "turboquant_k2v2",
        "octave_k3v4",
        "ultraquant_4bit",
        "octave_k3v3_compact",
    ],
)
def test_no_opinion_on_a_format_that_is_not_written_down(name: str) -> None:
    with pytest.raises(UnknownLayout, match="is not written down"):
        compare(LLAMA, [RIGHT], Resolved(name, "uint8"), SM90)


def test_no_opinion_on_another_layout() -> None:
    with pytest.raises(UnknownLayout, match="packed"):
        expected_pages(LLAMA, "packed", SM90)


def test_no_opinion_on_heads_that_do_not_fill_their_scales() -> None:
    with pytest.raises(UnknownLayout, match="head_dim 120 does not divide by 16"):
        expected_pages(LLAMA | {"head_dim": 120}, "nvfp4", SM90)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"] * 16},
        {"layer_types": ["full_attention", "linear_attention"] * 16},
    ],
)
def test_no_opinion_on_a_model_whose_layers_are_not_all_full(change: dict[str, Any]) -> None:
    with pytest.raises(UnknownLayout, match="not full attention"):
        compare(LLAMA | change, [RIGHT], AUTO, SM90)
    with pytest.raises(UnknownLayout, match="not full attention"):
        expected_pages(LLAMA | change, "bfloat16", SM90)


def test_layers_that_are_said_to_be_full_are_full() -> None:
    config = LLAMA | {"layer_types": ["full_attention"] * 32, "sliding_window": None}
    assert [] == compare(config, [RIGHT], AUTO, SM90)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
@pytest.mark.parametrize("value", [None, "64", 0, True, []])
def test_a_config_without_its_numbers(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=key):
        expected_pages(LLAMA | {key: value}, "bfloat16", SM90)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_a_model_whose_heads_are_no_shares_must_say_how_wide_they_are(model_type: str) -> None:
    with pytest.raises(UsageError, match="head_dim must be a positive integer"):
        expected_pages(LLAMA | {"model_type": model_type}, "bfloat16", SM90)


def test_heads_that_do_not_divide_the_hidden_size_must_say_how_wide_they_are() -> None:
    with pytest.raises(UsageError, match="head_dim must be written"):
        expected_pages(LLAMA | {"hidden_size": 4097}, "bfloat16", SM90)


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    return LLAMA | {
        "num_hidden_layers": draw(st.integers(1, 200)),
        "num_key_value_heads": draw(st.integers(1, 128)),
        "head_dim": 16 * draw(st.integers(1, 64)),
    }


@given(geometries(), st.sampled_from(sorted(full_attention.FORMATS)), st.integers(1, 2048))
def test_a_page_is_as_many_tokens_as_its_block(
    config: dict[str, Any], layout: str, block: int
) -> None:
    [token] = expected_pages(config, layout, SM90, 1)
    [page] = expected_pages(config, layout, SM90, block)
    assert page.page_size_bytes == block * token.page_size_bytes
    assert 0 == token.page_size_bytes % (2 * config["num_key_value_heads"])


@given(geometries(), st.sampled_from(sorted(full_attention.FORMATS)), st.integers(2, 5))
def test_depth_changes_only_the_count(config: dict[str, Any], layout: str, times: int) -> None:
    deep = config | {"num_hidden_layers": config["num_hidden_layers"] * times}
    [once] = expected_pages(config, layout, SM90)
    assert (replace(once, layers=once.layers * times),) == expected_pages(deep, layout, SM90)


@given(geometries())
def test_a_wider_element_makes_a_larger_page(config: dict[str, Any]) -> None:
    pages = [
        expected_pages(config, layout, SM90)[0].page_size_bytes
        for layout in ("nvfp4", "fp8", "int8_per_token_head", "bfloat16", "float32")
    ]
    assert sorted(set(pages)) == pages
