"""Several parts of a run made one: each cell once, whatever the order of the parts. Pure.

Where parts tell different things of one cell, the worst is kept: a merge hides no failure.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from harness.case import DEFAULT, UNSET, Case, slug
from harness.change import between, case_of, facts, state, verdict
from harness.matrix import SCHEMA
from harness.part import Part
from harness.record import Record, dumps
from harness.verdict import PASSING, VERDICTS
from harness.versus import WHATS

Data = Mapping[str, Any]
Key = tuple[Case, str, str]
"""Case, device SPEC and vLLM version of a cell."""

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
    engines, clash = _distinct(engines, "version", ("platform", "commit", "torch"), "vLLM ")
    devices, others = _distinct(devices, "spec", ("kind", "name", "capability", "mig"), "device ")
    order = _order(engines, devices)
    duplicates: list[dict[str, Any]] = []
    conflicts: list[dict[str, Any]] = []
    kept: list[tuple[Key, _Entry]] = []
    for key in sorted(entries, key=order):
        best = min(entries[key], key=_badness)
        kept.append((key, best))
        if len(entries[key]) > 1:
            what = _disagreement(entries[key])
            (conflicts if what else duplicates).append(_told(key, entries[key], what))
    ids = _ids([key for key, _ in kept], engines, devices)
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
        "run": {**_run(matrices, cells), "merged": {"parts": sorted({*own}), **found}},
        "engines": engines,
        "devices": devices,
        "differences": _differences(matrices),
        "cells": cells,
    }
    if len(matrices) == len(parts) == 1 and "baseline" in matrices[0]:
        data["baseline"] = matrices[0]["baseline"]
    records = tuple(entry.record for _, entry in kept if entry.record is not None)
    return Merged(data, records)


def _made_of(part: Part) -> Sequence[str]:
    before = (part.matrix or {}).get("run", {}).get("merged") or {}
    return before.get("parts") or [part.name]


def _union(found: list[Any], earlier: Sequence[Data], name: str) -> list[Any]:
    """Those of now and of earlier merges, each once, in an order that depends on nothing else."""
    every = [*found, *(each for before in earlier for each in before.get(name, ()))]
    return [json.loads(text) for text in sorted({_text(each) for each in every})]


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True)


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
    return rank, -VERDICTS.index(cell["verdict"]), _text(plain), _record_text(entry.record)


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


# ---- The run -------------------------------------------------------------------------------------


def _run(matrices: Sequence[Data], cells: Sequence[Data]) -> dict[str, Any]:
    runs = [matrix["run"] for matrix in matrices]
    found: dict[str, Any] = dict(runs[0]) if len(runs) == 1 else {}
    started = [run["started"] for run in runs if run.get("started")]
    depths: dict[str, set[str]] = {}
    for run in runs:
        for device, depth in (run.get("depth") or {}).items():
            depths.setdefault(device, set()).update(depth.split("+"))
    found["started"] = min(started, default=None)
    # Of all parts together: what the run cost, not how long it took.
    found["seconds"] = round(math.fsum(run.get("seconds") or 0 for run in runs), 1)
    found["depth"] = {device: "+".join(sorted(names)) for device, names in sorted(depths.items())}
    found["counts"] = counts(cells)
    found["vouched"] = dict(
        sorted(
            Counter(
                "+".join(cell.get("vouched") or ()) or "nobody"
                for cell in cells
                if cell["verdict"] == "ok"
            ).items(),
            key=lambda item: (-item[1], item[0]),
        )
    )
    return found


def counts(cells: Iterable[Data]) -> dict[str, int]:
    """How many of each verdict, in their order, `known` counted apart from it."""
    found = Counter("known" if cell.get("known") else str(cell["verdict"]) for cell in cells)
    return {name: found[name] for name in (*VERDICTS, "known") if found[name]}


def _differences(matrices: Sequence[Data]) -> list[Any]:
    every = {_text(each): each for matrix in matrices for each in matrix.get("differences", ())}
    return sorted(every.values(), key=_difference)


def _difference(each: Data) -> tuple[int, bool, bool, str]:
    """The most important first, as `versus` has them."""
    what, old, new = each.get("what"), each.get("old"), each.get("new")
    place = WHATS.index(what) if what in WHATS else len(WHATS)
    breaks = what == "verdict" and old in PASSING and new not in PASSING
    fixes = what == "verdict" and old not in PASSING and new in PASSING
    return place, not breaks, not fixes, _text(each)


def _distinct(
    found: Iterable[dict[str, Any]], name: str, same: Sequence[str], kind: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Each engine, or device, once, and what differs among those of one name."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        groups.setdefault(each[name], []).append(each)
    faults = []
    for title, group in groups.items():
        for field in same:
            values = sorted({_text(each[field]) for each in group if each.get(field) is not None})
            if len(values) > 1:
                faults.append(f"{kind}{title}: parts differ in its {field}: {', '.join(values)}")
    rank = _version if name == "version" else lambda text: (0, text)
    # The fullest tells most: of an engine of which a record alone tells, little is known.
    chosen = [
        max(groups[title], key=lambda each: (len(_text(each)), _text(each)))
        for title in sorted(groups, key=rank)
    ]
    return chosen, faults


def _version(text: str) -> tuple[int, Any]:
    try:
        return 0, (Version(text), text)
    except InvalidVersion:
        return 1, text


def _order(engines: Sequence[Data], devices: Sequence[Data]) -> Callable[[Key], Any]:
    """Sorts cells as a run plans them, as far as its matrix.json says how."""
    versions = {engine["version"]: place for place, engine in enumerate(engines)}
    specs = {device["spec"]: place for place, device in enumerate(devices)}
    names = {
        engine["version"]: (
            _places((DEFAULT, *engine.get("backends", ()))),
            _places((UNSET, *engine.get("kv_cache_dtypes", ()))),
        )
        for engine in engines
    }

    def order(key: Key) -> Any:
        case, device, engine = key
        backends, dtypes = names[engine]
        return (
            *(versions[engine], specs[device], case.model),
            *(case.block_size, case.tensor_parallel_size, case.model_runner),
            *(backends.get(case.backend, len(backends)), case.backend),
            *(dtypes.get(case.kv_cache_dtype, len(dtypes)), case.kv_cache_dtype),
        )

    return order


def _places(names: Iterable[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _ids(keys: Sequence[Key], engines: Sequence[Data], devices: Sequence[Data]) -> Iterator[str]:
    """Ids as the plan gives them: device and engine are named where there are several."""
    called = {device["spec"]: _device_id(device) for device in devices}
    often = Counter(called.values())
    for case, device, engine in keys:
        short = called[device]
        parts = [case.id]
        if len(devices) > 1:
            parts.append(short if often[short] == 1 else slug(device))
        if len(engines) > 1:
            parts.append(slug(engine))
        yield "-".join(parts)


def _device_id(device: Data) -> str:
    return device.get("label") or slug(device["spec"] if not device.get("uuid") else device["name"])
