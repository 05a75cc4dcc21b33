"""Reduction: a model small enough for a 16 GiB slice that has one layer of every KV kind. Pure.

Only depth, experts, MLP width and vocabulary shrink; whatever decides a page stays as published:
heads and their sizes, LoRA ranks, windows, compress ratios, dtypes, quantisation. The rules are the
tables below. That nothing was lost is not assumed here but proven by planning both (`proof.py`,
with `differences`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError

LAYERS = 5
"""Layers that are kept at least. A kind may come with a later layer by a default of vLLM's own that
no key tells: Llama 4 has one global layer in four, TurboQuant spares the first and last two."""

EXPERTS = 8
"""Experts that are kept where top-k and groups allow so few."""

VOCABULARY = 4096
WIDTH = 1024
"""MLP width: a multiple of the 128 and 32 values that quantised blocks hold."""

_TEXT = ("text_config", "llm_config", "language_config")
"""Where a multimodal config keeps its language model. Towers have no KV cache and stay."""

_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
_ENCODERS = ("encoder_layers",)

# What tells layers apart: the first layer of every distinct combination is kept.

_PER_LAYER = (
    *("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "no_rope_layers"),
    *("compress_ratios", "hybrid_override_pattern", "index_topk_pattern"),
)
"""An entry (or a letter) per layer, those of MTP layers behind them. Any other list of that length
is taken for one, too."""

_INDICES = {
    **dict.fromkeys(("moe_layers", "mlp_only_layers", "cross_attention_layers"), 0),
    **dict.fromkeys(("full_attn_idxs", "candidate_source_layer_id"), 0),
    **dict.fromkeys(("kda_layers", "full_attn_layers"), 1),
}
"""The numbers of some layers, counted from 0 or 1. So is any list that is named `*_layer_ids`, but
for the layers that a drafter looks at."""

_NESTED = ("linear_attn_config",)
"""Where such keys stand one level down."""

_BESIDE = {"engram_num_embeddings": "engram_layer_ids"}
"""Lists that have an entry for each entry of another."""

_LEADING = (
    *("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    *("num_hash_layers", "max_window_layers"),
)
"""So many layers at the beginning differ."""

_TRAILING = ("num_kv_shared_layers",)
"""So many layers at the end differ."""

_PERIODS = (
    *("full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern"),
    *("attn_layer_period", "expert_layer_period", "global_attn_every_n_layers"),
    *("no_rope_layer_interval", "every_n_layers_nope", "cross_attention_frequency"),
    *("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq", "moe_layer_interval"),
    *("index_topk_freq", "layer_group_size"),
)
"""Every so many layers one differs, whichever it is: all residues are kept. A pattern such as
`LLLG` repeats after its length."""

_NUMBERED = re.compile(r"\blayers\.\d+\b")
"""A layer that a quantisation config names."""

# What shrinks beside the depth.

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
_GROUPS = ("n_group", "num_expert_group")
_WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_dim"),
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"),
)
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
_FIRST_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


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


@dataclass(frozen=True)
class _Rule:
    """A key that tells layers apart."""

    place: dict[str, Any]
    key: str
    tells: Sequence[Any] = ()
    """A value per layer; () where it tells none apart."""
    rewritten: Callable[[Sequence[int]], Any] | None = None
    """Its value for the kept layers; None where it holds for leading layers only, as it is."""


def reduce(config: Mapping[str, Any], least: int = LAYERS) -> Reduced:
    """The reduced form of a config.json, which is not changed, with `least` layers where it has so
    many.

    UsageError names the model type, and what its config lacks or contradicts.
    """
    small = copy.deepcopy(dict(config))
    text = next((small[key] for key in _TEXT if isinstance(small.get(key), dict)), small)
    try:
        depth = _depth(text)
        rules = list(_rules(text, depth))
    except ValueError as error:
        kind = config.get("model_type")
        raise UsageError(f"config.json of model type {kind!r} cannot be reduced: {error}") from None
    kept = _kept(rules, depth, least)
    for rule in rules:
        if rule.rewritten is not None:
            rule.place[rule.key] = rule.rewritten(kept)
    for key in (*_DEPTHS, *_ENCODERS):
        if _is_count(text.get(key)):
            text[key] = len(kept) if text[key] == depth else min(text[key], least)
    experts = _shrink_experts(text)
    _shrink_widths(text)
    _shrink_vocabulary(small, text)
    return Reduced(small, len(kept), kept, experts)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _depth(text: Mapping[str, Any]) -> int:
    for key in _DEPTHS:
        value = text.get(key)
        if _is_count(value):
            return int(text[key])
        if value is not None:
            raise ValueError(f"{key} must be a positive integer, not {value!r}")
    raise ValueError(f"it has none of {', '.join(_DEPTHS)}")


def _rules(text: dict[str, Any], depth: int) -> Iterator[_Rule]:
    """The rules that speak of this config, whose text part is `text`. ValueError says why one
    cannot be followed."""
    more = text.get("num_nextn_predict_layers") or 0
    for place in (text, *(text[key] for key in _NESTED if isinstance(text.get(key), dict))):
        for key, value in place.items():
            if value is None or isinstance(value, bool):
                continue
            if key in _INDICES or (key.endswith("_layer_ids") and "target" not in key):
                yield _indices(place, key, depth)
            elif key in _BESIDE and isinstance(value, list):
                yield _beside(place, key, depth)
            elif _is_per_layer(key, value, depth, more):
                yield _per_layer(place, key, depth)
            elif key in _LEADING and _is_count(value):
                yield _between(place, key, depth, 0, value)
            elif key in _TRAILING and _is_count(value):
                yield _between(place, key, depth, depth - value, depth)
            elif key in _PERIODS:
                period = len(value) if isinstance(value, str | list) else value
                if _is_count(period) and period > 1:
                    yield _Rule(place, key, [at % period for at in range(depth)])
    if _NUMBERED.search(json.dumps(text.get("quantization_config"), default=str)):
        yield _Rule(text, "quantization_config")


def _is_per_layer(key: str, value: Any, depth: int, more: int) -> bool:
    if key in _PER_LAYER and isinstance(value, str | list) and value:
        if len(value) < depth:
            raise ValueError(f"{key} has {len(value)} entries for {depth} layers")
        return True
    other = key == "architectures" or key.endswith(("_token_id", "_token_ids"))
    return isinstance(value, list) and len(value) in (depth, depth + more) and not other


def _per_layer(place: dict[str, Any], key: str, depth: int) -> _Rule:
    values = place[key]

    def rewritten(kept: Sequence[int]) -> Any:
        entries = [*(values[at] for at in kept), *values[depth:]]
        return "".join(entries) if isinstance(values, str) else entries

    return _Rule(place, key, values[:depth], rewritten)


def _indices(place: dict[str, Any], key: str, depth: int) -> _Rule:
    base = _INDICES.get(key, 0)
    single = not isinstance(place[key], list)
    numbers = [place[key]] if single else place[key]
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise ValueError(f"{key} must hold layer numbers, not {place[key]!r}")

    def moved(number: int, kept: Sequence[int]) -> int:
        at = number - base
        # Below the first there is none (-1 means so); behind the last come the MTP layers.
        inside = kept.index(at) if 0 <= at < depth else at
        return inside + base if at < depth else number - depth + len(kept)

    def rewritten(kept: Sequence[int]) -> Any:
        found = [moved(n, kept) for n in numbers if n - base in kept or not 0 <= n - base < depth]
        return found[0] if single else found

    return _Rule(place, key, [at + base in numbers for at in range(depth)], rewritten)


def _beside(place: dict[str, Any], key: str, depth: int) -> _Rule:
    values, numbers = place[key], place.get(_BESIDE[key]) or []
    if len(values) != len(numbers):
        raise ValueError(f"{key} and {_BESIDE[key]} differ in length")
    return _Rule(
        place,
        key,
        rewritten=lambda kept: [
            value
            for value, at in zip(values, numbers, strict=True)
            if at in kept or not 0 <= at < depth
        ],
    )


def _between(place: dict[str, Any], key: str, depth: int, first: int, end: int) -> _Rule:
    tells = [first <= at < end for at in range(depth)]
    return _Rule(place, key, tells, lambda kept: sum(tells[at] for at in kept))


def _kept(rules: Sequence[_Rule], depth: int, least: int) -> tuple[int, ...]:
    """The first layer of every kind, and of a model with few kinds the first layers; all from the
    first on where a rule only holds for leading layers."""
    first: dict[str, int] = {}
    for at in range(depth):
        first.setdefault(repr([rule.tells[at] for rule in rules if rule.tells]), at)
    if any(rule.rewritten is None for rule in rules):
        return tuple(range(min(depth, max(least, *(at + 1 for at in first.values())))))
    kept = set(first.values())
    for at in range(depth):
        if len(kept) >= least:
            break
        kept.add(at)
    return tuple(sorted(kept))


def _shrink_experts(text: dict[str, Any]) -> int | None:
    """Shrink the routed experts; how many are left."""
    top_k = max((text[key] for key in _TOP_K if _is_count(text.get(key))), default=1)
    groups = max((text[key] for key in _GROUPS if _is_count(text.get(key))), default=1)
    least = max(EXPERTS, top_k)
    if groups > 1:
        # A group is scored by its two best experts, and the chosen groups must hold top-k.
        chosen = text["topk_group"] if _is_count(text.get("topk_group")) else 1
        least = max(least, groups * max(2, -(-top_k // chosen)))
    least = -(-least // groups) * groups
    left = None
    for key in _EXPERTS:
        if _is_count(text.get(key)) and text[key] > 1:
            text[key] = min(text[key], least)
            left = left or int(text[key])
    return left


def _shrink_widths(text: dict[str, Any]) -> None:
    for key in _WIDTHS:
        value = text.get(key)
        if key == "intermediate_size" and _is_state_width(text):
            continue
        if isinstance(value, list):
            text[key] = [min(width, WIDTH) if _is_count(width) else width for width in value]
        elif _is_count(value):
            text[key] = min(text[key], WIDTH)


def _is_state_width(text: Mapping[str, Any]) -> bool:
    """True where `intermediate_size` is no MLP's: a Mamba model's states are so wide."""
    expand, hidden = text.get("expand"), text.get("hidden_size")
    if not isinstance(expand, int | float) or not isinstance(hidden, int):
        return False
    return bool(text.get("intermediate_size") == expand * hidden)


def _shrink_vocabulary(small: dict[str, Any], text: dict[str, Any]) -> None:
    if "engram_vocab_size" in text:
        # The n-gram map is made for exactly this vocabulary: only its hash tables shrink.
        _shrink_engram(text)
        return
    if not _is_count(text.get("vocab_size")) or text["vocab_size"] <= VOCABULARY:
        return
    for key in _VOCABULARIES:
        if _is_count(text.get(key)):
            text[key] = min(text[key], VOCABULARY)
    for place in (small,) if small is text else (small, text):
        others = sorted(k for k in place if k.endswith("_token_id") and k not in _FIRST_IDS)
        for new, key in enumerate((*_FIRST_IDS, *others)):
            _move_ids(place, key, new)


def _shrink_engram(text: dict[str, Any]) -> None:
    """DeepSeek-V4.1: as many hash columns, each of a prime number of rows from the vocabulary on;
    below twice the vocabulary there are more than enough primes."""
    if _is_count(text["engram_vocab_size"]) and text["engram_vocab_size"] > VOCABULARY:
        columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
        text["engram_vocab_size"] = VOCABULARY
        text["engram_num_embeddings"] = [
            min(rows, columns * 2 * VOCABULARY) for rows in text["engram_num_embeddings"]
        ]


def _move_ids(place: dict[str, Any], key: str, new: int) -> None:
    """Give the token ids that no longer fit the id `new`."""
    value = place.get(key)
    if isinstance(value, list):
        moved = [new if isinstance(one, int) and one >= VOCABULARY else one for one in value]
        place[key] = list(dict.fromkeys(moved))
    elif _is_count(value) and place[key] >= VOCABULARY:
        place[key] = new
