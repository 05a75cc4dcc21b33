"""A virtual device's run beside that of a real one: where reality contradicts it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness import change
from harness.change import Change, case_of, facts, verdict
from harness.diff import to_json
from harness.errors import UsageError
from harness.record import STAGES

Data = Mapping[str, Any]

CONTRADICTED, BEYOND, UNCOMPARED = "contradicted", "beyond", "not compared"

KINDS = (CONTRADICTED, BEYOND, UNCOMPARED)
"""What can be told of a cell that was measured. `beyond`: it got as far as the virtual one, and
failed at a stage that a virtual device does not have. `not compared`: one of the two has no result,
which is no agreement."""

NO_RESULT = frozenset({"skipped", "infra", "notrun"})
"""Verdicts without an observation."""


@dataclass(frozen=True)
class Agreement:
    """What came of the comparison. In a `Change` the virtual device's value is the old one."""

    changes: tuple[Change, ...]
    compared: int
    """Cells with a result on both."""
    agreed: int
    """Those of them that are alike in all."""
    unmeasured: int
    """Cells of the virtual devices that no real one has run."""
    pairs: tuple[tuple[str, str], ...]
    """SPECs of the devices that were compared."""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 for contradictions, else 0."""
        return int(any(each.kind == CONTRADICTED for each in self.changes))

    def to_json(self) -> dict[str, Any]:
        """The agreement as plain JSON data."""
        rows = []
        for each in self.changes:
            row = to_json(each)
            rows.append(row | {"virtual": row.pop("old"), "measured": row.pop("new")})
        return {
            "schema": 1,
            "compared": self.compared,
            "agreed": self.agreed,
            "unmeasured": self.unmeasured,
            "devices": [{"virtual": a, "measured": b} for a, b in self.pairs],
            "notes": list(self.notes),
            "changes": rows,
        }


def agree(virtual: Data, measured: Data) -> Agreement:
    """Each cell of a real device in `measured` against that of its virtual device in `virtual`, of
    the same model, backend, dtype and vLLM. UsageError where there is nothing to compare."""
    pairs, notes = _pairs(virtual, measured)
    cells = {(case_of(c), c["device"], c["engine"]): c for c in virtual["cells"]}
    changes: list[Change] = []
    met, compared, agreed = set(), 0, 0
    for real in measured["cells"]:
        if real["device"] not in pairs:
            continue
        case, engine = case_of(real), real["engine"]
        key = (case, pairs[real["device"]], engine)
        guess = cells.get(key)
        met.add(key)
        at = (case, real["device"], engine)
        if guess is None or {guess["verdict"], real["verdict"]} & NO_RESULT:
            was = None if guess is None else verdict(guess)
            why = _no_result(guess, real)
            changes.append(Change(UNCOMPARED, *at, "verdict", was, verdict(real), reason=why))
            continue
        compared += 1
        found = [Change(kind, *at, *rest) for kind, *rest in _contradictions(guess, real)]
        agreed += not found
        changes += found
    if not compared:
        raise UsageError(
            "nothing to compare: no cell of the same model, backend, kv_cache_dtype and vLLM has "
            "a result on both a virtual device and the real one"
        )
    left = sum(key[1] in pairs.values() and key not in met for key in cells)
    changes.sort(key=lambda each: (KINDS.index(each.kind), each.what != "verdict"))
    together = tuple((theirs, ours) for ours, theirs in pairs.items())
    return Agreement(tuple(changes), compared, agreed, left, together, tuple(notes))


def _no_result(virtual: Data | None, real: Data) -> str:
    if virtual is None:
        return "the virtual run has no such cell"
    told = real if real["verdict"] in NO_RESULT else virtual
    return str(told.get("reason") or "")


def _contradictions(virtual: Data, real: Data) -> Iterator[tuple[Any, ...]]:
    """Kind, what, the two values, part and reason."""
    good = virtual["verdict"] == real["verdict"] == "ok"
    before, after = virtual["verdict"], real["verdict"]
    if before != after:
        kind = BEYOND if _beyond(virtual, real) else CONTRADICTED
        told = virtual if after == "ok" else real
        yield kind, "verdict", verdict(virtual), verdict(real), "", str(told.get("reason") or "")
    for (part, what), a, b in change.between(facts(virtual), facts(real), complete=good):
        yield CONTRADICTED, what, a, b, part, ""


def _beyond(virtual: Data, real: Data) -> bool:
    """True where the real device failed later than a virtual one can see."""
    stages = (virtual.get("stage"), real.get("stage"))
    if not all(stage in STAGES for stage in stages):
        return False
    ended = real.get("error") is not None or real.get("end", "finished") != "finished"
    early, late = (STAGES.index(str(stage)) for stage in stages)
    return virtual["verdict"] == "ok" and ended and late > early


def _pairs(virtual: Data, measured: Data) -> tuple[dict[str, str], list[str]]:
    """SPECs of real devices to those of the virtual ones that describe them, and what is to be
    said. The name decides (a virtual device has NVML's), then the compute capability, on which
    layouts depend; a slice is described by a slice of its profile."""
    guesses = [device for device in virtual["devices"] if device["kind"] == "virtual"]
    reals = [device for device in measured["devices"] if device["kind"] != "virtual"]
    if not guesses:
        raise UsageError("the first run has no virtual device: kvmatrix agree VIRTUAL MEASURED")
    if not reals:
        raise UsageError("the second run has no real device: kvmatrix agree VIRTUAL MEASURED")
    versions = [{engine["version"] for engine in run["engines"]} for run in (virtual, measured)]
    if not versions[0] & versions[1]:
        a, b = (", ".join(sorted(side)) for side in versions)
        raise UsageError(f"the runs have no vLLM in common: {a} virtual, {b} measured")
    pairs, notes = {}, []
    for real in reals:
        found = _describes(guesses, real)
        if found is None:
            notes.append(f"{_called(real)} is not compared: no virtual device is of its kind")
            continue
        pairs[real["spec"]] = found["spec"]
        if found["name"] != real["name"]:
            notes.append(f"{_called(real)} is compared with {found['spec']}, of its capability")
    if not pairs:
        raise UsageError("; ".join(notes))
    return pairs, notes


def _describes(guesses: list[Data], real: Data) -> Data | None:
    named = [guess for guess in guesses if guess["name"] == real["name"]]
    capability = real.get("capability")
    alike = [g for g in guesses if capability is not None and g.get("capability") == capability]
    # Slices differ from the whole in memory and multiprocessors, not in layouts.
    same = [guess for guess in alike if guess.get("mig") == real.get("mig")]
    return next(iter([*named, *same, *alike]), None)


def _called(device: Data) -> str:
    return f"{device['spec']} ({device['name']})"
