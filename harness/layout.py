"""The layout oracle: bytes per page from a model's published geometry and the formats' definitions.

The second opinion on every `ok` cell. Nothing here asks vLLM: the numbers are those that the
formats define (`fp8_ds_mla` of DeepSeek-V4, the indexer's key, the compressor's state), written
as arithmetic. Pure.

A family of models is one function from a config.json to its pages, picked by `model_type`; a new
one is a function and a line in `_FAMILIES`, and for new storage a line in `_LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError, near
from harness.record import KVCache, Resolved

Capability = tuple[int, int]


class UnknownLayout(LookupError):  # noqa: N818 - it says what, not that it is an error
    """The oracle has no opinion: a model_type, ratio or dtype whose format is not written down."""


@dataclass(frozen=True)
class Page:
    """One kind of KV cache that the model must have."""

    role: str
    """The layer's name behind its layer number, as in `KVCache.role`."""
    compress_ratio: int
    """Tokens that share one stored state, as in `KVCache.compress_ratio`: 1 for a compressor's own
    state too, which is kept for every token."""
    layers: int
    """How many layers must have it."""
    block_size: int
    """Tokens a block stands for."""
    content_bytes: int
    """Bytes of one block of one layer before alignment."""
    page_size_bytes: int
    """Bytes of one block of one layer, alignment included."""
    arithmetic: str
    """How the bytes come about, for people."""
    tail: int | None
    """What the tensor's last dimension must be; None where the format does not say."""
    storage: str
    """torch name of the tensor's element type without `torch.`."""


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


def layout_of(resolved_kv_cache_dtype: str | None, storage_dtype: str | None) -> str:
    """`packed`, `plain_fp8` or `plain_bf16`. UnknownLayout where name and element type disagree."""
    layout = _LAYOUTS.get((resolved_kv_cache_dtype or "", storage_dtype or ""))
    if layout is None:
        pairs = ", ".join(f"{name} as {storage}" for name, storage in _LAYOUTS)
        raise UnknownLayout(
            f"kv_cache_dtype {resolved_kv_cache_dtype} stored as {storage_dtype} is no layout: "
            f"known are {pairs}"
        )
    return layout


def expected_pages(
    config: Mapping[str, Any], layout: str, capability: Capability | None
) -> tuple[Page, ...]:
    """Every kind of KV cache that a config.json must give, the MTP layers left out.

    UnknownLayout where the format is not written down here; UsageError where the config lacks a
    number. Whether a device may have this layout at all is for the backends to declare: the
    capability only tells formats apart that differ in bytes.
    """
    return _family(config)(config, layout, capability)


def compare(
    config: Mapping[str, Any],
    kv: Sequence[KVCache],
    resolved: Resolved,
    capability: Capability | None,
) -> list[str]:
    """One line per disagreement between what was seen and what must be; [] means confirmed.

    Tensors are looked at only where they were seen (`KVCache.shape`). Raises as `expected_pages`;
    a resolved dtype that is no layout is a disagreement.
    """
    family = _family(config)
    try:
        layout = layout_of(resolved.kv_cache_dtype, resolved.storage_dtype)
    except UnknownLayout as error:
        return [str(error)]
    pages = family(config, layout, capability)
    lines: list[str] = []
    layers = [0] * len(pages)
    for cache in kv:
        at = _meant(cache, pages)
        if at is None:
            what = f"{cache.role} (ratio {cache.compress_ratio}): {_layers(cache.layers)}"
            lines.append(f"{what} of a kind that the model does not have")
        else:
            layers[at] += cache.layers
            lines += _differences(cache, pages[at])
    for page, seen in zip(pages, layers, strict=True):
        if seen != page.layers:
            what = f"{page.role} (ratio {page.compress_ratio}, block {page.block_size})"
            count = f"{_layers(seen)} seen" if seen else "missing"
            lines.append(f"{what}: {count}, must be {_layers(page.layers)}: {page.arithmetic}")
    return lines


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def _meant(cache: KVCache, pages: Sequence[Page]) -> int | None:
    """Index of the page that `cache` comes nearest to, among those of its role."""

    def distance(at: int) -> tuple[bool, bool, bool]:
        page = pages[at]
        return (
            page.compress_ratio != cache.compress_ratio,
            page.block_size != cache.block_size,
            page.layers != cache.layers,
        )

    of_role = [at for at, page in enumerate(pages) if page.role == cache.role]
    return min(of_role, key=distance, default=None)


def _differences(cache: KVCache, page: Page) -> Iterator[str]:
    """What is wrong with the bytes, the ratio and the tensor of one kind of cache."""
    facts: list[tuple[str, object, object]] = [
        ("ratio", cache.compress_ratio, page.compress_ratio),
        ("block size", cache.block_size, page.block_size),
        ("content bytes", cache.content_bytes, page.content_bytes),
        ("page size bytes", cache.page_size_bytes, page.page_size_bytes),
    ]
    if cache.shape is not None:
        if page.tail is not None:
            facts.append(("last dimension of the tensor", (cache.shape or (None,))[-1], page.tail))
        facts.append(("element type of the tensor", cache.tensor_dtype, page.storage))
    for what, seen, must in facts:
        if seen != must:
            yield (
                f"{cache.role} (ratio {cache.compress_ratio}, block {cache.block_size}, "
                f"{_layers(cache.layers)}): {what} {seen}, must be {must}: {page.arithmetic}"
            )


# DeepSeek-V4

_ELEMENT_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}

_FP8, _BF16, _FP32 = (_ELEMENT_BYTES[name] for name in ("float8_e4m3fn", "bfloat16", "float32"))

_SWA_BLOCK = 64
"""Tokens; the sliding-window cache keeps one state per token."""

_MAIN_BLOCK = 256
"""Tokens, so that a ratio of 4 gives the 64 states of a sliding-window block."""

_VALUES_PER_UE8M0 = 64
_SCALE_FIELD = 8
"""Bytes the scales are padded to: 448 / 64 = 7 UE8M0 bytes and an unused one. Only that geometry
is published; that another one would be padded likewise is an assumption."""

_INDEXER_VALUES_PER_SCALE = 128

_ALIGNMENT = {PACKED: 576, PLAIN_FP8: 512, PLAIN_BF16: 512}
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
class _State:
    """What is stored for one token, or for `compress_ratio` tokens."""

    size: int
    """Bytes."""
    sum: str
    tail: int
    storage: str


def _deepseek_v4(
    config: Mapping[str, Any], layout: str, capability: Capability | None
) -> tuple[Page, ...]:
    if capability is None:
        raise UnknownLayout("the DeepSeek-V4 cache of a CPU is not written down")
    if layout not in _ALIGNMENT:
        raise UnknownLayout(f"DeepSeek-V4 has no layout {layout!r}: {', '.join(_ALIGNMENT)}")
    align = _ALIGNMENT[layout]
    ratios = _ratios(config)
    head, index_head = _count(config, "head_dim"), _count(config, "index_head_dim")
    latent = _latent(head, _count(config, "qk_rope_head_dim"), layout)
    pages = [_page("attn.swa_cache", 1, len(ratios), _SWA_BLOCK, latent, align)]
    for ratio, how in _COMPRESSORS.items():
        layers = ratios.count(ratio)
        state = _compressor_state(head, how)
        pages += [
            _page("attn", ratio, layers, _MAIN_BLOCK, latent, align),
            _page("attn.compressor.state_cache", 1, layers, how.block, state, align),
        ]
        if how.indexer:
            key, state = _indexer_key(index_head), _compressor_state(index_head, how)
            pages += [
                _page("attn.indexer.k_cache", ratio, layers, _MAIN_BLOCK, key, align),
                _page("attn.indexer.compressor.state_cache", 1, layers, how.block, state, align),
            ]
    return tuple(page for page in pages if page.layers)


def _page(role: str, ratio: int, layers: int, block: int, state: _State, align: int) -> Page:
    states = block // ratio
    content = states * state.size
    page = -(-content // align) * align
    padding = f"a multiple of {align}"
    if page != content:
        padding = f"up to {padding} = {page}"
    return Page(
        role=role,
        compress_ratio=ratio,
        layers=layers,
        block_size=block,
        content_bytes=content,
        page_size_bytes=page,
        arithmetic=f"{states} states x {state.size} B ({state.sum}) = {content}, {padding}",
        tail=state.tail,
        storage=state.storage,
    )


def _latent(head: int, rope: int, layout: str) -> _State:
    """The vector that all heads attend to; the packed form keeps the RoPE part in bf16."""
    if layout != PACKED:
        storage = "float8_e4m3fn" if layout == PLAIN_FP8 else "bfloat16"
        each = _ELEMENT_BYTES[storage]
        return _State(head * each, f"{head} x {each}", head, storage)
    nope = head - rope
    if nope <= 0 or nope % _VALUES_PER_UE8M0:
        raise UnknownLayout(
            f"fp8_ds_mla scales {_VALUES_PER_UE8M0} values at a time: head_dim {head} less "
            f"qk_rope_head_dim {rope} does not divide"
        )
    scales = -(-(nope // _VALUES_PER_UE8M0) // _SCALE_FIELD) * _SCALE_FIELD
    size = nope * _FP8 + rope * _BF16 + scales
    how = f"{nope} fp8 + {rope} x {_BF16} RoPE + {scales} UE8M0 scales"
    return _State(size, how, size, "uint8")


def _indexer_key(head: int) -> _State:
    """fp8 with one fp32 scale per 128 values, in every layout of the main cache."""
    if head % _INDEXER_VALUES_PER_SCALE:
        raise UnknownLayout(
            f"the indexer's key scales {_INDEXER_VALUES_PER_SCALE} values at a time: "
            f"index_head_dim {head} does not divide"
        )
    scales = head // _INDEXER_VALUES_PER_SCALE
    size = head * _FP8 + scales * _FP32
    return _State(size, f"{head} fp8 + {scales} x {_FP32} scale", size, "uint8")


def _compressor_state(head: int, how: _Compressor) -> _State:
    """kv and score of one token that waits for its window to fill, in fp32 in every layout."""
    values = _KV_AND_SCORE * how.vectors * head
    text = f"kv and score: {_KV_AND_SCORE} x {how.vectors} x {head} x {_FP32}"
    return _State(values * _FP32, text, values, "float32")


def _ratios(config: Mapping[str, Any]) -> list[int]:
    """Compress ratio of each layer; what follows the last one in the config is the MTP layers'."""
    depth, ratios = _count(config, "num_hidden_layers"), config.get("compress_ratios")
    if not isinstance(ratios, Sequence) or len(ratios) < depth:
        raise UsageError(f"config.json: compress_ratios must be a list of at least {depth} ratios")
    known = (0, *_COMPRESSORS)
    for layer, ratio in enumerate(ratios[:depth]):
        if ratio not in known:
            raise UnknownLayout(f"compress ratio {ratio!r} of layer {layer}: known are {known}")
    return list(ratios[:depth])


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        close = [] if key in config else near(key, config)
        hint = f" (near: {', '.join(close)})" if close else ""
        raise UsageError(f"config.json: {key} must be a positive integer, not {value!r}{hint}")
    return value


Family = Callable[[Mapping[str, Any], str, Capability | None], tuple[Page, ...]]

_FAMILIES: dict[str, Family] = {"deepseek_v4": _deepseek_v4}


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(_FAMILIES)
        raise UnknownLayout(f"model_type {model_type!r} is not written down: known are {known}")
    return family
