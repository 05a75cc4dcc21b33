"""The layout oracle: bytes per page from a model's published geometry and the formats' definitions.

The second opinion on every `ok` cell. Nothing here asks vLLM: the numbers are those that the
formats define, written as arithmetic in `harness.layouts`. Pure.

A family of models is a module there, and a line for each model_type in `_FAMILIES`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.layouts import (
    deepseek_v4,
    deepseek_v41,
    encoder,
    full_attention,
    mla,
    state_space,
    windowed,
)
from harness.layouts.page import (
    ELEMENT_BYTES,
    Blocks,
    Capability,
    Config,
    Family,
    NoLayout,
    Page,
    UnknownLayout,
)
from harness.record import KVCache, Resolved

__all__ = [
    "Match",
    "NoLayout",
    "Page",
    "UnknownLayout",
    "compare",
    "expected_pages",
    "layout_of",
    "matches",
]

_FAMILIES: dict[str, Family] = {
    "bert": encoder.ENCODER_ONLY,
    "deepseek_v3": mla.DENSE,
    "deepseek_v32": mla.SPARSE,
    "deepseek_v4": deepseek_v4.FAMILY,
    "deepseek_v41": deepseek_v41.FAMILY,
    "falcon_h1": state_space.FAMILY,
    "gemma3_text": windowed.FAMILY,
    "glm_moe_dsa": mla.SPARSE,
    "gpt_oss": windowed.FAMILY,
    "jamba": state_space.FAMILY,
    "kimi_k2": mla.DENSE,
    "kimi_linear": state_space.FAMILY,
    "llama": full_attention.FAMILY,
    "llama4_text": windowed.FAMILY,
    "mamba2": state_space.FAMILY,
    "minimax_m2": full_attention.FAMILY,
    "mistral": windowed.FAMILY,
    "nemotron_h": state_space.FAMILY,
    "qwen2": full_attention.FAMILY,
    "qwen3": full_attention.FAMILY,
    "qwen3_moe": full_attention.FAMILY,
    "qwen3_next": state_space.FAMILY,
    "whisper": encoder.ENCODER_DECODER,
}
"""model_type -> family."""

DEFAULT_BLOCK_SIZE = 16
"""Tokens; what vLLM's documentation gives for `--block-size`. Only where none was seen."""


_FORMER_KINDS = {"TQFullAttentionSpec": "FullAttentionSpec"}
"""Kinds that were others' subclasses once: TurboQuant's in vLLM 0.27.1, gone in 0.33.0."""


def layout_of(
    config: Config,
    kv_cache_dtype: str | None,
    storage_dtype: str | None,
    capability: Capability | None,
) -> str:
    """The family's name for what a resolved dtype and an element type store, such as `packed`.

    NoLayout where the two disagree; UnknownLayout where the format is not written down.
    """
    return _family(config).layout_of(config, kv_cache_dtype, storage_dtype, capability)


def expected_pages(
    config: Config,
    layout: str,
    capability: Capability | None,
    blocks: Blocks | int = DEFAULT_BLOCK_SIZE,
) -> tuple[Page, ...]:
    """Every kind of KV cache that a config.json must give, the MTP layers left out.

    `blocks`, or their size in tokens, are for models that leave them to vLLM or its caller; others
    have their own.
    UnknownLayout where the format is not written down here; UsageError where the config lacks a
    number. Whether a device may have this layout at all is for the backends to declare: the
    capability only tells formats apart that differ in bytes.
    """
    blocks = Blocks(blocks) if isinstance(blocks, int) else blocks
    return _family(config).pages(config, layout, capability, blocks)


def compare(
    config: Config,
    kv: Sequence[KVCache],
    resolved: Resolved,
    capability: Capability | None,
    asked: int = 0,
    longest: int = 0,
    *,
    checkpoints: bool = True,
) -> list[str]:
    """One line per disagreement between what was seen and what must be; [] means confirmed.

    `asked` is the block size that the caller passed, in tokens; 0 where none was. `longest` is the
    longest sequence, in tokens; 0 where it was not seen. `checkpoints` as in `Blocks`.

    Tensors are looked at only where they were seen (`KVCache.shape`). Raises as `expected_pages`;
    a resolved dtype that is no layout is a disagreement.
    """
    try:
        found = matches(config, kv, resolved, capability, asked, longest, checkpoints=checkpoints)
    except NoLayout as error:
        return [str(error)]
    return [line for match in found for line in match.lines]


@dataclass(frozen=True)
class Match:
    """A KV cache that was seen, and the page that it must have."""

    cache: KVCache | None
    """None for layers of the page that are missing, or too many."""
    page: Page | None
    """None where the model must not have such a cache."""
    differences: tuple[str, ...] = ()
    """What disagrees, such as `block size 64, must be 256`."""

    @property
    def lines(self) -> list[str]:
        """The disagreements, each with what it is about and how the page comes about."""
        cache, page = self.cache, self.page
        if cache is not None and page is not None:
            about = f"{cache.role} (ratio {cache.compress_ratio}, block {cache.block_size}, "
            about += f"{_layers(cache.layers)}): "
        elif cache is not None:
            about = f"{cache.role} (ratio {cache.compress_ratio}): {_layers(cache.layers)} "
        else:
            assert page is not None
            about = f"{page.role} (ratio {page.compress_ratio}, block {page.block_size}): "
        why = "" if page is None else f": {page.arithmetic}"
        return [f"{about}{text}{why}" for text in self.differences]


def matches(
    config: Config,
    kv: Sequence[KVCache],
    resolved: Resolved,
    capability: Capability | None,
    asked: int = 0,
    longest: int = 0,
    *,
    checkpoints: bool = True,
) -> tuple[Match, ...]:
    """Each cache that was seen with its page, then each page whose layers do not add up.

    `asked`, `longest` and `checkpoints` as in `compare`. Raises as `expected_pages`, and NoLayout
    for a resolved dtype that is no layout.
    """
    layout = layout_of(config, resolved.kv_cache_dtype, resolved.storage_dtype, capability)
    backends = tuple(resolved.selected.split("+")) if resolved.selected else ()
    blocks = Blocks(_block_size(kv), asked, backends, _sequence(kv, longest), checkpoints)
    pages = expected_pages(config, layout, capability, blocks)
    found: list[Match] = []
    layers = [0] * len(pages)
    for cache in kv:
        at = _meant(cache, pages)
        if at is None:
            found.append(Match(cache, None, ("of a kind that the model does not have",)))
        else:
            layers[at] += cache.layers
            found.append(Match(cache, pages[at], tuple(_differences(cache, pages[at]))))
    for page, seen in zip(pages, layers, strict=True):
        if seen != page.layers:
            count = f"{_layers(seen)} seen" if seen else "missing"
            must = _layers(page.layers) + (f" of {page.kind}" if page.kind else "")
            found.append(Match(None, page, (f"{count}, must be {must}",)))
    return tuple(found)


def _block_size(kv: Sequence[KVCache]) -> int:
    """The block size of most layers, so that the others stand out."""
    layers: Counter[int] = Counter()
    for cache in kv:
        layers[cache.block_size] += cache.layers
    return layers.most_common(1)[0][0] if layers else DEFAULT_BLOCK_SIZE


def _sequence(kv: Sequence[KVCache], longest: int) -> int:
    """`Blocks.sequence`: the longest sequence, else the block that the states have."""
    whole = [cache.block_size for cache in kv if cache.state_mode == "none"]
    return (longest or max(whole)) if whole else 0


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def _meant(cache: KVCache, pages: Sequence[Page]) -> int | None:
    """Index of the page that `cache` comes nearest to, among those of its role."""

    def distance(at: int) -> tuple[bool, ...]:
        page = pages[at]
        return (
            page.kind not in (None, _kind(cache)),
            page.compress_ratio != cache.compress_ratio,
            page.block_size != cache.block_size,
            cache.dtype not in (page.storage, *page.also),
            page.layers != cache.layers,
        )

    of_role = [at for at, page in enumerate(pages) if page.role == cache.role]
    return min(of_role, key=distance, default=None)


def _kind(cache: KVCache) -> str:
    return _FORMER_KINDS.get(cache.kind, cache.kind)


def _differences(cache: KVCache, page: Page) -> Iterator[str]:
    """What is wrong with the bytes, the tokens and the tensor of one kind of cache."""
    facts: list[tuple[str, object, object]] = [
        ("kind", _kind(cache), page.kind or _kind(cache)),
        ("ratio", cache.compress_ratio, page.compress_ratio),
        ("block size", cache.block_size, page.block_size),
        ("content bytes", cache.content_bytes, page.content_bytes),
        ("page size bytes", cache.page_size_bytes, page.page_size_bytes),
        ("window", _window(cache.window), _window(page.window)),
    ]
    if cache.shape is not None:
        tail = (cache.shape or (None,))[-1]
        if page.tail is not None and not (page.with_padding and tail == page.page_size_bytes):
            facts.append(("last dimension of the tensor", tail, page.tail))
        if cache.tensor_dtype not in page.also:
            facts.append(("element type of the tensor", cache.tensor_dtype, page.storage))
        if (seen := _block_bytes(cache)) not in (sizes := _block_sizes(page)):
            facts.append(("bytes of a block of the tensor", seen, " or ".join(map(str, sizes))))
    for what, is_, must in facts:
        if is_ != must:
            yield f"{what} {is_}, must be {must}"


def _window(tokens: int | None) -> str:
    return "of all tokens" if tokens is None else f"of {tokens} tokens"


def _block_sizes(page: Page) -> list[int]:
    """Bytes that one block of the tensor may have."""
    handed = page.kernel_blocks or (page.block_size,)
    sizes = [page.content_bytes * tokens // page.block_size for tokens in handed]
    return sizes + ([page.page_size_bytes] if page.with_padding else [])


def _block_bytes(cache: KVCache) -> int | None:
    """Bytes that the tensor has for a block, whatever the order of its dimensions; None where it
    does not say which of them counts blocks, or its element type has no size here."""
    shape, element = cache.shape or (), ELEMENT_BYTES.get(cache.tensor_dtype or "")
    if shape.count(-1) != 1 or element is None:
        return None
    return -math.prod(shape) * element


def _family(config: Config) -> Family:
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(_FAMILIES)
        raise UnknownLayout(f"model_type {model_type!r} is not written down: known are {known}")
    return family
