"""The layers of state-space and linear-attention models: which have a state, and how large it is.

A state is the last inputs of a causal convolution and the recurrence's own matrix, as the models'
reports and configs define them. `harness.layouts.state_space` makes pages of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.errors import UsageError
from harness.layouts import cpu
from harness.layouts.page import ELEMENT_BYTES, Config, UnknownLayout, count

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


def kept(state: State, config: Config) -> State:
    """The state in the element type that the device keeps it in, where it has one of its own."""
    element = config.get(cpu.STATE_ELEMENT)
    return state if element is None else replace(state, element=str(element))


def mamba1(config: Config) -> State:
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


def codestral(config: Config) -> State:
    """Mamba 2 by itself, as Codestral Mamba has it."""
    return _mamba2(config, "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")


def falcon(config: Config) -> State:
    """Falcon-H1: Mamba 2 under names of its own."""
    return _mamba2(
        config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
    )


def nemotron(config: Config) -> State:
    """Nemotron-H keeps its states in float32 where its config names no other type."""
    state = _mamba2(
        config, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    )
    element = config.get("mamba_ssm_cache_dtype") or _FP32
    if element not in ELEMENT_BYTES:
        raise UnknownLayout(f"a state in {element!r} is not written down")
    return replace(state, element=str(element))


def delta_net(config: Config) -> State:
    """Gated delta net: queries and keys of the key heads, values of the value heads; a matrix of
    keys by values for every value head."""
    keys, values = count(config, "linear_num_key_heads"), count(config, "linear_num_value_heads")
    key, value = count(config, "linear_key_head_dim"), count(config, "linear_value_head_dim")
    width = 2 * keys * key + values * value
    return State(width, count(config, "linear_conv_kernel_dim"), (values, value, key))


def kda(config: Config) -> State:
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


def states_only(config: Config) -> tuple[int, int]:
    """Mamba 2 by itself: no layer has attention."""
    return count(config, "num_hidden_layers"), 0


def both_everywhere(config: Config) -> tuple[int, int]:
    """Falcon-H1: a mixer and attention side by side in every layer."""
    layers = count(config, "num_hidden_layers")
    return layers, layers


def periodic(config: Config) -> tuple[int, int]:
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


def pattern(config: Config) -> tuple[int, int]:
    """Nemotron-H: a letter a layer."""
    letters, layers = config.get("hybrid_override_pattern"), count(config, "num_hidden_layers")
    if not isinstance(letters, str) or len(letters) != layers:
        raise UsageError(
            f"config.json: hybrid_override_pattern must have a letter for each of {layers} layers, "
            f"not {letters!r}"
        )
    other = set(letters) - {_STATE_LAYER, _ATTENTION_LAYER, *_NEITHER}
    if other:
        raise UnknownLayout(f"layers of type {', '.join(sorted(other))} are not written down")
    return letters.count(_STATE_LAYER), letters.count(_ATTENTION_LAYER)


def interval(config: Config) -> tuple[int, int]:
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


def listed(config: Config) -> tuple[int, int]:
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
