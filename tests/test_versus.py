from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import device, versus
from harness.case import UNSET, Case
from harness.facts import EngineFacts
from harness.matrix import Outcome
from harness.plan import Cell, Model
from harness.record import KVCache, Record, Resolved
from harness.verdict import VERDICTS, Judgement
from harness.versus import Difference, differences
from tests.test_plan import FACTS

OLD, NEW = replace(FACTS, version="0.27.1"), replace(FACTS, version="0.33.0")
LLAMA = Model("llama3", Path("llama3"), {"architectures": ["LlamaForCausalLM"]})


def page(size: int, dtype: str = "bfloat16") -> KVCache:
    return KVCache("FullAttentionSpec", "attn", 2, 16, size, size, dtype)


def outcome(
    engine: EngineFacts,
    verdict: str = "ok",
    reason: str = "",
    backend: str = "default",
    dtype: str = "auto",
    place: str = "virtual:h200",
    kv: tuple[KVCache, ...] = (),
    **resolved: Any,
) -> Outcome:
    case = Case("llama3", backend, dtype)
    cell = Cell(f"{case.id}-{engine.version}", case, LLAMA, device.parse(place), engine)
    record = Record(
        id=cell.id,
        model="llama3",
        backend=backend,
        kv_cache_dtype=dtype,
        device=place,
        device_kind="virtual",
        capability=(9, 0),
        engine=engine.version,
        depth="allocate",
        stage="allocate",
        resolved=Resolved(**resolved),
        kv=kv,
    )
    ran = verdict not in ("skipped", "notrun")
    return Outcome(cell, Judgement(verdict, reason), record if ran else None, "ok")


def facts(*outcomes: Outcome) -> list[tuple[str, versus.Value, versus.Value]]:
    return [(d.what, d.old, d.new) for d in differences(outcomes)]


def test_what_is_alike_is_no_difference() -> None:
    both = [
        outcome(e, kv_cache_dtype="auto", selected="FLASH_ATTN", kv=(page(65536),))
        for e in (OLD, NEW)
    ]
    assert [] == facts(*both)


def test_the_founding_fix_is_one_difference_in_plain_data() -> None:
    """vLLM 47174: what the failed start did not get to is no difference of its own."""
    found = differences(
        [
            outcome(OLD, "broken", "only supports fp8 kv-cache, got auto", dtype=UNSET),
            outcome(NEW, dtype=UNSET, kv_cache_dtype="fp8_ds_mla", kv=(page(37440),)),
        ]
    )
    assert [
        {
            "id": "llama3-default-unset",
            "device": "virtual:h200",
            "from": "0.27.1",
            "to": "0.33.0",
            "what": "verdict",
            "old": "broken",
            "new": "ok",
            "reason": "only supports fp8 kv-cache, got auto",
        }
    ] == [d.to_json() for d in found]


def test_all_that_two_ok_cells_can_differ_in_is_told() -> None:
    old = outcome(OLD, kv_cache_dtype="auto", selected="FLASH_ATTN", kv=(page(65536),))
    new = outcome(
        NEW,
        kv_cache_dtype="fp8",
        storage_dtype="uint8",
        selected="FLASHINFER",
        kv=(page(32768, "uint8"),),
    )
    assert [
        ("selected", "FLASH_ATTN", "FLASHINFER"),
        ("kv_cache_dtype", "auto", "fp8"),
        ("storage_dtype", "bfloat16", "uint8"),
        ("page_size_bytes", (65536,), (32768,)),
    ] == facts(old, new)


def test_any_page_counts_not_the_main_one_alone() -> None:
    old, new = (outcome(e, kv=(page(65536), page(small))) for e, small in ((OLD, 16), (NEW, 32)))
    assert [("page_size_bytes", (16, 65536), (32, 65536))] == facts(old, new)


def test_a_case_is_compared_on_the_same_device_alone() -> None:
    assert [] == facts(
        outcome(OLD, "broken", place="virtual:h200"), outcome(NEW, place="virtual:b200")
    )


def test_each_engine_is_compared_with_the_one_before_it() -> None:
    middle = replace(FACTS, version="0.30.0")
    found = differences([outcome(OLD), outcome(middle, "broken"), outcome(NEW)])
    assert [("0.27.1", "0.30.0", "broken"), ("0.30.0", "0.33.0", "ok")] == [
        (d.old_engine, d.new_engine, d.new) for d in found
    ]


def test_a_model_that_one_engine_lacks_is_told_with_the_reason() -> None:
    found = differences([outcome(OLD, "skipped", "vLLM 0.27.1 has no Llama"), outcome(NEW)])
    assert [("runs", None, "ok", "vLLM 0.27.1 has no Llama")] == [
        (d.what, d.old, d.new, d.reason) for d in found
    ]
    assert [] == facts(outcome(OLD, "skipped"), outcome(NEW, "skipped"))


def test_a_dtype_or_backend_that_one_engine_lacks_is_told() -> None:
    bigger = replace(
        NEW,
        kv_cache_dtypes=("auto", "fp8", "nvfp4"),
        backends=(*NEW.backends, "FRESH"),
        kind_backends={"regular": ("FLASH_ATTN", "FRESH", "FLASHMLA")},
    )
    found = differences(
        [
            outcome(OLD),
            outcome(bigger),
            outcome(bigger, "rejected", dtype="nvfp4"),
            outcome(bigger, backend="FRESH"),
            outcome(bigger, backend="FLASHMLA"),
        ]
    )
    assert {
        "llama3-default-nvfp4": "vLLM 0.27.1 has no such kv_cache_dtype",
        "llama3-FRESH-auto": "vLLM 0.27.1 has no such backend",
        "llama3-FLASHMLA-auto": "vLLM 0.27.1 does not offer this model this backend",
    } == {d.case.id: d.reason for d in found if d.what == "runs" and d.old is None}
    assert 3 == len(found)


def test_a_cell_that_was_not_selected_is_no_difference() -> None:
    """A shard or -k may hold a cell of one engine alone."""
    assert [] == facts(outcome(OLD, dtype="auto"), outcome(NEW, dtype="fp8"))


def test_what_never_ran_says_nothing_of_the_engine() -> None:
    assert [] == facts(outcome(OLD, "notrun"), outcome(NEW))
    assert [] == facts(outcome(OLD), outcome(NEW, "infra"))


def test_what_broke_comes_first_then_what_was_fixed() -> None:
    changes = [
        ("FLASH_ATTN", "rejected", "ok"),
        ("a", "unclean", "rejected"),
        ("b", "broken", "ok"),
        ("c", "ok", "broken"),
        ("d", "unclean", "broken"),
    ]
    cells = [
        outcome(engine, verdict, backend=backend)
        for backend, *verdicts in changes
        for engine, verdict in zip((OLD, NEW), verdicts, strict=True)
    ]
    assert ["c", "b", "a", "FLASH_ATTN", "d"] == [d.case.backend for d in differences(cells)]


def test_a_verdict_either_breaks_or_fixes_or_neither() -> None:
    where = (Case("m"), device.parse("virtual:h200"), "1", "2", "verdict")
    for old in VERDICTS:
        assert not Difference(*where, old, old).breaks
        assert not Difference(*where, old, old).fixes
    assert Difference(*where, "rejected", "mismatch").breaks
    assert Difference(*where, "mismatch", "rejected").fixes
