"""Reduction of a model, rule by rule, and the comparison that proves it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.kinds import differences
from harness.record import Fault, KVCache, Record, Resolved
from harness.reduce import LAYERS, Reduced
from harness.reduce import reduce as shrink


def reduce(config: dict[str, Any]) -> Reduced:
    """With four layers at least, so that the rules show in short lists."""
    return shrink(config, 4)


def model(layers: int = 12, **keys: Any) -> dict[str, Any]:
    """A config.json of so many layers."""
    return {"model_type": "made_up", "num_hidden_layers": layers, "hidden_size": 4096, **keys}


# Depth: which layers are kept, and what is said of them.


def test_alike_layers_leave_the_first_few() -> None:
    reduced = reduce(model(32))
    assert (4, (0, 1, 2, 3)) == (reduced.layers, reduced.kept)
    assert 4 == reduced.config["num_hidden_layers"]


def test_turboquant_has_a_layer_between_the_ones_that_it_spares() -> None:
    """vLLM keeps the first two and the last two in the model's own dtype."""
    assert 2 + 1 + 2 <= shrink(model(32)).layers


def test_a_model_of_fewer_layers_keeps_them_all() -> None:
    assert (0, 1) == reduce(model(2)).kept


def test_the_first_layer_of_every_entry_is_kept() -> None:
    kinds = ["a", "a", "a", "b", "a", "c", "b", "d", "e", "a", "a", "a"]
    reduced = reduce(model(layer_types=kinds))
    assert (0, 3, 5, 7, 8) == reduced.kept
    assert ["a", "b", "c", "d", "e"] == reduced.config["layer_types"]


def test_two_lists_are_seen_together() -> None:
    reduced = reduce(
        model(6, layer_types=["a", "b", "a", "b", "a", "b"], mlp_layer_types=["x"] * 4 + ["y"] * 2)
    )
    assert (0, 1, 4, 5) == reduced.kept
    assert ["a", "b", "a", "b"] == reduced.config["layer_types"]
    assert ["x", "x", "y", "y"] == reduced.config["mlp_layer_types"]


def test_any_list_with_an_entry_per_layer_is_one() -> None:
    windows = [0] * 6 + [512] * 2 + [0] * 4
    reduced = reduce(model(surprising_windows=windows))
    assert (0, 1, 2, 6) == reduced.kept
    assert [0, 0, 0, 512] == reduced.config["surprising_windows"]


def test_other_lists_stay() -> None:
    config = model(6, architectures=["A"] * 6, eos_token_id=[7, 7, 7, 7, 7, 9], sizes=[1] * 5)
    assert {**config, "num_hidden_layers": 4} == reduce(config).config


def test_entries_of_mtp_layers_follow() -> None:
    # DeepSeek-V4-Flash, but for its length: two plain layers, then C4 and C128 in turn; one MTP.
    ratios = [0, 0, 4, 128, 4, 128, 4, 128, 0]
    reduced = reduce(model(8, num_nextn_predict_layers=1, compress_ratios=ratios))
    assert (0, 1, 2, 3) == reduced.kept
    assert [0, 0, 4, 128, 0] == reduced.config["compress_ratios"]
    assert 1 == reduced.config["num_nextn_predict_layers"]


def test_a_letter_per_layer() -> None:
    reduced = reduce(model(12, hybrid_override_pattern="M-M-M-M*-M-M"))
    assert (0, 1, 2, 7) == reduced.kept
    assert "M-M*" == reduced.config["hybrid_override_pattern"]


def test_layers_counted_from_one() -> None:
    linear = {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8], "head_dim": 128}
    reduced = reduce(model(8, linear_attn_config=linear, first_k_dense_replace=1))
    assert (0, 1, 2, 3) == reduced.kept
    assert {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 128} == (
        reduced.config["linear_attn_config"]
    )


def test_numbers_of_layers_move_with_them() -> None:
    # DeepSeek-V4.1-Flash, shortened: sources of shared KV and of shared indices, n-gram layers.
    reduced = reduce(
        model(
            12,
            compress_ratios=[0, 0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1],
            kv_source_layer_ids=[2, 5, 8],
            index_source_layer_ids=[2, 5, 8, 10],
            candidate_source_layer_id=8,
            engram_layer_ids=[1, 5],
            engram_num_embeddings=[111, 222],
            dspark_target_layer_ids=[9, 10, 11],
        )
    )
    assert (0, 1, 2, 3, 5, 8, 9, 10) == reduced.kept
    assert [0, 0, 2, 2, 2, 1, 1, 1] == reduced.config["compress_ratios"]
    assert [2, 4, 5] == reduced.config["kv_source_layer_ids"]
    assert [2, 4, 5, 7] == reduced.config["index_source_layer_ids"]
    assert 5 == reduced.config["candidate_source_layer_id"]
    assert [1, 4] == reduced.config["engram_layer_ids"]
    assert [111, 222] == reduced.config["engram_num_embeddings"]
    # Only a drafter reads these.
    assert [9, 10, 11] == reduced.config["dspark_target_layer_ids"]


def test_a_layer_that_goes_takes_what_stands_beside_it() -> None:
    config = model(engram_layer_ids=[1, 5, 7], engram_num_embeddings=[111, 222, 333])
    reduced = reduce(config)
    assert (0, 1, 2, 3) == reduced.kept
    assert ([1], [111]) == (
        reduced.config["engram_layer_ids"],
        reduced.config["engram_num_embeddings"],
    )


def test_numbers_outside_stay_outside() -> None:
    config = model(12, moe_layers=[11, 12], candidate_source_layer_id=-1)
    reduced = reduce(config)
    assert (0, 1, 2, 11) == reduced.kept
    assert [3, 4] == reduced.config["moe_layers"]
    assert -1 == reduced.config["candidate_source_layer_id"]


def test_a_list_of_all_layers_tells_none_apart() -> None:
    # Llama 4 lists every layer in `moe_layers`: as long as a list with an entry per layer.
    reduced = reduce(model(12, moe_layers=list(range(12)), no_rope_layers=[1, 1, 1, 0] * 3))
    assert (0, 1, 2, 3) == reduced.kept
    assert [0, 1, 2, 3] == reduced.config["moe_layers"]


@pytest.mark.parametrize("key", ["first_k_dense_replace", "num_hash_layers", "max_window_layers"])
def test_leading_layers_that_differ_are_counted_anew(key: str) -> None:
    reduced = reduce(model(12, **{key: 6}))
    assert (0, 1, 2, 6) == reduced.kept
    assert 3 == reduced.config[key]


def test_a_count_of_all_layers_stays_one_of_all_layers() -> None:
    reduced = reduce(model(36, max_window_layers=36))
    assert reduced.layers == reduced.config["max_window_layers"]


def test_trailing_layers_that_differ_are_counted_anew() -> None:
    # Gemma 3n: the last layers share the KV cache of earlier ones of their type.
    reduced = reduce(model(12, layer_types=["s", "s", "s", "f"] * 3, num_kv_shared_layers=4))
    assert (0, 3, 8, 11) == reduced.kept
    assert ["s", "f", "s", "f"] == reduced.config["layer_types"]
    assert 2 == reduced.config["num_kv_shared_layers"]


@pytest.mark.parametrize(
    "key",
    [
        "full_attention_interval",
        "sliding_window_pattern",
        "attn_layer_period",
        "expert_layer_period",
        "interleave_moe_layer_step",
        "decoder_sparse_step",
        "moe_layer_freq",
        "index_topk_freq",
    ],
)
def test_a_period_keeps_every_residue(key: str) -> None:
    reduced = reduce(model(24, **{key: 6}))
    assert (0, 1, 2, 3, 4, 5) == reduced.kept
    assert 6 == reduced.config[key]


def test_a_period_starts_anew_behind_leading_layers() -> None:
    # Dense 0; then every residue of 2 and 3, which is six layers, among the others.
    reduced = reduce(model(24, first_k_dense_replace=1, attn_layer_period=2, expert_layer_period=3))
    assert tuple(range(7)) == reduced.kept
    assert 1 == reduced.config["first_k_dense_replace"]


def test_a_pattern_of_letters_repeats() -> None:
    reduced = reduce(model(24, sliding_window_pattern="LLLLG"))
    assert 5 == reduced.layers
    assert "LLLLG" == reduced.config["sliding_window_pattern"]


def test_no_period_keeps_no_more() -> None:
    config = model(24, moe_layer_freq=1, sliding_window_pattern=None, layer_types=["a"] * 24)
    assert LAYERS == shrink(config).layers


def test_with_a_period_layers_are_kept_from_the_first_on() -> None:
    # What the period says of a layer hangs on its number, so none before it can go.
    reduced = reduce(model(24, attn_layer_period=2, layer_types=["a"] * 9 + ["b"] * 15))
    assert tuple(range(11)) == reduced.kept
    assert ["a"] * 9 + ["b"] * 2 == reduced.config["layer_types"]


def test_layers_that_a_quantisation_names_keep_their_numbers() -> None:
    named = {"modules_to_not_convert": ["model.layers.3.self_attn", "lm_head"]}
    kinds = ["a"] * 6 + ["b"] * 6
    reduced = reduce(model(12, layer_types=kinds, quantization_config=named))
    assert tuple(range(7)) == reduced.kept
    assert named == reduced.config["quantization_config"]
    any_layer = {"modules_to_not_convert": ["model.layers.*.self_attn"]}
    assert (0, 1, 2, 6) == (
        reduce(model(12, layer_types=kinds, quantization_config=any_layer)).kept
    )


def test_encoder_and_decoder() -> None:
    config = {"num_hidden_layers": 32, "encoder_layers": 24, "decoder_layers": 32}
    six = {**config, "full_attention_interval": 6}
    assert {"num_hidden_layers": 4, "encoder_layers": 4, "decoder_layers": 4} == (
        reduce(config).config
    )
    assert (6, 4, 6) == tuple(reduce(six).config[key] for key in config)


@pytest.mark.parametrize("key", ["num_layers", "n_layer"])
def test_other_names_of_the_depth(key: str) -> None:
    assert {"hidden_size": 64, key: 4} == reduce({"hidden_size": 64, key: 12}).config


def test_the_language_model_of_a_multimodal_config() -> None:
    text = model(40, layer_types=["a"] * 20 + ["b"] * 20, vocab_size=50_000, eos_token_id=49_000)
    vision = {"num_hidden_layers": 32, "intermediate_size": 2816}
    config = {
        "model_type": "m",
        "eos_token_id": 49_000,
        "text_config": text,
        "vision_config": vision,
    }
    reduced = reduce(config)
    assert (0, 1, 2, 20) == reduced.kept
    assert vision == reduced.config["vision_config"]
    small = reduced.config["text_config"]
    assert (4, ["a", "a", "a", "b"]) == (small["num_hidden_layers"], small["layer_types"])
    assert (1, 1) == (small["eos_token_id"], reduced.config["eos_token_id"])


# Experts, widths, vocabulary.


@pytest.mark.parametrize(
    ("left", "keys"),
    [
        (8, {"n_routed_experts": 256, "num_experts_per_tok": 6}),
        (8, {"num_experts": 16, "num_experts_per_tok": 2}),
        (8, {"num_local_experts": 32, "experts_per_token": 4}),
        (4, {"num_local_experts": 4, "num_experts_per_tok": 1}),
        (10, {"num_experts": 512, "num_experts_per_tok": 10}),
        (12, {"num_experts": 512, "num_experts_per_token": 12}),
        # Eight groups of two; four of them hold the eight that are chosen.
        (16, {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}),
        # A group is scored by its two best.
        (16, {"n_routed_experts": 256, "num_experts_per_tok": 4, "n_group": 8, "topk_group": 4}),
        # Two groups are chosen, which must hold eight: four in each of eight.
        (32, {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 2}),
        (8, {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}),
        # Up to a multiple of the groups.
        (9, {"num_experts": 64, "num_expert_group": 3, "topk_group": 3}),
        (None, {}),
    ],
)
def test_the_fewest_experts_that_routing_allows(left: int | None, keys: dict[str, int]) -> None:
    reduced = reduce(model(**keys))
    assert left == reduced.experts
    for key, value in keys.items():
        expected = left if key.endswith("_experts") else value
        assert expected == reduced.config[key]


def test_mlps_shrink_to_whole_blocks() -> None:
    reduced = reduce(
        model(
            intermediate_size=14336,
            moe_intermediate_size=2304,
            shared_expert_intermediate_size=512,
            shared_intermediate_size=0,
            encoder_ffn_dim=5120,
        )
    ).config
    assert (1024, 1024, 512, 0, 1024) == (
        reduced["intermediate_size"],
        reduced["moe_intermediate_size"],
        reduced["shared_expert_intermediate_size"],
        reduced["shared_intermediate_size"],
        reduced["encoder_ffn_dim"],
    )


def test_a_width_per_layer_is_both() -> None:
    reduced = reduce(model(6, intermediate_size=[4096, 4096, 4096, 4096, 512, 512])).config
    assert [1024, 1024, 1024, 512] == reduced["intermediate_size"]


def test_the_width_of_a_mamba_state_stays() -> None:
    config = model(64, expand=2, intermediate_size=8192, state_size=128)
    assert 8192 == reduce(config).config["intermediate_size"]
    # Nemotron-H has an MLP as well, and this is its width.
    assert 1024 == reduce({**config, "intermediate_size": 21504}).config["intermediate_size"]


def test_token_ids_that_no_longer_fit_move_inside() -> None:
    reduced = reduce(
        model(
            vocab_size=128_256,
            bos_token_id=128_000,
            eos_token_id=[128_001, 106, 128_008],
            pad_token_id=None,
            image_token_id=100_000,
            audio_token_id=100_001,
            mask_token_id=5,
        )
    ).config
    assert 4096 == reduced["vocab_size"]
    assert (0, [1, 106], None) == (
        reduced["bos_token_id"],
        reduced["eos_token_id"],
        reduced["pad_token_id"],
    )
    assert 5 == reduced["mask_token_id"]
    assert 2 == len({reduced["image_token_id"], reduced["audio_token_id"]} - {0, 1, 2, 5})
    assert 4096 > max(reduced["image_token_id"], reduced["audio_token_id"])


def test_a_small_vocabulary_stays() -> None:
    config = model(4, vocab_size=1000, eos_token_id=5000, pad_token_id=-1)
    assert config == reduce(config).config


def test_a_vocabulary_that_a_map_is_made_for_stays() -> None:
    config = model(
        vocab_size=129_280,
        eos_token_id=129_000,
        engram_layer_ids=[1],
        engram_vocab_size=16_000_000,
        engram_max_ngram_size=4,
        engram_n_heads=8,
        engram_num_embeddings=[384_006_168],
        engram_compressed_vocab_size=99_092,
    )
    reduced = reduce(config).config
    for kept in ("vocab_size", "eos_token_id", "engram_compressed_vocab_size", "engram_n_heads"):
        assert config[kept] == reduced[kept]
    # Three n-gram sizes of eight heads each; a prime number of rows a column, all distinct.
    rows = sum([*primes_from(reduced["engram_vocab_size"], 3 * 8)])
    assert rows <= reduced["engram_num_embeddings"][0] < 384_006_168 // 1000


def primes_from(start: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if all(start % n for n in range(2, int(start**0.5) + 1)):
            found.append(start)
        start += 1
    return found


def test_what_decides_a_page_stays() -> None:
    decides = {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 192,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "attention_chunk_size": 8192,
        "index_head_dim": 128,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "conv_kernel": 4,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131_072,
        "num_experts_per_tok": 8,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {"factor": 8.0, "short_factor": [1.0] * 12},
    }
    reduced = reduce(model(12, **decides)).config
    assert decides == {key: reduced[key] for key in decides}
    assert 4096 == reduced["hidden_size"]


# What cannot be reduced.


@pytest.mark.parametrize(
    ("reason", "config"),
    [
        ("it has none of num_hidden_layers", {}),
        ("num_hidden_layers must be a positive integer, not 0", {"num_hidden_layers": 0}),
        ("num_hidden_layers must be a positive integer, not True", {"num_hidden_layers": True}),
        ("num_hidden_layers must be a positive integer, not '4'", {"num_hidden_layers": "4"}),
        ("it has none of num_hidden_layers", {"text_config": {"hidden_size": 64}}),
        ("compress_ratios has 2 entries for 4 layers", model(4, compress_ratios=[0, 4])),
        ("hybrid_override_pattern has 3 entries", model(4, hybrid_override_pattern="M*M")),
        ("moe_layers must hold layer numbers", model(4, moe_layers=["first"])),
        (
            "engram_num_embeddings and engram_layer_ids differ in length",
            model(4, engram_layer_ids=[1, 2], engram_num_embeddings=[5]),
        ),
    ],
)
def test_what_cannot_be_reduced_is_told_with_the_model_type(
    reason: str, config: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as caught:
        reduce({**config, "model_type": "strange"})
    assert reason in str(caught.value)
    assert "'strange'" in str(caught.value)
    assert 1 == len(str(caught.value).splitlines())


# What holds for every config.


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    depth = draw(st.integers(1, 40))
    more = draw(st.integers(0, 2))
    numbers = st.lists(st.integers(0, depth - 1), unique=True).map(sorted)
    rules: dict[str, st.SearchStrategy[Any]] = {
        "layer_types": st.lists(st.sampled_from("ab"), min_size=depth, max_size=depth),
        "compress_ratios": st.lists(
            st.sampled_from([0, 4, 128]), min_size=depth + more, max_size=depth + more
        ),
        "moe_layers": numbers,
        "first_k_dense_replace": st.integers(0, depth + 1),
        "num_kv_shared_layers": st.integers(0, depth),
        "full_attention_interval": st.integers(1, 6),
        "num_experts": st.integers(1, 300),
        "num_experts_per_tok": st.integers(1, 8),
        "intermediate_size": st.integers(1, 20_000),
        "vocab_size": st.integers(10, 200_000),
        "eos_token_id": st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1, max_size=3),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(rules))))
    config = model(depth, num_nextn_predict_layers=more)
    return config | {key: draw(rules[key]) for key in sorted(chosen)}


def told(config: dict[str, Any], at: int) -> tuple[Any, ...]:
    """All that a config says of its layer `at`."""
    depth = config["num_hidden_layers"]
    return (
        config.get("layer_types", [None] * depth)[at],
        config.get("compress_ratios", [None] * depth)[at],
        at in config.get("moe_layers", ()),
        at < config.get("first_k_dense_replace", 0),
        at >= depth - config.get("num_kv_shared_layers", 0),
        (at + 1) % config.get("full_attention_interval", 1) == 0,
    )


@given(configs())
def test_every_kind_survives_and_every_kept_layer_is_what_it_was(config: dict[str, Any]) -> None:
    reduced = reduce(config)
    small = reduced.config
    assert [told(config, at) for at in reduced.kept] == [
        told(small, at) for at in range(reduced.layers)
    ]
    every = {told(config, at) for at in range(config["num_hidden_layers"])}
    assert every == {told(config, at) for at in reduced.kept}


@given(configs())
def test_lists_have_the_new_length(config: dict[str, Any]) -> None:
    reduced = reduce(config)
    assert reduced.layers == len(reduced.kept) == reduced.config["num_hidden_layers"]
    more = config["num_nextn_predict_layers"]
    for key, length in (
        ("layer_types", reduced.layers),
        ("compress_ratios", reduced.layers + more),
    ):
        if key in config:
            assert length == len(reduced.config[key])
    if "compress_ratios" in config and more:
        assert config["compress_ratios"][-more:] == reduced.config["compress_ratios"][-more:]


@given(configs())
def test_reducing_again_changes_nothing_and_neither_does_it_the_input(
    config: dict[str, Any],
) -> None:
    before = copy.deepcopy(config)
    once = reduce(config).config
    assert before == config
    assert once == reduce(once).config


def test_what_is_nested_in_the_input_stays_as_it_was() -> None:
    text = model(
        12,
        layer_types=["a", "b"] * 6,
        vocab_size=50_000,
        linear_attn_config={"kda_layers": [1, 12], "full_attn_layers": [2]},
    )
    config = {"text_config": text, "eos_token_id": [49_000]}
    before = copy.deepcopy(config)
    assert before != reduce(config).config
    assert before == config


# The comparison.

MAIN = KVCache(
    kind="MLAAttentionSpec",
    role="attn",
    layers=21,
    block_size=256,
    page_size_bytes=37440,
    content_bytes=37376,
    dtype="uint8",
    compress_ratio=4,
    backend="V4_FLASHMLA_SPARSE",
    shape=(-1, 64, 584),
    tensor_dtype="uint8",
    stride=(37440, 584, 1),
)
FEW = replace(MAIN, layers=1)
OTHER = replace(FEW, kind="SlidingWindowMLASpec", role="attn.swa_cache", compress_ratio=1)
REFUSAL = Fault("ValueError", ("ValueError", "Exception"), "no such\nthing", "vllm/x.py:f")


def planned(*kv: KVCache, **fields: Any) -> Record:
    """What became of a plan with these layers."""
    return replace(
        Record(
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
            resolved=Resolved("fp8_ds_mla", "uint8", "fp8_ds_mla", ("A", "B"), "A"),
            kv=kv,
        ),
        **fields,
    )


def test_numbers_of_layers_blocks_and_bytes_are_no_difference() -> None:
    full = planned(MAIN, OTHER, num_blocks=100)
    reduced = planned(
        OTHER, replace(FEW, stride=(999, 584, 1)), num_blocks=7, id="other", seconds={"total": 3.0}
    )
    assert [] == differences(full, reduced)


def test_layers_that_are_alike_but_for_strides_are_one_kind() -> None:
    full = planned(MAIN, replace(MAIN, stride=(1, 2, 3)))
    assert [] == differences(full, planned(FEW))


def test_a_lost_kind_is_named() -> None:
    (line,) = differences(planned(MAIN, OTHER), planned(FEW))
    assert line.startswith("lost SlidingWindowMLASpec attn.swa_cache ")
    assert "37440 B" in line


def test_an_added_kind_is_named() -> None:
    (line,) = differences(planned(MAIN), planned(FEW, OTHER))
    assert line.startswith("added SlidingWindowMLASpec attn.swa_cache ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 64),
        ("page_size_bytes", 37376),
        ("content_bytes", 37440),
        ("dtype", "bfloat16"),
        ("cache_dtype", "fp8_ds_mla"),
        ("alignment", 576),
        ("backend", "OTHER"),
        ("shape", (-1, 64, 656)),
        ("tensor_dtype", "float16"),
    ],
)
def test_a_changed_kind_is_named_with_what_changed(name: str, value: Any) -> None:
    (line,) = differences(planned(MAIN, OTHER), planned(replace(FEW, **{name: value}), OTHER))
    assert line.startswith("changed MLAAttentionSpec attn ")
    assert line.endswith(f": {name} {getattr(MAIN, name)!r} -> {value!r}")


@pytest.mark.parametrize(
    ("name", "value"), [("kind", "Other"), ("role", "attn.indexer"), ("compress_ratio", 128)]
)
def test_another_kind_is_no_changed_one(name: str, value: Any) -> None:
    lines = differences(planned(MAIN), planned(replace(FEW, **{name: value})))
    assert ["lost", "added"] == [line.split()[0] for line in lines]


def test_a_kind_that_is_left_once_of_twice_is_lost() -> None:
    smaller = replace(MAIN, page_size_bytes=1728)
    (line,) = differences(planned(MAIN, smaller), planned(FEW))
    assert line.startswith("lost MLAAttentionSpec attn ")
    assert "1728 B" in line


def test_a_layer_number_within_a_role_is_no_part_of_it() -> None:
    # Falcon-H1's mixers go by the number of layers: model.44.mixer of 44, model.4.mixer of 4.
    full = [replace(MAIN, layers=1, role=f"model.{44 + at}.mixer") for at in range(44)]
    reduced = [replace(MAIN, layers=1, role=f"model.{4 + at}.mixer") for at in range(4)]
    assert [] == differences(planned(*full), planned(*reduced))
    assert differences(planned(*full), planned(replace(FEW, role="model.4.mixer2")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_dtype", "auto"),
        ("storage_dtype", "bfloat16"),
        ("cache_config", "auto"),
        ("backends", ("A",)),
        ("selected", "B"),
    ],
)
def test_what_was_resolved_otherwise_is_named(name: str, value: Any) -> None:
    full = planned(MAIN)
    (line,) = differences(full, planned(FEW, resolved=replace(full.resolved, **{name: value})))
    assert f"resolved {name}: full {getattr(full.resolved, name)!r}, reduced {value!r}" == line


def test_the_same_refusal_at_the_same_stage_is_no_difference() -> None:
    refused = planned(stage="config", error=REFUSAL)
    assert [] == differences(refused, replace(refused, error=replace(REFUSAL, message="other")))
    # How far it had come by then is no matter.
    assert [] == differences(replace(refused, kv=(MAIN, OTHER)), refused)


@pytest.mark.parametrize(
    ("words", "reduced"),
    [
        ("ValueError at stage model (no such)", planned(stage="model", error=REFUSAL)),
        ("finished at stage plan", planned(FEW, stage="plan")),
        ("timeout at stage allocate", planned(end="timeout")),
    ],
)
def test_an_end_of_its_own_is_one_difference(words: str, reduced: Record) -> None:
    (line,) = differences(planned(MAIN), reduced)
    assert f"ended differently: full finished at stage allocate, reduced {words}" == line


@pytest.mark.parametrize(
    "other",
    [
        planned(stage="model", error=REFUSAL),
        planned(stage="config", error=replace(REFUSAL, type="KeyError")),
    ],
)
def test_another_refusal_is_a_difference(other: Record) -> None:
    assert differences(planned(stage="config", error=REFUSAL), other)


@pytest.mark.parametrize("end", ["timeout", "signal", "exit", "silent", "infra"])
def test_a_plan_that_did_not_finish_proves_nothing(end: str) -> None:
    lost = replace(planned(), end=end, stage="model", kv=())
    assert [f"could not be planned: {end} at stage model"] == differences(lost, lost)
