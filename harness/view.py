"""What the terminal shows of a cell, and the screen that it is shown on. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.case import slug
from harness.safe import clip, printable, wrap
from harness.verdict import PASSING

MIN_WIDTH = 24
"""Columns. Less is treated as this."""

MAX_TEXT = 600
"""Characters of one text from a record."""

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

_STYLES = {"bold": "1", "dim": "2", "good": "32", "known": "33", "bad": "1;31", "skip": "36"}

_SHORT = 6
"""Alternatives written between braces where a list is kept brief."""

_T = TypeVar("_T")
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
    stored: str | None = None
    """torch name of the main cache's element type."""
    vouched: tuple[str, ...] = ()
    """Which expectations confirmed an `ok`."""

    @property
    def fails(self) -> bool:
        """True where the verdict itself is a failure that nobody knows of."""
        return self.known is None and self.verdict not in PASSING | {"skipped"}

    @property
    def wrong(self) -> bool:
        """True where the cell fails the run."""
        return self.fails or self.stale is not None

    @property
    def became(self) -> str:
        """What the kv_cache_dtype ended up as; empty where it did not get so far."""
        if self.resolved is None and self.stored is None:
            return ""
        resolved = self.resolved or "no attention layer"
        return resolved if self.stored is None else f"{resolved}, stored as {self.stored}"

    @property
    def parts(self) -> Parts:
        """The id, taken apart by what the cell is: any part may hold a dash."""
        stem = [slug(part) for part in (self.model, self.backend, self.kv_cache_dtype)]
        base = "-".join(stem)
        if not self.id.startswith(base):
            return (self.id, "", "", "")
        return (stem[0], stem[1], stem[2], self.id[len(base) :])

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


@dataclass(frozen=True)
class Screen:
    """How to show: texts in, lines out, none wider than `width` columns."""

    width: int
    color: bool
    unicode: bool
    large: bool = False
    """True where there are more cells than can be shown one by one."""

    def paint(self, text: str, style: str) -> str:
        """`text` in the colour of `style`, where there are colours."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.color and text and style else text

    def clean(self, text: str) -> str:
        """A text from elsewhere as one line that is safe to show."""
        text = printable(re.sub(r"\s*\n\s*", " ", text.strip()))
        if not self.unicode:
            text = text.encode("ascii", "backslashreplace").decode("ascii")
        return clip(text, MAX_TEXT)

    def glyph(self, cell: CellView) -> str:
        """The sign of the cell's verdict, and its flag."""
        return GLYPHS[cell.verdict][0 if self.unicode else 1] + cell.flag

    def lines(
        self, text: str, style: str, indent: str = "", hanging: str | None = None
    ) -> list[str]:
        """`text`, which is clean, wrapped and painted."""
        return [self.paint(line, style) for line in wrap(text, self.width, indent, hanging)]


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Items by `key`, keys in the order in which they are first seen."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def count(cells: Sequence[CellView]) -> str:
    """How many cells, in words."""
    return f"{len(cells)} cell{'' if len(cells) == 1 else 's'}"


Parts = tuple[str, str, str, str]
"""Model, backend, kv_cache_dtype and what follows them in a cell's id."""


def names(screen: Screen, cells: Iterable[CellView], most: int | None = None) -> str:
    """The ids as `written` has them."""
    return written(screen, [cell.parts for cell in cells], most)


def written(screen: Screen, ids: Iterable[Parts], most: int | None = None) -> str:
    """The ids, as a shell writes those that differ in one part: `a-b-{c,d}`. With `most`, no more
    than so many names, and no long list between braces."""
    products: list[tuple[tuple[str, ...], ...]]
    products = [tuple((part,) for part in one) for one in dict.fromkeys(ids)]
    for at in (2, 1, 0, 3):
        merged: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for product in products:
            merged.setdefault(product[:at] + product[at + 1 :], []).extend(product[at])
        products = [(*rest[:at], tuple(part), *rest[at:]) for rest, part in merged.items()]
    shown = []
    for *stem, tail in products[:most]:
        words = "-".join(_braced(part, most is not None) for part in stem if any(part))
        shown.append(screen.clean(words + _braced(tail, most is not None)))
    hidden = sum(math.prod(map(len, product)) for product in products[len(shown) :])
    return " ".join(shown) + (f" and {hidden} more" if hidden else "")


def _braced(part: Sequence[str], brief: bool) -> str:
    if len(part) == 1:
        return part[0]
    cut = brief and len(part) > _SHORT
    return "{" + ",".join([*part[:_SHORT], "..."] if cut else part) + "}"
