"""The overview of many cells: a row for each model, and in full what failed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.case import DEFAULT, UNSET
from harness.grid import grid
from harness.safe import columns, wrap
from harness.verdict import VERDICTS
from harness.view import GAP, CellView, Screen, grouped

ROWS = 24
"""Rows with failures that are shown in full."""

Part = tuple[str, str, int]
"""A text, its style, and the columns that it takes: to the right where they are negative."""


def models(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """The block of one device and engine: for each model how many cells have which verdict, and
    what came of a start with nothing passed; then the rows with failures. Each followed by an
    empty line."""
    by_model = grouped(cells, lambda c: c.model)
    kinds = grouped(cells, _kind)
    columns_of = {key: kinds[key][0] for key in sorted(kinds)}
    side = max(map(columns, map(screen.clean, by_model)))
    sizes = {key: len(screen.glyph(cell)) for key, cell in columns_of.items()}
    for group in by_model.values():
        for key, cells_of in grouped(group, _kind).items():
            sizes[key] = max(sizes[key], len(str(len(cells_of))))
    plain = {model: _plain(group) for model, group in by_model.items()}
    page = max((len(str(c.page)) for c in plain.values() if c and c.page is not None), default=0)
    heads = [(screen.glyph(cell), cell.style, -sizes[key]) for key, cell in columns_of.items()]
    asked = f"{DEFAULT}-{UNSET}"
    yield from _packed(screen, [("", "dim", side), *heads, (asked, "bold", len(asked))])
    for model, group in by_model.items():
        found = grouped(group, _kind)
        counts = [
            (str(len(found[key])) if key in found else "", cell.style, -sizes[key])
            for key, cell in columns_of.items()
        ]
        yield from _packed(
            screen,
            [(screen.clean(model), "bold", side), *counts, *_said(screen, plain[model], page)],
        )
    yield ""
    yield from _failing(screen, cells)


def _kind(cell: CellView) -> tuple[int, str]:
    return VERDICTS.index(cell.verdict), cell.flag


def _plain(cells: Iterable[CellView]) -> CellView | None:
    """The cell of a start with nothing passed; the first where there are several."""
    return next((c for c in cells if (c.backend, c.kv_cache_dtype) == (DEFAULT, UNSET)), None)


def _said(screen: Screen, cell: CellView | None, page: int) -> list[Part]:
    if cell is None:
        return []
    became = cell.became.replace(", stored", "")
    number = f"{'' if cell.page is None else cell.page:>{page}}"
    text = f"{screen.glyph(cell):<2} {number} {screen.clean(became)}".rstrip(" ")
    return [(text, cell.style, columns(text))]


def _packed(screen: Screen, parts: Iterable[Part]) -> Iterator[str]:
    """The parts beside each other, on as many lines as they need."""
    line, used = "", 0
    for text, style, size in parts:
        for piece in wrap(text, screen.width - len(GAP)) if columns(text) > abs(size) else [text]:
            wide = max(abs(size), columns(piece))
            gap = len(GAP) if used else 0
            if used and used + gap + wide > screen.width:
                yield line.rstrip(" ")
                line, used, gap = GAP, len(GAP), 0
            blank = " " * (wide - columns(piece))
            painted = screen.paint(piece, style)
            line += " " * gap + (blank + painted if size < 0 else painted + blank)
            used += gap + wide
    yield line.rstrip(" ")


def _failing(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    rows = grouped(cells, lambda c: (c.model, c.backend))
    failing = [row for row in rows.values() if any(cell.wrong for cell in row)]
    if failing:
        yield from screen.lines("Rows with failures", "bold")
        yield from grid(screen, [cell for row in failing[:ROWS] for cell in row])
    hidden = len(failing) - ROWS
    text = f"{len(rows)} rows of model and backend"
    if hidden > 0:
        text += f", {hidden} more with failures"
    elif not failing:
        text += ", none with a failure"
    yield from screen.lines(f"{text}: matrix.json has each cell; fewer (-k) show in full.", "dim")
    yield ""
