"""What the page's table of what is supported shows, as a template reads it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness import safe
from harness.report.support import GLYPHS, Entry, entry, notes, told
from harness.since import Row, State
from harness.support import Support
from harness.view import grouped

_LINE = 160
"""Characters of what is told of one release."""


@dataclass(frozen=True)
class Shown:
    """A cell of the table."""

    entry: Entry
    states: tuple[State, ...]

    @property
    def text(self) -> str:
        """In words."""
        return safe.printable(self.entry.long)

    @property
    def strip(self) -> str:
        """The sign of each release, the oldest first; empty where that says nothing more."""
        if len({state.support for state in self.states}) == 1:
            return ""
        return "".join(_sign(state) for state in self.states)

    @property
    def story(self) -> str:
        """Each release in a line; the reason of the newest alone, for pages have many cells."""
        *old, newest = self.states
        lines = [told(replace(state, reason="")) for state in old] + [told(newest)]
        return "\n".join(safe.clip(safe.printable(line), _LINE) for line in lines)


@dataclass(frozen=True)
class Place:
    """A column."""

    name: str
    devices: str


@dataclass(frozen=True)
class Sheet:
    """The whole table."""

    releases: tuple[str, ...]
    notes: tuple[str, ...]
    places: tuple[Place, ...]
    models: Mapping[str, Mapping[str, tuple[Shown, ...]]]
    """Model, dtype, and a cell for each place."""
    legend: tuple[tuple[str, str, str], ...]
    """Sign, style and meaning of those that there are."""


def sheet(support: Support) -> Sheet:
    """The table, every text fit to show; a template escapes it."""
    clean = safe.printable
    models = {
        clean(model): {
            clean(dtype): tuple(Shown(entry(row), row.states) for row in cells)
            for dtype, cells in grouped(rows, _dtype).items()
        }
        for model, rows in grouped(support.rows, lambda row: row.model).items()
    }
    every = (cell for rows in models.values() for cells in rows.values() for cell in cells)
    used = {cell.entry.kind for cell in every}
    return Sheet(
        tuple(map(clean, support.releases)),
        tuple(notes(support)),
        tuple(
            Place(clean(name), clean(", ".join(specs)))
            for name, specs in support.capabilities.items()
        ),
        models,
        tuple(
            (sign, style, what) for kind, (sign, _, style, what) in GLYPHS.items() if kind in used
        ),
    )


def _dtype(row: Row) -> str:
    return row.kv_cache_dtype


def _sign(state: State) -> str:
    return GLYPHS[state.support if state.support in GLYPHS else "unknown"][0]
