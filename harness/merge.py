"""Several parts of a run made one: each cell once, whatever the order of the parts. Pure.

Where parts tell different things of one cell, the worst is kept: a merge hides no failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import joined
from harness.change import between, case_of, facts, state, verdict
from harness.joined import Data, Key
from harness.matrix import SCHEMA
from harness.part import Part
from harness.record import Record, dumps
from harness.verdict import VERDICTS

Judge = Callable[[Record], "tuple[dict[str, Any], dict[str, Any], dict[str, Any]]"]
"""A record judged as of now: its cell, engine and device, as matrix.json has them. ValueError says
why it cannot be."""

_STATES = ("failing", "known", "passing", "skipped", "lost")
"""What is kept of a cell that parts disagree on: the first of these. A result of the product comes
before none at all, for a shard may have been tried again on another host."""


@dataclass(frozen=True)
class Merged:
    """The whole."""

    data: dict[str, Any]
    """As matrix.json; what was found while merging is in `run.merged`."""
    records: tuple[Record, ...]
    """In the order of the cells; none for a cell that no child ran."""

    @property
    def clean(self) -> bool:
        """True where nothing was lost and nothing contradicts."""
        found = self.data["run"]["merged"]
        return not found["conflicts"] and not found["faults"]


@dataclass(frozen=True)
class _Entry:
    """A cell as one part has it."""

    part: str
    cell: dict[str, Any]
    record: Record | None


def merge(parts: Iterable[Part], judge: Judge) -> Merged:
    """The parts as one run. `judge` is asked for records whose part holds no verdict on them."""
    parts = sorted(parts, key=lambda part: part.name)
    engines: list[dict[str, Any]] = []
    devices: list[dict[str, Any]] = []
    entries: dict[Key, list[_Entry]] = {}
    faults = [fault for part in parts for fault in part.faults]
    for part in parts:
        if part.matrix is not None:
            engines += part.matrix["engines"]
            devices += part.matrix["devices"]
        keyed, more = _entries(part, judge, engines, devices)
        faults += more
        for key, entry in keyed:
            entries.setdefault(key, []).append(entry)
    engines, clash = joined.distinct(engines, "version", ("platform", "commit", "torch"), "vLLM ")
    devices, others = joined.distinct(
        devices, "spec", ("kind", "name", "capability", "mig"), "device "
    )
    order = joined.order_of(engines, devices)
    duplicates: list[dict[str, Any]] = []
    conflicts: list[dict[str, Any]] = []
    kept: list[tuple[Key, _Entry]] = []
    for key in sorted(entries, key=order):
        best = min(entries[key], key=_badness)
        kept.append((key, best))
        if len(entries[key]) > 1:
            what = _disagreement(entries[key])
            (conflicts if what else duplicates).append(_told(key, entries[key], what))
    ids = joined.ids_of([key for key, _ in kept], engines, devices)
    cells = [{**entry.cell, "id": name} for (_, entry), name in zip(kept, ids, strict=True)]
    matrices = [part.matrix for part in parts if part.matrix is not None]
    earlier = [matrix["run"].get("merged") or {} for matrix in matrices]
    found = {
        "duplicates": _union(duplicates, earlier, "duplicates"),
        "conflicts": _union(conflicts, earlier, "conflicts"),
        "faults": _union([*faults, *clash, *others], earlier, "faults"),
    }
    # What is merged again is made of what it was first made of.
    own = [name for part in parts for name in _made_of(part)]
    data = {
        "schema": SCHEMA,
        "run": {**joined.run(matrices, cells), "merged": {"parts": sorted({*own}), **found}},
        "engines": engines,
        "devices": devices,
        "differences": joined.differences(matrices),
        "cells": cells,
    }
    if len(matrices) == len(parts) == 1:
        # What earlier runs told of it is still so.
        told = {name: matrices[0].get(name) for name in ("baseline", "history")}
        data |= {name: value for name, value in told.items() if value is not None}
    records = tuple(entry.record for _, entry in kept if entry.record is not None)
    return Merged(data, records)


def lacking(parts: Iterable[Part]) -> list[str]:
    """A line for each run of which some shards are among the parts and others are not. Shards are
    of one run where they ran on the same kinds of devices with the same engines."""
    runs: dict[str, dict[int, int]] = {}
    for part in parts:
        matrix = part.matrix or {"run": {}}
        shard = matrix["run"].get("shard") or {}
        if isinstance(shard.get("count"), int) and isinstance(shard.get("index"), int):
            kinds = sorted({(d["kind"], d["name"]) for d in matrix["devices"]})
            engines = sorted(engine["version"] for engine in matrix["engines"])
            seen = runs.setdefault(joined.text([kinds, engines]), {})
            seen[shard["index"]] = shard["count"]
    found = []
    for seen in runs.values():
        count = max(seen.values())
        gone = [str(index) for index in range(1, count + 1) if index not in seen]
        if gone:
            found.append(f"shard {', '.join(gone)} of {count} is not among the parts")
    return found


def _made_of(part: Part) -> Sequence[str]:
    before = (part.matrix or {}).get("run", {}).get("merged") or {}
    return before.get("parts") or [part.name]


def _union(found: list[Any], earlier: Sequence[Data], name: str) -> list[Any]:
    """Those of now and of earlier merges, each once, in an order that depends on nothing else."""
    every = [*found, *(each for before in earlier for each in before.get(name, ()))]
    return [json.loads(text) for text in sorted({joined.text(each) for each in every})]


# ---- The cells of a part -------------------------------------------------------------------------


def _entries(
    part: Part, judge: Judge, engines: list[dict[str, Any]], devices: list[dict[str, Any]]
) -> tuple[list[tuple[Key, _Entry]], list[str]]:
    """Each cell of a part with its record, and what is wrong with them. Engines and devices of
    which only records tell are added to the lists."""
    cells = {_key(cell): cell for cell in (part.matrix or {}).get("cells", ())}
    records: dict[Key, Record] = {}
    faults = []
    for record in part.records:
        key = _home(record, part.matrix, cells)
        if key in records and records[key] != record:
            name = f"{record.id} on {record.device} with vLLM {record.engine}"
            faults.append(f"{part.name}: several records of {name}, the last one counts")
        records[key] = record
    judged = 0
    for key, record in records.items():
        if key in cells and _same(cells[key], record):
            continue
        try:
            cell, engine, device = judge(record)
        except ValueError as error:
            name = f"{record.id} on {record.device} with vLLM {record.engine}"
            faults.append(f"{part.name}: the record of {name} cannot be judged: {error}")
            continue
        judged += 1
        if key not in cells:
            engines += [] if any(e["version"] == record.engine for e in engines) else [engine]
            devices += [] if any(d["spec"] == record.device for d in devices) else [device]
        asked = {name: cells[key][name] for name in ("id", "device") if key in cells}
        cells[key] = {**cell, **asked}
    if judged:
        faults.append(f"{part.name}: {judged} records had no verdict, and are judged as of now")
    return [(key, _Entry(part.name, cell, records.get(key))) for key, cell in cells.items()], faults


def _key(cell: Data) -> Key:
    return case_of(cell), cell["device"], cell["engine"]


def _home(record: Record, matrix: Data | None, cells: Mapping[Key, Data]) -> Key:
    """The key of a record's cell. Of several devices that are alike, the cell names the first, the
    record the one that ran it."""
    key = _key(_head(record))
    if key in cells or matrix is None:
        return key
    kin = [
        device["spec"]
        for device in matrix["devices"]
        if device["kind"] == record.device_kind
        and device.get("capability") == (record.capability and list(record.capability))
        and (key[0], device["spec"], key[2]) in cells
    ]
    return (key[0], kin[0], key[2]) if len(kin) == 1 else key


def _head(record: Record) -> dict[str, Any]:
    """What of a record says which cell it is of."""
    names = ("id", "model", "backend", "kv_cache_dtype", "block_size", "tensor_parallel_size")
    return {name: getattr(record, name) for name in (*names, "device", "engine")}


def _same(cell: Data, record: Record) -> bool:
    """True where the cell's verdict is on this record, and not on one of an earlier run."""
    if cell["verdict"] in ("notrun", "skipped"):
        return False
    mine = {name: getattr(record, name) for name in ("stage", "end", "seconds")}
    return all(cell.get(name, value) == value for name, value in mine.items())


# ---- Several parts that have one cell ------------------------------------------------------------


def _badness(entry: _Entry) -> tuple[int, int, str, str]:
    """Sorts what is kept first; the text decides among those that are alike, so that no order of
    parts matters."""
    cell = entry.cell
    rank = _STATES.index(state(cell)) if cell["verdict"] != "notrun" else len(_STATES)
    plain = {name: value for name, value in cell.items() if name != "id"}
    return rank, -VERDICTS.index(cell["verdict"]), joined.text(plain), _record_text(entry.record)


def _record_text(record: Record | None) -> str:
    return "" if record is None else dumps(record)


def _disagreement(entries: Sequence[_Entry]) -> str:
    """In what the parts contradict each other; empty where they do not: no result contradicts
    nothing."""
    told = [e.cell for e in entries if e.cell["verdict"] not in ("notrun", "infra")]
    for one in told[1:]:
        if verdict(one) != verdict(told[0]):
            return "verdict"
        for (part, what), _, _ in between(facts(told[0]), facts(one), complete=True):
            return f"{what} of {part}" if part else what
    return ""


def _told(key: Key, entries: Sequence[_Entry], what: str) -> dict[str, Any]:
    case, device, engine = key
    parts = [[e.part, verdict(e.cell)] for e in sorted(entries, key=lambda e: e.part)]
    found = {"id": case.id, "device": device, "engine": engine, "parts": parts}
    return {**found, "what": what} if what else found
