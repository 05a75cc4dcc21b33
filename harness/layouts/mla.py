"""Multi-head latent attention: one vector a token for all heads, and the sparse form's index keys.

DeepSeek-V3 and Kimi-K2 attend to every token; DeepSeek-V3.2, GLM-5 and GLM-5.2 (DeepSeek sparse
attention, DSA) select tokens first by keys of their own. The block size is vLLM's choice, or the
caller's; what a token costs is the format's definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from harness.errors import UsageError
from harness.layouts.formats import ALIKE, FORMATS
from harness.layouts.full_attention import format_of
from harness.layouts.kernels import Kernel, handed, kernels_of
from harness.layouts.page import (
    ELEMENT_BYTES,
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

ROLE, KEY_ROLE = "self_attn.attn", "self_attn.indexer.k_cache"

KIND = "MLAAttentionSpec"
"""vLLM's name for a cache that keeps one vector of every token."""

_FP8, _BF16, _FP32 = (ELEMENT_BYTES[name] for name in ("float8_e4m3fn", "bfloat16", "float32"))

_LATENT_PER_SCALE = 128
"""Latent values that share an fp32 scale in fp8_ds_mla: 512 / 128 = 4 of them (FlashMLA)."""

_FP4_PER_BYTE, _FP4_PER_SCALE = 2, 16
"""NVFP4: e2m1 values, and the fp8 scale that 16 of them share."""

_INDEX_PER_SCALE = 128
"""Values of the indexer's key that share an fp32 scale (DeepGEMM's fp8 logits)."""

_BF16_SINCE = (8, 0)
"""The first compute capability with bfloat16 arithmetic: float16 is as wide."""

_INDEX_KERNEL = Kernel((64,))
"""DeepGEMM's logits: a larger block is handed to them in parts."""

_NVFP4_MAJOR = 10
"""The compute capability that FlashMLA defines nvfp4_ds_mla for (its pull request 18). A name alone
is not enough elsewhere: kernels for SM120 keep RoPE in bf16 under the same name."""


@dataclass(frozen=True)
class _Vector:
    """What is stored of one token."""

    size: int
    """Bytes."""
    sum: str
    """`size` as people write it."""
    elements: tuple[str, ...]
    """torch's element types that can hold it."""

    @property
    def tail(self) -> int:
        """Elements."""
        return self.size // ELEMENT_BYTES[self.elements[0]]


_PACKED = ("uint8",)


def _fp8_ds_mla(rank: int, rope: int) -> _Vector:
    """FlashMLA's record of V3.2: the latent in fp8, its scales, and RoPE as it was."""
    scales = _whole(rank, _LATENT_PER_SCALE, "fp8_ds_mla: kv_lora_rank")
    size = rank * _FP8 + scales * _FP32 + rope * _BF16
    text = f"{rank} fp8 + {scales} x {_FP32} scales + {rope} x {_BF16} RoPE"
    return _Vector(size, text, _PACKED)


def _nvfp4_ds_mla(rank: int, rope: int) -> _Vector:
    """FlashMLA's record for SM10x: the latent in NVFP4 with its scales, RoPE in fp8 without."""
    scales = _whole(rank, _FP4_PER_SCALE, "nvfp4_ds_mla: kv_lora_rank")
    data = _whole(rank, _FP4_PER_BYTE, "nvfp4_ds_mla: kv_lora_rank")
    size = data + rope * _FP8 + scales * _FP8
    text = f"{rank} / {_FP4_PER_BYTE} e2m1 + {rope} fp8 RoPE + {scales} fp8 scales"
    return _Vector(size, text, _PACKED)


_RECORDS: Mapping[str, Callable[[int, int], _Vector]] = MappingProxyType(
    {"fp8_ds_mla": _fp8_ds_mla, "nvfp4_ds_mla": _nvfp4_ds_mla}
)
"""Layouts that pack a token's parts, each stored in its own way, into bytes."""

_PLAIN = ("bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_inc", "fp8_e5m2")
"""Layouts that store latent and RoPE alike. Scales, if any, are the layer's: those kept a token and
head (`fp8_per_token_head`) are defined for keys and values only."""


def _plain(layout: str, rank: int, rope: int) -> _Vector:
    stored = ALIKE[layout]
    size = stored.size(rank + rope)
    return _Vector(size, f"({rank} latent + {rope} RoPE) x {stored.bits} bit", stored.elements)


def _whole(values: int, each: int, what: str) -> int:
    if values % each:
        raise UnknownLayout(f"{what} {values} does not divide by {each}")
    return values // each


def _vector(config: Config, layout: str) -> _Vector:
    rank, rope = count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim")
    record = _RECORDS.get(layout)
    return record(rank, rope) if record else _plain(layout, rank, rope)


def _index_key(config: Config) -> _Vector:
    """fp8 with fp32 scales, whatever the latent's layout is."""
    head = count(config, "index_head_dim")
    scales = _whole(head, _INDEX_PER_SCALE, "the indexer's key: index_head_dim")
    size = head * _FP8 + scales * _FP32
    return _Vector(size, f"{head} fp8 + {scales} x {_FP32} scale", _PACKED)


def _layout_of(
    config: Config,
    kv_cache_dtype: str | None,
    storage_dtype: str | None,
    capability: Capability | None,
) -> str:
    name = kv_cache_dtype or ""
    if name in _RECORDS:
        _defined(name, capability)
        if storage_dtype not in (None, *_PACKED):
            raise no_layout(name, storage_dtype, f"{name} is stored as {' or '.join(_PACKED)}")
        return name
    if name in FORMATS and name not in _PLAIN:
        raise UnknownLayout(f"the format {name} is not written down for MLA's latent vector")
    if storage_dtype is None:
        # The layer does not say; the tensor's own element type is looked at all the same.
        storage_dtype = ALIKE[name].elements[0] if name in ALIKE else _own(config, capability)
    return format_of(config, name, storage_dtype, capability)


def _own(config: Config, capability: Capability | None) -> str | None:
    """The dtype that the model runs in; `format_of` has no opinion where that is neither."""
    before = capability is not None and capability < _BF16_SINCE
    own = config.get("torch_dtype") or config.get("dtype")
    return "float16" if own == "bfloat16" and before else own


def _defined(layout: str, capability: Capability | None) -> None:
    if layout == "nvfp4_ds_mla" and (capability is None or capability[0] != _NVFP4_MAJOR):
        raise UnknownLayout(f"nvfp4_ds_mla is written down for SM{_NVFP4_MAJOR}x only")


def _latent(config: Config, layout: str, capability: Capability | None, blocks: Blocks) -> Page:
    if layout not in (*_PLAIN, *_RECORDS):
        raise UnknownLayout(f"MLA has no layout {layout!r}: {', '.join((*_PLAIN, *_RECORDS))}")
    _defined(layout, capability)
    layers = count(config, "num_hidden_layers")
    kernels = kernels_of(config, capability, blocks.backends)
    return _page(ROLE, layers, blocks.size, _vector(config, layout), kernels)


def _page(
    role: str, layers: int, block_size: int, vector: _Vector, kernels: Sequence[Kernel]
) -> Page:
    if block_size < 1:
        raise NoLayout(f"a block of {block_size} tokens holds nothing")
    page = block_size * vector.size
    return Page(
        role=role,
        compress_ratio=1,
        layers=layers,
        block_size=block_size,
        content_bytes=page,
        page_size_bytes=page,
        arithmetic=f"{block_size} tokens x {vector.size} B ({vector.sum}) = {page}",
        tail=vector.tail,
        storage=vector.elements[0],
        also=vector.elements[1:],
        kernel_blocks=handed(kernels, block_size),
        kind=KIND,
    )


def _dense(
    config: Config, layout: str, capability: Capability | None, blocks: Blocks
) -> tuple[Page, ...]:
    return (_latent(config, layout, capability, blocks),)


def _sparse(
    config: Config, layout: str, capability: Capability | None, blocks: Blocks
) -> tuple[Page, ...]:
    latent = _latent(config, layout, capability, blocks)
    layers = _indexers(config)
    if not layers:
        return (latent,)
    kernels = [_INDEX_KERNEL] if blocks.size % _INDEX_KERNEL.least == 0 else []
    key = _page(KEY_ROLE, layers, blocks.size, _index_key(config), kernels)
    # Both lie in one pool, so that the latent vectors are handed out as the keys must be.
    return replace(latent, kernel_blocks=key.kernel_blocks), key


# ---- Which layers have an indexer: the others use the selection of the one before ---------------

_OWN, _SHARED = "full", "shared"
_LETTERS = {"F": _OWN, "S": _SHARED}
"""In `index_topk_pattern`."""


def _indexers(config: Config) -> int:
    layers = count(config, "num_hidden_layers")
    types = config.get("indexer_types")
    pattern = config.get("index_topk_pattern")
    if types is not None:
        kinds = _first(types, layers, "indexer_types")
    elif pattern is not None:
        kinds = [_LETTERS.get(kind, kind) for kind in _first(pattern, layers, "index_topk_pattern")]
    elif config.get("index_topk_freq") is None:
        return layers
    else:
        # GLM-5.2: the first three, then the last of every four.
        every, first = count(config, "index_topk_freq"), count(config, "index_skip_topk_offset")
        return sum(at < first or (at - first + 1) % every == 0 for at in range(layers))
    other = set(kinds) - {_OWN, _SHARED}
    if other:
        raise UnknownLayout(f"indexers of type {', '.join(sorted(other))} are not written down")
    return kinds.count(_OWN)


def _first(kinds: object, layers: int, key: str) -> list[str]:
    if not isinstance(kinds, list | str) or len(kinds) < layers:
        raise UsageError(
            f"config.json: {key} must have an entry for each of {layers} layers, not {kinds!r}"
        )
    return [str(kind) for kind in kinds[:layers]]


DENSE = Family(_layout_of, _dense)
"""DeepSeek-V3, Kimi-K2."""

SPARSE = Family(_layout_of, _sparse)
"""DeepSeek-V3.2, GLM-5, GLM-5.2."""
