"""The lines that a run leaves in a history folder: one about it, one for each cell. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.change import case_of
from harness.matrix import largest
from harness.safe import clip
from harness.verdict import VERDICTS

SCHEMA = 1
"""Version of a history file. Raised when a field changes its meaning or goes away."""

MAX_REASON = 300
"""Characters of a reason that are kept."""

_ENGINE = ("version", "commit", "platform")
_DEVICE = ("spec", "kind", "name", "capability", "mig")
_RUN = ("started", "seconds", "counts", "shard", "unselected")

_NAMES = ("id", "model", "backend", "kv_cache_dtype", "device", "engine", "verdict")
"""What each cell says in text."""

_OPTIONAL: dict[str, type] = {
    "block_size": int,
    "tensor_parallel_size": int,
    "known": str,
    "stale": str,
    "reason": str,
    "page_size_bytes": int,
    "resolved": dict,
}
"""What a cell may say."""


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

    @property
    def when(self) -> tuple[str, str]:
        """Sorts runs by when they began; one without a date comes first."""
        return stamp(self.about), self.name


def stamp(about: Mapping[str, Any]) -> str:
    """When a run began, as `20260102T030000Z`; empty where it does not say."""
    return re.sub(r"[^0-9TZ]", "", str(about["run"].get("started") or ""))


# ---- Writing -------------------------------------------------------------------------------------


def lines(data: Mapping[str, Any]) -> str:
    """The history file of a matrix.json: a line about the run, and one for each cell."""
    about = {
        "schema": SCHEMA,
        "run": {name: data["run"][name] for name in _RUN if name in data["run"]},
        "engines": [some(engine, _ENGINE) for engine in data["engines"]],
        "devices": [some(device, _DEVICE) for device in data["devices"]],
    }
    return "".join(
        json.dumps(each, sort_keys=True, separators=(",", ":")) + "\n"
        for each in (about, *map(_line, data["cells"]))
    )


def name(text: str) -> str:
    """What the file of these lines is called: by when the run began, then by what it says, so that
    the same run is there once."""
    when = stamp(json.loads(text.partition("\n")[0]))
    return f"{when or 'unknown'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def some(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of the names that the data has."""
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
        "resolved": some(resolved, ("kv_cache_dtype", "storage_dtype", "backends")),
    }
    return {each: value for each, value in found.items() if value not in (None, "", {})}


# ---- Reading -------------------------------------------------------------------------------------


def parse(file: str, text: str) -> tuple[Night, list[str]]:
    """A history file's run, and what is wrong with lines that are left out. HistoryError where it
    is none at all."""
    first, *rest = text.split("\n")
    about = _about(first)
    cells, faults, bad = [], [], 0
    seen = set()
    for number, line in enumerate(rest, 2):
        if line.strip():
            try:
                cell = _cell(line)
                key = case_of(cell), cell["device"], cell["engine"]
                if key in seen:
                    raise HistoryError("the cell is there twice")
            except HistoryError as error:
                faults.append(f"line {number}: {error}")
                bad += 1
            else:
                seen.add(key)
                cells.append(cell)
    counts = about["run"].get("counts")
    planned = sum(counts.values()) if isinstance(counts, dict) else 0
    if planned > len(cells) + bad:
        faults.append(f"ends early: {len(cells) + bad} of {planned} cells are there")
    return Night(file, about, tuple(cells)), faults


def _about(line: str) -> dict[str, Any]:
    about = _json(line, "its first line is not JSON")
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise HistoryError(f"its first line has no schema {SCHEMA}, the one read here")
    for part, need in (("engines", "version"), ("devices", "spec")):
        named = about.get(part)
        if not isinstance(named, list) or not all(
            isinstance(each, dict) and isinstance(each.get(need), str) for each in named
        ):
            raise HistoryError(f"its first line does not list its {part}")
        if len({each[need] for each in named}) < len(named):
            raise HistoryError(f"its first line lists one of its {part} twice")
    if not all(isinstance(each.get("commit", ""), str) for each in about["engines"]):
        raise HistoryError("its first line names a commit that is no text")
    run = about.get("run")
    if not isinstance(run, dict) or not isinstance(run.get("started") or "", str):
        raise HistoryError("its first line says nothing of the run")
    counts = run.get("counts", {})
    if not isinstance(counts, dict) or not all(type(n) is int for n in counts.values()):
        raise HistoryError("its first line does not count its cells")
    return about


def _cell(line: str) -> Mapping[str, Any]:
    data = _json(line, "not JSON")
    if not isinstance(data, dict) or not all(isinstance(data.get(each), str) for each in _NAMES):
        raise HistoryError("not a cell")
    if data["verdict"] not in VERDICTS:
        raise HistoryError(f"unknown verdict {data['verdict']!r}")
    for name, kind in _OPTIONAL.items():
        # Not `isinstance`: true is no number.
        if name in data and type(data[name]) is not kind:
            raise HistoryError(f"not a cell: its {name} is {data[name]!r:.60}")
    return data


def _json(line: str, otherwise: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise HistoryError(otherwise) from None
