"""A cell of one matrix.json beside the same cell of another: what it says, what differs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.case import RUNNERS, Case
from harness.verdict import PASSING

Value = str | int | tuple["str | int", ...] | None
Fact = tuple[str, str]
"""What it is of, such as `attn.swa_cache` (empty for the whole cell), and what, such as
`page_size_bytes`."""

WHOLE = ("selected", "backends", "kv_cache_dtype", "storage_dtype")
CACHE = (
    *("page_size_bytes", "content_bytes", "block_size", "kind", "backend"),
    *("dtype", "tensor_dtype", "shape"),
)
"""What the cell, and each of its caches, says, wherever it ran."""

_RUNNER = re.compile(rf"-({'|'.join(RUNNERS)})(?=-|$)")


@dataclass(frozen=True)
class Change:
    """One thing in which two runs differ on one cell."""

    kind: str
    case: Case
    device: str
    """SPEC in the newer run; in the older one where the newer has no such cell."""
    engine: str
    what: str
    """`verdict`, or the name of the fact."""
    old: Value
    """None where there was nothing."""
    new: Value
    part: str = ""
    """Role of the caches that it is about; empty for the whole cell."""
    reason: str = ""
    """Why the cell fails, or failed, in words of vLLM's or the harness's."""


def case_of(cell: Mapping[str, Any]) -> Case:
    """What the cell asked for. The model runner stands in its id alone."""
    case = Case(
        cell["model"],
        cell["backend"],
        cell["kv_cache_dtype"],
        cell.get("block_size") or 0,
        cell.get("tensor_parallel_size") or 1,
    )
    found = _RUNNER.match(cell["id"].removeprefix(case.id))
    return case if found is None else replace(case, model_runner=found[1])


def state(cell: Mapping[str, Any]) -> str:
    """`passing`, `known`, `skipped`, `failing`, or `lost` where the host gave no result."""
    if cell["verdict"] == "infra":
        return "lost"
    if cell["verdict"] == "skipped":
        return "skipped"
    if cell.get("stale"):
        return "failing"
    if cell.get("known"):
        return "known"
    return "passing" if cell["verdict"] in PASSING else "failing"


def verdict(cell: Mapping[str, Any]) -> str:
    """The verdict, and whether a known entry stands beside it."""
    note = " (stale known entry)" if cell.get("stale") else " (known)" if cell.get("known") else ""
    return f"{cell['verdict']}{note}"


def facts(cell: Mapping[str, Any], *more: str) -> dict[Fact, Value]:
    """What was observed of the cell, those that the file does not tell left out. `more` names facts
    of the caches that depend on the depth of the model."""
    resolved = cell.get("resolved") or {}
    found: dict[Fact, Value] = {
        ("", name): _value(resolved[name]) for name in WHOLE if name in resolved
    }
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for cache in cell.get("kv") or ():
        parts.setdefault(_part(cache), []).append(cache)
    for part, caches in parts.items():
        for name in (*CACHE, *more):
            if any(name in cache for cache in caches):
                found[part, name] = _among(cache.get(name) for cache in caches)
    return found


def capacity(cell: Mapping[str, Any]) -> dict[Fact, Value]:
    """What fits, and what a token costs."""
    found: dict[Fact, Value] = {
        ("", name): cell[name] for name in ("num_blocks", "kv_bytes_per_token") if name in cell
    }
    fits = cell.get("capacity") or {}
    return found | ({("", "tokens"): _value(fits["tokens"])} if "tokens" in fits else {})


def between(
    olds: Mapping[Fact, Value], news: Mapping[Fact, Value], *, complete: bool
) -> Iterator[tuple[Fact, Value, Value]]:
    """The facts that differ. Unless both cells are `complete`, one that either lacks is none: a
    failed start did not get to it."""
    parts = [{part for part, _ in side} - {""} for side in (olds, news)]
    if complete and parts[0] != parts[1]:
        lists = (_pages(olds, parts[0] - parts[1]), _pages(news, parts[1] - parts[0]))
        yield ("", "caches"), *lists
    for fact, old in olds.items():
        if fact not in news or old == news[fact]:
            continue
        if complete or not {old, news[fact]} & {None, ()}:
            yield fact, old, news[fact]


def _pages(side: Mapping[Fact, Value], parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{part} of {shown(side[part, 'page_size_bytes'])} B" for part in sorted(parts))


def _part(cache: Mapping[str, Any]) -> str:
    """The role of a cache, and what tells caches of one role apart."""
    ratio = cache.get("compress_ratio") or 1
    part = str(cache["role"]) + (f" (1 state in {ratio} tokens)" if ratio != 1 else "")
    return f"draft {part}" if cache.get("draft") else part


def _among(values: Iterable[Any]) -> Value:
    """The value of several caches of one part: one where all are alike, else each."""
    found = [*dict.fromkeys(_plain(value) for value in values)]
    if len(found) == 1:
        return found[0]
    return tuple(sorted((shown(value) for value in found), key=lambda text: (len(text), text)))


def _plain(value: Any) -> str | int | None:
    """A value of JSON as one that can be compared and shown: a shape in its usual brackets."""
    if value is None:
        return None
    if isinstance(value, (str, int)):
        return value
    if isinstance(value, list):
        return f"({', '.join('blocks' if side == -1 else str(side) for side in value)})"
    return str(value)


def _value(value: Any) -> Value:
    if isinstance(value, list):
        return tuple(sorted(str(each) for each in value))
    return _plain(value)


def shown(value: Value) -> str:
    """A value as text."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
