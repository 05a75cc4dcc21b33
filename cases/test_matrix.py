"""The matrix: one test per cell. What it expects lies beside it; what it does, in `harness`."""

from __future__ import annotations

from harness.matrix import Outcome
from harness.plugin import finish


def test_cell(outcome: Outcome) -> None:
    """The KV cache became what it must be, or was refused clearly."""
    finish(outcome)
