"""What a cell was, run after run: the lines that a run leaves behind, and what they tell. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.change import case_of, state, verdict
from harness.diff import Key, pairs
from harness.matrix import largest
from harness.safe import clip
from harness.verdict import VERDICTS

SCHEMA = 1
"""Version of a history file. Raised when a field changes its meaning or goes away."""

LAST = 14
"""Runs that a strip shows: two weeks of nights."""

MAX_REASON = 300
"""Characters of a reason that are kept."""

NO_RESULT = ("infra", "skipped", "notrun")
"""Verdicts that say nothing of the product: neither a pass nor a failure, and no change."""

_ENGINE = ("version", "commit", "platform")
_DEVICE = ("spec", "kind", "name", "capability", "mig")
_RUN = ("started", "seconds", "counts", "shard")


class HistoryError(ValueError):
    """A text that is no history file, or a line of one that is no cell."""


@dataclass(frozen=True)
class Night:
    """One earlier run."""

    name: str
    """Of its file, without the suffix: it sorts by time."""
    about: Mapping[str, Any]
    """`run`, `engines` and `devices`, as matrix.json has them, in brief."""
    cells: tuple[Mapping[str, Any], ...]


# ---- Lines ---------------------------------------------------------------------------------------


def lines(data: Mapping[str, Any]) -> str:
    """The history file of a matrix.json: a line about the run, and one for each cell."""
    about = {
        "schema": SCHEMA,
        "run": {name: data["run"][name] for name in _RUN if name in data["run"]},
        "engines": [_some(engine, _ENGINE) for engine in data["engines"]],
        "devices": [_some(device, _DEVICE) for device in data["devices"]],
    }
    return "".join(
        json.dumps(each, sort_keys=True, separators=(",", ":")) + "\n"
        for each in (about, *map(_line, data["cells"]))
    )


def name(text: str) -> str:
    """What the file of these lines is called: by when the run began, then by what it says, so that
    the same run is there once."""
    started = json.loads(text.partition("\n")[0])["run"].get("started") or ""
    when = re.sub(r"[^0-9TZ]", "", str(started)) or "unknown"
    return f"{when}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _some(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {each: data[each] for each in names if data.get(each) is not None}


def _line(cell: Mapping[str, Any]) -> dict[str, Any]:
    caches = cell.get("kv") or ()
    resolved = cell.get("resolved") or {}
    found = {
        "id": case_of(cell).id,
        "model": cell["model"],
        "backend": cell["backend"],
        "kv_cache_dtype": cell["kv_cache_dtype"],
        "block_size": cell.get("block_size"),
        "tensor_parallel_size": cell.get("tensor_parallel_size"),
        "device": cell["device"],
        "engine": cell["engine"],
        "verdict": cell["verdict"],
        "known": cell.get("known"),
        "stale": cell.get("stale"),
        "reason": clip(str(cell.get("reason") or ""), MAX_REASON),
        "page_size_bytes": largest((kv["kind"], kv["page_size_bytes"]) for kv in caches),
        "resolved": _some(resolved, ("kv_cache_dtype", "storage_dtype", "backends")),
    }
    return {each: value for each, value in found.items() if value not in (None, "", {})}


def parse(file: str, text: str) -> tuple[Night, list[str]]:
    """A history file's run, and what is wrong with lines that are left out. HistoryError where it
    is none at all."""
    first, *rest = text.split("\n")
    try:
        about = json.loads(first)
    except (ValueError, RecursionError):
        raise HistoryError("its first line is not JSON") from None
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise HistoryError(f"its first line has no schema {SCHEMA}, the one read here")
    for part, need in (("engines", "version"), ("devices", "spec")):
        named = about.get(part)
        if not isinstance(named, list) or not all(
            isinstance(each, dict) and isinstance(each.get(need), str) for each in named
        ):
            raise HistoryError(f"its first line does not list its {part}")
    if not isinstance(about.get("run"), dict):
        raise HistoryError("its first line says nothing of the run")
    cells, faults = [], []
    for number, line in enumerate(rest, 2):
        if line.strip():
            try:
                cells.append(_cell(line))
            except HistoryError as error:
                faults.append(f"line {number}: {error}")
    return Night(file, about, tuple(cells)), faults


_OPTIONAL = {
    "block_size": int,
    "tensor_parallel_size": int,
    "known": str,
    "stale": str,
    "reason": str,
    "page_size_bytes": int,
    "resolved": dict,
}
"""What a cell may say."""


def _cell(line: str) -> Mapping[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise HistoryError("not JSON") from None
    names = ("id", "model", "backend", "kv_cache_dtype", "device", "engine", "verdict")
    if not isinstance(data, dict) or not all(isinstance(data.get(each), str) for each in names):
        raise HistoryError("not a cell")
    if data["verdict"] not in VERDICTS:
        raise HistoryError(f"unknown verdict {data['verdict']!r}")
    for each, kind in _OPTIONAL.items():
        if each in data and (not isinstance(data[each], kind) or isinstance(data[each], bool)):
            raise HistoryError(f"{each} is not what it must be")
    return data


# ---- What they tell ------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class History:
    """All that the runs before tell of a run."""

    runs: tuple[Mapping[str, Any], ...]
    """About each run of the strips, oldest first, this one last."""
    traces: tuple[Trace, ...]
    """In the order of the run's cells."""
    missing: tuple[Key, ...]
    """Cells that the run before had and this one has not."""

    def to_json(self) -> dict[str, Any]:
        """`history` of matrix.json."""
        return {
            "runs": [dict(run) for run in self.runs],
            "cells": [
                {
                    "id": trace.key[0].id,
                    "device": trace.key[1],
                    "engine": trace.key[2],
                    "strip": list(trace.strip),
                    "since": trace.since,
                    "always": trace.always,
                    "gaps": trace.gaps,
                    "flaky": list(trace.flaky),
                }
                for trace in self.traces
            ],
            "missing": [
                {"id": case.id, "device": device, "engine": engine}
                for case, device, engine in self.missing
            ],
        }


def history(
    data: Mapping[str, Any],
    nights: Sequence[Night],
    unselected: Collection[Key] = (),
    last: int = LAST,
) -> History:
    """What the `nights`, in any order, tell of the run of a matrix.json.

    Devices and engines of them are taken for the run's as `diff` takes them. A strip has the last
    runs that had any of the run's cells. `unselected` are cells that were planned and not asked
    for: that they are not there is no loss.
    """
    keys = [_key(cell) for cell in data["cells"]]
    mine = set(keys)
    own = name(lines(data))
    found: list[tuple[Night, dict[Key, Mapping[str, Any]]]] = []
    for night in sorted({n.name: n for n in nights}.values(), key=lambda n: n.name, reverse=True):
        # A run that is reported on again is in its history already.
        if night.name == own or len(found) >= last - 1:
            continue
        there = dict(_matched(night, data))
        if mine & there.keys():
            found.append((night, there))
    found.reverse()
    now = dict(zip(keys, data["cells"], strict=True))
    places = [there for _, there in found] + [now]
    builds = [_builds(night.about) for night, _ in found] + [_builds(data)]
    before = found[-1][1] if found else {}
    return History(
        (*(_about(night.name, night.about) for night, _ in found), _about(own, data)),
        tuple(_trace(key, [there.get(key) for there in places], builds) for key in keys),
        tuple(key for key in before if key not in mine and key not in unselected),
    )


def _key(cell: Mapping[str, Any]) -> Key:
    return case_of(cell), cell["device"], cell["engine"]


def _matched(night: Night, data: Mapping[str, Any]) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """The cells of a night under the keys that they have in the run."""
    devices, engines = pairs(night.about, data)
    for cell in night.cells:
        case, device, engine = _key(cell)
        if device in devices and engine in engines:
            yield (case, devices[device], engines[engine]), cell


def _builds(about: Mapping[str, Any]) -> dict[str, str]:
    """What tells an engine's builds apart, by version."""
    return {
        each["version"]: f"{each['version']} {each.get('commit') or ''}"
        for each in about["engines"]
    }


def _about(file: str, about: Mapping[str, Any]) -> dict[str, Any]:
    engines = [_some(engine, ("version", "commit")) for engine in about["engines"]]
    return {"name": file, "started": about["run"].get("started"), "engines": engines}


def _trace(
    key: Key, cells: Sequence[Mapping[str, Any] | None], builds: Sequence[Mapping[str, str]]
) -> Trace:
    strip = tuple(None if cell is None else verdict(cell) for cell in cells)
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


def _flaky(
    cells: Sequence[Mapping[str, Any] | None], builds: Sequence[Mapping[str, str]]
) -> tuple[int, ...]:
    groups: dict[str, dict[int, bool]] = {}
    for at, cell in enumerate(cells):
        if cell is not None and cell["verdict"] not in NO_RESULT:
            build = builds[at].get(cell["engine"], cell["engine"])
            groups.setdefault(build, {})[at] = state(cell) == "passing"
    return tuple(
        sorted(at for group in groups.values() if len({*group.values()}) > 1 for at in group)
    )
