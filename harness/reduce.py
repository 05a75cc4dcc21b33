"""Reduction: a model small enough for a 16 GiB slice that has one layer of every KV kind. Pure.

Only depth, experts, MLP width and vocabulary shrink; whatever decides a page stays as published:
heads and their sizes, LoRA ranks, windows, compress ratios, dtypes, quantisation. That nothing was
lost is not assumed here but proven by planning both (`proof.py`, with `differences`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError
from harness.record import KVCache, Record

LAYERS = 4
"""Layers of a model whose config tells no two apart; more than one, so that a kind that only comes
with a later layer shows in the proof."""

EXPERTS = 8
"""Experts that are kept where top-k and groups allow so few."""

VOCABULARY = 4096
WIDTH = 1024
"""MLP width: a multiple of the 128 and 32 values that quantised blocks hold."""

_LAYERS = ("num_hidden_layers",)
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_WIDTHS = ("intermediate_size", "moe_intermediate_size")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_NO_RULE = (
    *(
        "full_attention_interval",
        "sliding_window_pattern",
        "attn_layer_period",
        "first_k_dense_replace",
    ),
    *("hybrid_override_pattern", "linear_attn_config", "interleave_moe_layer_step", "text_config"),
)
"""Keys that tell layers apart in ways for which there is no rule here yet."""


@dataclass(frozen=True)
class Reduced:
    """A reduced model."""

    config: dict[str, Any]
    """Its config.json."""
    layers: int
    kept: tuple[int, ...]
    """Indices of the layers of the full model that it has."""
    experts: int | None
    """Routed experts; None where there are none."""


def reduce(config: Mapping[str, Any]) -> Reduced:
    """The reduced form of a config.json, which is not changed.

    UsageError where the config lacks what the rules need, or tells layers apart in a way for which
    there is no rule.
    """
    depth = config.get("num_hidden_layers")
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise UsageError(
            f"config.json: num_hidden_layers must be a positive integer, not {depth!r}"
        )
    strange = [key for key in _NO_RULE if config.get(key) is not None]
    if strange:
        raise UsageError(f"no rule for {', '.join(strange)} of {config.get('model_type')!r}")
    small = dict(config)
    lists = _per_layer(config, depth)
    kept = _kept(lists, depth)
    small["num_hidden_layers"] = len(kept)
    for key, values in lists.items():
        # What follows the last layer belongs to the MTP layers.
        small[key] = [values[at] for at in kept] + list(values[depth:])
    experts = _experts(small)
    for key in _WIDTHS:
        if isinstance(small.get(key), int):
            small[key] = min(small[key], WIDTH)
    if isinstance(small.get("vocab_size"), int):
        small["vocab_size"] = min(small["vocab_size"], VOCABULARY)
        for at, key in enumerate(_IDS):
            if isinstance(small.get(key), int):
                small[key] = small[key] if small[key] < small["vocab_size"] else at
    return Reduced(small, len(kept), kept, experts)


def _per_layer(config: Mapping[str, Any], depth: int) -> dict[str, Sequence[Any]]:
    """The lists that have an entry per layer, those of MTP layers behind them."""
    more = config.get("num_nextn_predict_layers") or 0
    return {
        key: value
        for key, value in config.items()
        if isinstance(value, list) and len(value) in (depth, depth + more)
    }


def _kept(lists: Mapping[str, Sequence[Any]], depth: int) -> tuple[int, ...]:
    """The first layer of every kind; of a model with but one kind, the first few."""
    first: dict[str, int] = {}
    for at in range(depth):
        first.setdefault(repr([values[at] for values in lists.values()]), at)
    kept = set(first.values())
    for at in range(depth):
        if len(kept) >= LAYERS:
            break
        kept.add(at)
    return tuple(sorted(kept))


def _experts(small: dict[str, Any]) -> int | None:
    """Shrink the routed experts; how many are left."""
    for key in _EXPERTS:
        experts = small.get(key)
        if isinstance(experts, int) and experts > 1:
            groups = small.get("n_group") or 1
            least = max(EXPERTS, small.get("num_experts_per_tok") or 1)
            small[key] = min(experts, -(-least // groups) * groups)
            return int(small[key])
    return None


def differences(full: Record, reduced: Record) -> list[str]:
    """One line per KV kind that the reduced model lost, added or changed, and per other fact that
    differs. Both records plan the same case on the same device."""
    ends = [(r.stage, r.error.type if r.error else None, r.end) for r in (full, reduced)]
    if ends[0] != ends[1]:
        return [f"the full model ended with {ends[0]}, the reduced one with {ends[1]}"]
    lines = []
    if full.resolved != reduced.resolved:
        lines.append(f"resolved {full.resolved}, reduced {reduced.resolved}")
    there, here = _kinds(full.kv), _kinds(reduced.kv)
    lines += [f"lost {_said(kind)}" for kind in there if kind not in here]
    lines += [f"added {_said(kind)}" for kind in here if kind not in there]
    return lines


def _kinds(kv: Sequence[KVCache]) -> list[KVCache]:
    # How many layers there are is no part of a kind, nor are strides, which depend on the blocks.
    return list(dict.fromkeys(dataclasses.replace(one, layers=0, stride=None) for one in kv))


def _said(kind: KVCache) -> str:
    return (
        f"{kind.kind} {kind.role} (ratio {kind.compress_ratio}, block {kind.block_size}, "
        f"{kind.page_size_bytes} B, {kind.backend}, {kind.shape})"
    )
