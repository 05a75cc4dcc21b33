"""Hand-written expectations: how one is picked, and those of DeepSeek-V4."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from cases.dsv4 import EXPLICIT
from harness.case import Case
from harness.expect import Expectation, Explicit, expected_verdict, find
from harness.known import Known
from harness.layout import expected_pages
from harness.record import KVCache, Record

FLASH = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128],
}
EVERYWHERE = Explicit("dsv4-default-unset", "ok", "anywhere")
SM90_ONLY = replace(EVERYWHERE, why="Hopper", capabilities=(9,))
KNOWN = Known(
    name="n",
    cells=("*",),
    verdict="broken",
    signature="s",
    link="https://example.org/1",
    since=date(2026, 1, 1),
    expires=date(2026, 1, 2),
    reason="r",
)


@pytest.mark.parametrize(
    ("found", "case_id", "capability"),
    [
        (True, "dsv4-default-unset", (9, 0)),
        (False, "dsv4-default-unset", (10, 0)),
        (False, "dsv4-default-unset", None),
        (False, "dsv4-default-unset-more", (9, 0)),
    ],
)
def test_a_case_is_found_by_exact_id_and_capability(
    found: bool, case_id: str, capability: tuple[int, int] | None
) -> None:
    assert (SM90_ONLY if found else None) == find([SM90_ONLY], case_id, capability)


@pytest.mark.parametrize("capability", [None, (7, 5), (12, 1)])
def test_a_case_without_capabilities_holds_everywhere(capability: tuple[int, int] | None) -> None:
    assert EVERYWHERE == find([EVERYWHERE], "dsv4-default-unset", capability)


@pytest.mark.parametrize(
    ("verdict", "case", "expectation"),
    [
        ("broken", Case("dsv4"), Expectation(EVERYWHERE, KNOWN)),
        ("rejected", Case("dsv4"), Expectation(replace(EVERYWHERE, outcome="rejected"))),
        ("ok", Case("dsv4", "default", "fp8"), Expectation(EVERYWHERE)),
        ("ok", Case("dsv4"), Expectation()),
        ("ok or rejected", Case("dsv4", "default", "fp8"), Expectation()),
    ],
)
def test_what_is_expected_before_the_cell_runs(
    verdict: str, case: Case, expectation: Expectation
) -> None:
    assert verdict == expected_verdict(case, expectation)


STATE = KVCache(
    kind="SlidingWindowMLASpec",
    role="attn.compressor.state_cache",
    layers=1,
    block_size=4,
    page_size_bytes=32832,
    content_bytes=32768,
    dtype="float32",
)


def seen(*kv: KVCache) -> Record:
    return Record(
        id="dsv4-default-unset",
        model="dsv4",
        backend="default",
        kv_cache_dtype="unset",
        device="virtual:h200",
        device_kind="virtual",
        capability=(9, 0),
        engine="0.33.0",
        depth="plan",
        stage="plan",
        kv=kv,
    )


def test_a_second_size_under_the_same_role_is_a_difference() -> None:
    once = replace(EVERYWHERE, pages=(("attn.compressor.state_cache", 1, 32832),))
    small = replace(STATE, layers=2, page_size_bytes=32768)
    assert [] == once.differences(seen(STATE, replace(STATE, block_size=8)))
    assert [
        "page of attn.compressor.state_cache (ratio 1) is 32768, must be 32832"
    ] == once.differences(seen(STATE, small))


def test_a_tail_is_asked_of_main_caches_only() -> None:
    tail = replace(EVERYWHERE, tail=584)
    main = replace(STATE, role="attn", shape=(-1, 1, 64, 512))
    state = replace(STATE, shape=(-1, 1, 4, 2048))
    assert ["last dimension of attn is 512, must be 584"] == tail.differences(seen(main, state))


# ---- cases/dsv4.py ----


def dsv4(backend: str, dtype: str, major: int) -> Explicit | None:
    return find(EXPLICIT, Case("dsv4", backend, dtype).id, (major, 0))


@pytest.mark.parametrize("major", [9, 10, 12])
@pytest.mark.parametrize("dtype", ["unset", "auto", "fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_dsv4_default_is_the_packed_layout(dtype: str, major: int) -> None:
    case = dsv4("default", dtype, major)
    assert case is not None
    assert ("ok", "fp8_ds_mla", "uint8") == (case.outcome, case.kv_cache_dtype, case.storage_dtype)
    assert case.written_back
    assert 584 == case.tail
    assert [
        ("attn", 4, 37440),
        ("attn", 128, 1728),
        ("attn.compressor.state_cache", 1, 32832),
        ("attn.indexer.compressor.state_cache", 1, 8640),
        ("attn.indexer.k_cache", 4, 8640),
        ("attn.swa_cache", 1, 37440),
    ] == sorted(case.pages)


@pytest.mark.parametrize("major", [9, 10, 12])
def test_dsv4_bfloat16_is_refused_with_advice(major: int) -> None:
    case = dsv4("default", "bfloat16", major)
    assert case is not None
    assert ("rejected", ("kv-cache", "--kv-cache-dtype fp8")) == (case.outcome, case.says)


@pytest.mark.parametrize(
    ("dtype", "storage", "main", "c128"),
    [
        ("fp8", "float8_e4m3fn", 32768, 1024),
        ("fp8_e4m3", "float8_e4m3fn", 32768, 1024),
        ("unset", "bfloat16", 65536, 2048),
        ("auto", "bfloat16", 65536, 2048),
        ("bfloat16", "bfloat16", 65536, 2048),
    ],
)
def test_dsv4_plain_layout_passes_through_on_sm100(
    dtype: str, storage: str, main: int, c128: int
) -> None:
    case = dsv4("FLASHINFER_MLA_SPARSE_DSV4", dtype, 10)
    assert case is not None
    assert ("ok", storage, 512) == (case.outcome, case.storage_dtype, case.tail)
    assert [("attn", 4, main), ("attn", 128, c128), ("attn.swa_cache", 1, main)] == sorted(
        case.pages
    )
    assert dsv4("FLASHINFER_MLA_SPARSE_DSV4", dtype, 9) is None


@pytest.mark.parametrize("case", [case for case in EXPLICIT if case.outcome == "ok"])
def test_dsv4_agrees_with_the_layout_oracle(case: Explicit) -> None:
    layouts = {"uint8": "packed", "float8_e4m3fn": "plain_fp8", "bfloat16": "plain_bf16"}
    layout = layouts[case.storage_dtype or ""]
    oracle = expected_pages(FLASH, layout, (case.capabilities[0], 0))
    assert set(case.pages) <= {(p.role, p.compress_ratio, p.page_size_bytes) for p in oracle}


def test_dsv4_has_one_case_for_a_cell() -> None:
    cells = [(case.id, major) for case in EXPLICIT for major in case.capabilities]
    assert sorted(set(cells)) == sorted(cells)
