"""Models with an encoder: what decodes keeps keys and values, of its own and of the encoder's.

An encoder sees all of its input at once, so that nothing of it is looked up later: a model that is
only an encoder has no KV cache at all. A decoder beside one keeps two in every layer, its own
tokens' and, for cross-attention, those of the encoder's output.
"""

from __future__ import annotations

from dataclasses import replace

from harness.layouts.full_attention import format_of, of_blocks
from harness.layouts.page import Blocks, Capability, Config, Family, Page, UnknownLayout, count

NO_CACHE = "no KV cache"
"""The layout of a model that is only an encoder: no kv_cache_dtype has a meaning there."""

SELF_ROLE, CROSS_ROLE = "layers.self_attn.attn", "layers.encoder_attn.attn"

CROSS_KIND = "CrossAttentionSpec"
"""vLLM's name for a cache of what the encoder saw: as long as its output, whatever is decoded."""


def _no_layout(
    config: Config,
    _kv_cache_dtype: str | None,
    _storage_dtype: str | None,
    _capability: Capability | None,
) -> str:
    for key in ("is_decoder", "add_cross_attention"):
        if config.get(key):
            raise UnknownLayout(f"an encoder with {key} is not written down")
    return NO_CACHE


def _no_pages(
    config: Config, layout: str, capability: Capability | None, _blocks: Blocks
) -> tuple[Page, ...]:
    _no_layout(config, layout, None, capability)
    return ()


def _pages(
    config: Config, layout: str, capability: Capability | None, blocks: Blocks
) -> tuple[Page, ...]:
    # Every head has keys and values of its own, a share of the model's width (Whisper's report).
    heads = {
        "hidden_size": count(config, "d_model"),
        "num_attention_heads": count(config, "decoder_attention_heads"),
    }
    own = of_blocks(heads, layout, capability, blocks, count(config, "decoder_layers"))
    text = f"{own.arithmetic}, of the encoder's output"
    return (
        replace(own, role=SELF_ROLE),
        replace(own, role=CROSS_ROLE, kind=CROSS_KIND, arithmetic=text),
    )


ENCODER_ONLY = Family(_no_layout, _no_pages)
"""BERT."""

ENCODER_DECODER = Family(format_of, _pages)
"""Whisper."""
