"""The table of what is supported since which release, for a terminal and as Markdown. Pure; every
text is escaped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness import safe
from harness.case import DEFAULT
from harness.report.changes import code
from harness.since import ABSENT, FAILS, OK, REFUSED, Row, State
from harness.support import Support
from harness.view import GAP, Screen, grouped

GLYPHS = {
    OK: ("✓", "+", "good", "supported since this release"),
    "gap": ("◐", "%", "known", "supported, but not in this release between others"),
    "lost": ("✗", "x", "bad", "supported once, and not since this release"),
    FAILS: ("✗", "x", "bad", "fails: not supported by any release that was run"),
    REFUSED: ("·", ".", "dim", "refused by a clear error, by every backend that was run"),
    ABSENT: ("-", "-", "dim", "vLLM has no such kv_cache_dtype, or no such model"),
    "unknown": ("?", "?", "skip", "not examined: skipped, not run, or not there"),
}
"""What a row comes to: its sign, the sign in ASCII, its style, its meaning."""

MARKS = {
    "≤": "in this release or before: the one before it was not examined",
    ">": "not in this release",
    "!": "not in this release, though in one before",
    " ?": "not examined in the newest release",
}
"""What stands in `Entry.short`, and its meaning."""

MEANING = (
    "Supported: vLLM initialises with this model, kv_cache_dtype and device, with any backend that "
    "was run, and the KV cache is what it must be."
)

_LABEL = 48
"""Columns of the dtypes of a row, at most."""


@dataclass(frozen=True)
class Entry:
    """What is shown of one row."""

    kind: str
    """A key of `GLYPHS`."""
    short: str
    """For narrow tables: `≤0.27.1`, `refused`."""
    long: str
    """In words: `0.27.1 or before, gap in 0.30.0`."""
    measured: bool

    @property
    def style(self) -> str:
        """Name of a colour."""
        return GLYPHS[self.kind][2]

    def sign(self, *, unicode: bool = True) -> str:
        """The glyph."""
        return GLYPHS[self.kind][0 if unicode else 1]


def entry(row: Row) -> Entry:
    """What a row comes to."""
    newest = row.newest
    if newest is None:
        return Entry("unknown", "", "not examined", measured=False)
    open_ = row.unexamined
    tail = f", {open_[-1]} not examined" if open_ else ""
    mark = " ?" if open_ else ""
    if row.since is None:
        why = word(newest)
        when = f" in {newest.release}" if open_ else ""
        return Entry(newest.support, why + mark, f"no{when} ({why}){tail}", newest.measured)
    short, long = _since(row)
    kind = OK
    for gap in row.gaps:
        kind, span = "gap", gap[0] if len(gap) == 1 else f"{gap[0]}-{gap[-1]}"
        short, long = f"{short} !{span}", f"{long}, gap in {span}"
    if row.lost is not None:
        kind, why = "lost", word(newest)
        short, long = f"{short} !{row.lost}", f"{long}, not since {row.lost} ({why})"
    return Entry(kind, short + mark, long + tail, newest.measured)


def _since(row: Row) -> tuple[str, str]:
    if not row.or_before:
        return f"{row.since}", f"{row.since}"
    if row.after is None:
        return f"≤{row.since}", f"{row.since} or before"
    return f"≤{row.since} >{row.after}", f"after {row.after}, by {row.since}"


def word(state: State) -> str:
    """What a release makes of it, in a word: the verdict, where it fails."""
    return state.verdict if state.support == FAILS else state.support


def told(state: State) -> str:
    """One release in a line."""
    how = [word(state)]
    how += [f"with {', '.join(state.backends)}"] if state.backends else []
    how += ["measured"] if state.measured else []
    return f"{state.release}: {', '.join(how)}" + (f": {state.reason}" if state.reason else "")


def notes(support: Support) -> list[str]:
    """What a reader must know of the runs."""
    found = [MEANING]
    if support.backends == (DEFAULT,):
        found.append("Only the default backend was run: another one, if named, may do more.")
    if any(state.measured for row in support.rows for state in row.states):
        found.append("m: measured on a real device; all else was computed on virtual ones.")
    else:
        found.append("All of it was computed on virtual devices, none of it measured.")
    return found


def nothing(cells: int) -> str:
    """What is said where no cell was examined."""
    what = f"none of {cells} cells has a result" if cells else "there are no cells"
    return f"Nothing was examined: {what} (skipped, not run, or no usable host)"


# ---- The terminal --------------------------------------------------------------------------------


def terminal(screen: Screen, support: Support) -> list[str]:
    """Lines: a table for each model, dtypes that are alike in one row, capabilities that are alike
    in one column. None is wider than the screen, if that has room for the names."""
    title = f"Supported since: vLLM {', '.join(support.releases)}"
    lines = screen.lines(screen.clean(title), "bold", hanging=GAP)
    for note in notes(support):
        lines += screen.lines(screen.clean(note), "dim", GAP, GAP * 2)
    used: dict[Entry, None] = {}
    for model, rows in grouped(support.rows, lambda row: row.model).items():
        lines += ["", *screen.lines(screen.clean(model), "bold")]
        lines += _model(screen, rows, [*support.capabilities], used)
    lines += ["", *_legend(screen, used)]
    return lines


def _model(
    screen: Screen, rows: Sequence[Row], places: Sequence[str], used: dict[Entry, None]
) -> Iterator[str]:
    shown = _entries(rows, places)
    used |= dict.fromkeys(itertools.chain.from_iterable(shown.values()))
    columns = _alike(places, lambda n: tuple(cells[n] for cells in shown.values()))
    heads = [_span([places[n] for n in column]) for column in columns]
    lines = grouped(shown, lambda dtype: tuple(shown[dtype][column[0]] for column in columns))
    texts = [[_cell(screen, each) for each in cells] for cells in lines]
    widths = [
        max(safe.columns(text) for text in (head, *(line[n] for line in texts)))
        for n, head in enumerate(heads)
    ]
    names = [_folded(screen, group) for group in lines.values()]
    side = max(safe.columns(line) for name in names for line in name)
    for part in _parts(widths, screen.width - side - 2 * len(GAP)):
        head = GAP.join(heads[n].ljust(widths[n]) for n in part)
        yield f"{GAP}{' ' * side}{GAP}{head}".rstrip()
        for name, cells, line in zip(names, lines, texts, strict=True):
            row = GAP.join(
                screen.paint(line[n], cells[n].style) + " " * (widths[n] - safe.columns(line[n]))
                for n in part
            )
            first, *more = name
            yield f"{GAP}{first}{' ' * (side - safe.columns(first))}{GAP}{row}".rstrip()
            yield from (f"{GAP}{text}" for text in more)


def _entries(rows: Sequence[Row], places: Sequence[str]) -> dict[str, tuple[Entry, ...]]:
    """Of each dtype of a model what it comes to, capability by capability."""
    found = {(row.kv_cache_dtype, row.capability): entry(row) for row in rows}
    dtypes = dict.fromkeys(row.kv_cache_dtype for row in rows)
    return {dtype: tuple(found[dtype, place] for place in places) for dtype in dtypes}


def _alike(places: Sequence[str], key: Callable[[int], object]) -> list[list[int]]:
    """Neighbours that are alike, as indexes; what is no compute capability is alike to none."""
    numbers = itertools.groupby(
        range(len(places)), key=lambda n: (places[n][2:].isdigit() or places[n], key(n))
    )
    return [[*group] for _, group in numbers]


def _span(places: Sequence[str]) -> str:
    return places[0] if len(places) == 1 else f"{places[0]}-{places[-1].removeprefix('SM')}"


def _cell(screen: Screen, each: Entry) -> str:
    text = f"{each.sign(unicode=screen.unicode)} {each.short}{' m' if each.measured else ''}"
    return screen.clean(text if screen.unicode else text.replace("≤", "<="))


def _folded(screen: Screen, dtypes: Sequence[str]) -> list[str]:
    text = screen.clean(", ".join(dtypes))
    return safe.wrap(text, max(8, min(_LABEL, screen.width // 3)))


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """The columns, in as many parts as there must be for each to fit."""
    parts: list[list[int]] = [[]]
    for number, width in enumerate(widths):
        used = sum(widths[n] + len(GAP) for n in parts[-1])
        if parts[-1] and used + width > room:
            parts.append([])
        parts[-1].append(number)
    return parts


def legend(used: Iterable[Entry]) -> Iterator[tuple[str, str, str]]:
    """The sign, style and meaning of all that stands in these."""
    used = [*used]
    kinds = {each.kind for each in used}
    for kind, (sign, _, style, meaning) in GLYPHS.items():
        if kind in kinds:
            yield sign, style, meaning
    for mark, meaning in MARKS.items():
        if any(mark in each.short for each in used):
            yield (
                mark.strip(),
                "dim",
                meaning if mark.strip() == mark else f"behind others: {meaning}",
            )


def _legend(screen: Screen, used: Iterable[Entry]) -> Iterator[str]:
    plain = {sign: other for sign, other, _, _ in GLYPHS.values()} | {"≤": "<="}
    for sign, style, meaning in legend(used):
        text = f"{sign if screen.unicode else plain.get(sign, sign)}  {meaning}"
        yield from screen.lines(screen.clean(text), style, GAP, GAP * 3)


# ---- Markdown ------------------------------------------------------------------------------------

_SCREEN = Screen(0, color=False, unicode=True)
_NAME = 120
"""Characters of one name."""


def markdown(support: Support) -> str:
    """One table in GitHub's Markdown; names from a run are code spans. Dtypes of a model that are
    alike share a row."""
    places = [*support.capabilities]
    out = [f"## Supported since: vLLM {', '.join(map(_code, support.releases))}", ""]
    out += [f"- {note}" for note in notes(support)]
    out += ["", f"| model | kv_cache_dtype | {' | '.join(places)} |"]
    out.append(f"|---|---|{'---|' * len(places)}")
    used: dict[Entry, None] = {}
    for model, rows in grouped(support.rows, lambda row: row.model).items():
        shown = _entries(rows, places)
        used |= dict.fromkeys(itertools.chain.from_iterable(shown.values()))
        lines: dict[tuple[Entry, ...], list[str]] = {}
        for dtype, cells in shown.items():
            lines.setdefault(cells, []).append(dtype)
        for cells, group in lines.items():
            texts = [_code(model), ", ".join(map(_code, group)), *map(_marked, cells)]
            out.append(f"| {' | '.join(map(_piped, texts))} |")
    out += ["", *(f"- `{sign}` {meaning}" for sign, _, meaning in legend(used))]
    return "\n".join(out) + "\n"


def _marked(each: Entry) -> str:
    words = [each.sign(), *([_code(each.short)] if each.short else [])]
    return " ".join([*words, *(["m"] if each.measured else [])])


def _piped(text: str) -> str:
    """A cell of a table, which a bar would end, and so may one behind a backslash."""
    return text.replace("\\|", "\\ |").replace("|", "\\|")


def _code(text: str) -> str:
    return code(_SCREEN.clean(text)[:_NAME])
