"""Two releases in one run: kept records of both, judged and compared as the run itself does it.

`resources/two-engines.jsonl` is what vLLM 0.27.1 and 0.33.0 did on `virtual:h200`, less memory,
times and block counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import explain, sections, versus
from harness.matrix import Outcome
from harness.view import Screen

KEPT = Path(__file__).parent / "resources" / "two-engines.jsonl"
RELEASES = ("0.27.1", "0.33.0")
CASES = ("qwen3-next-default-unset", "dsv4-default-fp8", "dsv4-default-unset")


def outcomes(*cases: str) -> list[Outcome]:
    """As a run with both engines has them, one engine after the other."""
    return [
        explain.read(KEPT, case, engines=[release]).outcome
        for release in RELEASES
        for case in cases
    ]


def test_47174_the_founding_bug_is_broken_in_one_and_ok_in_the_other() -> None:
    old, new = outcomes("dsv4-default-unset")
    assert ("broken", "ok") == (old.judgement.verdict, new.judgement.verdict)
    assert "only supports fp8 kv-cache, got auto" in old.judgement.reason


def test_what_is_the_same_in_both_is_no_difference() -> None:
    assert () == versus.differences(outcomes("dsv4-default-fp8"))


def test_the_founding_fix_is_told_first_then_the_states_that_blocks_now_end_with() -> None:
    """Qwen3-Next has states of 1097728 B and tokens of 2048 B of attention: 34 blocks of 16 tokens
    hold one; 0.33.0 caches prefixes, so it is 9 of 64, where a state can be had."""
    found = versus.differences(outcomes(*CASES))
    [lines] = sections.differences(Screen(100, False, True, False), found)
    assert [
        "Differences between vLLM 0.27.1 and 0.33.0: 2, in 2 cells",
        "  broken -> ok: dsv4-default-unset",
        f"  page_size_bytes {34 * 16 * 2048} -> {9 * 64 * 2048}: qwen3-next-default-unset",
    ] == lines


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("release", RELEASES)
def test_the_oracle_knows_the_pages_of_both(case: str, release: str) -> None:
    """Only what never came to a page has no word from it."""
    outcome = explain.read(KEPT, case, engines=[release]).outcome
    record = outcome.record
    assert record is not None
    assert ("oracle" in outcome.judgement.vouched) == (record.error is None)
