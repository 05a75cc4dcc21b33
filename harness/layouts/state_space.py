"""State-space and linear-attention models: a state of fixed size a sequence, and what keeps pace.

A state is the last inputs of a causal convolution and the recurrence's own matrix; it does not grow
with the sequence. Where some layers are attention, one pool of equal blocks serves both kinds: the
block of the attention layers is the least multiple of the kernel's block whose page holds a state,
and the state's page is padded up to it. The bytes of a token are those of
`harness.layouts.full_attention`, or of MLA's latent vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from harness.errors import UsageError
from harness.layouts.formats import ALIKE
from harness.layouts.full_attention import format_of, keys_and_values
from harness.layouts.page import (
    ELEMENT_BYTES,
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

_FP32 = "float32"


@dataclass(frozen=True)
class State:
    """What one layer keeps of a sequence."""

    width: int
    """Channels that the convolution runs over."""
    kernel: int
    """Taps of the convolution: all but the last are kept."""
    matrix: tuple[int, ...]
    """The recurrence's state: heads x rows x columns, without heads for Mamba 1."""
    element: str | None = None
    """Element type of the matrix; None: that of the convolution, which is the model's own."""

    def size(self, own: str) -> int:
        """Bytes, for a model that runs in `own`."""
        elements = 1
        for side in self.matrix:
            elements *= side
        conv = (self.kernel - 1) * self.width * ELEMENT_BYTES[own]
        return conv + elements * ELEMENT_BYTES[self.element or own]

    def sum(self, own: str) -> str:
        """`size` as people write it."""
        matrix = " x ".join(map(str, self.matrix))
        return (
            f"conv {self.kernel - 1} x {self.width} channels x {ELEMENT_BYTES[own]} B + "
            f"state {matrix} x {ELEMENT_BYTES[self.element or own]} B = {self.size(own)}"
        )


def _mamba1(config: Config) -> State:
    """Mamba: every channel has a state of its own, and is what the convolution runs over."""
    inner = count(config, "mamba_expand") * count(config, "hidden_size")
    return State(inner, count(config, "mamba_d_conv"), (inner, count(config, "mamba_d_state")))


def _mamba2(
    config: Config, heads: str, head_dim: str, groups: str, size: str, kernel: str
) -> State:
    """Mamba 2: B and C of every group run through the convolution beside the heads' inputs."""
    heads_, dim, state = count(config, heads), count(config, head_dim), count(config, size)
    width = heads_ * dim + 2 * count(config, groups) * state
    return State(width, count(config, kernel), (heads_, dim, state))


def _codestral(config: Config) -> State:
    return _mamba2(config, "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")


def _falcon(config: Config) -> State:
    return _mamba2(
        config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
    )


def _nemotron(config: Config) -> State:
    """Nemotron-H keeps its states in float32 where its config names no other type."""
    state = _mamba2(
        config, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    )
    element = config.get("mamba_ssm_cache_dtype") or _FP32
    if element not in ELEMENT_BYTES:
        raise UnknownLayout(f"a state in {element!r} is not written down")
    return replace(state, element=str(element))


def _delta_net(config: Config) -> State:
    """Gated delta net: queries and keys of the key heads, values of the value heads; a matrix of
    keys by values for every value head."""
    keys, values = count(config, "linear_num_key_heads"), count(config, "linear_num_value_heads")
    key, value = count(config, "linear_key_head_dim"), count(config, "linear_value_head_dim")
    width = 2 * keys * key + values * value
    return State(width, count(config, "linear_conv_kernel_dim"), (values, value, key))


def _kda(config: Config) -> State:
    """Kimi Delta Attention: queries, keys and values each through a convolution of their own; the
    matrix is kept in float32. That default is vLLM's own (`kda_state_dtype`), not a document's."""
    linear = _linear(config)
    heads, dim = count(linear, "num_heads"), count(linear, "head_dim")
    kernel = count(linear, "short_conv_kernel_size")
    return State(3 * heads * dim, kernel, (heads, dim, dim), _FP32)


def _linear(config: Config) -> Mapping[str, Any]:
    linear = config.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise UsageError(f"config.json: linear_attn_config must be an object, not {linear!r}")
    return linear


# ---- Which layers have what: (layers with a state, layers with attention) ----------------------


def _states_only(config: Config) -> tuple[int, int]:
    return count(config, "num_hidden_layers"), 0


def _both_everywhere(config: Config) -> tuple[int, int]:
    """Falcon-H1: a mixer and attention side by side in every layer."""
    layers = count(config, "num_hidden_layers")
    return layers, layers


def _periodic(config: Config) -> tuple[int, int]:
    """Jamba: one attention layer in a period, at an offset."""
    layers = count(config, "num_hidden_layers")
    period, offset = count(config, "attn_layer_period"), config.get("attn_layer_offset")
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < period:
        raise UsageError(
            f"config.json: attn_layer_offset must be 0 to {period - 1}, not {offset!r}"
        )
    attention = sum(at % period == offset for at in range(layers))
    return layers - attention, attention


_STATE_LAYER, _ATTENTION_LAYER, _NEITHER = "M", "*", "-E"
"""In `hybrid_override_pattern`: Mamba, attention, MLP or experts."""


def _pattern(config: Config) -> tuple[int, int]:
    pattern, layers = config.get("hybrid_override_pattern"), count(config, "num_hidden_layers")
    if not isinstance(pattern, str) or len(pattern) != layers:
        raise UsageError(
            f"config.json: hybrid_override_pattern must have a letter for each of {layers} layers, "
            f"not {pattern!r}"
        )
    other = set(pattern) - {_STATE_LAYER, _ATTENTION_LAYER, *_NEITHER}
    if other:
        raise UnknownLayout(f"layers of type {', '.join(sorted(other))} are not written down")
    return pattern.count(_STATE_LAYER), pattern.count(_ATTENTION_LAYER)


def _interval(config: Config) -> tuple[int, int]:
    """Qwen3-Next: every n-th layer is attention, unless `layer_types` says otherwise."""
    layers, types = count(config, "num_hidden_layers"), config.get("layer_types")
    if types is None:
        attention = layers // count(config, "full_attention_interval")
        return layers - attention, attention
    if not isinstance(types, list) or len(types) < layers:
        raise UsageError(
            f"config.json: layer_types must have an entry for each of {layers} layers, "
            f"not {types!r}"
        )
    other = {str(kind) for kind in types[:layers]} - {"linear_attention", "full_attention"}
    if other:
        raise UnknownLayout(f"layers of type {', '.join(sorted(other))} are not written down")
    attention = types[:layers].count("full_attention")
    return layers - attention, attention


def _listed(config: Config) -> tuple[int, int]:
    """Kimi Linear: both kinds are listed by number."""
    layers, linear = count(config, "num_hidden_layers"), _linear(config)
    states, attention = linear.get("kda_layers"), linear.get("full_attn_layers")
    if not isinstance(states, list) or not isinstance(attention, list):
        raise UsageError("config.json: kda_layers and full_attn_layers must be lists of layers")
    if sorted([*states, *attention]) != list(range(1, layers + 1)):
        raise UsageError(
            f"config.json: kda_layers and full_attn_layers must name each of {layers} layers once"
        )
    return len(states), len(attention)


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


def _sixteen(_capability: Capability | None) -> int:
    """The least block of the kernels for full attention."""
    return 16


def _chunks(capability: Capability | None) -> int:
    """The gated delta net's prefill hands out states every 64 tokens where FlashInfer has it, and
    blocks begin where a state can be had. Seen on SM90; on SM10x taken to be the same, not seen."""
    return 64 if capability is not None and capability[0] in (9, 10) else 16


def _latent_kernel(_capability: Capability | None) -> int:
    """MLA's decoding kernels on Blackwell want their blocks in 128 tokens; all devices follow."""
    return 128


@dataclass(frozen=True)
class _Model:
    """One model_type."""

    state: Callable[[Config], State]
    layers: Callable[[Config], tuple[int, int]]
    role: str
    """Of the layers with a state."""
    attention: str = ""
    """Role of the attention layers."""
    page: Callable[[Config, str, int, int], Page] = _plain
    kernel: Callable[[Capability | None], int] = _sixteen
    """Tokens of the kernel's block: the attention layers' is a multiple of it."""


_MODELS: Mapping[str, _Model] = MappingProxyType(
    {
        "falcon_h1": _Model(_falcon, _both_everywhere, "model.N.mixer", "attn"),
        "jamba": _Model(_mamba1, _periodic, "mixer", "attn"),
        "kimi_linear": _Model(_kda, _listed, "self_attn", "self_attn", _latent, _latent_kernel),
        "mamba2": _Model(_codestral, _states_only, "mixer"),
        "nemotron_h": _Model(_nemotron, _pattern, "mixer", "mixer.attn"),
        "qwen3_next": _Model(
            _delta_net, _interval, "linear_attn", "self_attn.attn", kernel=_chunks
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


_KERNEL_BLOCKS = (16, 32, 64)
"""Tokens of a block to the attention kernels of FlashInfer and FlashMLA (their documented page
sizes); a hybrid's block, made large for the states, is handed to them in parts."""

_BF16_SINCE = (8, 0)


def _own(config: Config, capability: Capability | None) -> str:
    """The element type that the model runs in, and its convolutions' inputs are kept in."""
    own = config.get("torch_dtype") or config.get("dtype")
    if own not in ("bfloat16", "float16"):
        raise UnknownLayout(f"a model in {own!r} does not say what its states are kept in")
    before = capability is not None and capability < _BF16_SINCE
    return "float16" if before else str(own)


def _pages(
    config: Config, layout: str, capability: Capability | None, block_size: int
) -> tuple[Page, ...]:
    model, own = _MODELS[config["model_type"]], _own(config, capability)
    states, attentions = model.layers(config)
    state = model.state(config)
    size, text, block, padded = state.size(own), state.sum(own), block_size, state.size(own)
    attention: list[Page] = []
    if attentions:
        kernel = model.kernel(capability)
        least = model.page(config, layout, kernel, attentions)
        block = kernel * -(-size // least.page_size_bytes)
        page = model.page(config, layout, block, attentions)
        padded = page.page_size_bytes
        why = f"least multiple of {kernel} tokens whose page holds a state of {size}"
        how = f"{page.arithmetic}; {block} is {why}"
        attention = [
            replace(page, role=model.attention, arithmetic=how, kernel_blocks=_KERNEL_BLOCKS)
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
        block_size=block,
        content_bytes=size,
        page_size_bytes=padded,
        arithmetic=text,
        # Handed out as bytes: the convolution's inputs and the matrix are views into them.
        tail=size,
        storage="int8",
        also=("uint8",),
        kind=STATE,
    )
    return (held, *attention)


FAMILY = Family(_layout_of, _pages)
