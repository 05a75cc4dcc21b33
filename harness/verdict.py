"""Verdicts: a record against an expectation. Pure."""

from __future__ import annotations

from dataclasses import dataclass

VERDICTS = (
    "ok",
    "rejected",
    "broken",
    "unguarded",
    "unclean",
    "mismatch",
    "crashed",
    "timeout",
    "oom",
    "infra",
    "skipped",
    "notrun",
)
"""Every verdict there is, in the order in which summaries list them."""

PASSING = frozenset({"ok", "rejected"})


@dataclass(frozen=True)
class Judgement:
    """What a record means."""

    verdict: str
    reason: str
    """One line for people: why. Empty only where there is nothing to say."""
    remarks: tuple[str, ...] = ()
    """`overdeclared`, `coerced`: they fail nothing."""
    vouched: tuple[str, ...] = ()
    """Which expectations confirmed an `ok`: of `explicit`, `oracle`, `contract`."""
    known: str | None = None
    """The bug link of the known failure that this verdict fulfils."""

    @property
    def passes(self) -> bool:
        """True where pytest passes the cell: verdict as it should be, or a known failure."""
        return self.verdict in PASSING or self.known is not None
