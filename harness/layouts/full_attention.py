"""Full attention: keys and values of every token, for every KV head, in every layer.

The block size is vLLM's choice, or the caller's; what a token costs is the format's definition.
"""

from __future__ import annotations

from dataclasses import replace

from harness.errors import UsageError
from harness.layouts.formats import FORMATS, PACKED, Packed
from harness.layouts.kernels import UNSAID, handed, kernels_of
from harness.layouts.page import (
    Blocks,
    Capability,
    Config,
    Family,
    NoLayout,
    Page,
    UnknownLayout,
    count,
    no_layout,
)

ROLE = "self_attn.attn"

KIND = "FullAttentionSpec"
"""vLLM's name for a cache that keeps every token."""

KEPT_AT_EACH_END = 2
"""Attention layers at either end that stay in the model's own dtype under a format of
`harness.layouts.formats` that packs keys and values together: vLLM's boundary protection, as
`TurboQuantConfig` documents it. Hybrids have none: their attention layers are few."""

_LATENT_ONLY = ("fp8_ds_mla", "nvfp4_ds_mla")
"""Records of MLA's latent vector: without one there is nothing that they could describe."""

_BF16_SINCE = (8, 0)
"""The first compute capability with bfloat16 arithmetic: a model in bfloat16 runs in float16 before
it, which is as wide."""

_FLOAT16_OVERFLOWS = ("gemma3_text",)
"""Model types whose activations exceed float16's 65504, so that they run in float32 instead."""


def _layout_of(
    config: Config,
    kv_cache_dtype: str | None,
    storage_dtype: str | None,
    capability: Capability | None,
) -> str:
    _only_full(config)
    names = set((kv_cache_dtype or "").split("+"))
    packed = sorted(names & PACKED.keys())
    kept = _kept(config)
    if len(packed) != 1 or not kept:
        return format_of(config, kv_cache_dtype, storage_dtype, capability)
    own = _own_dtype(config, capability)
    stored = "+".join(sorted({own, *PACKED[packed[0]].elements}))
    if names not in ({"auto", *packed}, {own, *packed}) or storage_dtype != stored:
        why = f"{kept} layers are kept in {own} beside {packed[0]}, stored as {stored}"
        raise no_layout(kv_cache_dtype, storage_dtype, why)
    return f"{own}+{packed[0]}"


def _kept(config: Config) -> int:
    """Layers that stay in the model's own dtype where the others are packed: never more than half
    of a shallow model's from either end."""
    layers = count(config, "num_hidden_layers")
    return 2 * min(KEPT_AT_EACH_END, layers // 2)


def format_of(
    config: Config,
    kv_cache_dtype: str | None,
    storage_dtype: str | None,
    capability: Capability | None,
) -> str:
    """The name in `FORMATS` for keys and values that are stored alike in all layers.

    NoLayout where dtype and element type disagree; UnknownLayout where it is not written down.
    """
    names = (kv_cache_dtype or "").split("+")
    for name in names:
        if name and name != "auto" and name not in FORMATS and name not in _LATENT_ONLY:
            raise UnknownLayout(f"the format {name} is not written down for full attention")
    name = _own_dtype(config, capability) if names == ["auto"] else names[0]
    if len(names) > 1 or not name:
        # Layers that differ among themselves are no layout: all of these models' are alike.
        why = f"one of auto, {', '.join(FORMATS)} in all layers"
    elif name in _LATENT_ONLY:
        why = "it describes MLA's latent vector, and this model has keys and values"
    elif storage_dtype not in FORMATS[name].elements:
        why = f"{name} is stored as {' or '.join(FORMATS[name].elements)}"
    else:
        return name
    raise no_layout(kv_cache_dtype, storage_dtype, why)


def _own_dtype(config: Config, capability: Capability | None) -> str:
    """The dtype that the model runs in."""
    own = config.get("torch_dtype") or config.get("dtype")
    if own == "bfloat16" and capability is not None and capability < _BF16_SINCE:
        return "float32" if config.get("model_type") in _FLOAT16_OVERFLOWS else "float16"
    if own in ("bfloat16", "float16"):
        return str(own)
    # A checkpoint in float32 is run in a narrower dtype, and which one is the engine's choice.
    raise UnknownLayout(f"a model in {own!r} does not say what auto is")


def _pages(
    config: Config, layout: str, capability: Capability | None, blocks: Blocks
) -> tuple[Page, ...]:
    _only_full(config)
    layers, (name, *others) = count(config, "num_hidden_layers"), layout.split("+")
    if not others:
        return (of_blocks(config, layout, capability, blocks, layers),)
    kept = _kept(config)
    counts = {name: kept, "+".join(others): layers - kept}
    pages = [of_blocks(config, one, capability, blocks, of) for one, of in counts.items() if of]
    return tuple(
        replace(page, arithmetic=f"{page.arithmetic}, {name} in {kept} layers at the ends")
        for page in pages
    )


def of_blocks(
    config: Config, layout: str, capability: Capability | None, blocks: Blocks, layers: int
) -> Page:
    """`keys_and_values` in blocks that kernels may be handed in parts, where a long one was asked
    for."""
    page = keys_and_values(config, layout, blocks.size, layers)
    kernels = kernels_of(config, capability, blocks.backends)
    return replace(page, kernel_blocks=handed(kernels, blocks.size) or page.kernel_blocks)


def keys_and_values(config: Config, layout: str, block_size: int, layers: int) -> Page:
    """The page of `layers` layers that keep keys and values for every KV head, in a format of
    `FORMATS`. NoLayout where a block holds nothing; raises as `Family.pages` beside that."""
    if layout not in FORMATS:
        raise UnknownLayout(f"full attention has no layout {layout!r}: {', '.join(FORMATS)}")
    if block_size < 1:
        raise NoLayout(f"a block of {block_size} tokens holds nothing")
    stored, heads, head_dim = FORMATS[layout], _kv_heads(config), _head_dim(config)
    page = block_size * heads * stored.pair(head_dim)
    packed = isinstance(stored, Packed)
    return Page(
        role=ROLE,
        compress_ratio=1,
        layers=layers,
        block_size=block_size,
        content_bytes=page,
        page_size_bytes=page,
        arithmetic=f"{block_size} tokens x {stored.token(heads, head_dim)} = {page}",
        # Backends order heads, tokens, K and V as they like, but a slot is in one piece.
        tail=stored.pair(head_dim) if packed else None,
        storage=stored.elements[0],
        also=stored.elements[1:],
        kernel_blocks=handed([UNSAID], block_size) if packed else (),
        kind=KIND,
    )


_SOFTMAX = 1
"""In MiniMax's `attn_type_list`, where 0 is lightning attention, whose state does not grow."""


def _only_full(config: Config) -> None:
    """UnknownLayout where some layer has a window, or is no attention at all."""
    other = {str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"}
    if other:
        raise UnknownLayout(f"layers of type {', '.join(sorted(other))} are not full attention")
    if set(config.get("attn_type_list") or ()) - {_SOFTMAX}:
        raise UnknownLayout("attn_type_list has layers that are not full attention")
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise UnknownLayout(f"a sliding window of {config['sliding_window']} is not full attention")


def _kv_heads(config: Config) -> int:
    key = "num_key_value_heads"
    # Left out where every head has keys and values of its own.
    return count(config, "num_attention_heads" if config.get(key) is None else key)


_HEAD_DIM_WRITTEN = ("gemma3_text", "gpt_oss", "minimax_m2", "qwen3", "qwen3_moe")
"""Model types whose heads are not simply shares of the hidden size."""


def _head_dim(config: Config) -> int:
    if config.get("head_dim") is not None or config.get("model_type") in _HEAD_DIM_WRITTEN:
        return count(config, "head_dim")
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    if hidden % heads:
        raise UsageError(
            f"config.json: hidden_size {hidden} does not divide by num_attention_heads {heads}: "
            "head_dim must be written"
        )
    return hidden // heads


FAMILY = Family(_layout_of, _pages)
