"""What the oracle says of a record as a whole: ranks, drafters, blocks that were asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness import plan
from harness.layouts import drafter, rank
from harness.layouts.page import UnknownLayout
from harness.oracle import Oracle
from harness.record import KVCache, Record, Resolved

MODELS = {model.key: model for model in plan.models()}

LLAMA = MODELS["llama3"].config

SHARE = KVCache(
    kind="FullAttentionSpec",
    role="self_attn.attn",
    layers=32,
    block_size=16,
    # 16 tokens x 2 (K and V) x 8 / 8 heads x 128 x 2 B
    page_size_bytes=8192,
    content_bytes=8192,
    dtype="bfloat16",
    shape=(-1, 2, 16, 1, 128),
    tensor_dtype="bfloat16",
)


def seen(*kv: KVCache, ranks: int = 1, block_size: int = 0) -> Record:
    return Record(
        id="m-default-unset",
        model="m",
        backend="default",
        kv_cache_dtype="unset",
        device="virtual:h200",
        device_kind="virtual",
        capability=(9, 0),
        engine="0.33.0",
        depth="allocate",
        stage="allocate",
        block_size=block_size,
        tensor_parallel_size=ranks,
        resolved=Resolved(kv_cache_dtype="auto", storage_dtype="bfloat16"),
        kv=kv,
    )


def test_a_rank_keeps_its_share_of_the_heads() -> None:
    assert Oracle(LLAMA)(seen(SHARE, ranks=8)) == []
    [content, page, tensor] = Oracle(LLAMA)(seen(SHARE, ranks=4))
    assert "must be 16384" in content and "must be 16384" in page and "must be 16384" in tensor


def test_more_ranks_than_heads_repeat_them() -> None:
    """8 KV heads on 16 ranks: one each, as on 8."""
    assert Oracle(LLAMA)(seen(SHARE, ranks=16)) == []


def test_heads_that_do_not_divide_confirm_nothing() -> None:
    [line] = Oracle(LLAMA)(seen(SHARE, ranks=3))
    assert line == "no layout confirms it: num_key_value_heads 8 does not divide among 3 ranks"


@pytest.mark.parametrize(
    ("key", "numbers"),
    [
        ("jamba", {"hidden_size": 4096 // 2, "num_key_value_heads": 8 // 2, "head_dim": 128}),
        ("falcon-h1", {"mamba_n_heads": 24 // 2, "num_key_value_heads": 2 // 2}),
        ("nemotron-h", {"mamba_num_heads": 128 // 2, "n_groups": 8 // 2}),
        ("qwen3-next", {"linear_num_key_heads": 16 // 2, "linear_num_value_heads": 32 // 2}),
        ("mamba2", {"num_heads": 128 // 2, "n_groups": 8 // 2}),
        ("whisper", {"d_model": 1280 // 2, "decoder_attention_heads": 20 // 2}),
    ],
)
def test_what_two_ranks_divide(key: str, numbers: dict[str, int]) -> None:
    mine = rank.of(MODELS[key].config, 2)
    assert {name: mine[name] for name in numbers} == numbers


@pytest.mark.parametrize("key", ["dsv3", "dsv32", "dsv4", "kimi-k2", "glm5"])
def test_every_rank_keeps_the_latent_vector_whole(key: str) -> None:
    config = MODELS[key].config
    names = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "head_dim")
    mine = rank.of(config, 8)
    assert {name: mine.get(name) for name in names} == {name: config.get(name) for name in names}


def test_one_head_each_where_the_config_counts_none_for_keys() -> None:
    """Heads keep their width though there are fewer of them."""
    config = {"num_attention_heads": 16, "hidden_size": 2048}
    mine = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
    assert rank.of(config, 4) == config | mine


V3_LATENT = KVCache(
    kind="MLAAttentionSpec",
    role="self_attn.attn",
    layers=61,
    block_size=64,
    page_size_bytes=64 * (512 + 64) * 2,
    content_bytes=64 * (512 + 64) * 2,
    dtype="bfloat16",
    shape=(-1, 64, 576),
    tensor_dtype="bfloat16",
)


def test_a_drafter_has_layers_of_its_own() -> None:
    v3, mtp = MODELS["dsv3"].config, replace(V3_LATENT, layers=1, draft=True)
    assert Oracle(v3, drafts=True)(seen(V3_LATENT, mtp)) == []
    [line] = Oracle(v3, drafts=True)(seen(V3_LATENT))
    assert line.startswith("drafter: self_attn.attn") and "missing, must be 1 layer" in line
    [line] = Oracle(v3, drafts=True)(seen(V3_LATENT, replace(mtp, page_size_bytes=73664)))
    assert line.startswith("drafter: ") and "page size bytes 73664, must be 73728" in line


def test_a_drafter_of_deepseek_v4_has_the_ratios_behind_the_last_layer() -> None:
    config: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 4, 128, 0],
    }
    assert drafter.of(config) == config | {"num_hidden_layers": 1, "compress_ratios": [0]}


def test_a_model_without_mtp_layers_has_no_drafter() -> None:
    with pytest.raises(UnknownLayout, match="num_nextn_predict_layers"):
        drafter.of(LLAMA)


def test_a_format_that_is_not_written_down_confirms_nothing() -> None:
    [line] = Oracle({"model_type": "unheard_of"})(seen(SHARE))
    assert line.startswith("no layout confirms it: model_type 'unheard_of' is not written down")


def test_a_block_size_that_was_asked_for_must_be_seen() -> None:
    whole = replace(SHARE, page_size_bytes=65536, content_bytes=65536, shape=(-1, 2, 16, 8, 128))
    assert Oracle(LLAMA)(seen(whole, block_size=16)) == []
    [line] = Oracle(LLAMA)(seen(whole, block_size=64))
    assert line == "block size 64 was asked for, yet blocks have 16 tokens"
