"""Attention in a window: some layers, or all, keep only the last tokens, or those of their chunk.

A window decides how many blocks a sequence needs, never what a block costs: the bytes are those of
`harness.layouts.full_attention`. Which layers have one is the config's word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.errors import UsageError
from harness.layouts.full_attention import ROLE, format_of, of_blocks
from harness.layouts.page import Blocks, Capability, Config, Family, Page, UnknownLayout, count

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Layer types, as `layer_types` has them."""


@dataclass(frozen=True)
class _Window:
    """How a layer type forgets."""

    size: str
    """The config's key for its tokens; null there means that nothing is forgotten."""
    kind: str
    """vLLM's name for a cache that can free what is forgotten."""
    kept: str


_WINDOWS = {
    SLIDING: _Window("sliding_window", "SlidingWindowSpec", "the last {} tokens"),
    CHUNKED: _Window("attention_chunk_size", "ChunkedLocalAttentionSpec", "a chunk of {} tokens"),
}


def _alternating(_config: Config, layers: int) -> list[str]:
    """gpt-oss: banded and dense in turns, as its model card has it, the banded first."""
    return [(SLIDING, FULL)[at % 2] for at in range(layers)]


_GEMMA_PERIOD = 6
"""Gemma 3's report: five local layers for every global one, the local first."""


def _interleaved(config: Config, layers: int) -> list[str]:
    key = "sliding_window_pattern"
    period = count(config, key) if config.get(key) is not None else _GEMMA_PERIOD
    return [SLIDING if (at + 1) % period else FULL for at in range(layers)]


def _by_rope(config: Config, layers: int) -> list[str]:
    """Llama 4: layers with RoPE look at their chunk, those without at everything."""
    rope = config.get("no_rope_layers")
    if not isinstance(rope, list) or len(rope) < layers:
        raise UsageError(
            f"config.json: no_rope_layers must have an entry for each of {layers} layers, "
            f"not {rope!r}"
        )
    return [CHUNKED if with_rope else FULL for with_rope in rope[:layers]]


def _everywhere(_config: Config, layers: int) -> list[str]:
    return [SLIDING] * layers


_PATTERNS: dict[str, Callable[[Config, int], list[str]]] = {
    "gemma3_text": _interleaved,
    "gpt_oss": _alternating,
    "llama4_text": _by_rope,
    "mistral": _everywhere,
}
"""model_type -> (config, layers) -> each layer's type, for a config without `layer_types`."""

_ROLES = {"gpt_oss": "attn.attn"}
"""Where layers are not called as in `harness.layouts.full_attention`."""

_OWN_DTYPE = {"gpt_oss": "bfloat16"}
"""What models run in whose config.json does not say it: all of gpt-oss but its experts' weights is
published in bfloat16."""


def _layout_of(
    config: Config,
    kv_cache_dtype: str | None,
    storage_dtype: str | None,
    capability: Capability | None,
) -> str:
    own = _OWN_DTYPE.get(str(config.get("model_type")))
    if own and config.get("torch_dtype") is None and config.get("dtype") is None:
        config = {**config, "dtype": own}
    return format_of(config, kv_cache_dtype, storage_dtype, capability)


def _pages(
    config: Config, layout: str, capability: Capability | None, blocks: Blocks
) -> tuple[Page, ...]:
    types = _types(config)
    role = _ROLES.get(config["model_type"], ROLE)
    pages = []
    for kind in dict.fromkeys(types):
        page = of_blocks(config, layout, capability, blocks, types.count(kind))
        window = _WINDOWS.get(kind)
        if window is not None:
            tokens = count(config, window.size)
            text = f"{page.arithmetic}, for {window.kept.format(tokens)}"
            page = replace(page, kind=window.kind, window=tokens, arithmetic=text)
        pages.append(replace(page, role=role))
    return tuple(pages)


def _types(config: Config) -> list[str]:
    """The type of each layer, those of MTP layers left out."""
    layers = count(config, "num_hidden_layers")
    written = config.get("layer_types")
    if written is None:
        types = _PATTERNS[config["model_type"]](config, layers)
    elif isinstance(written, list) and len(written) >= layers:
        types = [str(kind) for kind in written[:layers]]
    else:
        raise UsageError(
            f"config.json: layer_types must have an entry for each of {layers} layers, "
            f"not {written!r}"
        )
    other = set(types) - {FULL, *_WINDOWS}
    if other:
        raise UnknownLayout(f"layers of type {', '.join(sorted(other))} are not written down")
    return [FULL if _forgets_nothing(config, kind) else kind for kind in types]


def _forgets_nothing(config: Config, kind: str) -> bool:
    window = _WINDOWS.get(kind)
    return window is None or config.get(window.size) is None


FAMILY = Family(_layout_of, _pages)
