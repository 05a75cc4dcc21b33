"""What Test Engine is told of a cell."""

from __future__ import annotations

from harness.testengine import tags
from harness.verdict import Judgement


def test_a_known_failure_keeps_its_verdict() -> None:
    """Test Engine itself shows it as skipped, as it does a cell that cannot run."""
    known = tags(Judgement("broken", "why", known="https://github.com/vllm-project/vllm/issues/1"))
    assert {"kvmatrix.verdict": "broken", "kvmatrix.known": "yes", "kvmatrix.stale": "no"} == known
    skipped = tags(Judgement("skipped", "too small"))
    assert {"kvmatrix.verdict": "skipped", "kvmatrix.known": "no", "kvmatrix.stale": "no"} == (
        skipped
    )


def test_every_tag_is_text() -> None:
    """The collector takes nothing else."""
    assert all(isinstance(value, str) for value in tags(Judgement("ok", "")).values())
