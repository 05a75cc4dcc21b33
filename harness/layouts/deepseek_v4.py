"""The DeepSeek-V4 family: a sliding window in every layer, compressed states, an indexer's keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.layouts.page import (
    ELEMENT_BYTES,
    Blocks,
    Capability,
    Config,
    Family,
    Page,
    UnknownLayout,
    count,
    no_layout,
)

PACKED, PLAIN_FP8, PLAIN_BF16 = "packed", "plain_fp8", "plain_bf16"

_LAYOUTS = {
    ("fp8_ds_mla", "uint8"): PACKED,
    ("fp8", "float8_e4m3fn"): PLAIN_FP8,
    ("fp8_e4m3", "float8_e4m3fn"): PLAIN_FP8,
    ("auto", "bfloat16"): PLAIN_BF16,
    ("bfloat16", "bfloat16"): PLAIN_BF16,
}
"""(resolved kv_cache_dtype, element type) -> layout. Only names that say what is stored: `fp8_e5m2`
stored as float8_e4m3fn, or `nvfp4` stored as bfloat16, is a cache that is not what it is called."""

_FP8, _BF16, _FP32 = (ELEMENT_BYTES[name] for name in ("float8_e4m3fn", "bfloat16", "float32"))

_SWA_BLOCK = 64
"""Tokens; the sliding-window cache keeps one state per token."""

_MAIN_BLOCK = 256
"""Tokens, so that a ratio of 4 gives the 64 states of a sliding-window block."""

_VALUES_PER_UE8M0 = 64
_SCALE_FIELD = 8
"""Bytes the scales are padded to: 448 / 64 = 7 UE8M0 bytes and an unused one. Only that geometry
is published; that another one would be padded likewise is an assumption."""

_INDEXER_VALUES_PER_SCALE = 128

ALIGNMENT = {PACKED: 576, PLAIN_FP8: 512, PLAIN_BF16: 512}
"""Bytes. The packed layout's 576 (448 + 64 x 2, a state less its scales) is defined for every
cache, as all of them share one pool of pages. In the plain layouts the 512 is sure where it cannot
matter: main, sliding-window and state pages of the published geometry are multiples of 512 anyway.
It matters for the indexer alone, 8448 or 8704 B; FlashInfer's sparse kernels ask for 512."""


@dataclass(frozen=True)
class _Compressor:
    """How a compress ratio works."""

    vectors: int
    """Head vectors a token contributes: 2 where windows overlap, so that each token belongs to its
    own window and to the one after."""
    block: int
    """Tokens per block of the compressor's state: for the main cache's compressor they come to
    32768 B, an fp8 page of 64 plain states, so that pages can be shared."""
    indexer: bool
    """True where the attended states are selected by an indexer (and its own compressor)."""


_COMPRESSORS = {
    4: _Compressor(vectors=2, block=4, indexer=True),
    128: _Compressor(vectors=1, block=8, indexer=False),
}

_KV_AND_SCORE = 2
"""What a compressor keeps per token and head vector, in fp32, until the window is full."""


@dataclass(frozen=True)
class State:
    """What is stored for one token, or for `compress_ratio` tokens."""

    size: int
    """Bytes."""
    sum: str
    tail: int
    storage: str


def layout_of(
    _config: Config,
    kv_cache_dtype: str | None,
    storage_dtype: str | None,
    _capability: Capability | None,
) -> str:
    """As `Family.layout_of`."""
    layout = _LAYOUTS.get((kv_cache_dtype or "", storage_dtype or ""))
    if layout is None:
        pairs = ", ".join(f"{name} as {storage}" for name, storage in _LAYOUTS)
        raise no_layout(kv_cache_dtype, storage_dtype, f"known are {pairs}")
    return layout


def _pages(
    config: Config, layout: str, capability: Capability | None, _blocks: Blocks
) -> tuple[Page, ...]:
    if layout not in ALIGNMENT:
        raise UnknownLayout(f"DeepSeek-V4 has no layout {layout!r}: {', '.join(ALIGNMENT)}")
    # The packed format is defined byte by byte, whatever device reads it; the plain ones are
    # FlashInfer's, and of another kernel's rows nothing is written down.
    if capability is None and layout != PACKED:
        raise UnknownLayout(f"the {layout} cache of a CPU is not written down for DeepSeek-V4")
    align = ALIGNMENT[layout]
    ratios = _ratios(config)
    head, index_head = count(config, "head_dim"), count(config, "index_head_dim")
    latent = latent_state(head, count(config, "qk_rope_head_dim"), layout)
    window = count(config, "sliding_window")
    pages = [page_of("attn.swa_cache", 1, len(ratios), _SWA_BLOCK, latent, align, window)]
    for ratio, how in _COMPRESSORS.items():
        # A token waits for the windows that it belongs to.
        layers, waits = ratios.count(ratio), how.vectors * ratio
        state = compressor_state(head, how.vectors)
        pages += [
            page_of("attn", ratio, layers, _MAIN_BLOCK, latent, align),
            page_of("attn.compressor.state_cache", 1, layers, how.block, state, align, waits),
        ]
        if how.indexer:
            key, state = indexer_key(index_head), compressor_state(index_head, how.vectors)
            pages += [
                page_of("attn.indexer.k_cache", ratio, layers, _MAIN_BLOCK, key, align),
                page_of(
                    *("attn.indexer.compressor.state_cache", 1, layers, how.block),
                    *(state, align, waits),
                ),
            ]
    return tuple(page for page in pages if page.layers)


def page_of(
    role: str,
    ratio: int,
    layers: int,
    block: int,
    state: State,
    align: int,
    window: int | None = None,
) -> Page:
    """`layers` caches of a state for every `ratio` of `block` tokens; pages in steps of `align`."""
    states = block // ratio
    content = states * state.size
    page = -(-content // align) * align
    padding = f", a multiple of {align}" if align > 1 else ""
    if page != content:
        padding = f", up to{padding.removeprefix(',')} = {page}"
    return Page(
        role=role,
        compress_ratio=ratio,
        layers=layers,
        block_size=block,
        content_bytes=content,
        page_size_bytes=page,
        arithmetic=f"{states} states x {state.size} B ({state.sum}) = {content}{padding}",
        tail=state.tail,
        storage=state.storage,
        window=window,
    )


def latent_state(head: int, rope: int, layout: str) -> State:
    """The vector that all heads attend to; the packed form keeps the RoPE part in bf16."""
    if layout != PACKED:
        storage = "float8_e4m3fn" if layout == PLAIN_FP8 else "bfloat16"
        each = ELEMENT_BYTES[storage]
        return State(head * each, f"{head} x {each}", head, storage)
    nope = head - rope
    if nope <= 0 or nope % _VALUES_PER_UE8M0:
        raise UnknownLayout(
            f"fp8_ds_mla scales {_VALUES_PER_UE8M0} values at a time: head_dim {head} less "
            f"qk_rope_head_dim {rope} does not divide"
        )
    scales = -(-(nope // _VALUES_PER_UE8M0) // _SCALE_FIELD) * _SCALE_FIELD
    size = nope * _FP8 + rope * _BF16 + scales
    how = f"{nope} fp8 + {rope} x {_BF16} RoPE + {scales} UE8M0 scales"
    return State(size, how, size, "uint8")


def indexer_key(head: int) -> State:
    """fp8 with one fp32 scale per 128 values, in every layout of the main cache."""
    if head % _INDEXER_VALUES_PER_SCALE:
        raise UnknownLayout(
            f"the indexer's key scales {_INDEXER_VALUES_PER_SCALE} values at a time: "
            f"index_head_dim {head} does not divide"
        )
    scales = head // _INDEXER_VALUES_PER_SCALE
    size = head * _FP8 + scales * _FP32
    return State(size, f"{head} fp8 + {scales} x {_FP32} scale", size, "uint8")


def compressor_state(head: int, vectors: int) -> State:
    """kv and score of one token that waits for its window to fill, in fp32 in every layout."""
    values = _KV_AND_SCORE * vectors * head
    text = f"kv and score: {_KV_AND_SCORE} x {vectors} x {head} x {_FP32}"
    return State(values * _FP32, text, values, "float32")


def _ratios(config: Config) -> list[int]:
    """Compress ratio of each layer; what follows the last one in the config is the MTP layers'."""
    depth, ratios = count(config, "num_hidden_layers"), config.get("compress_ratios")
    if not isinstance(ratios, Sequence) or len(ratios) < depth:
        raise UsageError(f"config.json: compress_ratios must be a list of at least {depth} ratios")
    known = (0, *_COMPRESSORS)
    for layer, ratio in enumerate(ratios[:depth]):
        if ratio not in known:
            raise UnknownLayout(f"compress ratio {ratio!r} of layer {layer}: known are {known}")
    return list(ratios[:depth])


FAMILY = Family(layout_of, _pages)
