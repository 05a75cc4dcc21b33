"""The matrix of a run as text for a terminal. Pure: plain data in, one string out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from harness.safe import clip, columns, fold, printable, wrap
from harness.verdict import PASSING, VERDICTS

MIN_WIDTH = 24
"""Columns. Less is treated as this."""

MAX_TEXT = 600
"""Characters of one text from a record."""

HEADER_LINES = 3
"""A column header is folded to at most so many lines before its column grows wider."""

GAP = "  "

GLYPHS = {
    "ok": ("✓", "+", "initialised, everything as expected"),
    "rejected": ("·", ".", "refused by a clear error"),
    "broken": ("✗", "B", "must work, yet it failed"),
    "unguarded": ("!", "!", "declared unsupported, yet it initialised"),
    "unclean": ("~", "~", "refused, but not by a clear error"),
    "mismatch": ("≠", "#", "initialised, but not as it must be"),
    "crashed": ("☠", "X", "the child died"),
    "timeout": ("T", "T", "passed its deadline"),
    "oom": ("O", "O", "ran out of device memory"),
    "infra": ("?", "?", "host or device not usable"),
    "skipped": ("-", "-", "cannot run here"),
    "notrun": ("∅", "N", "planned, never reported"),
}
"""Verdict to its glyph, the glyph in ASCII, and its meaning in the legend."""

REMARKS = {
    "overdeclared": "the backend declares it, the configuration refuses it clearly",
    "coerced": "another dtype than asked was stored, and a log line said so",
}
"""Remark to its meaning."""

BRIEF = 4
"""Names listed where a list is kept brief."""

_STYLES = {"bold": "1", "dim": "2", "good": "32", "known": "33", "bad": "1;31", "skip": "36"}


_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True)
class CellView:
    """What the terminal shows of one cell. Texts may hold anything; they are escaped here."""

    id: str
    model: str
    backend: str
    kv_cache_dtype: str
    device: str
    engine: str
    verdict: str
    known: str | None
    """Bug link of the known failure that the verdict fulfils."""
    reason: str
    remarks: tuple[str, ...]
    stale: str | None
    """What is wrong with a known entry that no longer holds; fails the cell."""
    stage: str
    page: int | None
    """`page_size_bytes` of the main attention cache."""
    resolved: str | None
    """The kv_cache_dtype that the main attention layers ended up with."""
    where: str | None
    """`file:function` of the error."""

    @property
    def fails(self) -> bool:
        """True where the verdict itself is a failure that nobody knows of."""
        return self.known is None and self.verdict not in PASSING | {"skipped"}

    @property
    def flag(self) -> str:
        """`s` for a stale known entry, `k` for a known failure, else empty."""
        return "s" if self.stale else "k" if self.known else ""

    @property
    def style(self) -> str:
        """Name of the colour that the cell has everywhere."""
        if self.flag:
            return "bad" if self.stale else "known"
        return {"ok": "good", "rejected": "dim", "skipped": "skip"}.get(self.verdict, "bad")


def render(
    cells: Sequence[CellView],
    *,
    width: int,
    color: bool,
    unicode: bool = True,
    titles: Mapping[tuple[str, str], str] | None = None,
) -> str:
    """The matrix, its legend and totals, and what failed and why, no line above `width` columns.

    `titles` maps (engine, device) to what is said of the device, such as `SM90, virtual`.
    """
    if not cells:
        return "0 cells\n"
    screen = _Screen(max(width, MIN_WIDTH), color, unicode)
    out: list[str] = []
    for (engine, device), block in _grouped(cells, lambda c: (c.engine, c.device)).items():
        out += [*_title(screen, block, (titles or {}).get((engine, device))), ""]
        out += _grid(screen, block)
    out += [*_legend(screen, cells), "", *_totals(screen, cells)]
    for section in (_resolved, _remarks, _failures, _known, _skipped):
        lines = list(section(screen, cells))
        out += ["", *lines] if lines else []
    return "\n".join(out) + "\n"


@dataclass(frozen=True)
class _Screen:
    width: int
    color: bool
    unicode: bool

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.color and text else text

    def clean(self, text: str) -> str:
        """A text from elsewhere as one line that is safe to show."""
        text = printable(re.sub(r"\s*\n\s*", " ", text.strip()))
        if not self.unicode:
            text = text.encode("ascii", "backslashreplace").decode("ascii")
        return clip(text, MAX_TEXT)

    def glyph(self, cell: CellView) -> str:
        return GLYPHS[cell.verdict][0 if self.unicode else 1] + cell.flag

    def lines(
        self, text: str, style: str, indent: str = "", hanging: str | None = None
    ) -> list[str]:
        return [self.paint(line, style) for line in wrap(text, self.width, indent, hanging)]


def _grouped(cells: Iterable[CellView], key: Callable[[CellView], _K]) -> dict[_K, list[CellView]]:
    """Cells by `key`, keys in the order in which they are first seen."""
    groups: dict[_K, list[CellView]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return groups


def _title(screen: _Screen, cells: Sequence[CellView], about: str | None) -> list[str]:
    models = {cell.model for cell in cells}
    what = cells[0].model if len(models) == 1 else f"{len(models)} models"
    device = f"{cells[0].device} ({about})" if about else cells[0].device
    dot = " · " if screen.unicode else " - "
    text = dot.join(screen.clean(t) for t in (what, device, f"vLLM {cells[0].engine}"))
    return screen.lines(text, "bold", hanging=GAP)


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    cells: dict[tuple[str, str], tuple[str, str]]
    """(model, backend) to text and style."""

    @property
    def header(self) -> list[str]:
        return fold(self.title, self.width)


def _column(screen: _Screen, dtype: str, cells: Sequence[CellView], room: int) -> _Column:
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


def _grid(screen: _Screen, cells: Sequence[CellView]) -> Iterator[str]:
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
    by_dtype = _grouped(cells, lambda c: c.kv_cache_dtype)
    table = [_column(screen, *item, room - len(GAP)) for item in by_dtype.items()]
    for band in _bands([column.width for column in table], room):
        shown = _widened([table[index] for index in band], room)
        height = max(len(column.header) for column in shown)
        for n in range(height):
            # Folded headers stand on the row below them, not on the one above.
            heads = [([""] * (height - len(c.header)) + c.header)[n] for c in shown]
            parts = [(h, "bold", c.width) for h, c in zip(heads, shown, strict=True)]
            yield _row(screen, "", side, parts)
        for row, label in labels.items():
            if not any(row in column.cells for column in shown):
                continue
            first, *more = wrap(label, side, hanging=GAP)
            yield _row(
                screen, first, side, [(*c.cells.get(row, ("", "dim")), c.width) for c in shown]
            )
            yield from more
        yield ""


def _row(screen: _Screen, label: str, side: int, parts: Iterable[tuple[str, str, int]]) -> str:
    text = label + " " * (side - columns(label))
    for part, style, width in parts:
        text += GAP + screen.paint(part, style) + " " * (width - columns(part))
    return text.rstrip(" ")


def _legend(screen: _Screen, cells: Sequence[CellView]) -> Iterator[str]:
    groups = _grouped(cells, lambda c: (VERDICTS.index(c.verdict), c.flag))
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


def _totals(screen: _Screen, cells: Sequence[CellView]) -> list[str]:
    found = Counter(cell.verdict for cell in cells)
    known = Counter(cell.verdict for cell in cells if cell.known)
    stale = sum(cell.stale is not None for cell in cells)
    counts = [
        f"{found[v]} {v}" + (f" ({known[v]} known)" if known[v] else "")
        for v in VERDICTS
        if found[v]
    ] + ([f"{stale} stale"] if stale else [])
    bad = stale or any(cell.fails for cell in cells)
    return screen.lines(f"{_count(cells)}: {', '.join(counts)}", "bad" if bad else "good")


def _resolved(screen: _Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """What another kv_cache_dtype than the one asked for became."""
    changed = [cell for cell in cells if cell.resolved not in (None, cell.kv_cache_dtype)]
    if changed:
        yield from screen.lines("Resolved to another kv_cache_dtype than asked", "bold")
    for resolved, group in _grouped(changed, lambda c: c.resolved).items():
        asked = Counter(cell.kv_cache_dtype for cell in group)
        text = f"{resolved} from " + ", ".join(f"{name} ({n})" for name, n in asked.items())
        yield from wrap(screen.clean(text), screen.width, GAP, GAP * 2)


def _remarks(screen: _Screen, cells: Sequence[CellView]) -> Iterator[str]:
    groups: dict[str, list[CellView]] = {}
    for cell in cells:
        for remark in dict.fromkeys(cell.remarks):
            groups.setdefault(remark, []).append(cell)
    if groups:
        yield from screen.lines("Remarks (they fail nothing)", "bold")
    for remark, group in groups.items():
        meaning = f": {REMARKS[remark]}" if remark in REMARKS else ""
        text = f"{screen.clean(remark)}, {_count(group)}{meaning}"
        yield from wrap(text, screen.width, GAP, GAP * 2)
        yield from screen.lines(_names(screen, group, BRIEF), "dim", GAP * 2)


def _failures(screen: _Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """One paragraph for each verdict and reason, then one for each stale known entry."""
    causes = _grouped((c for c in cells if c.fails), lambda c: (c.verdict, c.reason))
    stale = _grouped((c for c in cells if c.stale), lambda c: c.stale)
    failed = [cell for cell in cells if cell.fails or cell.stale]
    if not failed:
        return
    several = len(causes) + len(stale)
    text = f"FAILED: {_count(failed)}, {several} cause{'s' if several > 1 else ''}"
    yield from screen.lines(text, "bad")
    for (verdict, reason), group in causes.items():
        stages = " or ".join(dict.fromkeys(c.stage for c in group if c.stage))
        places = ", ".join(dict.fromkeys(c.where for c in group if c.where))
        text = f"{GLYPHS[verdict][0 if screen.unicode else 1]} {verdict}, {_count(group)}"
        text += f", stage {stages}" if stages else ""
        yield ""
        yield from screen.lines(screen.clean(text), "bad", hanging=GAP)
        yield from wrap(screen.clean(reason or "no reason given"), screen.width, GAP)
        if places:
            yield from screen.lines(screen.clean(f"in {places}"), "dim", GAP, GAP * 2)
        yield from wrap(_names(screen, group), screen.width, GAP)
    for problem, group in stale.items():
        yield ""
        yield from screen.lines(f"stale known entry, {_count(group)}", "bad", hanging=GAP)
        yield from wrap(screen.clean(problem or ""), screen.width, GAP)
        yield from wrap(_names(screen, group), screen.width, GAP)


def _known(screen: _Screen, cells: Sequence[CellView]) -> Iterator[str]:
    links = _grouped((c for c in cells if c.known and not c.stale), lambda c: c.known)
    if not links:
        return
    text = f"Known failures: {_count([c for group in links.values() for c in group])}"
    yield from screen.lines(text, "known")
    for link, group in links.items():
        counts = Counter(cell.verdict for cell in group)
        what = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        yield from wrap(screen.clean(f"{link}: {what}"), screen.width, GAP, GAP * 2)
        yield from screen.lines(_names(screen, group, BRIEF), "dim", GAP * 2)


def _skipped(screen: _Screen, cells: Sequence[CellView]) -> Iterator[str]:
    reasons = _grouped((c for c in cells if c.verdict == "skipped"), lambda c: c.reason)
    for reason, group in reasons.items():
        text = f"Skipped, {_count(group)}: {reason or 'no reason given'}"
        yield from wrap(screen.clean(text), screen.width, hanging=GAP)
        yield from screen.lines(_names(screen, group, BRIEF), "dim", GAP * 2)


def _count(cells: Sequence[CellView]) -> str:
    return f"{len(cells)} cell{'' if len(cells) == 1 else 's'}"


def _names(screen: _Screen, cells: Sequence[CellView], most: int | None = None) -> str:
    """The ids, those that differ in kv_cache_dtype alone as a shell writes them: `a-b-{c,d}`."""
    stems: dict[tuple[str, ...], list[str]] = {}
    for cell in cells:
        model, backend, dtype, *rest = [*cell.id.split("-"), "", ""]
        stems.setdefault((model, backend, *rest), []).append(dtype)
    names = []
    for (model, backend, *rest), dtypes in stems.items():
        middle = dtypes[0] if len(dtypes) == 1 else "{" + ",".join(dtypes) + "}"
        names.append("-".join(part for part in (model, backend, middle, *rest) if part))
    shown = [screen.clean(name) for name in names[:most]]
    hidden = sum(len(dtypes) for dtypes in list(stems.values())[len(shown) :])
    return " ".join(shown) + (f" and {hidden} more" if hidden else "")
