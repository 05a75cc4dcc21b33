"""Full attention: keys and values of every token, for every KV head, in every layer.

The block size is vLLM's choice, or the caller's; what a token costs is the format's definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from harness.errors import UsageError
from harness.layouts.page import (
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

K_AND_V = 2

_BITS_PER_BYTE = 8


@dataclass(frozen=True)
class Format:
    """How one key or one value vector of a head is stored."""

    bits: int
    """Of one element."""
    elements: tuple[str, ...]
    """torch's element types that can hold it."""
    scale_bytes: int = 0
    """Of one scale; 0 where none is stored with the elements."""
    per_scale: int | None = None
    """Elements that share a scale; None: all of a token and head."""

    def size(self, head_dim: int) -> int:
        """Bytes of one vector of `head_dim` elements. UnknownLayout where it does not divide."""
        return self._data(head_dim) + self._scales(head_dim) * self.scale_bytes

    def sum(self, head_dim: int) -> str:
        """`size` as people write it."""
        each = f"{head_dim} x {self.bits} bit"
        scales = self._scales(head_dim)
        return f"{each} + {scales} x {self.scale_bytes} scale" if self.scale_bytes else each

    def _data(self, head_dim: int) -> int:
        if head_dim * self.bits % _BITS_PER_BYTE:
            raise UnknownLayout(f"{head_dim} elements of {self.bits} bits fill no whole bytes")
        return head_dim * self.bits // _BITS_PER_BYTE

    def _scales(self, head_dim: int) -> int:
        per_scale = self.per_scale or head_dim
        if head_dim % per_scale:
            raise UnknownLayout(f"head_dim {head_dim} does not divide by {per_scale} to a scale")
        return head_dim // per_scale


_FP32_SCALE, _FP8_SCALE = 4, 1

_E4M3 = Format(8, ("uint8", "float8_e4m3fn"))
"""Scaled per tensor: the scale is the layer's, not the page's."""

_NVFP4 = Format(4, ("uint8",), _FP8_SCALE, per_scale=16)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "bfloat16": Format(16, ("bfloat16",)),
        "float16": Format(16, ("float16",)),
        "float32": Format(32, ("float32",)),
        "fp8": _E4M3,
        "fp8_e4m3": _E4M3,
        # Gaudi's name for it.
        "fp8_inc": _E4M3,
        "fp8_e5m2": Format(8, ("uint8", "float8_e5m2")),
        "int8_per_token_head": Format(8, ("int8", "uint8"), _FP32_SCALE),
        "fp8_per_token_head": Format(8, ("uint8", "float8_e4m3fn"), _FP32_SCALE),
        # Asymmetric: the zero point is hidden in the scale's lowest bits.
        "int4_per_token_head": Format(4, ("uint8",), _FP32_SCALE),
        "nvfp4": _NVFP4,
        # Four Over Six: the same format, its scales chosen with more care.
        "nvfp4_4over6": _NVFP4,
    }
)
"""kv_cache_dtype -> what it stores, which is also the layout's name."""

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
    return format_of(config, kv_cache_dtype, storage_dtype, capability)


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
    config: Config, layout: str, _capability: Capability | None, block_size: int
) -> tuple[Page, ...]:
    _only_full(config)
    return (keys_and_values(config, layout, block_size, count(config, "num_hidden_layers")),)


def keys_and_values(config: Config, layout: str, block_size: int, layers: int) -> Page:
    """The page of `layers` layers that keep keys and values for every KV head, in a format of
    `FORMATS`. NoLayout where a block holds nothing; raises as `Family.pages` beside that."""
    if layout not in FORMATS:
        raise UnknownLayout(f"full attention has no layout {layout!r}: {', '.join(FORMATS)}")
    if block_size < 1:
        raise NoLayout(f"a block of {block_size} tokens holds nothing")
    stored, heads, head_dim = FORMATS[layout], _kv_heads(config), _head_dim(config)
    vector = stored.size(head_dim)
    page = block_size * K_AND_V * heads * vector
    return Page(
        role=ROLE,
        compress_ratio=1,
        layers=layers,
        block_size=block_size,
        content_bytes=page,
        page_size_bytes=page,
        arithmetic=(
            f"{block_size} tokens x {K_AND_V} (K and V) x {heads} heads x {vector} B "
            f"({stored.sum(head_dim)}) = {page}"
        ),
        # Backends order heads, tokens, K and V as they like.
        tail=None,
        storage=stored.elements[0],
        also=stored.elements[1:],
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
