"""The DeepSeek-V4.1 family: a window in every layer, and a few layers that keep for all others.

Every layer has the sliding window of DeepSeek-V4. The compressed states, and the indexer's keys
beside them, are kept by the layers of `kv_source_layer_ids` alone, each at its own compress ratio;
the layers behind read those of the last source before them, and the other indexers of
`index_source_layer_ids` select by its keys. A ratio of 2 pools two tokens and needs the ring of a
compressor; a ratio of 1 pools nothing. Engram layers look n-grams up in weights: no cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.errors import UsageError
from harness.layouts import deepseek_v4
from harness.layouts.deepseek_v4 import (
    ALIGNMENT,
    PACKED,
    PLAIN_BF16,
    PLAIN_FP8,
    State,
    compressor_state,
    indexer_key,
    latent_state,
    page_of,
)
from harness.layouts.page import (
    Blocks,
    Capability,
    Config,
    Family,
    Page,
    UnknownLayout,
    count,
    no_layout,
)

MXFP8, NVFP4 = "packed_mxfp8", "packed_nvfp4"
"""FlashMLA's records of this family for SM10x, ModelType V41 and V41_FP4. The second is for the
compressed states alone: the window beside it keeps the first."""

_RECORD_MAJOR = 10
"""The compute capability that FlashMLA reads those records on; elsewhere it is DeepSeek-V4's."""

_MXFP8_PER_SCALE, _NVFP4_PER_SCALE, _NVFP4_PER_BYTE = 32, 16, 2
"""Values that share a scale of one byte, UE8M0 or fp8, and e2m1 values to a byte."""

_ALIGNMENT = {**ALIGNMENT, MXFP8: 512, NVFP4: 512}

_SWA_BLOCK = 32
"""Tokens of a block of the window's cache."""

_RING_BLOCK = 8
"""Tokens in the ring of a compressor: those of a decoding step without drafts and the one before
are 2, and a ring is never smaller than 8. It lies in no page of another's, and is not aligned."""

_RATIOS = (1, 2)
_VECTORS = 1
"""Head vectors a token contributes to its window: windows do not overlap."""

SWA_KIND, MAIN_KIND, RING_KIND = "SlidingWindowMLASpec", "MLAAttentionSpec", "CircularBufferSpec"
"""vLLM's names for what keeps them."""


def _layout_of(
    config: Config,
    kv_cache_dtype: str | None,
    storage_dtype: str | None,
    capability: Capability | None,
) -> str:
    if (kv_cache_dtype, storage_dtype) == ("nvfp4_ds_mla", "uint8"):
        if not _own_records(capability):
            why = f"its states are read on SM{_RECORD_MAJOR}x only"
            raise no_layout(kv_cache_dtype, storage_dtype, why)
        return NVFP4
    layout = deepseek_v4.layout_of(config, kv_cache_dtype, storage_dtype, capability)
    return MXFP8 if layout == PACKED and _own_records(capability) else layout


def _own_records(capability: Capability | None) -> bool:
    return capability is not None and capability[0] == _RECORD_MAJOR


def _pages(
    config: Config, layout: str, capability: Capability | None, blocks: Blocks
) -> tuple[Page, ...]:
    if layout not in _ALIGNMENT:
        raise UnknownLayout(f"DeepSeek-V4.1 has no layout {layout!r}: {', '.join(_ALIGNMENT)}")
    if capability is None:
        raise UnknownLayout("DeepSeek-V4.1 on a CPU is not written down")
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UsageError(f"config.json: text_config must be an object, not {text!r}")
    align, block = _ALIGNMENT[layout], _main_block(capability, blocks)
    head, rope = count(text, "head_dim"), count(text, "qk_rope_head_dim")
    key, ring = indexer_key(count(text, "index_head_dim")), compressor_state(head, _VECTORS)
    window, latent = _window(head, rope, layout), _latent(head, rope, layout)
    layers = count(text, "num_hidden_layers")
    last = count(text, "sliding_window")
    swa = page_of("attn.swa_cache", 1, layers, _SWA_BLOCK, window, align, last)
    pages = [_kept(SWA_KIND, swa)]
    sources = _source_ratios(text, layers)
    for ratio in sorted(set(sources)):
        of = sources.count(ratio)
        pages += [
            _kept(MAIN_KIND, page_of("attn", ratio, of, block, latent, align)),
            _kept(MAIN_KIND, page_of("attn.indexer.k_cache", ratio, of, block, key, align)),
        ]
    if pooled := sum(ratio > 1 for ratio in sources):
        state = page_of("attn.compressor.state_cache", 1, pooled, _RING_BLOCK, ring, 1)
        pages.append(_kept(RING_KIND, state))
    return tuple(pages)


def _kept(kind: str, page: Page) -> Page:
    return replace(page, kind=kind)


def _main_block(capability: Capability, blocks: Blocks) -> int:
    """Tokens: what DeepGEMM's logits take of keys and FlashMLA of states, 64 on SM90 and 128
    elsewhere; FlashInfer's sparse kernels take 128. A larger one may be asked for."""
    kernels = [64 if capability[0] == 9 else 128]
    kernels += [128 for backend in blocks.backends if backend.startswith("FLASHINFER")]
    least = math.lcm(*kernels)
    return blocks.asked if blocks.asked and blocks.asked % least == 0 else least


def _window(head: int, rope: int, layout: str) -> State:
    return _latent(head, rope, MXFP8 if layout == NVFP4 else layout)


def _latent(head: int, rope: int, layout: str) -> State:
    """The vector that all heads attend to; the records of SM10x quantise the RoPE part as well."""
    if layout in (PACKED, PLAIN_FP8, PLAIN_BF16):
        return latent_state(head, rope, layout)
    each = _MXFP8_PER_SCALE if layout == MXFP8 else _NVFP4_PER_SCALE
    if head % each:
        raise UnknownLayout(f"{layout} scales {each} values at a time: head_dim {head}")
    scales = head // each
    data, text = head, f"{head} fp8 + {scales} UE8M0 scales"
    if layout == NVFP4:
        data = head // _NVFP4_PER_BYTE
        text = f"{head} / {_NVFP4_PER_BYTE} e2m1 + {scales} fp8 scales"
    return State(data + scales, text, data + scales, "uint8")


def _source_ratios(text: Config, layers: int) -> list[int]:
    """The compress ratio of each layer that keeps compressed states; those of drafts left out."""
    ratios, sources = text.get("compress_ratios"), text.get("kv_source_layer_ids")
    if not isinstance(ratios, Sequence) or len(ratios) < layers:
        raise UsageError(f"config.json: compress_ratios must be a list of at least {layers} ratios")
    if not isinstance(sources, Sequence) or not all(isinstance(at, int) for at in sources):
        raise UsageError("config.json: kv_source_layer_ids must be a list of layers")
    found = [ratios[at] for at in sorted({at for at in sources if 0 <= at < layers})]
    for ratio in found:
        if ratio not in _RATIOS:
            raise UnknownLayout(f"compress ratio {ratio!r} of a source: known are {_RATIOS}")
    return found


FAMILY = Family(_layout_of, _pages)
