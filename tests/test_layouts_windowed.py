"""The oracle on layers with a window: numbers worked out by hand, records with one thing wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.layout import NoLayout, UnknownLayout, compare, expected_pages, layout_of
from harness.layouts import full_attention, windowed
from harness.record import KVCache, Resolved

SM75, SM90 = (7, 5), (9, 0)
AUTO = Resolved("auto", "bfloat16")

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "head_dim": 256,
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text",
    "torch_dtype": "bfloat16",
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m2",
    "dtype": "bfloat16",
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
}

FULL, SLIDING, CHUNKED = "FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"


def seen(
    kind: str,
    layers: int,
    heads: int,
    head_dim: int,
    window: int | None = None,
    role: str = "self_attn.attn",
) -> KVCache:
    """A right cache in bfloat16, 16 tokens a block."""
    page = 16 * 2 * heads * head_dim * 2
    return KVCache(
        kind=kind,
        role=role,
        layers=layers,
        block_size=16,
        page_size_bytes=page,
        content_bytes=page,
        dtype="bfloat16",
        shape=(-1, heads, 16, 2 * head_dim),
        tensor_dtype="bfloat16",
        window=window,
    )


RIGHT: dict[str, tuple[dict[str, Any], list[KVCache]]] = {
    "gpt-oss": (
        GPT_OSS,
        [
            seen(SLIDING, 12, 8, 64, 128, role="attn.attn"),
            seen(FULL, 12, 8, 64, role="attn.attn"),
        ],
    ),
    # Layers 6, 12, 18 and 24 of 26.
    "gemma3": (GEMMA, [seen(SLIDING, 22, 1, 256, 512), seen(FULL, 4, 1, 256)]),
    "llama4": (LLAMA4, [seen(CHUNKED, 36, 8, 128, 8192), seen(FULL, 12, 8, 128)]),
    "mistral": (MISTRAL, [seen(SLIDING, 32, 8, 128, 4096)]),
    "minimax-m2": (MINIMAX, [seen(FULL, 62, 8, 128)]),
}
every_model = pytest.mark.parametrize("model", RIGHT)
models_with_windows = pytest.mark.parametrize("model", ["gpt-oss", "gemma3", "llama4", "mistral"])


@pytest.mark.parametrize(
    ("page", "config", "layout"),
    [
        (16 * 2 * 8 * 64 * 2, GPT_OSS, "bfloat16"),
        (16 * 2 * 8 * 64, GPT_OSS, "fp8"),
        (16 * 2 * 8 * (64 + 4), GPT_OSS, "int8_per_token_head"),
        (16 * 2 * 1 * 256 * 2, GEMMA, "bfloat16"),
        (16 * 2 * 1 * 256, GEMMA, "fp8"),
        (16 * 2 * 1 * (256 + 4), GEMMA, "fp8_per_token_head"),
        (16 * 2 * 1 * (256 // 2 + 256 // 16), GEMMA, "nvfp4"),
        (16 * 2 * 8 * 128 * 2, LLAMA4, "bfloat16"),
        (16 * 2 * 8 * 128, LLAMA4, "fp8"),
        (16 * 2 * 8 * (128 // 2 + 128 // 16), LLAMA4, "nvfp4"),
        (16 * 2 * 8 * 128 * 2, MISTRAL, "bfloat16"),
        (16 * 2 * 8 * 128, MISTRAL, "fp8"),
        (16 * 2 * 8 * 128 * 2, MINIMAX, "bfloat16"),
        (16 * 2 * 8 * 128, MINIMAX, "fp8"),
    ],
)
def test_pages(page: int, config: dict[str, Any], layout: str) -> None:
    assert {page} == {one.page_size_bytes for one in expected_pages(config, layout, SM90)}


def test_the_arithmetic_says_what_is_kept() -> None:
    window, whole = (page.arithmetic for page in expected_pages(GPT_OSS, "bfloat16", SM90))
    bytes_ = "16 tokens x 2 (K and V) x 8 heads x 128 B (64 x 16 bit) = 32768"
    assert (f"{bytes_}, for the last 128 tokens", bytes_) == (window, whole)
    chunk = expected_pages(LLAMA4, "bfloat16", SM90)[0].arithmetic
    assert chunk.endswith(" = 65536, for a chunk of 8192 tokens")


@every_model
def test_a_right_record_is_confirmed_in_any_order(model: str) -> None:
    config, kv = RIGHT[model]
    assert [] == compare(config, kv, AUTO, SM90)
    assert [] == compare(config, kv[::-1], AUTO, SM90)


@models_with_windows
def test_windows_that_are_kept_in_full_are_reported(model: str) -> None:
    """The bytes of a page are right, and a long context costs many times as many."""
    config, kv = RIGHT[model]
    told = f"missing, must be {kv[0].layers} layers of {kv[0].kind}" if kv[1:] else kv[0].kind
    lines = compare(config, [replace(one, kind=FULL) for one in kv], AUTO, SM90)
    assert any(told in line for line in lines)


@models_with_windows
def test_one_window_that_is_kept_in_full_is_reported(model: str) -> None:
    config, (window, *rest) = RIGHT[model]
    lost = replace(window, kind=FULL, layers=1)
    kv = [replace(window, layers=window.layers - 1), *rest, lost]
    # Where the model has no full layer, it is the kind that is wrong, not a count.
    told = f"must be {window.layers} layers of {window.kind}" if rest else f"must be {window.kind}"
    assert any(told in line for line in compare(config, kv, AUTO, SM90))


@every_model
def test_another_kind_is_reported(model: str) -> None:
    config, (first, *rest) = RIGHT[model]
    wrong = "CrossAttentionSpec"
    lines = compare(config, [replace(first, kind=wrong), *rest], AUTO, SM90)
    assert any(f"kind {wrong}, must be {first.kind}" in line for line in lines)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("field", ["page_size_bytes", "content_bytes", "block_size", "layers"])
@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("model", ["gpt-oss", "gemma3", "llama4"])
def test_one_off_is_reported(model: str, by: int, field: str, kind: int) -> None:
    config, kv = RIGHT[model]
    wrong = replace(kv[kind], **{field: getattr(kv[kind], field) + by})
    assert compare(config, [*kv[:kind], wrong, *kv[kind + 1 :]], AUTO, SM90)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        *((model, {"head_dim": 32}) for model in RIGHT),
        *((model, {"head_dim": 384}) for model in RIGHT),
        *((model, {"num_key_value_heads": 2}) for model in RIGHT),
        *((model, {"num_hidden_layers": 23}) for model in RIGHT),
        ("gpt-oss", {"layer_types": ["sliding_attention"] * 24}),
        ("gpt-oss", {"layer_types": ["full_attention"] * 24}),
        ("gpt-oss", {"layer_types": ["sliding_attention"] * 13 + ["full_attention"] * 11}),
        (
            "gpt-oss",
            {
                "layer_types": ["chunked_attention", "full_attention"] * 12,
                "attention_chunk_size": 128,
            },
        ),
        ("gpt-oss", {"sliding_window": None}),
        ("gemma3", {"sliding_window_pattern": 5}),
        ("gemma3", {"sliding_window_pattern": 7}),
        ("gemma3", {"sliding_window": None}),
        ("gemma3", {"layer_types": ["full_attention"] * 26}),
        ("llama4", {"no_rope_layers": [1] * 48}),
        ("llama4", {"no_rope_layers": [1, 0, 1, 0] * 12}),
        ("llama4", {"attention_chunk_size": None}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"] * 16}),
    ],
)
def test_a_wrong_fact_in_the_config_is_reported(model: str, change: dict[str, Any]) -> None:
    config, kv = RIGHT[model]
    assert compare(config | change, kv, AUTO, SM90)


def always_first(_config: Any, layers: int) -> list[str]:
    return [windowed.SLIDING] + [windowed.FULL] * (layers - 1)


@pytest.mark.parametrize(
    ("model", "name", "wrong"),
    [
        ("gpt-oss", "_PATTERNS", {"gpt_oss": always_first}),
        ("gpt-oss", "_ROLES", {"gpt_oss": "self_attn.attn"}),
        ("gpt-oss", "_OWN_DTYPE", {"gpt_oss": "float16"}),
        ("gemma3", "_GEMMA_PERIOD", 5),
        ("gemma3", "_WINDOWS", {windowed.SLIDING: windowed._Window("sliding_window", FULL, "{}")}),
        ("llama4", "_PATTERNS", {"llama4_text": always_first}),
        ("mistral", "_PATTERNS", {"mistral": always_first}),
    ],
)
def test_a_wrong_fact_in_the_oracle_is_reported(
    monkeypatch: pytest.MonkeyPatch, model: str, name: str, wrong: Any
) -> None:
    config, kv = RIGHT[model]
    # Where config and family agree the family alone must do.
    config = {"sliding_window": 128} | config
    config |= {"layer_types": None, "sliding_window_pattern": None}
    assert [] == compare(config, kv, AUTO, SM90)
    before = getattr(windowed, name)
    monkeypatch.setattr(windowed, name, before | wrong if isinstance(wrong, dict) else wrong)
    assert compare(config, kv, AUTO, SM90)


@models_with_windows
@pytest.mark.parametrize("by", [1, -1])
def test_another_window_than_the_configs_is_one_line(model: str, by: int) -> None:
    config, (kv, *rest) = RIGHT[model]
    assert kv.window is not None
    [line] = compare(config, [replace(kv, window=kv.window + by), *rest], AUTO, SM90)
    assert f"window of {kv.window + by} tokens, must be of {kv.window} tokens" in line


@models_with_windows
def test_a_window_that_forgets_nothing_is_one_line(model: str) -> None:
    config, (kv, *rest) = RIGHT[model]
    [line] = compare(config, [replace(kv, window=None), *rest], AUTO, SM90)
    assert f"window of all tokens, must be of {kv.window} tokens" in line


@models_with_windows
def test_without_its_window_a_model_is_full_attention(model: str) -> None:
    """Mistral 7B v0.2 on says so: `"sliding_window": null`."""
    config, kv = RIGHT[model]
    config = config | {"sliding_window": None, "attention_chunk_size": None}
    whole = replace(kv[0], kind=FULL, window=None, layers=sum(one.layers for one in kv))
    assert [] == compare(config, [whole], AUTO, SM90)


def test_layer_types_beyond_the_last_layer_are_those_of_mtp_layers() -> None:
    config = GPT_OSS | {"layer_types": [*GPT_OSS["layer_types"], "sliding_attention"]}
    assert [] == compare(config, RIGHT["gpt-oss"][1], AUTO, SM90)


@pytest.mark.parametrize(
    ("storage", "change", "capability"),
    [
        ("bfloat16", {}, SM90),
        ("float16", {}, SM75),
        ("bfloat16", {}, None),
        ("float16", {"dtype": "float16"}, SM90),
        ("float16", {"torch_dtype": "float16"}, SM90),
    ],
)
def test_gpt_oss_runs_in_bfloat16_where_nothing_else_is_said(
    storage: str, change: dict[str, Any], capability: tuple[int, int] | None
) -> None:
    config = GPT_OSS | change
    assert storage == layout_of(config, "auto", storage, capability)
    other = {"bfloat16": "float16", "float16": "bfloat16"}[storage]
    with pytest.raises(NoLayout, match=f"kv_cache_dtype auto stored as {other}"):
        layout_of(config, "auto", other, capability)


def test_gemma_runs_in_float32_where_there_is_no_bfloat16() -> None:
    """Its activations do not fit float16."""
    page = 16 * 2 * 1 * 256 * 4
    kv = [
        replace(one, page_size_bytes=page, content_bytes=page, tensor_dtype="float32")
        for one in RIGHT["gemma3"][1]
    ]
    assert [] == compare(GEMMA, kv, Resolved("auto", "float32"), SM75)
    for resolved, capability in ((Resolved("auto", "float32"), SM90), (AUTO, SM75)):
        [line] = compare(GEMMA, kv, resolved, capability)
        assert line.startswith(f"kv_cache_dtype auto stored as {resolved.storage_dtype} is no")


def test_no_opinion_on_other_layer_types() -> None:
    config = GPT_OSS | {"layer_types": ["linear_attention", "full_attention"] * 12}
    with pytest.raises(UnknownLayout, match="layers of type linear_attention"):
        expected_pages(config, "bfloat16", SM90)


def test_no_opinion_on_minimax_layers_with_lightning_attention() -> None:
    with pytest.raises(UnknownLayout, match="attn_type_list"):
        expected_pages(MINIMAX | {"attn_type_list": [0, 1] * 31}, "bfloat16", SM90)


@pytest.mark.parametrize("config", [GPT_OSS, GEMMA, MINIMAX])
def test_a_model_whose_heads_are_no_shares_must_say_how_wide_they_are(
    config: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match="head_dim must be a positive integer"):
        expected_pages(config | {"head_dim": None}, "bfloat16", SM90)


@pytest.mark.parametrize(
    ("config", "change", "names"),
    [
        (GPT_OSS, {"layer_types": ["full_attention"] * 23}, "layer_types .* each of 24 layers"),
        (GPT_OSS, {"layer_types": "full_attention"}, "layer_types .* each of 24 layers"),
        (GPT_OSS, {"sliding_window": 0}, "sliding_window must be a positive integer"),
        (GEMMA, {"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive"),
        (GEMMA, {"sliding_window": "512"}, "sliding_window must be a positive integer"),
        (LLAMA4, {"no_rope_layers": None}, "no_rope_layers .* each of 48 layers"),
        (LLAMA4, {"no_rope_layers": [1] * 47}, "no_rope_layers .* each of 48 layers"),
        (LLAMA4, {"attention_chunk_size": True}, "attention_chunk_size must be a positive"),
        (MISTRAL, {"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
    ],
)
def test_a_config_that_does_not_say_what_it_must(
    config: dict[str, Any], change: dict[str, Any], names: str
) -> None:
    with pytest.raises(UsageError, match=names):
        expected_pages(config | change, "bfloat16", SM90)


TYPES = {
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "full_attention": FULL,
}
KEPT = {"sliding_attention": 1024, "chunked_attention": 8192}
patterns = st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=80)


def with_layers(types: list[str]) -> dict[str, Any]:
    config = LLAMA4 | {"sliding_window": 1024}
    return config | {"layer_types": types, "num_hidden_layers": len(types)}


@given(patterns, st.data())
def test_any_pattern_is_confirmed_and_one_other_layer_is_reported(
    types: list[str], data: st.DataObject
) -> None:
    kv = [
        seen(TYPES[kind], types.count(kind), 8, 128, KEPT.get(kind))
        for kind in dict.fromkeys(types)
    ]
    assert [] == compare(with_layers(types), kv, AUTO, SM90)
    at = data.draw(st.integers(0, len(types) - 1))
    other = data.draw(st.sampled_from(sorted(TYPES.keys() - {types[at]})))
    assert compare(with_layers([*types[:at], other, *types[at + 1 :]]), kv, AUTO, SM90)


@given(patterns, st.sampled_from(sorted(full_attention.FORMATS)), st.integers(1, 512))
def test_a_window_changes_no_byte(types: list[str], layout: str, block: int) -> None:
    whole = {"model_type": "llama", "layer_types": None, "sliding_window": None}
    [full] = expected_pages(LLAMA4 | whole, layout, SM90, block)
    pages = expected_pages(with_layers(types), layout, SM90, block)
    assert {full.page_size_bytes} == {page.page_size_bytes for page in pages}
    assert len(types) == sum(page.layers for page in pages)


@given(st.integers(1, 200), st.integers(1, 32))
def test_one_layer_in_a_period_is_global(layers: int, period: int) -> None:
    config = GEMMA | {"num_hidden_layers": layers, "sliding_window_pattern": period}
    pages = {page.kind: page.layers for page in expected_pages(config, "fp8", SM90)}
    assert layers // period == pages.get(FULL, 0)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_the_size_of_a_window_changes_no_page(one: int, other: int) -> None:
    def pages(window: int) -> list[tuple[str | None, int, int]]:
        config = GEMMA | {"sliding_window": window}
        found = expected_pages(config, "bfloat16", SM90)
        return [(page.kind, page.layers, page.page_size_bytes) for page in found]

    assert pages(one) == pages(other)
