"""The differences between two runs as a sheet of changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.diff import APPEARED, CHANGED, FIXED, LOST, NEW, STILL, VANISHED, Diff
from harness.report.changes import Section, Sheet

_SECTIONS = {
    NEW: ("New failures", "bad"),
    LOST: ("No result: host or device was not usable", "known"),
    FIXED: ("Fixed", "good"),
    STILL: ("Still failing", ""),
    CHANGED: ("Changed, though none of it fails anew", ""),
    APPEARED: ("Appeared", ""),
    VANISHED: ("Vanished: the newer run has no such cell, which is no pass", "known"),
}


def sheet(found: Diff, old: Mapping[str, Any], new: Mapping[str, Any]) -> Sheet:
    """What `diff` found between two matrix.json."""
    cells = f"{found.compared} cell{'' if found.compared == 1 else 's'}"
    return Sheet(
        f"Differences: {run(old)}, then {run(new)}",
        [
            Section(title, style, [each for each in found.changes if each.kind == kind])
            for kind, (title, style) in _SECTIONS.items()
        ],
        f"No difference in the {cells} that both runs have",
        [*(f"{a} is compared with {b}" for a, b in found.renamed), *found.notes],
    )


def run(data: Mapping[str, Any]) -> str:
    """A run in a few words: its engines, its devices, when it was."""
    engines = ", ".join(engine["version"] for engine in data["engines"])
    devices = [device["spec"] for device in data["devices"]]
    where = devices[0] if len(devices) == 1 else f"{len(devices)} devices"
    started = data["run"].get("started")
    return f"vLLM {engines} on {where}" + (f" ({started})" if started else "")
