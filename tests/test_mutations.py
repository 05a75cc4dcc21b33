"""What makes a cell fail: one byte in the oracle, another dtype expected, a lost write-back.

Built from the record that vLLM 0.33.0 gave for dsv4-default-unset on a virtual H200.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from cases.dsv4 import EXPLICIT
from harness import layout, plan
from harness.expect import Expectation, find
from harness.layouts import deepseek_v4
from harness.record import Record, loads
from harness.verdict import judge

CONFIG = next(m for m in plan.models() if m.key == "dsv4").config
MEASURED = Path(__file__).parent / "resources" / "dsv4-default-unset.json"


@pytest.fixture
def record() -> Record:
    return loads(MEASURED.read_text())


def oracle(record: Record) -> list[str]:
    return layout.compare(CONFIG, record.kv, record.resolved, record.capability)


def verdict(record: Record) -> str:
    explicit = find(EXPLICIT, record.id, record.capability)
    return judge(record, Expectation(explicit), oracle).verdict


def test_the_record_as_it_is_is_ok(record: Record) -> None:
    assert "ok" == verdict(record)


@pytest.mark.parametrize("name", ["_SCALE_FIELD", "_SWA_BLOCK", "_INDEXER_VALUES_PER_SCALE"])
def test_an_oracle_one_off_makes_the_cell_fail(
    record: Record, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without the explicit case, so that the oracle alone is heard."""
    assert "ok" == judge(record, Expectation(), oracle).verdict
    before = getattr(deepseek_v4, name)
    wrong = before // 2 if "SCALE" in name and before > 8 else before + 1
    monkeypatch.setattr(deepseek_v4, name, wrong)
    assert "mismatch" == judge(record, Expectation(), oracle).verdict


def test_another_dtype_expected_makes_the_cell_fail(record: Record) -> None:
    explicit = find(EXPLICIT, record.id, record.capability)
    assert explicit is not None
    other = Expectation(dataclasses.replace(explicit, kv_cache_dtype="fp8"))
    assert "mismatch" == judge(record, other, oracle).verdict


def swa_too_small(record: Record) -> Record:
    """What vLLM does where nothing is written back: a plain fp8 page for the window's cache."""
    kv = tuple(
        dataclasses.replace(one, page_size_bytes=64 * 512, content_bytes=64 * 512)
        if one.role == "attn.swa_cache"
        else one
        for one in record.kv
    )
    return dataclasses.replace(record, kv=kv)


def not_written_back(record: Record) -> Record:
    resolved = dataclasses.replace(record.resolved, cache_config="auto")
    return dataclasses.replace(record, resolved=resolved)


@pytest.mark.parametrize("broken", [not_written_back, swa_too_small])
def test_a_lost_write_back_makes_the_cell_fail(
    record: Record, broken: Callable[[Record], Record]
) -> None:
    assert "mismatch" == verdict(broken(record))
