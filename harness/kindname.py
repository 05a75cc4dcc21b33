"""What people call the KV caches of a model, from the oracle's pages alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from harness.errors import UsageError
from harness.layout import NoLayout, Page, UnknownLayout, expected_pages, layout_of
from harness.layouts.page import Config

_BY_KIND = {
    "SlidingWindowSpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked attention",
    "MLAAttentionSpec": "MLA latent vector",
    "FullAttentionSpec": "full attention",
    "CrossAttentionSpec": "cross attention",
}

_RESOLVED = (
    ("fp8_ds_mla", "uint8"),
    *((name, name) for name in ("bfloat16", "float16")),
    (None, None),
)
"""(resolved kv_cache_dtype, element type) to try: kinds do not depend on them, but each family
knows only some."""


def kind_names(config: Config) -> tuple[str, ...] | None:
    """The kinds of KV cache that a model has, such as `sliding window`, each once and the one
    with most layers first; None where the oracle does not know the model."""
    found = _pages(config)
    if found is None:
        return None
    pages = sorted(found, key=lambda page: -page.layers)
    names = [_name(page) for page in pages]
    ratios = sorted({page.compress_ratio for page in pages if _name(page) == _COMPRESSED})
    shown = {_COMPRESSED: f"{_COMPRESSED} {' and '.join(map(str, ratios))}"}
    return tuple(shown.get(name, name) for name in dict.fromkeys(names))


_COMPRESSED = "compressed"


def _pages(config: Config) -> Iterable[Page] | None:
    for name, storage in _RESOLVED:
        try:
            return expected_pages(config, layout_of(config, name, storage, _HOPPER), _HOPPER)
        except (UnknownLayout, NoLayout, UsageError):
            continue
    return None


_HOPPER = (9, 0)


def _name(page: Page) -> str:
    if page.role.endswith("state_cache"):
        return "compressor state"
    if page.role.endswith("k_cache"):
        return "indexer keys"
    if page.role.endswith("swa_cache"):
        return "sliding window"
    if page.compress_ratio > 1:
        return _COMPRESSED
    if page.kind == "MambaSpec":
        return "Mamba state" if page.role.endswith("mixer") else "linear-attention state"
    return _BY_KIND.get(page.kind or "", page.role)
