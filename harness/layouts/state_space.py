"""State-space and linear-attention models: a state of fixed size a sequence, and what keeps pace.

A state is the last inputs of a causal convolution and the recurrence's own matrix; it does not grow
with the sequence. Where some layers are attention, one pool of equal blocks serves both kinds: the
block of the attention layers is the least multiple of the kernel's block whose page holds a state,
and the state's page is padded up to it. Where no prefix is cached, a state's own block is the
longest sequence. The bytes of a token are those of `harness.layouts.full_attention`, or of MLA's
latent vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from harness.layouts import state_layers
from harness.layouts.formats import ALIKE
from harness.layouts.full_attention import format_of, keys_and_values
from harness.layouts.kernels import UNSAID, Kernel, common, handed, kernels_of
from harness.layouts.page import (
    Blocks,
    Capability,
    Config,
    Family,
    NoLayout,
    Page,
    UnknownLayout,
    count,
)

STATE = "MambaSpec"
"""vLLM's name for a cache that keeps one state a sequence."""

NO_TOKENS = -1
"""`KVCache.compress_ratio` of a state: it stands for any number of tokens."""

STATE_ONLY = "state only"
"""The layout of a model without attention: no kv_cache_dtype has a meaning there."""


# ---- A token of attention ---------------------------------------------------------------------


def _plain(config: Config, layout: str, block_size: int, layers: int) -> Page:
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise UnknownLayout("a hybrid with a sliding window is not written down")
    if config.get("attention_head_dim") is not None:
        config = {**config, "head_dim": config["attention_head_dim"]}
    return keys_and_values(config, layout, block_size, layers)


_LATENT = ("bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Layouts of MLA's latent vector without scales of its own."""


def _latent(config: Config, layout: str, block_size: int, layers: int) -> Page:
    """MLA: one latent vector a token, the part with (or without) RoPE behind it, for all heads."""
    if layout not in _LATENT:
        raise UnknownLayout(f"MLA beside linear attention has no layout {layout!r}")
    rank, rope = count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim")
    stored = ALIKE[layout]
    page = block_size * stored.size(rank + rope)
    return Page(
        role="self_attn",
        compress_ratio=1,
        layers=layers,
        block_size=block_size,
        content_bytes=page,
        page_size_bytes=page,
        arithmetic=f"{block_size} tokens x ({rank} + {rope}) x {stored.bits} bit = {page}",
        tail=rank + rope,
        storage=stored.elements[0],
        also=stored.elements[1:],
        kind="MLAAttentionSpec",
    )


# ---- Families ---------------------------------------------------------------------------------


def _anywhere(_config: Config, _capability: Capability | None, _blocks: Blocks) -> int:
    """A state can be had behind every token."""
    return 1


_CHUNK = 64
"""Tokens between the states that FlashInfer's gated delta net hands out while it prefills."""

_CHUNK_MAJORS = (9, 10, 12)
"""Compute capabilities that it is for; but for the first with keys of one width alone, and with
CUDA 13, as vLLM's usual wheels have it."""

_CHUNK_KEY_DIM = 128


def _chunks(config: Config, capability: Capability | None, blocks: Blocks) -> int:
    """Blocks begin where a state can be had, so that a prefix can be found again."""
    major = capability[0] if capability else None
    if blocks.sequence or not blocks.checkpoints or major not in _CHUNK_MAJORS:
        return 1
    fits = major == _CHUNK_MAJORS[0] or count(config, "linear_key_head_dim") == _CHUNK_KEY_DIM
    return _CHUNK if fits else 1


def _latent_kernel(_config: Config, _capability: Capability | None, _blocks: Blocks) -> int:
    """MLA's decoding kernels on Blackwell want their blocks in 128 tokens; all devices follow."""
    return 128


@dataclass(frozen=True)
class _Model:
    """One model_type."""

    state: Callable[[Config], state_layers.State]
    layers: Callable[[Config], tuple[int, int]]
    role: str
    """Of the layers with a state."""
    attention: str = ""
    """Role of the attention layers."""
    page: Callable[[Config, str, int, int], Page] = _plain
    step: Callable[[Config, Capability | None, Blocks], int] = _anywhere
    """Tokens that the attention layers' block must be a multiple of beside the kernels'."""


_MODELS: Mapping[str, _Model] = MappingProxyType(
    {
        "falcon_h1": _Model(
            state_layers.falcon, state_layers.both_everywhere, "model.N.mixer", "attn"
        ),
        "jamba": _Model(state_layers.mamba1, state_layers.periodic, "mixer", "attn"),
        "kimi_linear": _Model(
            state_layers.kda, state_layers.listed, "self_attn", "self_attn", _latent, _latent_kernel
        ),
        "mamba2": _Model(state_layers.codestral, state_layers.states_only, "mixer"),
        "nemotron_h": _Model(state_layers.nemotron, state_layers.pattern, "mixer", "mixer.attn"),
        "qwen3_next": _Model(
            state_layers.delta_net,
            state_layers.interval,
            "linear_attn",
            "self_attn.attn",
            step=_chunks,
        ),
    }
)


def _layout_of(
    config: Config,
    kv_cache_dtype: str | None,
    storage_dtype: str | None,
    capability: Capability | None,
) -> str:
    model = _MODELS[config["model_type"]]
    if not model.attention:
        return STATE_ONLY
    if storage_dtype is None and model.page is _latent:
        # The layer does not say; the tensor's own element type is looked at all the same.
        known = ALIKE.get(
            _own(config, capability) if kv_cache_dtype == "auto" else str(kv_cache_dtype)
        )
        storage_dtype = known.elements[0] if known else None
    return format_of(config, kv_cache_dtype, storage_dtype, capability)


def _kernels(
    config: Config, capability: Capability | None, backends: tuple[str, ...]
) -> list[Kernel]:
    """What the kernels of the attention layers take."""
    found = kernels_of(config, capability, backends)
    if len(found) < len(backends):
        raise UnknownLayout(f"what {', '.join(backends)} take is not written down")
    return found or [UNSAID]


_BF16_SINCE = (8, 0)


def _own(config: Config, capability: Capability | None) -> str:
    """The element type that the model runs in, and its convolutions' inputs are kept in."""
    own = config.get("torch_dtype") or config.get("dtype")
    if own not in ("bfloat16", "float16"):
        raise UnknownLayout(f"a model in {own!r} does not say what its states are kept in")
    before = capability is not None and capability < _BF16_SINCE
    return "float16" if before else str(own)


def _pages(
    config: Config, layout: str, capability: Capability | None, blocks: Blocks
) -> tuple[Page, ...]:
    model, own = _MODELS[config["model_type"]], _own(config, capability)
    states, attentions = model.layers(config)
    state = state_layers.kept(model.state(config), config)
    size, text, block, padded = state.size(own), state.sum(own), blocks.size, state.size(own)
    attention: list[Page] = []
    if attentions:
        kernels = _kernels(config, capability, blocks.backends)
        step = math.lcm(common(kernels, blocks.asked), model.step(config, capability, blocks))
        least = model.page(config, layout, step, attentions)
        block = step * -(-size // least.page_size_bytes)
        page = model.page(config, layout, block, attentions)
        padded = page.page_size_bytes
        why = f"least multiple of {step} tokens whose page holds a state of {size}"
        how = f"{page.arithmetic}; {block} is {why}"
        # Made large for the states, it is handed to the kernels in parts.
        attention = [
            replace(
                page, role=model.attention, arithmetic=how, kernel_blocks=handed(kernels, block)
            )
        ]
        text += f", up to the attention page {padded}"
    elif block < 1:
        raise NoLayout(f"a block of {block} tokens holds nothing")
    if not states:
        return tuple(attention)
    held = Page(
        role=model.role,
        compress_ratio=NO_TOKENS,
        layers=states,
        block_size=blocks.sequence or block,
        content_bytes=size,
        page_size_bytes=padded,
        arithmetic=text,
        # Handed out as bytes: the convolution's inputs and the matrix are views into them.
        tail=size,
        storage="int8",
        also=("uint8",),
        kind=STATE,
        # The whole page on vLLM 0.27.1, the content alone on 0.33.0.
        with_padding=True,
    )
    return (held, *attention)


FAMILY = Family(_layout_of, _pages)
