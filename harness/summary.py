"""What the terminal tells when a run has ended: the matrix, and what is news in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness import matrix, versus
from harness.matrix import Outcome
from harness.report import changes, strips
from harness.report.changes import Sheet
from harness.session import Run
from harness.terminal import render
from harness.view import MIN_WIDTH, Screen


def rows(
    run: Run,
    outcomes: Sequence[Outcome],
    screen: Screen,
    since: Sheet | None,
    history: Mapping[str, Any] | None,
) -> list[str]:
    """Lines, none wider than the screen. `since` are the changes since a baseline, `history` is
    that of a matrix.json; None where there is none."""
    text = render(
        [matrix.view(outcome) for outcome in outcomes],
        width=screen.width,
        color=screen.color,
        unicode=screen.unicode,
        titles=_titles(run),
        differences=versus.differences(outcomes),
    )
    found = text.splitlines()
    screen = replace(screen, width=max(screen.width, MIN_WIDTH))
    if since is not None:
        found += [*changes.terminal(screen, since), ""]
    if history is not None:
        found += [*strips.terminal(screen, history), ""]
    return found


def _titles(run: Run) -> dict[tuple[str, str], str]:
    """What stands beside an engine and a device above their table."""
    titles = {}
    for engine in run.engines:
        for device in run.options.devices:
            parts = [device.kind] if device.real else ["virtual"]
            if device.capability is not None:
                parts.insert(0, "SM{}{}".format(*device.capability))
            if device.real:
                parts.insert(0, device.name)
            titles[engine.version, device.spec] = ", ".join(parts)
    return titles
