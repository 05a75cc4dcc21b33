"""The oracle on state-space and linear-attention models: numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.layout import UnknownLayout, compare, expected_pages
from harness.oracle import Oracle
from harness.record import KVCache, Record, Resolved

SM80, SM90 = (8, 0), (9, 0)
AUTO = Resolved("auto", "bfloat16")

MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "torch_dtype": "bfloat16",
    "conv_kernel": 4,
    "head_dim": 64,
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "state_size": 128,
}
JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "torch_dtype": "bfloat16",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "attention_head_dim": 128,
    "conv_kernel": 4,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
}
FALCON: dict[str, Any] = {
    "model_type": "falcon_h1",
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "num_attention_heads": 12,
    "num_hidden_layers": 44,
    "num_key_value_heads": 2,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_hidden_layers": 27,
    "qk_rope_head_dim": 64,
}

# Bytes of a state: (taps - 1) x channels x 2 B, and the matrix.
CODESTRAL_STATE = 3 * (128 * 64 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 2
JAMBA_STATE = 3 * 8192 * 2 + 8192 * 16 * 2
NEMOTRON_STATE = 3 * (128 * 64 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4
FALCON_STATE = 3 * (24 * 128 + 2 * 256) * 2 + 24 * 128 * 256 * 2
QWEN_STATE = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2
KIMI_STATE = 3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4


def held(role: str, layers: int, block: int, state: int, page: int) -> KVCache:
    return KVCache(
        kind="MambaSpec",
        role=role,
        layers=layers,
        block_size=block,
        page_size_bytes=page,
        content_bytes=state,
        dtype="",
        compress_ratio=-1,
        shape=(-1, 1, 1, state),
        tensor_dtype="int8",
    )


def attention(
    role: str, layers: int, block: int, token: int, kind: str = "FullAttentionSpec"
) -> KVCache:
    """`token` in bytes."""
    return KVCache(
        kind=kind,
        role=role,
        layers=layers,
        block_size=block,
        page_size_bytes=block * token,
        content_bytes=block * token,
        dtype="bfloat16",
        shape=(-1, 1, block, token // 2),
        tensor_dtype="bfloat16",
    )


def hybrid(
    role: str, states: int, attn: str, layers: int, block: int, state: int, token: int, **kind: str
) -> list[KVCache]:
    return [
        held(role, states, block, state, block * token),
        attention(attn, layers, block, token, **kind),
    ]


RIGHT: dict[str, tuple[dict[str, Any], list[KVCache]]] = {
    "mamba2": (MAMBA2, [held("mixer", 64, 4096, CODESTRAL_STATE, CODESTRAL_STATE)]),
    "jamba": (JAMBA, hybrid("mixer", 28, "attn", 4, 80, JAMBA_STATE, 4096)),
    "nemotron-h": (NEMOTRON, hybrid("mixer", 24, "mixer.attn", 4, 1040, NEMOTRON_STATE, 4096)),
    "falcon-h1": (FALCON, hybrid("model.N.mixer", 44, "attn", 44, 1568, FALCON_STATE, 1024)),
    "qwen3-next": (QWEN, hybrid("linear_attn", 36, "self_attn.attn", 12, 576, QWEN_STATE, 2048)),
    "kimi-linear": (
        KIMI,
        hybrid(*("self_attn", 20, "self_attn", 7, 1920, KIMI_STATE, 1152), kind="MLAAttentionSpec"),
    ),
}
every_model = pytest.mark.parametrize("model", RIGHT)
HYBRIDS = [model for model in RIGHT if model != "mamba2"]


@every_model
def test_a_right_record_is_confirmed_in_any_order(model: str) -> None:
    config, kv = RIGHT[model]
    assert [] == compare(config, kv, AUTO, SM90)
    assert [] == compare(config, kv[::-1], AUTO, SM90)


@pytest.mark.parametrize(
    ("block", "config", "layout"),
    [
        (160, JAMBA, "fp8"),
        (272, JAMBA, "nvfp4"),
        (2080, NEMOTRON, "fp8"),
        (3120, FALCON, "fp8"),
        (1088, QWEN, "fp8"),
        (3840, KIMI, "fp8"),
    ],
)
def test_narrower_tokens_need_longer_blocks(
    block: int, config: dict[str, Any], layout: str
) -> None:
    assert {block} == {page.block_size for page in expected_pages(config, layout, SM90)}


def test_states_of_delta_nets_are_had_every_64_tokens_on_hopper_only() -> None:
    [seen] = {page.block_size for page in expected_pages(QWEN, "bfloat16", SM80)}
    assert 544 == seen


@every_model
@pytest.mark.parametrize(
    "field", ["page_size_bytes", "content_bytes", "block_size", "layers", "compress_ratio"]
)
@pytest.mark.parametrize("by", [1, -1])
def test_one_off_is_reported(model: str, field: str, by: int) -> None:
    config, kv = RIGHT[model]
    for at, one in enumerate(kv):
        if model == "mamba2" and field == "block_size":
            continue  # a state stands for any number of tokens
        wrong = replace(one, **{field: getattr(one, field) + by})
        assert compare(config, [*kv[:at], wrong, *kv[at + 1 :]], AUTO, SM90)


@pytest.mark.parametrize("model", HYBRIDS)
@pytest.mark.parametrize("by", [64, 128, -64, -128])
def test_another_block_is_reported_though_all_pages_are_equal(model: str, by: int) -> None:
    config, (state, attn) = RIGHT[model]
    block, page = attn.block_size + by, attn.page_size_bytes // attn.block_size
    kv = [
        replace(one, block_size=block, page_size_bytes=block * page, shape=None)
        for one in (state, replace(attn, content_bytes=block * page))
    ]
    assert compare(config, kv, AUTO, SM90)


@pytest.mark.parametrize("model", HYBRIDS)
def test_a_state_that_is_not_padded_is_reported(model: str) -> None:
    config, (state, attn) = RIGHT[model]
    bare = replace(state, page_size_bytes=state.content_bytes)
    assert any("page size bytes" in line for line in compare(config, [bare, attn], AUTO, SM90))


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("mamba2", {"conv_kernel": 3}),
        ("mamba2", {"n_groups": 1}),
        ("mamba2", {"state_size": 64}),
        ("mamba2", {"num_hidden_layers": 63}),
        ("mamba2", {"torch_dtype": "float16", "num_heads": 64}),
        ("jamba", {"mamba_d_state": 32}),
        ("jamba", {"mamba_expand": 1}),
        ("jamba", {"attn_layer_period": 16}),
        ("jamba", {"num_key_value_heads": 4}),
        ("nemotron-h", {"mamba_ssm_cache_dtype": "bfloat16"}),
        ("nemotron-h", {"attention_head_dim": 64}),
        ("nemotron-h", {"hybrid_override_pattern": "M" * 52}),
        ("falcon-h1", {"mamba_n_heads": 12}),
        ("falcon-h1", {"mamba_n_groups": 2}),
        ("qwen3-next", {"linear_num_value_heads": 16}),
        ("qwen3-next", {"linear_num_key_heads": 8}),
        ("qwen3-next", {"full_attention_interval": 2}),
        ("qwen3-next", {"head_dim": 128}),
        ("kimi-linear", {"kv_lora_rank": 256}),
        ("kimi-linear", {"qk_rope_head_dim": 32}),
        ("kimi-linear", {"linear_attn_config": KIMI["linear_attn_config"] | {"num_heads": 16}}),
    ],
)
def test_a_wrong_fact_in_the_config_is_reported(model: str, change: dict[str, Any]) -> None:
    config, kv = RIGHT[model]
    assert compare(config | change, kv, AUTO, SM90)


@pytest.mark.parametrize(
    ("config", "change", "names"),
    [
        (JAMBA, {"attn_layer_offset": 8}, "attn_layer_offset must be 0 to 7"),
        (NEMOTRON, {"hybrid_override_pattern": "M"}, "each of 52 layers"),
        (QWEN, {"layer_types": ["full_attention"]}, "each of 48 layers"),
        (KIMI, {"num_hidden_layers": 28}, "each of 28 layers once"),
        (KIMI, {"linear_attn_config": None}, "linear_attn_config must be an object"),
        (FALCON, {"mamba_d_state": 0}, "mamba_d_state must be a positive integer"),
    ],
)
def test_a_config_that_does_not_say_what_it_must(
    config: dict[str, Any], change: dict[str, Any], names: str
) -> None:
    with pytest.raises(UsageError, match=names):
        expected_pages(config | change, "bfloat16", SM90)


def test_no_opinion_on_layers_that_are_not_written_down() -> None:
    with pytest.raises(UnknownLayout, match="layers of type X"):
        expected_pages(NEMOTRON | {"hybrid_override_pattern": "X" * 52}, "bfloat16", SM90)


sizes = st.integers(1, 256)


@given(sizes, st.integers(1, 64), st.integers(1, 512), st.sampled_from(["bfloat16", "fp8"]))
def test_the_block_is_the_least_that_holds_a_state(
    heads: int, kv_heads: int, state: int, layout: str
) -> None:
    config = FALCON | {
        "mamba_n_heads": heads,
        "num_key_value_heads": kv_heads,
        "mamba_d_state": state,
    }
    held_, attn = expected_pages(config, layout, SM90)
    token = attn.page_size_bytes // attn.block_size
    assert 0 == attn.block_size % 16
    assert held_.page_size_bytes == attn.page_size_bytes
    assert (attn.block_size - 16) * token < held_.content_bytes <= attn.page_size_bytes


@given(st.integers(1, 300), st.integers(1, 300))
def test_depth_changes_no_page(one: int, other: int) -> None:
    def pages(layers: int) -> list[int]:
        config = FALCON | {"num_hidden_layers": layers}
        return [page.page_size_bytes for page in expected_pages(config, "fp8", SM90)]

    assert pages(one) == pages(other)


@given(sizes)
def test_a_wider_type_never_needs_a_longer_block(heads: int) -> None:
    config = QWEN | {"linear_num_value_heads": heads}
    blocks = [expected_pages(config, of, SM90)[0].block_size for of in ("bfloat16", "fp8")]
    assert sorted(blocks) == blocks


@pytest.mark.parametrize(("fits", "tokens"), [(True, 80), (True, 16), (False, 40), (False, 8)])
def test_a_long_block_may_be_handed_to_kernels_in_parts(fits: bool, tokens: int) -> None:
    """FlashInfer splits a hybrid's block of 80 tokens into five of its own."""
    config, (state, attn) = RIGHT["jamba"]
    part = replace(attn, shape=(-1, 1, tokens, 4096 // 2))
    assert fits == (compare(config, [state, part], AUTO, SM90) == [])


def whole_sequence(
    model: str, block: int, longest: int = 8192
) -> tuple[dict[str, Any], list[KVCache]]:
    """A state for each whole sequence, in a tensor that holds its padding, too."""
    config, (state, attn) = RIGHT[model]
    token = attn.page_size_bytes // attn.block_size
    page = block * token
    state = replace(
        state,
        block_size=longest,
        page_size_bytes=page,
        shape=(-1, 1, 1, page),
        state_mode="none",
    )
    return config, [state, attention(attn.role, attn.layers, block, token, attn.kind)]


@pytest.mark.parametrize(
    ("model", "block"),
    [
        ("jamba", 80),
        ("nemotron-h", 1040),
        ("falcon-h1", 1568),
        # No prefix is cached, so blocks need not end where a chunk of 64 tokens does.
        ("qwen3-next", 16 * -(-QWEN_STATE // (16 * 2048))),
        ("kimi-linear", 1920),
    ],
)
def test_a_state_of_a_whole_sequence_has_its_block(model: str, block: int) -> None:
    """vLLM 0.27.1, which caches no prefixes beside states unless asked."""
    config, kv = whole_sequence(model, block)
    assert [] == compare(config, kv, AUTO, SM90, longest=8192)
    assert any("block size 8192" in line for line in compare(config, kv, AUTO, SM90, longest=4096))


@pytest.mark.parametrize("model", HYBRIDS)
def test_a_state_of_blocks_must_not_have_the_block_of_a_whole_sequence(model: str) -> None:
    config, (state, attn) = RIGHT[model]
    kv = [replace(state, block_size=8192, state_mode="align"), attn]
    assert any("block size 8192" in line for line in compare(config, kv, AUTO, SM90, longest=8192))


@pytest.mark.parametrize(("engine", "block"), [("0.30.0", 544), ("0.32.0", 544), ("0.33.0", 576)])
def test_blocks_end_where_chunks_do_from_vllm_0_33_on(engine: str, block: int) -> None:
    """536 tokens hold a state: 34 blocks of 16 are the least, or 9 chunks of 64."""
    config, (state, attn) = whole_sequence("qwen3-next", block)
    state = replace(state, block_size=block, state_mode="align")
    record = Record(
        id="qwen3-next-default-unset",
        model="qwen3-next",
        backend="default",
        kv_cache_dtype="unset",
        device="virtual:h200",
        device_kind="virtual",
        capability=SM90,
        engine=engine,
        depth="allocate",
        stage="allocate",
        resolved=AUTO,
        kv=(state, attn),
    )
    assert [] == Oracle(config)(record)
    other = "0.33.0" if block == 544 else "0.32.1.dev7"
    must = 576 if block == 544 else 544
    told = Oracle(config)(replace(record, engine=other))
    assert any(f"block size {block}, must be {must}" in line for line in told)


def test_a_delta_net_without_prefixes_needs_no_chunks() -> None:
    config, kv = whole_sequence("qwen3-next", 576)
    assert any("block size 576, must be 544" in line for line in compare(config, kv, AUTO, SM90))


@pytest.mark.parametrize("size", [-1, 1])
def test_a_tensor_holds_a_state_or_its_page(size: int) -> None:
    config, (state, attn) = whole_sequence("jamba", 80)
    wrong = replace(state, shape=(-1, 1, 1, state.page_size_bytes + size))
    assert any("last dimension" in line for line in compare(config, [wrong, attn], AUTO, SM90))
