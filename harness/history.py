"""What a cell was, run after run: its strip, since when it holds, whether it is flaky. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.change import case_of, verdict
from harness.diff import Key, pairs
from harness.night import Night, lines, name, some, stamp
from harness.verdict import PASSING

LAST = 14
"""Runs that a strip shows: two weeks of nights."""

NO_RESULT = ("infra", "skipped", "notrun")
"""Verdicts that say nothing of the product: neither a pass nor a failure, and no change."""


@dataclass(frozen=True)
class Trace:
    """What one cell was in the last runs, and is now."""

    key: Key
    strip: tuple[str | None, ...]
    """Its verdict in each run, oldest first, this one last, with ` (known)` behind it; None where
    the run had no such cell. Neither None nor one of `NO_RESULT` is a pass."""
    since: int | None
    """Place in the strip from which on it has been what it is now; None where it is nothing."""
    gaps: int
    """Runs since then that gave no result."""
    flaky: tuple[int, ...]
    """Places of the strip where one engine, of one commit, both passed and failed."""

    @property
    def always(self) -> bool:
        """True where no run that is known of was otherwise: it may have been so before."""
        return self.since is not None and all(
            each is None or each in NO_RESULT for each in self.strip[: self.since]
        )

    def to_json(self) -> dict[str, Any]:
        """One entry of `cells`, or of `missing`."""
        return {
            "id": self.key[0].id,
            "device": self.key[1],
            "engine": self.key[2],
            "strip": list(self.strip),
            "since": self.since,
            "always": self.always,
            "gaps": self.gaps,
            "flaky": list(self.flaky),
        }


@dataclass(frozen=True)
class History:
    """All that the runs before tell of a run."""

    runs: tuple[Mapping[str, Any], ...]
    """About each run of the strips, oldest first, this one last."""
    traces: tuple[Trace, ...]
    """In the order of the run's cells."""
    missing: tuple[Trace, ...]
    """Cells that any of the earlier runs had and this one has not: those of the newest first."""

    def to_json(self) -> dict[str, Any]:
        """`history` of matrix.json."""
        return {
            "runs": [dict(run) for run in self.runs],
            "cells": [trace.to_json() for trace in self.traces],
            "missing": [trace.to_json() for trace in self.missing],
        }


def history(
    data: Mapping[str, Any],
    nights: Sequence[Night],
    unselected: Collection[Key] | None = None,
    last: int = LAST,
) -> History:
    """What the `nights`, in any order, tell of the run of a matrix.json.

    Devices and engines of them are taken for the run's as `diff` takes them. A strip has the last
    runs that had any of the run's cells; runs that began later are none of its past. With
    `unselected`, these cells were planned and not asked for, as were other devices and engines:
    that they are not there is no loss.
    """
    keys = [_key(cell) for cell in data["cells"]]
    mine = set(keys)
    own, began = name(lines(data)), stamp(data)
    found: list[tuple[Night, dict[Key, Mapping[str, Any]]]] = []
    for night in sorted({n.name: n for n in nights}.values(), key=lambda n: n.when, reverse=True):
        # A run that is reported on again is in its history already.
        if night.name == own or (began and stamp(night.about) > began):
            continue
        if len(found) >= last - 1:
            break
        there = dict(_matched(night, data, others=unselected is None))
        if mine & there.keys():
            found.append((night, there))
    gone = {key: None for _, there in found for key in there if key not in mine}
    found.reverse()
    now = dict(zip(keys, data["cells"], strict=True))
    places = [there for _, there in found] + [now]
    builds = [_builds(night.about) for night, _ in found] + [_builds(data)]

    def trace(key: Key) -> Trace:
        return _trace(key, [there.get(key) for there in places], builds)

    return History(
        (*(_about(night.name, night.about, data) for night, _ in found), _about(own, data, data)),
        tuple(trace(key) for key in keys),
        tuple(trace(key) for key in gone if key not in (unselected or ())),
    )


def _key(cell: Mapping[str, Any]) -> Key:
    return case_of(cell), cell["device"], cell["engine"]


def _matched(
    night: Night, data: Mapping[str, Any], *, others: bool
) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """The cells of a night under the keys that they have in the run; `others` are those of devices
    and engines that the run has not."""
    devices, engines = pairs(night.about, data)
    for cell in night.cells:
        case, device, engine = _key(cell)
        if others or (device in devices and engine in engines):
            yield (case, devices.get(device, device), engines.get(engine, engine)), cell


def _builds(about: Mapping[str, Any]) -> dict[str, str]:
    """What tells an engine's builds apart, by version."""
    return {
        each["version"]: f"{each['version']} {each.get('commit') or ''}"
        for each in about["engines"]
    }


def _about(file: str, about: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """A run of the strips. `as` has the versions that stand for those of the run of `data`, where
    they are others."""
    engines = [some(engine, ("version", "commit")) for engine in about["engines"]]
    others = {now: then for then, now in pairs(about, data)[1].items() if now != then}
    found = {"name": file, "started": about["run"].get("started"), "engines": engines}
    return {**found, **({"as": others} if others else {}), **some(about["run"], ("unselected",))}


def _trace(
    key: Key, cells: Sequence[Mapping[str, Any] | None], builds: Sequence[Mapping[str, str]]
) -> Trace:
    strip = tuple(None if cell is None else _told(cell) for cell in cells)
    since, gaps, unclear = None, 0, 0
    if strip[-1] not in (None, *NO_RESULT):
        for at in range(len(strip) - 1, -1, -1):
            if strip[at] == strip[-1]:
                since, gaps = at, gaps + unclear
                unclear = 0
            elif strip[at] is None or strip[at] in NO_RESULT:
                unclear += 1
            else:
                break
    return Trace(key, strip, since, gaps, _flaky(cells, builds))


def _told(cell: Mapping[str, Any]) -> str:
    # What gave no result is known for nothing.
    return str(cell["verdict"]) if cell["verdict"] in NO_RESULT else verdict(cell)


def _flaky(
    cells: Sequence[Mapping[str, Any] | None], builds: Sequence[Mapping[str, str]]
) -> tuple[int, ...]:
    groups: dict[str, dict[int, bool]] = {}
    for at, cell in enumerate(cells):
        if cell is not None and cell["verdict"] not in NO_RESULT:
            build = builds[at].get(cell["engine"], cell["engine"])
            groups.setdefault(build, {})[at] = cell["verdict"] in PASSING
    return tuple(
        sorted(at for group in groups.values() if len({*group.values()}) > 1 for at in group)
    )
