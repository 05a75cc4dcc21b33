"""The oracle on models with an encoder: numbers worked out by hand, and wrong records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.layout import UnknownLayout, compare, expected_pages
from harness.record import KVCache, Resolved

SM90 = (9, 0)
AUTO = Resolved("auto", "float16")

# Whisper large v3: 20 heads of 1280 / 20 = 64, in 32 decoder layers.
WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "torch_dtype": "float16",
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_layers": 32,
    "encoder_attention_heads": 16,
    "encoder_layers": 24,
    "num_hidden_layers": 24,
}
BERT: dict[str, Any] = {
    "model_type": "bert",
    "torch_dtype": "float32",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
}


def cache(role: str, kind: str, layers: int = 32) -> KVCache:
    page = 16 * 2 * 20 * 64 * 2
    return KVCache(
        kind=kind,
        role=role,
        layers=layers,
        block_size=16,
        page_size_bytes=page,
        content_bytes=page,
        dtype="float16",
        shape=(-1, 20, 16, 2 * 64),
        tensor_dtype="float16",
    )


OWN = cache("layers.self_attn.attn", "FullAttentionSpec")
CROSS = cache("layers.encoder_attn.attn", "CrossAttentionSpec")


def test_whisper_keeps_its_own_and_the_encoders() -> None:
    assert [] == compare(WHISPER, [OWN, CROSS], AUTO, SM90)
    assert [] == compare(WHISPER, [CROSS, OWN], AUTO, SM90)


@pytest.mark.parametrize(
    ("page", "layout"),
    [
        (81920, "float16"),  # 16 x 2 x 20 x 64 x 2
        (40960, "fp8"),
        (43520, "fp8_per_token_head"),  # 16 x 2 x 20 x (64 + 4)
        (23040, "int4_per_token_head"),  # 16 x 2 x 20 x (32 + 4)
    ],
)
def test_whisper_by_format(page: int, layout: str) -> None:
    assert [page, page] == [p.page_size_bytes for p in expected_pages(WHISPER, layout, SM90)]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("field", ["page_size_bytes", "content_bytes", "layers", "block_size"])
def test_one_off_is_reported(at: int, by: int, field: str) -> None:
    kv = [OWN, CROSS]
    kv[at] = replace(kv[at], **{field: getattr(kv[at], field) + by})
    assert compare(WHISPER, kv, AUTO, SM90)


@pytest.mark.parametrize("kv", [[OWN], [CROSS], []])
def test_a_cache_that_is_missing_is_reported(kv: list[KVCache]) -> None:
    assert any("missing, must be 32 layers" in line for line in compare(WHISPER, kv, AUTO, SM90))


@pytest.mark.parametrize("wrong", [CROSS, replace(OWN, role="encoder.self_attn.attn")])
def test_an_encoder_that_keeps_something_is_reported(wrong: KVCache) -> None:
    assert compare(WHISPER, [OWN, CROSS, wrong], AUTO, SM90)


def test_what_comes_from_the_encoder_is_kept_as_such() -> None:
    kv = [OWN, replace(CROSS, kind="FullAttentionSpec")]
    [line] = compare(WHISPER, kv, AUTO, SM90)
    assert "kind FullAttentionSpec, must be CrossAttentionSpec" in line


@pytest.mark.parametrize(
    "change", [{"d_model": 2560}, {"decoder_layers": 31}, {"torch_dtype": "bfloat16"}]
)
def test_a_wrong_fact_in_the_config_is_reported(change: dict[str, Any]) -> None:
    assert compare(WHISPER | change, [OWN, CROSS], AUTO, SM90)


@pytest.mark.parametrize("key", ["d_model", "decoder_layers", "decoder_attention_heads"])
def test_a_config_without_its_numbers(key: str) -> None:
    with pytest.raises(UsageError, match=key):
        expected_pages(WHISPER | {key: None}, "float16", SM90)


@pytest.mark.parametrize("resolved", [AUTO, Resolved("fp8", "uint8"), Resolved()])
def test_an_encoder_alone_has_no_cache(resolved: Resolved) -> None:
    assert [] == compare(BERT, [], resolved, SM90)
    role = "encoder.layer.N.attention.self.attn"
    wrong = cache(role, "FullAttentionSpec", 12)
    assert [f"{role} (ratio 1): 12 layers of a kind that the model does not have"] == compare(
        BERT, [wrong], resolved, SM90
    )


@pytest.mark.parametrize("key", ["is_decoder", "add_cross_attention"])
def test_no_opinion_on_an_encoder_that_decodes(key: str) -> None:
    with pytest.raises(UnknownLayout, match=key):
        compare(BERT | {key: True}, [], AUTO, SM90)
    with pytest.raises(UnknownLayout, match=key):
        expected_pages(BERT | {key: True}, "float16", SM90)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 512))
def test_both_caches_cost_the_same(layers: int, heads: int, block: int) -> None:
    config = WHISPER | {
        "decoder_layers": layers,
        "decoder_attention_heads": heads,
        "d_model": 64 * heads,
    }
    pages = expected_pages(config, "float16", SM90, block)
    assert 2 * [(layers, block * 2 * heads * 64 * 2)] == [
        (page.layers, page.page_size_bytes) for page in pages
    ]
