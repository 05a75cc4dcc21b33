"""Two engines in one run: where the same case on the same device came out differently. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.case import DEFAULT, UNSET, Case
from harness.device import Device
from harness.facts import EngineFacts
from harness.matrix import Outcome, main_storage
from harness.plan import Axes, cases
from harness.verdict import PASSING

WHATS = ("verdict", "runs", "selected", "kv_cache_dtype", "storage_dtype", "page_size_bytes")
"""What can differ, in the order in which it is told. `runs`: one engine alone has the cell at all,
or can start it."""

_NEVER_RAN = frozenset({"notrun", "infra"})
"""Verdicts that say nothing of the engine."""

Value = str | tuple[int, ...] | None


@dataclass(frozen=True)
class Difference:
    """One thing in which two engines differ on one cell."""

    case: Case
    device: Device
    old_engine: str
    """vLLM's version; the engine that was named first."""
    new_engine: str
    what: str
    """One of `WHATS`."""
    old: Value
    """None, for `runs`, where the cell cannot run, or is none at all."""
    new: Value
    reason: str = ""
    """Why it failed, was refused or is no cell of one engine; empty where nothing explains it."""

    @property
    def breaks(self) -> bool:
        """True where what passed before now fails."""
        return self.what == "verdict" and self.old in PASSING and self.new not in PASSING

    @property
    def fixes(self) -> bool:
        """True where what failed before now passes."""
        return self.what == "verdict" and self.old not in PASSING and self.new in PASSING

    @property
    def rank(self) -> tuple[int, bool, bool, bool]:
        """Sorts the most important first: what broke, what was fixed; of each what was or is ok."""
        ok = self.what == "verdict" and "ok" in (self.old, self.new)
        return (WHATS.index(self.what), not self.breaks, not self.fixes, not ok)

    def to_json(self) -> dict[str, Any]:
        """One entry of `differences` in matrix.json."""
        old, new = (list(v) if isinstance(v, tuple) else v for v in (self.old, self.new))
        return {
            "id": self.case.id,
            "device": self.device.spec,
            "from": self.old_engine,
            "to": self.new_engine,
            "what": self.what,
            "old": old,
            "new": new,
            "reason": self.reason,
        }


def differences(outcomes: Iterable[Outcome]) -> tuple[Difference, ...]:
    """Where each engine differs from the one named before it, on the devices that both serve; the
    most important first."""
    places: dict[str, dict[EngineFacts, dict[Case, Outcome]]] = {}
    for outcome in outcomes:
        cell = outcome.cell
        engines = places.setdefault(cell.device.spec, {})
        engines.setdefault(cell.engine, {})[cell.case] = outcome
    found = [
        difference
        for engines in places.values()
        for olds, news in itertools.pairwise(engines.items())
        for difference in _between(*olds, *news)
    ]
    return tuple(sorted(found, key=lambda d: d.rank))


def _between(
    old_engine: EngineFacts,
    olds: Mapping[Case, Outcome],
    new_engine: EngineFacts,
    news: Mapping[Case, Outcome],
) -> Iterator[Difference]:
    versions = (old_engine.version, new_engine.version)
    known = _Known()
    for case in dict.fromkeys((*olds, *news)):
        old, new = olds.get(case), news.get(case)
        one = old or new
        assert one is not None
        if old is not None and new is not None:
            facts = _facts(old, new)
        elif (why := known.lacking(one, new_engine if new is None else old_engine)) is not None:
            facts = _alone(old, new, why)
        else:
            continue  # the other engine has it, too: it was not selected
        for what, before, after, reason in facts:
            yield Difference(case, one.cell.device, *versions, what, before, after, reason)


_Fact = tuple[str, Value, Value, str]


def _facts(old: Outcome, new: Outcome) -> Iterator[_Fact]:
    verdicts = [old.judgement.verdict, new.judgement.verdict]
    if _NEVER_RAN & {*verdicts}:
        return
    if "skipped" in verdicts:
        lacking = old if verdicts[0] == "skipped" else new
        yield from _alone(
            None if verdicts[0] == "skipped" else old,
            None if verdicts[1] == "skipped" else new,
            lacking.judgement.reason,
        )
        return
    if verdicts[0] != verdicts[1]:
        told = old if verdicts[1] == "ok" else new
        yield "verdict", verdicts[0], verdicts[1], told.judgement.reason
    if old.record is None or new.record is None:
        return
    before, after = _observed(old), _observed(new)
    for what, value in before.items():
        # What a failed start did not get to is no difference beside its verdict.
        if value and after[what] and value != after[what]:
            yield what, value, after[what], ""


def _observed(outcome: Outcome) -> dict[str, Value]:
    record = outcome.record
    assert record is not None
    return {
        "selected": record.resolved.selected,
        "kv_cache_dtype": record.resolved.kv_cache_dtype,
        "storage_dtype": main_storage(record),
        "page_size_bytes": tuple(sorted({kv.page_size_bytes for kv in record.kv})),
    }


def _alone(old: Outcome | None, new: Outcome | None, why: str) -> Iterator[_Fact]:
    """The fact that one of the two alone ran."""
    before, after = (None if one is None else one.judgement.verdict for one in (old, new))
    if {before, after} - {None, "skipped", *_NEVER_RAN}:
        yield "runs", before, after, why


class _Known:
    """Which cases an engine has, whatever was selected."""

    def __init__(self) -> None:
        self._cases: dict[tuple[str, EngineFacts, Axes], frozenset[Case]] = {}

    def lacking(self, outcome: Outcome, engine: EngineFacts) -> str | None:
        """Why `engine` has no such case; None where it has."""
        model, case = outcome.cell.model, outcome.cell.case
        axes = Axes((case.block_size,), (case.tensor_parallel_size,), (case.model_runner,))
        key = (model.key, engine, axes)
        if key not in self._cases:
            self._cases[key] = frozenset(cases(model, engine, axes))
        if case in self._cases[key]:
            return None
        no = f"vLLM {engine.version} has no"
        if engine.architectures and model.architecture not in engine.architectures:
            return f"{no} {model.architecture}"
        if case.kv_cache_dtype not in (UNSET, *engine.kv_cache_dtypes):
            return f"{no} such kv_cache_dtype"
        own = engine.model_backends.get(model.architecture, ())
        if case.backend not in (DEFAULT, *engine.backends, *own):
            return f"{no} such backend"
        return f"vLLM {engine.version} does not offer this model this backend"
