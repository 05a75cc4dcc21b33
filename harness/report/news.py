"""What is news of a cell: other engines and devices of its run, its baseline, its history. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from harness.case import Case
from harness.diff import KINDS, VANISHED
from harness.matrix import largest

Key = tuple[str, str, str]
"""Id of the case, device SPEC and vLLM version of a cell."""

ENGINES, DEVICES = "between engines", "between devices"
"""What is news of a cell beside the news since a baseline: the same case became another thing with
another engine on its device, or on another device with its engine."""

_SAYS_NOTHING = ("notrun", "infra")
"""Verdicts that are no outcome to compare."""

FLAKY = "flaky"

WORDS = (ENGINES, DEVICES, FLAKY, *(f"baseline: {kind}" for kind in KINDS if kind != VANISHED))
"""All that `words` gives, in the order in which the page offers them."""


def words(
    differing: Iterable[str], changes: Iterable[Mapping[str, Any]], past: Mapping[str, Any] | None
) -> list[str]:
    """What kinds of news there are of a cell: of `WORDS`, each once."""
    found = {*differing, *(f"baseline: {each['kind']}" for each in changes if each["kind"])}
    found |= {FLAKY} if past and past["flaky"] else set()
    return [word for word in WORDS if word in found]


def changes(matrix: Mapping[str, Any]) -> dict[Key, list[dict[str, Any]]]:
    """What changed on each cell since the engine before it, and since the baseline."""
    found = defaultdict(list)
    for each in matrix.get("differences") or ():
        about = {"kind": None, "since": f"vLLM {each['from']}", "part": None}
        found[each["id"], each["device"], each["to"]].append({**each, **about})
    for each in (matrix.get("baseline") or {}).get("changes") or ():
        about = {"since": "the baseline"}
        found[each["id"], each["device"], each["engine"]].append({**each, **about})
    kept = ("kind", "since", "what", "part", "old", "new", "reason")
    return {
        key: [{name: each.get(name) for name in kept} for each in of] for key, of in found.items()
    }


def baseline(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the page tells of the baseline beside its cells: those that the run lacks have none."""
    gone = [each for each in found.get("changes") or () if each["kind"] == VANISHED]
    return {
        "compared": found.get("compared"),
        "counts": found.get("counts") or {},
        "notes": [
            *(f"{old} is compared with {new}" for old, new in found.get("renamed") or ()),
            *(found.get("notes") or ()),
        ],
        "vanished": [[each[name] for name in ("id", "device", "engine", "old")] for each in gone],
    }


def page(cell: Mapping[str, Any]) -> int | None:
    """As `harness.matrix.main_page`."""
    return largest((kv["kind"], kv["page_size_bytes"]) for kv in cell.get("kv") or ())


def differing(cases: Iterable[Case], cells: Iterable[Mapping[str, Any]]) -> dict[Key, list[str]]:
    """`ENGINES`, `DEVICES` or both for each cell whose case did not become the same elsewhere."""
    became: dict[tuple[str, ...], set[Any]] = defaultdict(set)
    keys = {}
    for case, cell in zip(cases, cells, strict=True):
        if cell["verdict"] in _SAYS_NOTHING:
            continue
        device, engine = cell["device"], cell["engine"]
        places = (ENGINES, case.id, device), (DEVICES, case.id, engine)
        resolved = cell.get("resolved") or {}
        selected, dtype = resolved.get("selected"), resolved.get("kv_cache_dtype")
        for place in places:
            became[place].add((cell["verdict"], page(cell), dtype, selected))
        keys[case.id, device, engine] = places
    return {
        key: kinds
        for key, places in keys.items()
        if (kinds := [place[0] for place in places if len(became[place]) > 1])
    }
