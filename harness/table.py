"""Rows as lines with aligned columns. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness import safe

_GAP = "  "

LEAST_COLUMN = 7
"""Columns that the last column is given at least."""


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None
) -> list[str]:
    """Lines with aligned columns; control characters of the cells shown as their escapes. The last
    column is wrapped where lines would have more than `width` columns."""
    lines = [[safe.printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(safe.columns, column)) for column in zip(*lines, strict=True)]
    side = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    room = widths[-1] if width is None else max(width - side, LEAST_COLUMN)
    out: list[str] = []
    for line in lines:
        *cells, last = (
            cell + " " * (size - safe.columns(cell))
            for cell, size in zip(line, widths, strict=True)
        )
        first, *more = safe.wrap(last.rstrip(), room)
        out.append(_GAP.join([*cells, first]).rstrip())
        out += [" " * side + part for part in more]
    return out
