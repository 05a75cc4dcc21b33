"""What a family of layouts is made of: pages, why there may be none, the numbers of a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError, near

Capability = tuple[int, int]

Config = Mapping[str, Any]
"""A model's config.json."""

ELEMENT_BYTES = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}
"""Bytes of torch's element types, by name without `torch.`."""


class UnknownLayout(LookupError):  # noqa: N818 - it says what, not that it is an error
    """The oracle has no opinion: a model_type, ratio or dtype whose format is not written down."""


class NoLayout(ValueError):  # noqa: N818 - as above
    """What was resolved cannot be: a name that does not say what is stored. A disagreement."""


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
    also: tuple[str, ...] = ()
    """Other element types that hold the same bytes."""
    kernel_blocks: tuple[int, ...] = ()
    """Tokens of a block of the tensor, any of these: a kernel may be handed a large block in parts.
    () where blocks must be whole."""
    kind: str | None = None
    """What keeps it, as `KVCache.kind`: a window that is kept in full costs more blocks, not bigger
    ones. None where any kind will do."""
    with_padding: bool = False
    """True where the tensor may hold the padding behind the content, too."""
    window: int | None = None
    """Tokens of a sequence that are kept, as in `KVCache.window`; None where all are, or where a
    state or a ring has a size of its own."""


@dataclass(frozen=True)
class Blocks:
    """What decides how long blocks are, where the model leaves that to vLLM or its caller."""

    size: int
    """Tokens that a block has."""
    asked: int = 0
    """Tokens that the caller asked for, of which a hybrid's block becomes a multiple; 0: none."""
    backends: tuple[str, ...] = ()
    """`get_name()` of the main attention layers' backends; () where it was not seen."""
    sequence: int = 0
    """Tokens of the longest sequence, where recurrent states are kept for a whole sequence each; 0
    where they are kept for blocks."""
    checkpoints: bool = True
    """False for an engine that takes a state from wherever a block ends: vLLM before 0.33, the
    first that has them where its kernels' chunks end."""


@dataclass(frozen=True)
class Family:
    """Models whose KV caches follow one set of definitions."""

    layout_of: Callable[[Config, str | None, str | None, Capability | None], str]
    """(config, resolved kv_cache_dtype, element type, capability) -> name of a layout. NoLayout
    where the two disagree, UnknownLayout where the format is not written down."""
    pages: Callable[[Config, str, Capability | None, Blocks], tuple[Page, ...]]
    """(config, layout, capability, blocks) -> every kind of KV cache. UnknownLayout as above;
    UsageError where the config lacks a number."""


def no_layout(kv_cache_dtype: str | None, storage_dtype: str | None, why: str) -> NoLayout:
    """A NoLayout that names what disagrees, and why."""
    return NoLayout(
        f"kv_cache_dtype {kv_cache_dtype} stored as {storage_dtype} is no layout: {why}"
    )


def count(config: Config, key: str) -> int:
    """A positive number of the config. UsageError where there is none, with what is near."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        close = [] if key in config else near(key, config)
        hint = f" (near: {', '.join(close)})" if close else ""
        raise UsageError(f"config.json: {key} must be a positive integer, not {value!r}{hint}")
    return value
