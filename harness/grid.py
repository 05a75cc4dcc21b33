"""The grid of a block of cells: rows of model and backend, columns of kv_cache_dtype. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.safe import columns, fold, wrap
from harness.view import GAP, CellView, Screen, grouped

HEADER_LINES = 3
"""A column header is folded to at most so many lines before its column grows wider."""


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    cells: dict[tuple[str, str], tuple[str, str]]
    """(model, backend) to text and style."""

    @property
    def header(self) -> list[str]:
        return fold(self.title, self.width)


def _column(screen: Screen, dtype: str, cells: Sequence[CellView], room: int) -> _Column:
    mark = max(len(screen.glyph(cell)) for cell in cells)
    page = max(len(str(cell.page)) if cell.page is not None else 0 for cell in cells)
    shown: dict[tuple[str, str], tuple[str, str]] = {}
    for cell in cells:
        text = screen.glyph(cell)
        if cell.page is not None:
            text = f"{text:<{mark}} {cell.page:>{page}}"
        row = (cell.model, cell.backend)
        # Where two engines of one version meet, the failure must not be covered.
        if row not in shown or cell.style == "bad":
            shown[row] = (text, cell.style)
    title = screen.clean(dtype)
    width = max(columns(part) for part in re.findall("[^_]*_|[^_]+", title) or [""])
    width = min(max(width, *(len(text) for text, _ in shown.values())), room)
    while width < room and len(fold(title, width)) > HEADER_LINES:
        width += 1
    return _Column(title, width, shown)


def _bands(widths: Sequence[int], room: int) -> list[list[int]]:
    """Indices of columns in as few bands of `room` as they need, the bands evenly filled."""

    def filled(limit: int) -> list[list[int]]:
        bands: list[list[int]] = []
        used = limit
        for index, width in enumerate(widths):
            used += len(GAP) + width
            if used > limit:
                bands.append([])
                used = len(GAP) + width
            bands[-1].append(index)
        return bands

    fewest = filled(room)
    return next(
        bands
        for limit in range(max(widths) + len(GAP), room + 1)
        if len(bands := filled(limit)) == len(fewest)
    )


def _widened(band: Sequence[_Column], room: int) -> list[_Column]:
    """The band with what is left of `room` spent on headers, the tallest first."""
    shown = list(band)
    spare = room - sum(len(GAP) + column.width for column in shown)
    for index in sorted(range(len(shown)), key=lambda n: -len(shown[n].header)) * HEADER_LINES:
        column = shown[index]
        for width in range(column.width + 1, column.width + spare + 1):
            if len(fold(column.title, width)) < len(column.header):
                spare -= width - column.width
                shown[index] = replace(column, width=width)
                break
    return shown


def grid(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """The bands of one block, each followed by an empty line."""
    rows = dict.fromkeys((cell.model, cell.backend) for cell in cells)
    several = len({model for model, _ in rows}) > 1
    models = max(len(model) for model, _ in rows)
    labels = {
        (model, backend): screen.clean(f"{model:<{models}} {backend}" if several else backend)
        for model, backend in rows
    }
    side = min(max(map(columns, labels.values())), max(8, screen.width * 2 // 5))
    room = screen.width - side
    by_dtype = grouped(cells, lambda c: c.kv_cache_dtype)
    table = [_column(screen, *item, room - len(GAP)) for item in by_dtype.items()]
    for band in _bands([column.width for column in table], room):
        shown = _widened([table[index] for index in band], room)
        height = max(len(column.header) for column in shown)
        for n in range(height):
            # Folded headers stand on the row below them, not on the one above.
            heads = [([""] * (height - len(c.header)) + c.header)[n] for c in shown]
            parts = [(h, "bold", c.width) for h, c in zip(heads, shown, strict=True)]
            yield line(screen, "", side, parts)
        for row, label in labels.items():
            if not any(row in column.cells for column in shown):
                continue
            first, *more = wrap(label, side, hanging=GAP)
            yield line(
                screen, first, side, [(*c.cells.get(row, ("", "dim")), c.width) for c in shown]
            )
            yield from more
        yield ""


def line(screen: Screen, label: str, side: int, parts: Iterable[tuple[str, str, int]]) -> str:
    """One row: a label of `side` columns, then parts of text, style and width."""
    text = label + " " * (side - columns(label))
    for part, style, width in parts:
        text += GAP + screen.paint(part, style) + " " * (width - columns(part))
    return text.rstrip(" ")
