"""Histories of cells as text: a sign for each run. Pure; every text is escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.report.changes import code
from harness.view import GLYPHS, Screen

MANY = 12
"""Cells of one kind that are listed."""

ABSENT = ("□", "_")
"""The sign of a run that had no such cell, and in ASCII."""

KNOWN = " (known)"

MISSING = "Missing: earlier runs had them"

Data = Mapping[str, Any]
"""`history` of a matrix.json."""


def strip(screen: Screen, found: Sequence[str | None]) -> str:
    """One sign for each run, oldest first."""
    return "".join(_sign(screen, each) for each in found)


def _sign(screen: Screen, verdict: str | None) -> str:
    at = 0 if screen.unicode else 1
    if verdict is None:
        return ABSENT[at]
    if verdict.endswith(KNOWN):
        return "k"
    # Of a stale known entry the verdict itself is shown.
    return GLYPHS[verdict.partition(" ")[0]][at]


def told(data: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What the history in a matrix.json says of each cell, by id (of the case), device and engine:
    `strip`, `since` in words, `flaky`. Empty where the run had none."""
    history = data.get("history") or {"cells": ()}
    return {
        (cell["id"], cell["device"], cell["engine"]): {
            "strip": cell["strip"],
            "since": since(history, cell),
            "flaky": bool(cell["flaky"]),
        }
        for cell in history["cells"]
    }


def flaky(history: Data) -> list[Data]:
    """The cells that one engine gave both ways."""
    return [cell for cell in history["cells"] if cell["flaky"]]


def changed(history: Data) -> list[Data]:
    """The cells that are not what they were in the last run that had a result of them."""
    return [cell for cell in history["cells"] if not cell["flaky"] and _turned(cell)]


def _turned(cell: Data) -> bool:
    # `since` is this run itself, and some run before it gave a result.
    return cell["since"] == len(cell["strip"]) - 1 and not cell.get("always")


def since(history: Data, cell: Data) -> str:
    """When the cell's verdict began, in words; empty where it has none."""
    if cell["since"] is None:
        return ""
    run = history["runs"][cell["since"]]
    engine = (run.get("as") or {}).get(cell["engine"], cell["engine"])
    when = f"{run.get('started') or 'a run without a date'} (vLLM {engine})"
    if cell["since"] == len(cell["strip"]) - 1:
        when = "this run"
    gaps = f", {_runs(cell['gaps'])} without a result" if cell["gaps"] else ""
    return f"{'at least ' if cell.get('always') else ''}since {when}{gaps}"


def _runs(number: int) -> str:
    return f"{number} run{'' if number == 1 else 's'}"


def _cells(number: int) -> str:
    return f"{number} cell{'' if number == 1 else 's'}"


def named(cell: Data) -> str:
    """A cell in words."""
    return f"{cell['id']} on {cell['device']} with vLLM {cell['engine']}"


def _sections(history: Data) -> Iterator[tuple[str, str, list[Data]]]:
    yield "Flaky: one engine gave both", "bad", flaky(history)
    yield "Not what it was in the run before", "bold", changed(history)
    yield f"{MISSING}, which is no pass", "known", list(history["missing"])


def _lost(history: Data) -> list[tuple[str, int]]:
    """What a lost shard leaves: devices and engines of which nothing is there, and how many cells
    earlier runs had of each."""
    here = {(cell["device"], cell["engine"]) for cell in history["cells"]}
    gone = Counter((cell["device"], cell["engine"]) for cell in history["missing"])
    return [
        (f"all of {device} with vLLM {engine}", number)
        for (device, engine), number in gone.items()
        if (device, engine) not in here
    ]


def _single(history: Data, cells: Sequence[Data]) -> list[Data]:
    """The cells but those that `_lost` tells of."""
    here = {(cell["device"], cell["engine"]) for cell in history["cells"]}
    return [cell for cell in cells if (cell["device"], cell["engine"]) in here]


def terminal(screen: Screen, history: Data) -> list[str]:
    """Lines, none wider than the screen: what is not as it always was."""
    before = len(history["runs"]) - 1
    if not before:
        return screen.lines("History: no earlier run has any of these cells", "dim")
    first = screen.clean(str(history["runs"][0].get("started")))
    lines = screen.lines(f"History: {_runs(before)} before this one, from {first} on", "bold")
    for title, style, cells in _sections(history):
        if not cells:
            continue
        lines += screen.lines(f"{title}: {_cells(len(cells))}", style, "  ", "    ")
        if title.startswith(MISSING):
            for text, number in _lost(history):
                text = screen.clean(f"{text}: {_cells(number)}")
                lines += screen.lines(text, style, "    ", "      ")
        for text in _listed(screen, history, cells):
            lines += screen.lines(text, "", "    ", "      ")
    if len(lines) == 1:
        lines += screen.lines("Every cell is what it was in the run before", "good", "  ")
    return lines


def _listed(screen: Screen, history: Data, cells: Sequence[Data]) -> Iterator[str]:
    cells = _single(history, cells)
    for cell in cells[:MANY]:
        signs = f"{strip(screen, cell['strip'])}  "
        told = since(history, cell) if cell.get("flaky") == [] else ""
        yield signs + screen.clean(named(cell) + (f", {told}" if told else ""))
    if len(cells) > MANY:
        yield f"and {len(cells) - MANY} more, which matrix.json has"


def markdown(history: Data) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Titles and lists for matrix.md, with how many cells each entry is of: what `terminal`
    tells."""
    screen = Screen(0, color=False, unicode=True)
    for title, _, cells in _sections(history):
        rows = []
        if title.startswith(MISSING):
            for text, number in _lost(history):
                rows.append((f"- {code(screen.clean(text))}: {_cells(number)}", number))
        for cell in _single(history, cells):
            signs = code(strip(screen, cell["strip"]))
            rows.append((f"- {signs} {code(screen.clean(named(cell)))}", 1))
        yield f"{title}: {_cells(len(cells))}", rows


def table(screen: Screen, history: Data, cells: Iterable[Data]) -> list[str]:
    """A line for each cell: its strip, what it is, since when."""
    lines = []
    # A run that was asked for a part of the cells has lost none by that.
    gone = (
        "not in this run, which had a part" if history["runs"][-1].get("unselected") else "missing"
    )
    for cell in cells:
        mark = "flaky  " if cell["flaky"] else ""
        last = cell["strip"][-1] or gone
        told = since(history, cell)
        text = f"{named(cell)}: {last}{f', {told}' if told else ''}"
        head = f"{strip(screen, cell['strip'])}  {mark}"
        style = "bad" if cell["flaky"] else ""
        lines += screen.lines(head + screen.clean(text), style, hanging="  ")
    return lines
