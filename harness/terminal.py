"""The matrix of a run as text for a terminal. Pure: plain data in, one string out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from harness import overview, sections
from harness.grid import grid
from harness.safe import wrap
from harness.verdict import VERDICTS
from harness.view import GAP, GLYPHS, MIN_WIDTH, CellView, Screen, count, grouped

if TYPE_CHECKING:
    # It needs the plan and the records, which are not for a screen.
    from harness.versus import Difference

LARGE = 400
"""Cells. With more the models are summed up, and only what failed is shown in full."""


def render(
    cells: Sequence[CellView],
    *,
    width: int,
    color: bool,
    unicode: bool = True,
    titles: Mapping[tuple[str, str], str] | None = None,
    differences: Sequence[Difference] = (),
) -> str:
    """The matrix, its legend and totals, and what failed and why, no line above `width` columns.

    `titles` maps (engine, device) to what is said of the device, such as `SM90, virtual`.
    """
    if not cells:
        return "0 cells\n"
    screen = Screen(max(width, MIN_WIDTH), color, unicode, len(cells) > LARGE)
    block_of = overview.models if screen.large else grid
    out: list[str] = []
    for (engine, device), block in grouped(cells, lambda c: (c.engine, c.device)).items():
        out += [*_title(screen, block, (titles or {}).get((engine, device))), ""]
        out += block_of(screen, block)
    out += [*_legend(screen, cells), "", *_totals(screen, cells)]
    for section in (
        *(sections.vouched, sections.resolved, sections.remarks),
        *(sections.failures, sections.known, sections.skipped),
    ):
        lines = list(section(screen, cells))
        out += ["", *lines] if lines else []
    for lines in sections.differences(screen, differences):
        out += ["", *lines]
    return "\n".join(out) + "\n"


def _title(screen: Screen, cells: Sequence[CellView], about: str | None) -> list[str]:
    models = {cell.model for cell in cells}
    what = cells[0].model if len(models) == 1 else f"{len(models)} models"
    device = f"{cells[0].device} ({about})" if about else cells[0].device
    dot = " · " if screen.unicode else " - "
    text = dot.join(screen.clean(t) for t in (what, device, f"vLLM {cells[0].engine}"))
    return screen.lines(text, "bold", hanging=GAP)


def _legend(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    groups = grouped(cells, lambda c: (VERDICTS.index(c.verdict), c.flag))
    notes = {"": "", "k": " (known failure)", "s": " (its known entry is stale)"}
    digits = max(len(str(len(group))) for group in groups.values())
    for (_, flag), group in sorted(groups.items()):
        cell, glyph = group[0], screen.glyph(group[0])
        text = f"{glyph:<3}{len(group):>{digits}} {cell.verdict:<11}"
        text += GLYPHS[cell.verdict][2] + notes[flag]
        first, *more = wrap(text, screen.width, hanging="   ")
        yield screen.paint(glyph, cell.style) + first[len(glyph) :]
        yield from more
    if any(cell.page is not None for cell in cells):
        text = "Numbers are page_size_bytes of the main attention cache."
        yield from screen.lines(text, "dim")


def _totals(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    found = Counter(cell.verdict for cell in cells)
    known = Counter(cell.verdict for cell in cells if cell.known)
    stale = sum(cell.stale is not None for cell in cells)
    counts = [
        f"{found[v]} {v}" + (f" ({known[v]} known)" if known[v] else "")
        for v in VERDICTS
        if found[v]
    ] + ([f"{stale} stale"] if stale else [])
    bad = any(cell.wrong for cell in cells)
    yield from screen.lines(f"{count(cells)}: {', '.join(counts)}", "bad" if bad else "good")
    by = Counter(" + ".join(cell.vouched) or "nobody" for cell in cells if cell.verdict == "ok")
    if by:
        text = ", ".join(f"{who} {n}" for who, n in by.most_common())
        yield from wrap(screen.clean(f"ok vouched for by: {text}"), screen.width, hanging=GAP)
