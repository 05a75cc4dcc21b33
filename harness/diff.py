"""Two runs, the older and the newer: what broke, was fixed, changed, appeared, vanished. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import change
from harness.case import Case
from harness.change import Change, Fact, Value, capacity, case_of, facts, state, verdict
from harness.errors import EXIT_INFRA

Data = Mapping[str, Any]
"""A matrix.json, or a part of one."""

Key = tuple[Case, str, str]
"""Case, device SPEC and vLLM version of a cell."""

NEW, LOST, FIXED = "new failure", "no result", "fixed"
STILL, CHANGED, APPEARED, VANISHED = "still failing", "changed", "appeared", "vanished"

KINDS = (NEW, LOST, FIXED, STILL, CHANGED, APPEARED, VANISHED)
"""What can be told of a cell, in the order in which it is told. `changed` is news of a cell that
fails in neither run; a cell that the newer run lacks has `vanished`, and counts as nothing else."""

JITTER = 0.02
"""Share by which a real device's capacity may differ between runs and be the same: vLLM measures
the memory that is free, and that depends on the driver and on what else runs."""


@dataclass(frozen=True)
class Diff:
    """The differences between two runs."""

    changes: tuple[Change, ...]
    compared: int
    """Cells that both have."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Devices (SPECs) and engines (`vLLM <version>`) that were compared though not called alike."""
    notes: tuple[str, ...] = ()
    """What could not be compared."""

    def counts(self) -> dict[str, int]:
        """How many cells of each kind."""
        return {
            kind: len({(c.case, c.device, c.engine) for c in self.changes if c.kind == kind})
            for kind in KINDS
        }

    @property
    def exit_code(self) -> int:
        """1 for new failures, 75 where the host alone gave no result, else 0."""
        kinds = {each.kind for each in self.changes}
        return 1 if NEW in kinds else EXIT_INFRA if LOST in kinds else 0

    def to_json(self) -> dict[str, Any]:
        """The differences as plain JSON data."""
        return {
            "schema": 1,
            "compared": self.compared,
            "counts": self.counts(),
            "renamed": [list(pair) for pair in self.renamed],
            "notes": list(self.notes),
            "changes": [to_json(each) for each in self.changes],
        }


def to_json(found: Change) -> dict[str, Any]:
    """One entry of `changes`."""
    return {
        "kind": found.kind,
        "id": found.case.id,
        "device": found.device,
        "engine": found.engine,
        "what": found.what,
        "part": found.part or None,
        "old": list(found.old) if isinstance(found.old, tuple) else found.old,
        "new": list(found.new) if isinstance(found.new, tuple) else found.new,
        "reason": found.reason,
    }


def diff(old: Data, new: Data, unselected: Collection[Key] | None = None) -> Diff:
    """What is news in `new` to one who knows `old`.

    With `unselected`, the newer run is one in which these cells were planned and not selected, and
    only the devices and engines asked for: what it left out has not vanished.
    """
    devices, engines = pairs(old, new)
    news = {_key(cell): cell for cell in new["cells"]}
    kinds = {device["spec"]: device["kind"] for device in new["devices"]}
    changes: list[Change] = []
    met, notes = set(), dict[str, None]()
    for cell in old["cells"]:
        case, device, engine = _key(cell)
        key = (case, devices.get(device, ""), engines.get(engine, ""))
        if (after := news.get(key)) is not None:
            met.add(key)
            note = _asked(cell, after)
            notes |= {note: None} if note else {}
            changes += _of_both(key, cell, after, JITTER if kinds[key[1]] != "virtual" else 0)
        elif unselected is None or (all(key[1:]) and key not in unselected):
            at = (case, key[1] or device, key[2] or engine)
            changes.append(Change(VANISHED, *at, "verdict", verdict(cell), None))
    for key, cell in news.items():
        if key not in met:
            kind = {"failing": NEW, "lost": LOST}.get(state(cell), APPEARED)
            reason = "" if kind == APPEARED else _reason(cell)
            changes.append(Change(kind, *key, "verdict", None, verdict(cell), reason=reason))
    order = {kind: place for place, kind in enumerate(KINDS)}
    changes.sort(key=lambda each: (order[each.kind], each.what != "verdict"))
    renamed = [(a, b) for a, b in devices.items() if a != b]
    renamed += [(f"vLLM {a}", f"vLLM {b}") for a, b in engines.items() if a != b]
    return Diff(tuple(changes), len(met), tuple(renamed), tuple(notes))


def _key(cell: Data) -> Key:
    return case_of(cell), cell["device"], cell["engine"]


# ---- Devices and engines -------------------------------------------------------------------------

_DEVICE = ("kind", "name", "capability", "mig")
_ENGINE = ("platform",)
"""What is the same of a device that is called otherwise, such as another GPU of the same name, and
of another version of an engine."""


def pairs(old: Data, new: Data) -> tuple[dict[str, str], dict[str, str]]:
    """Devices (SPECs) and engines (versions) of the older run to those of the newer that they are
    compared with; those that have none are not there."""
    return (
        _pairs(old["devices"], new["devices"], lambda d: d["spec"], _DEVICE),
        _pairs(old["engines"], new["engines"], lambda e: e["version"], _ENGINE),
    )


def _pairs(
    olds: Sequence[Data], news: Sequence[Data], name: Callable[[Data], str], same: Sequence[str]
) -> dict[str, str]:
    """Names in the older run to those in the newer one: those that are called alike, then those of
    which each run has one left that is of the same kind."""

    def nature(one: Data) -> str:
        return repr([one.get(field) for field in same])

    here = {name(one) for one in news}
    found = {name(one): name(one) for one in olds if name(one) in here}
    left_old = [one for one in olds if name(one) not in found]
    left_new = [one for one in news if name(one) not in found]
    for one in left_old:
        alike = [each for each in left_old if nature(each) == nature(one)]
        others = [each for each in left_new if nature(each) == nature(one)]
        if len(alike) == len(others) == 1:
            found[name(one)] = name(others[0])
    return found


# ---- One cell ------------------------------------------------------------------------------------


def _of_both(key: Key, old: Data, new: Data, jitter: float) -> Iterator[Change]:
    before, after = verdict(old), verdict(new)
    kind = _kind(old, new)
    if kind != CHANGED or before != after:
        told = old if kind == FIXED else new
        reason = _reason(told) if kind != CHANGED or after != "ok" else ""
        yield Change(kind, *key, "verdict", before, after, reason=reason)
    for (part, what), a, b in _observed(old, new, jitter):
        yield Change(CHANGED, *key, what, a, b, part)


def _kind(old: Data, new: Data) -> str:
    """What became of a cell. Where there was no result nothing is known, so a failure is new; and
    no result is neither a pass nor a fix."""
    before, after = state(old), state(new)
    bad = before in ("failing", "lost")
    if after == "failing":
        unknown = before == "lost" or (old["verdict"] == "notrun" != new["verdict"])
        return STILL if bad and not unknown else NEW
    if after == "lost":
        return STILL if before == "lost" else LOST
    return FIXED if after == "passing" and (bad or before == "known") else CHANGED


def _observed(old: Data, new: Data, jitter: float) -> Iterator[tuple[Fact, Value, Value]]:
    complete = old["verdict"] == new["verdict"] == "ok" and old.get("stage") == new.get("stage")
    yield from change.between(facts(old, "layers"), facts(new, "layers"), complete=complete)
    if _asked(old, new):
        return
    for fact, a, b in change.between(capacity(old), capacity(new), complete=complete):
        near = isinstance(a, int) and isinstance(b, int) and abs(a - b) <= jitter * max(a, b)
        if not near or fact[1] == "kv_bytes_per_token":
            yield fact, a, b


def _asked(old: Data, new: Data) -> str:
    """Why the capacities of two cells are no matter of comparison; empty where they are."""
    sides = [cell.get("capacity") or {} for cell in (old, new)]
    if not all(sides):
        return ""
    for name in ("max_model_len", "gpu_memory_utilization"):
        a, b = (side.get(name) for side in sides)
        if a != b:
            return f"capacity is not compared where {name} differs ({a}, now {b})"
    return ""


def _reason(cell: Data) -> str:
    return str(cell.get("stale") or cell.get("reason") or "")
