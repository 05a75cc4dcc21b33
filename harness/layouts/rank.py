"""One rank of a tensor-parallel group: the config that its share of a model would have. Pure.

Heads are divided among the ranks, and keys and values with them; where there are fewer KV heads (or
groups of a state's inputs) than ranks, each rank keeps one, and some keep the same. What all heads
share, as MLA's latent vector, every rank keeps whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.layouts.page import Config, UnknownLayout, count

_DIVIDED = (
    # Mamba 2, by its models' names for it; gated delta net; KDA's lies in `linear_attn_config`.
    *("mamba_num_heads", "mamba_n_heads", "num_heads"),
    *("linear_num_key_heads", "linear_num_value_heads"),
    # Encoder-decoder models, whose heads all have keys and values of their own, and are together
    # as wide as the model.
    "d_model",
    *("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"),
)
"""Numbers of heads that every rank has an equal share of."""

_REPEATED = ("num_key_value_heads", "n_groups", "mamba_n_groups")
"""Numbers of which a rank keeps one at least."""


def of(config: Config, size: int) -> Config:
    """`config` as one rank of `size` would have it: to be given to the oracle, no model's own.

    UnknownLayout where something does not divide; UsageError where the config lacks a number.
    """
    if size == 1:
        return config
    mine: dict[str, Any] = dict(config)
    for name in ("text_config", "linear_attn_config"):
        if isinstance(config.get(name), Mapping):
            mine[name] = of(config[name], size)
    if config.get("kv_lora_rank") is None and config.get("num_attention_heads") is not None:
        # Before the heads are divided: each is as wide on one rank as on all.
        heads = count(config, "num_attention_heads")
        if config.get("head_dim") is None and config.get("hidden_size") is not None:
            mine["head_dim"] = count(config, "hidden_size") // heads
        mine.setdefault("num_key_value_heads", heads)
    for name in _REPEATED:
        if mine.get(name) is not None:
            mine[name] = _share(name, count(mine, name), size, repeated=True)
    for name in _DIVIDED:
        if mine.get(name) is not None:
            mine[name] = _share(name, count(mine, name), size)
    if config.get("mamba_expand") is not None:
        # Mamba 1 has channels in place of heads: `mamba_expand` times the hidden size.
        mine["hidden_size"] = _share("hidden_size", count(config, "hidden_size"), size)
    return mine


def _share(name: str, number: int, size: int, *, repeated: bool = False) -> int:
    if repeated and size % number == 0:
        return 1
    if number % size:
        raise UnknownLayout(f"{name} {number} does not divide among {size} ranks")
    return number // size
