from __future__ import annotations

from dataclasses import replace

from harness import matrix, versus
from harness.record import KVCache, Resolved
from harness.verdict import Judgement
from tests.test_versus import NEW, OLD, outcome

MLA = KVCache("MLAAttentionSpec", "attn", 61, 64, 1, 1, "uint8")
INDEXER = replace(MLA, role="indexer.k_cache", dtype="float8_e4m3fn")
WINDOW = replace(MLA, kind="SlidingWindowMLASpec", dtype="bfloat16")


def test_vouchers_are_counted_by_their_combination_and_ok_cells_alone() -> None:
    judgements = [
        Judgement("ok", "", vouched=("oracle", "contract")),
        Judgement("ok", "", vouched=("oracle", "contract")),
        Judgement("ok", "", vouched=("contract",)),
        Judgement("ok", ""),
        Judgement("rejected", ""),
    ]
    assert {"oracle+contract": 2, "contract": 1, "nobody": 1} == matrix.vouched(judgements)


def test_the_element_type_is_the_layers_own_where_they_have_one() -> None:
    record = outcome(NEW, kv=(MLA,)).record
    assert record is not None
    assert "uint8" == matrix.main_storage(record)
    assert "int8" == matrix.main_storage(replace(record, resolved=Resolved(storage_dtype="int8")))


def test_the_element_type_is_of_the_main_attention_cache() -> None:
    assert "uint8" == matrix.main_storage(outcome(NEW, kv=(MLA, INDEXER, WINDOW)).record)
    assert "bfloat16" == matrix.main_storage(outcome(NEW, kv=(WINDOW,)).record)


def test_states_have_no_element_type_of_their_own() -> None:
    state = replace(MLA, kind="MambaSpec", role="mixer", dtype="")
    assert matrix.main_storage(outcome(NEW, kv=(state,)).record) is None


def test_the_json_has_the_element_type_and_the_differences() -> None:
    both = [outcome(OLD, "broken", "why"), outcome(NEW, kv=(MLA,))]
    found = [difference.to_json() for difference in versus.differences(both)]
    data = matrix.to_json({}, [OLD, NEW], [], both, found)
    assert "uint8" == data["cells"][1]["resolved"]["storage_dtype"]
    assert [("broken", "ok")] == [(d["old"], d["new"]) for d in data["differences"]]
