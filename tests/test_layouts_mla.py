"""The oracle on MLA and DSA: numbers worked out by hand, and records with one thing wrong."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.layout import NoLayout, UnknownLayout, compare, expected_pages, layout_of
from harness.layouts import mla
from harness.record import KVCache, Resolved

SM75, SM90, SM100, SM120 = (7, 5), (9, 0), (10, 0), (12, 0)
LATENT, KEY = "self_attn.attn", "self_attn.indexer.k_cache"

V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_rope_head_dim": 64,
}
KIMI = V3 | {"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64}
V32 = V3 | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048}
# `head_dim` is there, and says nothing of the cache.
GLM5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "head_dim": 64,
    "index_head_dim": 128,
    "kv_lora_rank": 512,
    "num_hidden_layers": 78,
    "qk_rope_head_dim": 64,
}
GLM52 = GLM5 | {
    "head_dim": 192,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": ["full"] * 2 + (["full"] + ["shared"] * 3) * 19,
}
MODELS = [V3, KIMI, V32, GLM5, GLM52]
SPARSE = [V32, GLM5, GLM52]

# Bytes of one token.
BF16 = (512 + 64) * 2
FP8 = 512 + 64
PACKED = 512 + 4 * 4 + 64 * 2
NVFP4 = 512 // 2 + 64 + 512 // 16
INDEX = 128 + 4

STORED = [
    ("auto", "bfloat16", BF16, 576),
    ("bfloat16", "bfloat16", BF16, 576),
    ("float16", "float16", BF16, 576),
    ("float32", "float32", 576 * 4, 576),
    ("fp8", "uint8", FP8, 576),
    ("fp8", "float8_e4m3fn", FP8, 576),
    ("fp8_e4m3", "uint8", FP8, 576),
    ("fp8_inc", "float8_e4m3fn", FP8, 576),
    ("fp8_e5m2", "float8_e5m2", FP8, 576),
    ("fp8_ds_mla", "uint8", PACKED, 656),
    ("nvfp4_ds_mla", "uint8", NVFP4, 352),
]
"""Resolved name, element type, bytes of a token, elements of a token."""


def cache(
    role: str, layers: int, block: int, token: int, tail: int, storage: str, kind: str = mla.KIND
) -> KVCache:
    return KVCache(
        kind=kind,
        role=role,
        layers=layers,
        block_size=block,
        page_size_bytes=block * token,
        content_bytes=block * token,
        dtype=storage,
        shape=(-1, 1, block, tail),
        tensor_dtype=storage,
    )


def key(layers: int, block: int = 64) -> KVCache:
    return cache(KEY, layers, block, INDEX, 132, "uint8")


def latent(layers: int, block: int, token: int, tail: int, storage: str) -> KVCache:
    return cache(LATENT, layers, block, token, tail, storage)


def numbers(config: dict[str, Any], layout: str, block: int) -> list[tuple[str, int, int]]:
    """Role, layers, bytes of a page."""
    pages = expected_pages(config, layout, SM100, block)
    assert [p.content_bytes for p in pages] == [p.page_size_bytes for p in pages]
    assert {(block, 1)} == {(p.block_size, p.compress_ratio) for p in pages}
    return [(p.role, p.layers, p.page_size_bytes) for p in pages]


@pytest.mark.parametrize("model", [V3, KIMI])
@pytest.mark.parametrize(
    ("page", "layout", "block"),
    [
        (18432, "bfloat16", 16),  # 16 x 576 x 2
        (18432, "float16", 16),
        (36864, "fp8", 64),  # 64 x 576
        (18432, "fp8_e4m3", 32),
        (41984, "fp8_ds_mla", 64),  # 64 x 656
        (22528, "nvfp4_ds_mla", 64),  # 64 x 352
    ],
)
def test_dense(model: dict[str, Any], page: int, layout: str, block: int) -> None:
    assert [(LATENT, 61, page)] == numbers(model, layout, block)


@pytest.mark.parametrize(
    ("layers", "indexers", "model"), [(61, 61, V32), (78, 78, GLM5), (78, 21, GLM52)]
)
@pytest.mark.parametrize(
    ("page", "layout"), [(73728, "bfloat16"), (36864, "fp8_e4m3"), (41984, "fp8_ds_mla")]
)
def test_sparse_has_index_keys_of_the_same_bytes_in_every_layout(
    layers: int, indexers: int, model: dict[str, Any], page: int, layout: str
) -> None:
    assert [(LATENT, layers, page), (KEY, indexers, 64 * 132)] == numbers(model, layout, 64)


def test_arithmetic_can_be_read() -> None:
    told = [
        page.arithmetic
        for layout in ("bfloat16", "fp8_ds_mla", "nvfp4_ds_mla")
        for page in expected_pages(V3, layout, SM100, 64)
    ]
    assert [
        "64 tokens x 1152 B ((512 latent + 64 RoPE) x 16 bit) = 73728",
        "64 tokens x 656 B (512 fp8 + 4 x 4 scales + 64 x 2 RoPE) = 41984",
        "64 tokens x 352 B (512 / 2 e2m1 + 64 fp8 RoPE + 32 fp8 scales) = 22528",
    ] == told
    assert (
        "64 tokens x 132 B (128 fp8 + 1 x 4 scale) = 8448"
        == expected_pages(V32, "fp8", SM90, 64)[1].arithmetic
    )


@pytest.mark.parametrize(("name", "storage", "token", "tail"), STORED)
@pytest.mark.parametrize("block", [16, 64, 128])
def test_a_right_record_is_confirmed_at_any_block_size(
    name: str, storage: str, token: int, tail: int, block: int
) -> None:
    # Both lie in one pool, whose blocks are handed out as DeepGEMM takes them.
    tokens = min(block, 64)
    right = handed(latent(78, block, token, tail, storage), tokens)
    # vLLM's MLA layers do not say what they store: the tensor does.
    for said in (storage, None):
        resolved = Resolved(name, said)
        for config, layers in [(GLM5, 78), (GLM52, 21)]:
            kv = [right, handed(key(layers, block), tokens)]
            assert [] == compare(config, kv, resolved, SM100)


def handed(cache: KVCache, tokens: int) -> KVCache:
    """`cache` with the tensor of a kernel whose blocks have so many tokens."""
    return replace(cache, shape=(-1, 1, tokens, (cache.shape or ())[-1]))


@pytest.mark.parametrize(
    ("backend", "block", "tokens"),
    [
        ("FLASHMLA", 128, 64),
        ("FLASHMLA", 64, 64),
        ("FLASHINFER_MLA", 128, 64),
        ("FLASHINFER_MLA", 96, 32),
        ("FLASHINFER_MLA", 32, 32),
        ("TOKENSPEED_MLA", 128, 64),
        ("CUTLASS_MLA", 256, 128),
        ("FLASH_ATTN_MLA", 128, 128),
        ("TRITON_MLA", 128, 128),
        ("CPU_MLA", 128, 16),
    ],
)
def test_a_large_block_is_handed_to_the_kernels_in_parts(
    backend: str, block: int, tokens: int
) -> None:
    """The largest that they take of those that divide it, the whole where they take that."""
    resolved = Resolved("fp8", "uint8", selected=backend)
    big = latent(61, block, FP8, 576, "uint8")
    assert [] == compare(V3, [handed(big, tokens)], resolved, SM100, block)
    for other in {16, 32, 48, 64, 128, 256} - {tokens}:
        [line] = compare(V3, [handed(big, other)], resolved, SM100, block)
        assert "bytes of a block of the tensor" in line


def test_the_indexers_keys_are_handed_out_by_64_and_the_latent_vectors_with_them() -> None:
    big, keys = latent(61, 128, PACKED, 656, "uint8"), key(61, 128)
    assert [] == compare(V32, [handed(big, 64), handed(keys, 64)], PACKED_AS_BYTES, SM120)
    for other in (16, 32, 128):
        lines = compare(V32, [handed(big, other), handed(keys, other)], PACKED_AS_BYTES, SM120)
        assert 2 == len(lines)
        assert all("bytes of a block of the tensor" in line for line in lines)


RIGHT = latent(61, 64, PACKED, 656, "uint8")
PACKED_AS_BYTES = Resolved("fp8_ds_mla", None)


@pytest.mark.parametrize(
    ("says", "kv"),
    [
        ("content bytes 37376", (latent(61, 64, 584, 584, "uint8"), key(61))),  # V4's record
        ("content bytes 36864", (latent(61, 64, FP8, 576, "uint8"), key(61))),
        (
            "page size bytes 42048, must be 41984",  # aligned to 576, as V4's is
            (replace(RIGHT, page_size_bytes=42048), key(61)),
        ),
        ("61 layers of MLAAttentionSpec", (RIGHT,)),
        (f"{KEY} (ratio 1, block 64): 60 layers seen", (RIGHT, key(60))),
        (f"{LATENT} (ratio 1, block 64): 60 layers seen", (replace(RIGHT, layers=60), key(61))),
        ("block size 32, must be 64", (RIGHT, key(61, 32))),
        (
            "content bytes 8704",
            (RIGHT, cache(KEY, 61, 64, 136, 136, "uint8")),  # a scale for every 64
        ),
        ("content bytes 16384", (RIGHT, cache(KEY, 61, 64, 256, 128, "bfloat16"))),
        ("element type of the tensor bfloat16", (RIGHT, replace(key(61), tensor_dtype="bfloat16"))),
        ("last dimension of the tensor 576", (replace(RIGHT, shape=(-1, 1, 64, 576)), key(61))),
        ("kind FullAttentionSpec", (replace(RIGHT, kind="FullAttentionSpec"), key(61))),
        ("of a kind that the model does not have", (RIGHT, key(61), replace(RIGHT, role="attn"))),
    ],
)
def test_a_wrong_record_is_told_apart(says: str, kv: tuple[KVCache, ...]) -> None:
    assert [] == compare(V32, [RIGHT, key(61)], PACKED_AS_BYTES, SM90)
    lines = compare(V32, kv, PACKED_AS_BYTES, SM90)
    assert any(says in line for line in lines), lines


def test_index_keys_in_a_dense_model_are_of_no_kind_that_it_has() -> None:
    [line] = compare(V3, [RIGHT, key(61)], PACKED_AS_BYTES, SM90)
    assert f"{KEY} (ratio 1): 61 layers of a kind that the model does not have" == line


def test_a_name_and_an_element_type_that_disagree() -> None:
    for name, storage in [
        ("bfloat16", "float8_e4m3fn"),
        ("auto", "uint8"),
        ("fp8", "bfloat16"),
        ("fp8_e5m2", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e5m2"),
        ("fp8_ds_mla", "bfloat16"),
        ("fp8_ds_mla", "float8_e4m3fn"),
        ("nvfp4_ds_mla", "bfloat16"),
        ("auto+fp8_ds_mla", "bfloat16"),
        ("auto+fp8_ds_mla", None),
    ]:
        with pytest.raises(NoLayout, match="is no layout"):
            layout_of(V32, name, storage, SM100)


@pytest.mark.parametrize(("name", "wrong"), [("auto", "uint8"), ("fp8_e5m2", "float8_e4m3fn")])
def test_a_layer_that_does_not_say_what_it_stores_is_held_to_its_tensor(
    name: str, wrong: str
) -> None:
    token, tail = next((token, tail) for n, _, token, tail in STORED if n == name)
    seen = latent(61, 64, token, tail, wrong)
    lines = compare(V3, [seen], Resolved(name, None), SM90)
    assert any(f"element type of the tensor {wrong}" in line for line in lines), lines


@pytest.mark.parametrize(
    "name",
    [
        "fp8_per_token_head",
        "int8_per_token_head",
        "int4_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
        "turboquant_k8v4",
        "octave_k3v4",
    ],
)
def test_no_opinion_of_a_format_that_is_not_defined_for_a_latent(name: str) -> None:
    for storage in ("uint8", None):
        with pytest.raises(UnknownLayout, match=name):
            layout_of(V3, name, storage, SM90)
    with pytest.raises(UnknownLayout, match=name):
        expected_pages(V3, name, SM90, 64)


@pytest.mark.parametrize("capability", [SM90, SM120, None])
def test_nvfp4_ds_mla_is_another_record_off_sm100(capability: tuple[int, int] | None) -> None:
    with pytest.raises(UnknownLayout, match="SM10x only"):
        layout_of(V32, "nvfp4_ds_mla", "uint8", capability)
    with pytest.raises(UnknownLayout, match="SM10x only"):
        expected_pages(V32, "nvfp4_ds_mla", capability, 64)
    assert "nvfp4_ds_mla" == layout_of(V32, "nvfp4_ds_mla", "uint8", (10, 3))


def test_auto_is_the_models_own_dtype() -> None:
    assert "bfloat16" == layout_of(V3, "auto", "bfloat16", SM90)
    assert "float16" == layout_of(V3 | {"torch_dtype": "float16"}, "auto", "float16", SM90)
    assert "float16" == layout_of(V3, "auto", "float16", SM75)
    assert [] == compare(V3, [latent(61, 16, BF16, 576, "float16")], Resolved("auto"), SM75)
    with pytest.raises(UnknownLayout, match="what auto is"):
        layout_of(V3 | {"torch_dtype": "float32"}, "auto", "float32", SM90)


# ---- Which layers have an indexer ---------------------------------------------------------------

FREQ = {key: value for key, value in GLM52.items() if key != "indexer_types"}


def indexers(config: dict[str, Any]) -> int:
    return sum(p.layers for p in expected_pages(config, "bfloat16", SM90) if p.role == KEY)


def test_indexers_as_they_are_listed_or_counted_out() -> None:
    assert 21 == indexers(GLM52) == indexers(FREQ)
    pattern = {"indexer_types": None, "index_topk_pattern": "FFSSF" + "S" * 73}
    assert 3 == indexers(GLM52 | pattern)
    assert 78 == indexers(GLM5)
    # What is listed beyond the last layer is the MTP layers'.
    assert 21 == indexers(GLM52 | {"indexer_types": GLM52["indexer_types"] + ["full"]})


@given(layers=st.integers(1, 200), every=st.integers(1, 9), first=st.integers(1, 9))
def test_indexers_counted_out_leave_no_gap(layers: int, every: int, first: int) -> None:
    """Never more than `every` - 1 layers in a row borrow, and the first ones do not."""
    more = {"index_topk_freq": every, "index_skip_topk_offset": first}
    own = [indexers(FREQ | more | {"num_hidden_layers": n}) for n in range(1, layers + 1)]
    assert list(range(1, min(first, layers) + 1)) == own[:first]
    assert first + (layers - first) // every == own[-1] or layers <= first


def test_all_layers_may_borrow() -> None:
    none = GLM52 | {"indexer_types": ["shared"] * 78}
    assert [LATENT] == [p.role for p in expected_pages(none, "bfloat16", SM90)]


# ---- What a config may lack ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({k: v for k, v in V3.items() if k != "kv_lora_rank"}, "kv_lora_rank"),
        (V3 | {"qk_rope_head_dim": "64"}, "qk_rope_head_dim must be a positive integer"),
        (V3 | {"num_hidden_layers": 0}, "num_hidden_layers"),
        ({k: v for k, v in V32.items() if k != "index_head_dim"}, "index_head_dim"),
        (GLM52 | {"indexer_types": ["full"] * 77}, "entry for each of 78 layers"),
        (GLM52 | {"indexer_types": {}}, "entry for each of 78 layers"),
        (FREQ | {"index_skip_topk_offset": None}, "index_skip_topk_offset"),
    ],
)
def test_a_config_without_a_number(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        expected_pages(config, "bfloat16", SM90)


@pytest.mark.parametrize(
    ("config", "layout", "says"),
    [
        (V3 | {"kv_lora_rank": 500}, "fp8_ds_mla", "500 does not divide by 128"),
        (V3 | {"kv_lora_rank": 520}, "nvfp4_ds_mla", "520 does not divide by 16"),
        (V32 | {"index_head_dim": 64}, "bfloat16", "64 does not divide by 128"),
        (GLM52 | {"indexer_types": ["other"] * 78}, "bfloat16", "type other"),
    ],
)
def test_a_geometry_that_no_format_describes(
    config: dict[str, Any], layout: str, says: str
) -> None:
    with pytest.raises(UnknownLayout, match=says):
        expected_pages(config, layout, SM100)


def test_a_block_of_nothing() -> None:
    with pytest.raises(NoLayout, match="holds nothing"):
        expected_pages(V3, "bfloat16", SM90, 0)


# ---- Properties over geometries -----------------------------------------------------------------

LAYOUTS = ("bfloat16", "float16", "float32", "fp8", "fp8_e5m2", "fp8_ds_mla", "nvfp4_ds_mla")


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    model: dict[str, Any] = draw(st.sampled_from([V3, KIMI, V32, GLM5]))
    return model | {
        "kv_lora_rank": 128 * draw(st.integers(1, 16)),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 128)),
        "index_head_dim": 128 * draw(st.integers(1, 4)),
        "num_hidden_layers": draw(st.integers(1, 200)),
    }


@given(config=geometries(), layout=st.sampled_from(LAYOUTS), block=st.integers(1, 4096))
def test_pages_divide_into_equal_tokens(config: dict[str, Any], layout: str, block: int) -> None:
    one = expected_pages(config, layout, SM100, 1)
    many = expected_pages(config, layout, SM100, block)
    assert [block * p.page_size_bytes for p in one] == [p.page_size_bytes for p in many]


@given(config=geometries(), block=st.integers(1, 256))
def test_wider_elements_make_larger_pages(config: dict[str, Any], block: int) -> None:
    pages = [
        expected_pages(config, layout, SM100, block)
        for layout in ("nvfp4_ds_mla", "fp8", "fp8_ds_mla", "bfloat16", "float32")
    ]
    sizes = [p[0].page_size_bytes for p in pages]
    assert sorted(set(sizes)) == sizes
    assert 2 * sizes[1] == sizes[3] == sizes[4] // 2
    # The index keys are what they are.
    assert 1 == len({p[1:] for p in pages})


@given(config=geometries(), layout=st.sampled_from(LAYOUTS), depth=st.integers(1, 500))
def test_depth_changes_counts_only(config: dict[str, Any], layout: str, depth: int) -> None:
    deep = expected_pages(config | {"num_hidden_layers": depth}, layout, SM100, 64)
    assert {depth} == {p.layers for p in deep}
    assert tuple(replace(p, layers=depth) for p in expected_pages(config, layout, SM100, 64)) == (
        deep
    )


@given(config=geometries(), layout=st.sampled_from(LAYOUTS), heads=st.integers(1, 512))
def test_heads_change_nothing(config: dict[str, Any], layout: str, heads: int) -> None:
    other = config | {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": heads}
    assert expected_pages(config, layout, SM100, 64) == expected_pages(other, layout, SM100, 64)


# ---- Mutations: a wrong number anywhere is seen -------------------------------------------------

RIGHT_RECORDS = [
    (V3, Resolved("auto"), SM90, (latent(61, 16, BF16, 576, "bfloat16"),)),
    (V3, Resolved("fp8"), SM90, (latent(61, 64, FP8, 576, "uint8"),)),
    (V32, Resolved("fp8_ds_mla"), SM90, (RIGHT, key(61))),
    (V32, Resolved("nvfp4_ds_mla"), SM100, (latent(61, 64, NVFP4, 352, "uint8"), key(61))),
    (GLM52, Resolved("auto"), SM90, (latent(78, 64, BF16, 576, "bfloat16"), key(21))),
]


@pytest.mark.parametrize(("config", "resolved", "capability", "kv"), RIGHT_RECORDS)
def test_a_number_of_the_config_one_off_is_seen(
    config: dict[str, Any],
    resolved: Resolved,
    capability: tuple[int, int],
    kv: tuple[KVCache, ...],
) -> None:
    assert [] == compare(config, kv, resolved, capability)
    for name, other in [
        ("kv_lora_rank", 384),
        ("qk_rope_head_dim", 32),
        ("num_hidden_layers", config["num_hidden_layers"] - 4),
        *([("index_head_dim", 256)] if len(kv) > 1 else []),
    ]:
        assert [] != compare(config | {name: other}, kv, resolved, capability), name


@pytest.mark.parametrize("at", [0, 3, 77])
def test_an_indexer_more_or_less_is_seen(at: int) -> None:
    types = list(GLM52["indexer_types"])
    types[at] = "shared" if types[at] == "full" else "full"
    kv = (latent(78, 64, BF16, 576, "bfloat16"), key(21))
    assert [] != compare(GLM52 | {"indexer_types": types}, kv, Resolved("auto"), SM90)


@pytest.mark.parametrize(
    ("name", "value", "layout"),
    [
        ("_FP8", 2, "fp8_ds_mla"),
        ("_BF16", 4, "fp8_ds_mla"),
        ("_FP32", 2, "fp8_ds_mla"),
        ("_LATENT_PER_SCALE", 64, "fp8_ds_mla"),
        ("_INDEX_PER_SCALE", 64, "fp8_ds_mla"),
        ("_FP4_PER_BYTE", 1, "nvfp4_ds_mla"),
        ("_FP4_PER_SCALE", 32, "nvfp4_ds_mla"),
        ("_FP8", 2, "nvfp4_ds_mla"),
        ("KEY_ROLE", "indexer.k_cache", "fp8_ds_mla"),
        ("ROLE", "attn", "fp8_ds_mla"),
    ],
)
def test_a_constant_of_the_oracle_one_off_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, layout: str
) -> None:
    config, resolved, capability, kv = next(
        r for r in RIGHT_RECORDS if r[1].kv_cache_dtype == layout
    )
    assert [] == compare(config, kv, resolved, capability)
    monkeypatch.setattr(mla, name, value)
    assert [] != compare(config, kv, resolved, capability)


@pytest.mark.parametrize(("config", "resolved", "capability", "kv"), RIGHT_RECORDS)
@pytest.mark.parametrize(
    "field", ["page_size_bytes", "content_bytes", "block_size", "layers", "compress_ratio"]
)
def test_a_number_of_the_record_one_off_is_seen(
    config: dict[str, Any],
    resolved: Resolved,
    capability: tuple[int, int],
    kv: tuple[KVCache, ...],
    field: str,
) -> None:
    for at, one in enumerate(kv):
        wrong = dataclasses.replace(one, **{field: getattr(one, field) + 1})
        assert [] != compare(config, [*kv[:at], wrong, *kv[at + 1 :]], resolved, capability)
