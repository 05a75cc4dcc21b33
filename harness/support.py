"""What each release makes of each model, kv_cache_dtype and compute capability. Pure.

What supports it: a release whose run has a cell of this model, dtype and capability, with whatever
backend, that is `ok`. Cells that pass a block size, ranks or a model runner are left out. A slice
of a GPU counts as its GPU. Where a real device examined a case, virtual ones say nothing of it.

What does not support it:

- a release in which every backend that was run failed or refused, if those are all the backends by
  which another release supports it and which this one offers. Else `default` alone would be
  compared with a backend that was named;
- a release that does not have the dtype. Its engine says which it has (`kv_cache_dtypes`). That
  there is no cell does not say so: `-k` or a shard may have left it out;
- a release that does not have the model: its cells are skipped for that, and the model's class is
  not among the engine's `architectures`.

Of all else nothing is known. Cells that are skipped, not run, without a usable host, or not there
are never a no.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version

from harness.case import DEFAULT, UNSET, Case
from harness.change import case_of
from harness.safe import clip
from harness.since import ABSENT, FAILS, OK, REFUSED, UNKNOWN, Row, State
from harness.verdict import VERDICTS

Data = Mapping[str, Any]
"""A matrix.json, or a part of one."""

NOT_EXAMINED = frozenset({"infra", "skipped", "notrun"})
"""Verdicts that say nothing of what vLLM supports."""

CPU, NO_CAPABILITY = "CPU", "SM?"
"""In place of a compute capability: vLLM's CPU build, and a device that does not tell its own."""

_REASON = 300
"""Characters of a reason that are kept."""


@dataclass(frozen=True)
class Support:
    """The whole table."""

    releases: tuple[str, ...]
    """The oldest first."""
    capabilities: Mapping[str, tuple[str, ...]]
    """Each, in order, and the SPECs of its devices."""
    rows: tuple[Row, ...]
    """For every model and dtype, in order, one for each capability."""
    backends: tuple[str, ...]
    """What was passed as backend in any cell."""

    @property
    def examined(self) -> bool:
        """True where any cell says anything."""
        return any(s.support not in (ABSENT, UNKNOWN) for row in self.rows for s in row.states)

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain JSON data."""
        return {
            "schema": 1,
            "releases": list(self.releases),
            "capabilities": {name: list(specs) for name, specs in self.capabilities.items()},
            "backends": list(self.backends),
            "rows": [row.to_json() for row in self.rows],
        }


def release(version: str) -> str:
    """The release that a vLLM version is of: `0.33.0` for `0.33.0+cu130`. A development build, and
    what is no version at all, is its own."""
    try:
        found = Version(version)
    except InvalidVersion:
        return version
    return version if found.is_devrelease else found.public


def support(matrices: Iterable[Data]) -> Support:
    """What the runs, in whatever order, say of each model, kv_cache_dtype and capability."""
    runs = _Runs()
    for data in matrices:
        runs.add(data)
    return runs.table()


# ---- What the runs have --------------------------------------------------------------------------


@dataclass
class _Offer:
    """What a release has, as far as its engines tell."""

    dtypes: set[str] = field(default_factory=set)
    backends: set[str] = field(default_factory=set)

    def add(self, engine: Data) -> None:
        self.dtypes.update(_names(engine.get("kv_cache_dtypes")))
        by = [engine.get(name) for name in ("model_backends", "kind_backends")]
        lists = [each for group in by if isinstance(group, Mapping) for each in group.values()]
        chosen = {n for each in [engine.get("cpu_backends"), *lists] for n in _names(each)}
        self.backends.update(chosen or _names(engine.get("backends")))

    def lacks_dtype(self, dtype: str) -> bool:
        return bool(self.dtypes) and dtype not in self.dtypes and dtype != UNSET

    def lacks_backend(self, backend: str) -> bool:
        return bool(self.backends) and backend not in self.backends and backend != DEFAULT


@dataclass(frozen=True, order=True)
class _Seen:
    """One cell."""

    verdict: str
    real: bool
    backend: str
    serves: tuple[str, ...]
    reason: str
    no_model: bool


_Key = tuple[str, str, str]
"""Model, kv_cache_dtype, capability."""


class _Runs:
    def __init__(self) -> None:
        self._cells: dict[_Key, dict[str, set[_Seen]]] = {}
        self._offers: dict[bool, dict[str, _Offer]] = {False: {}, True: {}}
        """By whether it is the CPU build, then by release."""
        self._order: dict[str, set[tuple[str, ...]]] = {}  # release to its lists of dtypes
        self._devices: dict[str, set[str]] = {}
        self._backends: set[str] = set()

    def add(self, data: Data) -> None:
        releases, lacking = {}, {}
        for engine in data["engines"]:
            version = engine["version"]
            releases[version] = name = release(version)
            cpu = engine.get("platform") == "cpu"
            self._offers[cpu].setdefault(name, _Offer()).add(engine)
            self._order.setdefault(name, set()).add(tuple(_names(engine.get("kv_cache_dtypes"))))
            lacking[version] = _names(engine.get("architectures"))
        devices = {device["spec"]: device for device in data["devices"]}
        for cell in data["cells"]:
            case = case_of(cell)
            if case != Case(case.model, case.backend, case.kv_cache_dtype):
                continue
            device = devices[cell["device"]]
            place = capability(device)
            self._devices.setdefault(place, set()).add(device["spec"])
            self._backends.add(case.backend)
            key = (case.model, case.kv_cache_dtype, place)
            seen = self._cells.setdefault(key, {}).setdefault(releases[cell["engine"]], set())
            seen.add(_seen(cell, device["kind"] != "virtual", lacking[cell["engine"]]))

    def table(self) -> Support:
        places = sorted(self._devices, key=_rank)
        names = sorted({name for offers in self._offers.values() for name in offers}, key=_version)
        dtypes = self._dtypes(names)
        asked = sorted(
            {(model, dtype) for model, dtype, _ in self._cells},
            key=lambda pair: (pair[0], dtypes.get(pair[1], len(dtypes)), pair[1]),
        )
        return Support(
            tuple(names),
            {place: tuple(sorted(self._devices[place])) for place in places},
            tuple(self._row((*pair, place)) for pair in asked for place in places),
            tuple(sorted(self._backends, key=lambda name: (name != DEFAULT, name))),
        )

    def _dtypes(self, releases: Sequence[str]) -> dict[str, int]:
        """Where each stands: as the newest release has them, then what older ones had."""
        lists = [each for name in reversed(releases) for each in sorted(self._order[name])]
        found = dict.fromkeys((UNSET, *itertools.chain.from_iterable(lists)))
        return {name: place for place, name in enumerate(found)}

    def _row(self, key: _Key) -> Row:
        offers = self._offers[key[2] == CPU]
        found = {
            name: _decided(seen)
            for name, seen in self._cells.get(key, {}).items()
            if name in offers
        }
        needed = {s.backend for seen in found.values() for s in seen if s.verdict == "ok"}
        states = [
            _state(name, key[1], found.get(name, []), needed, offers[name])
            for name in sorted(offers, key=_version)
        ]
        return Row(*key, tuple(states))


def capability(device: Data) -> str:
    """The class of a device: `SM90`, or `CPU`."""
    if device["kind"] == "cpu":
        return CPU
    found = device.get("capability")
    if isinstance(found, (list, tuple)) and len(found) == 2:
        major, minor = found
        if isinstance(major, int) and isinstance(minor, int):
            return f"SM{major}{minor}"
    return NO_CAPABILITY


def _seen(cell: Data, real: bool, architectures: Collection[str]) -> _Seen:
    resolved = cell.get("resolved") or {}
    serves = [cell["backend"]]
    if cell["backend"] == DEFAULT:
        serves = _names([resolved.get("selected")]) or _names(resolved.get("backends")) or serves
    reason = str(cell.get("reason") or "")
    lacks = re.fullmatch(r"vLLM \S+ has no (\w+)", reason)  # as `plan.Cell.lacks` says it
    return _Seen(
        cell["verdict"],
        real,
        cell["backend"],
        tuple(sorted(serves)),
        "" if cell["verdict"] == "ok" else clip(reason, _REASON),
        cell["verdict"] == "skipped"
        and lacks is not None
        and bool(architectures)
        and lacks[1] not in architectures,
    )


def _decided(seen: Iterable[_Seen]) -> list[_Seen]:
    """Of each backend the cells that count: measured ones where there are any that say something,
    then those that say something at all."""
    by: dict[str, list[_Seen]] = {}
    for one in sorted(seen):
        by.setdefault(one.backend, []).append(one)
    return [one for cells in by.values() for one in _counting(cells)]


def _counting(cells: Sequence[_Seen]) -> Sequence[_Seen]:
    examined = [one for one in cells if one.verdict not in NOT_EXAMINED]
    return [one for one in examined if one.real] or examined or cells


def _state(
    name: str, dtype: str, seen: Sequence[_Seen], needed: Collection[str], offer: _Offer
) -> State:
    good = [one for one in seen if one.verdict == "ok"]
    if good:
        backends = sorted({name for one in good for name in one.serves})
        return State(name, OK, any(one.real for one in good), tuple(backends))
    examined = [one for one in seen if one.verdict not in NOT_EXAMINED]
    if not examined and offer.lacks_dtype(dtype):
        return State(name, ABSENT, reason=f"vLLM {name} has no such kv_cache_dtype")
    if not examined and seen and all(one.no_model for one in seen):
        return State(name, ABSENT, reason=seen[0].reason)
    open_ = [one for one in seen if one.verdict in NOT_EXAMINED]
    missing = {b for b in needed if not offer.lacks_backend(b)} - {one.backend for one in seen}
    if not examined or open_ or missing:
        return State(name, UNKNOWN, reason=_why(examined, open_, missing))
    told = min(
        examined,
        key=lambda s: (s.verdict == "rejected", s.backend != DEFAULT, VERDICTS.index(s.verdict), s),
    )
    kind = REFUSED if told.verdict == "rejected" else FAILS
    return State(name, kind, any(s.real for s in examined), (), told.verdict, told.reason)


def _why(examined: Sequence[_Seen], open_: Sequence[_Seen], missing: Collection[str]) -> str:
    """Why nothing is known."""
    if not examined and not open_:
        return "no cell"
    told = [f"{one.backend} {one.verdict}" for one in (*examined, *open_)]
    told += [f"{backend} not there" for backend in sorted(missing)]
    reasons = {one.reason for one in open_ if one.reason}
    one = f": {reasons.pop()}" if len(reasons) == 1 and not examined and not missing else ""
    return clip(", ".join(dict.fromkeys(told)) + one, _REASON)


def _names(value: Any) -> list[str]:
    return (
        [one for one in value if isinstance(one, str)] if isinstance(value, (list, tuple)) else []
    )


def _version(name: str) -> tuple[int, Any]:
    try:
        return 0, (Version(name), name)
    except InvalidVersion:
        return 1, name


def _rank(place: str) -> tuple[int, int, str]:
    number = place.removeprefix("SM")
    return (0, int(number), "") if number.isdigit() else (1, 0, place)
