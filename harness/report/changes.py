"""Changes between runs as text for a terminal and as Markdown. Pure; every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.case import slug
from harness.change import Change, shown
from harness.view import GAP, Screen, grouped, written

MANY = 12
"""Changes of one section that are listed; `--json` has all."""

NAMES = 4
"""Names of cells, some of which stand for many, that are listed of one change."""


@dataclass(frozen=True)
class Section:
    """Changes under one title."""

    title: str
    """What they are, such as `New failures`."""
    style: str
    """Name of a colour of `view.py`; may be empty."""
    changes: Sequence[Change]


@dataclass(frozen=True)
class Sheet:
    """All that is told."""

    title: str
    sections: Sequence[Section]
    nothing: str
    """What is said where no section has anything."""
    notes: Sequence[str] = ()


def terminal(screen: Screen, sheet: Sheet) -> list[str]:
    """Lines, none wider than the screen."""
    lines = screen.lines(screen.clean(sheet.title), "bold", hanging=GAP)
    for note in sheet.notes:
        lines += screen.lines(screen.clean(note), "dim", GAP, GAP * 2)
    full = [section for section in sheet.sections if section.changes]
    for section in full:
        lines += ["", *screen.lines(screen.clean(_head(section)), section.style or "bold")]
        for text, ids, reason in _entries(screen, section.changes):
            what = f"{screen.clean(text)}: {ids}"
            lines += screen.lines(what, section.style, GAP, GAP * 2)
            if reason:
                lines += screen.lines(screen.clean(reason), "dim", GAP * 2)
        lines += [f"{GAP}{text}" for text in _rest(section.changes)]
    if not full:
        lines += screen.lines(screen.clean(sheet.nothing), "good")
    return lines


def markdown(sheet: Sheet) -> str:
    """The same as GitHub's and Buildkite's Markdown: texts from a run are code, so nothing in them
    is a link, a mention or a tag."""
    screen = Screen(0, color=False, unicode=True)
    lines = [f"## {_plain(screen, sheet.title)}"]
    lines += [""] if sheet.notes else []
    lines += [f"- {code(screen.clean(note))}" for note in sheet.notes]
    full = [section for section in sheet.sections if section.changes]
    for section in full:
        lines += ["", f"### {_plain(screen, _head(section))}", ""]
        for text, ids, reason in _entries(screen, section.changes):
            lines.append(f"- {code(screen.clean(text))}: {code(ids)}")
            if reason:
                lines.append(f"  <br>{code(screen.clean(reason))}")
        lines += [f"- {text}" for text in _rest(section.changes)]
    if not full:
        lines += ["", _plain(screen, sheet.nothing)]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """A text, which is one line, as a code span that nothing in it can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text or ' '}{space}{fence}"


def _plain(screen: Screen, text: str) -> str:
    """A text outside of code, without what Markdown would act upon."""
    return re.sub(r"([\\`*_\[\]<>|#@&~])", r"\\\1", screen.clean(text))


def _head(section: Section) -> str:
    cells = len({(c.case, c.device, c.engine) for c in section.changes})
    return f"{section.title}: {cells} cell{'' if cells == 1 else 's'}"


_Alike = tuple[object, ...]


def _alike(change: Change) -> _Alike:
    return change.what, change.part, change.old, change.new, change.reason


def _groups(changes: Sequence[Change]) -> list[list[Change]]:
    """Changes that are alike, verdicts first, of each the most cells first."""
    groups = [*grouped(changes, _alike).values()]
    return sorted(groups, key=lambda group: (group[0].what != "verdict", -len(group)))


def _entries(screen: Screen, changes: Sequence[Change]) -> Iterator[tuple[str, str, str]]:
    """What changed, the cells in which it did, and why."""
    several = len({(c.device, c.engine) for c in changes}) > 1
    for group in _groups(changes)[:MANY]:
        first, many = group[0], len(group)
        cells = f", {many} cells" if many > 1 else ""
        yield _text(first) + cells, _ids(screen, group, several), first.reason


def _text(change: Change) -> str:
    of = f" of {change.part}" if change.part else ""
    what = "" if change.what == "verdict" else f"{change.what}{of} "
    if change.what == "verdict" and change.old is None:
        return shown(change.new)
    if change.what == "verdict" and change.new is None:
        return f"was {shown(change.old)}"
    return f"{what}{shown(change.old)} -> {shown(change.new)}"


def _ids(screen: Screen, changes: Sequence[Change], several: bool) -> str:
    ids = []
    for change in changes:
        case = change.case
        tail = case.id.removeprefix(case.base)
        tail += f"-{slug(change.device)}-{slug(change.engine)}" if several else ""
        ids.append((slug(case.model), slug(case.backend), slug(case.kv_cache_dtype), tail))
    return written(screen, ids, NAMES)


def _rest(changes: Sequence[Change]) -> list[str]:
    hidden = len(_groups(changes)) - MANY
    return [f"{hidden} more, all of them with --json"] if hidden > 0 else []
