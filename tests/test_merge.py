from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.merge import Judge, Merged, lacking, merge
from harness.part import Part
from harness.record import Record
from tests.results import H200, cache, cell, gpu, matrix

B200 = {"spec": "virtual:b200", "kind": "virtual", "name": "NVIDIA B200", "capability": [10, 0]}


def record(dtype: str = "auto", stage: str = "allocate", **more: Any) -> Record:
    """The record of `cell(dtype=dtype)`."""
    fields: dict[str, Any] = {
        "id": f"llama3-default-{dtype}",
        "model": "llama3",
        "backend": "default",
        "kv_cache_dtype": dtype,
        "device": "virtual:h200",
        "device_kind": "virtual",
        "capability": (9, 0),
        "engine": "0.33.0",
        "depth": "allocate",
        "stage": stage,
    }
    return Record(**{**fields, **more})


def refuse(record: Record) -> Any:
    raise AssertionError(f"{record.id} was judged")


def judged(verdict: str) -> Judge:
    def judge(record: Record) -> Any:
        made = cell(verdict, record.kv_cache_dtype, device=record.device, stage=record.stage)
        return made, {"version": record.engine, "platform": "cuda"}, H200

    return judge


def part(name: str, *cells: dict[str, Any], records: tuple[Record, ...] = (), **more: Any) -> Part:
    return Part(name, matrix(*cells, **more), records)


def ids(found: Merged) -> list[str]:
    return [each["id"] for each in found.data["cells"]]


def verdicts(found: Merged) -> list[str]:
    return [each["verdict"] for each in found.data["cells"]]


def shard(index: int, count: int, *devices: dict[str, Any]) -> Part:
    made = matrix(devices=devices or (H200,))
    made["run"]["shard"] = {"index": index, "count": count, "durations": None}
    return Part(str(index), made, ())


def test_shards_that_are_not_among_the_parts_are_named() -> None:
    assert [] == lacking([shard(1, 2), shard(2, 2), part("whole", cell())])
    assert ["shard 3, 4 of 4 is not among the parts"] == lacking([shard(2, 4), shard(1, 4)])
    assert ["shard 2 of 2 is not among the parts"] == lacking([shard(1, 2)])
    # GPUs of one name are one kind of device, slices of another are another run's.
    slices = (gpu(3, name="MIG 1g"),)
    found = lacking([shard(1, 2, gpu(1)), shard(2, 2, gpu(2)), shard(1, 3, *slices)])
    assert ["shard 2, 3 of 3 is not among the parts"] == found


def test_shards_are_one_run() -> None:
    one = part("a", cell("ok", "auto"), cell("rejected", "fp8"), records=(record("auto"),))
    two = part("b", cell("broken", "unset"), cell("ok", "bfloat16"))
    found = merge([one, two], refuse)
    assert {"ok": 2, "rejected": 1, "broken": 1} == found.data["run"]["counts"]
    assert "llama3-default-unset" == ids(found)[0]  # what is not passed comes first
    assert (record("auto"),) == found.records
    assert ["a", "b"] == found.data["run"]["merged"]["parts"]
    assert found.clean


def test_cells_are_in_the_order_in_which_a_run_plans_them() -> None:
    data = matrix(*(cell(dtype=d) for d in ("fp8", "auto", "unset", "zz", "bfloat16")))
    data["engines"][0]["kv_cache_dtypes"] = ["auto", "bfloat16", "fp8"]
    found = merge([Part("a", data, ())], refuse)
    dtypes = [each["kv_cache_dtype"] for each in found.data["cells"]]
    assert ["unset", "auto", "bfloat16", "fp8", "zz"] == dtypes


@pytest.mark.parametrize(
    ("verdicts_", "kept"),
    [
        (("ok", "broken"), "broken"),
        (("ok", "rejected"), "rejected"),
        (("skipped", "ok"), "ok"),
        (("oom", "ok"), "oom"),
    ],
)
def test_of_what_contradicts_the_worst_is_kept_and_named(
    verdicts_: tuple[str, str], kept: str
) -> None:
    parts = [part(name, cell(verdict)) for name, verdict in zip("ab", verdicts_, strict=True)]
    found = merge(parts, refuse)
    assert [kept] == verdicts(found)
    assert not found.clean
    assert [
        {
            "id": "llama3-default-auto",
            "device": "virtual:h200",
            "engine": "0.33.0",
            "parts": [["a", verdicts_[0]], ["b", verdicts_[1]]],
            "what": "verdict",
        }
    ] == found.data["run"]["merged"]["conflicts"]


def test_another_page_is_a_contradiction_though_both_are_ok() -> None:
    found = merge([part("a", cell()), part("b", cell(kv=[cache(32768)]))], refuse)
    (conflict,) = found.data["run"]["merged"]["conflicts"]
    assert "page_size_bytes of attn" == conflict["what"]


def test_a_known_failure_and_a_new_one_contradict() -> None:
    parts = [part("a", cell("broken", known="vllm:1")), part("b", cell("broken"))]
    found = merge(parts, refuse)
    assert [None] == [each["known"] for each in found.data["cells"]]
    assert 1 == len(found.data["run"]["merged"]["conflicts"])


def test_the_same_twice_is_a_duplicate() -> None:
    found = merge([part("a", cell(seconds={"total": 1.0})), part("b", cell())], refuse)
    assert found.clean
    assert ["ok"] == verdicts(found)
    (duplicate,) = found.data["run"]["merged"]["duplicates"]
    assert [["a", "ok"], ["b", "ok"]] == duplicate["parts"]


@pytest.mark.parametrize("nothing", ["notrun", "infra"])
def test_no_result_yields_to_one_of_another_try(nothing: str) -> None:
    found = merge([part("a", cell(nothing)), part("b", cell("ok"))], refuse)
    assert ["ok"] == verdicts(found)
    assert found.clean
    assert 1 == len(found.data["run"]["merged"]["duplicates"])


def test_ids_name_the_device_and_the_engine_where_there_are_several() -> None:
    one = part("a", cell())
    two = part("b", cell(device="virtual:b200"), devices=(B200,))
    assert ["llama3-default-auto-virtual_b200", "llama3-default-auto-virtual_h200"] == ids(
        merge([one, two], refuse)
    )
    old = part("c", cell(engine="0.27.1"), engines=("0.27.1",))
    assert ["llama3-default-auto-0.27.1", "llama3-default-auto-0.33.0"] == ids(
        merge([one, old], refuse)
    )


def test_ids_differ_where_devices_are_called_alike() -> None:
    parts = [
        part(name, cell(device=f"GPU-{number}"), devices=(gpu(number, uuid=f"GPU-{number}"),))
        for number, name in enumerate("ab")
    ]
    assert ["llama3-default-auto-GPU-0", "llama3-default-auto-GPU-1"] == ids(merge(parts, refuse))


def test_parts_of_other_builds_of_one_version_are_named() -> None:
    one, two = matrix(cell()), matrix(cell(dtype="fp8"))
    one["engines"][0]["commit"], two["engines"][0]["commit"] = "aaa", "bbb"
    found = merge([Part("a", one, ()), Part("b", two, ())], refuse)
    assert ['vLLM 0.33.0: parts differ in its commit: "aaa", "bbb"'] == (
        found.data["run"]["merged"]["faults"]
    )


# ---- A run that was cut off ----------------------------------------------------------------------


def test_a_record_of_a_cell_that_never_reported_is_judged() -> None:
    cut = part("a", cell("notrun", "auto"), cell("notrun", "fp8"), records=(record("auto"),))
    found = merge([cut], judged("ok"))
    assert ["ok", "notrun"] == verdicts(found)
    assert ["a: 1 records had no verdict, and are judged as of now"] == (
        found.data["run"]["merged"]["faults"]
    )


def test_records_alone_are_a_part() -> None:
    found = merge([Part("a", None, (record("auto"),), ("missing",))], judged("broken"))
    assert ["broken"] == verdicts(found)
    assert ["virtual:h200"] == [device["spec"] for device in found.data["devices"]]
    assert "missing" in found.data["run"]["merged"]["faults"]


def test_a_verdict_on_another_record_does_not_count() -> None:
    """matrix.json of an earlier run beside records.jsonl of one that was cut off."""
    old = part("a", cell("ok", seconds={"total": 1.0}), records=(record(seconds={"total": 2.0}),))
    assert ["crashed"] == verdicts(merge([old], judged("crashed")))
    same = part("a", cell("ok", seconds={"total": 2.0}), records=(record(seconds={"total": 2.0}),))
    assert ["ok"] == verdicts(merge([same], refuse))


def test_a_record_that_cannot_be_judged_is_named_and_the_rest_kept() -> None:
    def judge(record: Record) -> Any:
        raise ValueError("unknown model")

    cut = part("a", cell("ok", "fp8"), cell("notrun", "auto"), records=(record("auto"),))
    found = merge([cut], judge)
    assert {"ok": 1, "notrun": 1} == found.data["run"]["counts"]
    (fault,) = found.data["run"]["merged"]["faults"]
    assert "llama3-default-auto on virtual:h200 with vLLM 0.33.0 cannot be judged" in fault


def test_a_record_is_of_the_cell_of_a_device_that_is_alike() -> None:
    """Of several GPUs that are alike, the cell names the first, a record the one that ran it."""
    ran = replace(record(), device="GPU-2", device_kind="gpu")
    found = merge([part("a", cell(device="GPU-0"), devices=(gpu(0),), records=(ran,))], refuse)
    assert (ran,) == found.records


# ---- Orders --------------------------------------------------------------------------------------


def text(found: Merged) -> str:
    return json.dumps(found.data) + repr(found.records)


def test_the_order_of_the_parts_does_not_matter() -> None:
    parts = [
        part("a", cell("ok", "auto", seconds={"total": 0.1}), cell("broken", "fp8")),
        part("b", cell("ok", "auto", seconds={"total": 0.2}), cell("mismatch", "fp8")),
        part("c", cell("skipped", "auto"), cell(device="virtual:b200"), devices=(H200, B200)),
        Part("d", None, (record("bfloat16"), record("fp8", "config")), ("d: missing",)),
    ]
    assert 1 == len({text(merge(each, judged("oom"))) for each in itertools.permutations(parts)})


@given(st.data())
def test_no_shards_in_no_order_lose_or_change_a_cell(data: st.DataObject) -> None:
    dtypes = [f"dtype{number}" for number in range(8)]
    results = {dtype: data.draw(st.sampled_from(["ok", "broken", "rejected"])) for dtype in dtypes}
    homes = {dtype: data.draw(st.integers(0, 3)) for dtype in dtypes}
    parts = [
        part(f"p{number}", *(cell(results[d], d) for d in dtypes if homes[d] == number))
        for number in range(4)
    ]
    found = merge(data.draw(st.permutations(parts)), refuse)
    assert results == {c["kv_cache_dtype"]: c["verdict"] for c in found.data["cells"]}
    assert text(found) == text(merge(parts, refuse))


def test_what_is_merged_again_stays_as_it_is() -> None:
    parts = [part("a", cell("ok"), records=(record(),)), part("b", cell("broken", stage="spec"))]
    once = merge(parts, refuse)
    again = merge([Part("whole", once.data, once.records)], refuse)
    assert text(once) == text(again)
