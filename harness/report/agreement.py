"""Where a real device contradicted the virtual one, as a sheet of changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.agree import BEYOND, CONTRADICTED, UNCOMPARED, Agreement
from harness.report.changes import Section, Sheet
from harness.report.differences import run

_SECTIONS = {
    CONTRADICTED: ("Contradicted by the real device (virtual -> measured)", "bad"),
    BEYOND: ("Failed later than a virtual device can see (virtual -> measured)", "known"),
    UNCOMPARED: ("Not compared, which is no agreement (virtual -> measured)", "known"),
}


def sheet(found: Agreement, virtual: Mapping[str, Any], measured: Mapping[str, Any]) -> Sheet:
    """What `agree` found between two matrix.json."""
    notes = [f"{a} (virtual) beside {b} (measured)" for a, b in found.pairs]
    total = f"{found.agreed} of {found.compared} cells with a result on both agree"
    left = f"{found.unmeasured} cells of the virtual run were not measured"
    return Sheet(
        f"Agreement: {run(virtual)}, and {run(measured)}",
        [
            Section(title, style, [each for each in found.changes if each.kind == kind])
            for kind, (title, style) in _SECTIONS.items()
        ],
        "No contradiction",
        [*notes, *found.notes, total, *([left] if found.unmeasured else [])],
    )
