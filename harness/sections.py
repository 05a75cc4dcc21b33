"""What stands below the matrix: lists of what became of cells, what failed, and why. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from harness.case import UNSET, slug
from harness.safe import wrap
from harness.view import GAP, GLYPHS, CellView, Screen, count, grouped, names, written

if TYPE_CHECKING:
    from harness.versus import Difference

REMARKS = {
    "overdeclared": "the backend declares it, the configuration refuses it clearly",
    "coerced": "another dtype than asked was stored, and a log line said so",
}
"""Remark to its meaning."""

BRIEF = 4
"""Names listed where a list is kept brief."""

MANY = 12
"""Causes, names of failed cells, and changes of one kind that are listed of a large run."""

AUTO = (UNSET, "auto")
"""What leaves the choice of a kv_cache_dtype to vLLM."""


def vouched(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """The cells that are ok for want of anybody who could say otherwise."""
    good = [cell for cell in cells if cell.verdict == "ok"]
    alone = [cell for cell in good if not cell.vouched]
    # The declaration says nothing of bytes.
    pages = [cell for cell in good if cell.vouched == ("contract",) and cell.page is not None]
    for group, text in ((alone, "Nobody vouches for"), (pages, "Nobody confirms the page of")):
        if group:
            yield from screen.lines(f"{text} {count(group)} of verdict ok", "known", hanging=GAP)
            yield from wrap(names(screen, group, BRIEF), screen.width, GAP)


def resolved(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """What `unset` and `auto` became, and each other kv_cache_dtype that was not kept."""
    changed = [
        cell
        for cell in cells
        if cell.became and (cell.kv_cache_dtype in AUTO or _changed(cell.resolved, cell))
    ]
    if changed:
        yield from screen.lines("What kv_cache_dtype became", "bold")
    for became, group in grouped(changed, lambda c: c.became).items():
        asked = Counter(cell.kv_cache_dtype for cell in group)
        text = ", ".join(f"{name} ({n})" for name, n in asked.items()) + f" -> {became}"
        yield from wrap(screen.clean(text), screen.width, GAP, GAP * 2)
        yield from screen.lines(_places(screen, group, cells), "dim", GAP * 2)


def _changed(resolved: str | None, cell: CellView) -> bool:
    return resolved not in (None, cell.kv_cache_dtype)


def _places(screen: Screen, cells: Sequence[CellView], among: Sequence[CellView]) -> str:
    """The models of the cells, and the devices and engines where they are not all there are."""
    models = [*dict.fromkeys(cell.model for cell in cells)]
    text = " ".join(models[:BRIEF])
    text += f" and {len(models) - BRIEF} more models" if len(models) > BRIEF else ""
    devices = _some([cell.device for cell in cells], [cell.device for cell in among])
    engines = _some([cell.engine for cell in cells], [cell.engine for cell in among])
    text += f" on {devices}" if devices else ""
    return screen.clean(text + (f" with vLLM {engines}" if engines else ""))


def _some(found: Sequence[str], among: Sequence[str]) -> str:
    return "" if {*found} == {*among} else ", ".join(dict.fromkeys(found))


def remarks(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """What stands beside verdicts."""
    groups: dict[str, list[CellView]] = {}
    for cell in cells:
        for remark in dict.fromkeys(cell.remarks):
            groups.setdefault(remark, []).append(cell)
    if groups:
        yield from screen.lines("Remarks (they fail nothing)", "bold")
    for remark, group in groups.items():
        meaning = f": {REMARKS[remark]}" if remark in REMARKS else ""
        text = f"{screen.clean(remark)}, {count(group)}{meaning}"
        yield from wrap(text, screen.width, GAP, GAP * 2)
        yield from screen.lines(names(screen, group, BRIEF), "dim", GAP * 2)


def failures(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """One paragraph for each verdict and reason, then one for each stale known entry."""
    causes = grouped((c for c in cells if c.fails), lambda c: (c.verdict, _alike(c)))
    stale = grouped((c for c in cells if c.stale), lambda c: c.stale)
    failed = [cell for cell in cells if cell.wrong]
    if not failed:
        return
    several = len(causes) + len(stale)
    text = f"FAILED: {count(failed)}, {several} cause{'s' if several > 1 else ''}"
    yield from screen.lines(text, "bad")
    most = MANY if screen.large else None
    shown = sorted(causes.items(), key=lambda item: -len(item[1])) if most else [*causes.items()]
    for (verdict, alike), group in shown[:most]:
        reason = group[0].reason if len({cell.reason for cell in group}) == 1 else alike
        stages = " or ".join(dict.fromkeys(c.stage for c in group if c.stage))
        places = ", ".join(dict.fromkeys(c.where for c in group if c.where))
        text = f"{GLYPHS[verdict][0 if screen.unicode else 1]} {verdict}, {count(group)}"
        text += f", stage {stages}" if stages else ""
        yield ""
        yield from screen.lines(screen.clean(text), "bad", hanging=GAP)
        yield from wrap(screen.clean(reason or "no reason given"), screen.width, GAP)
        if places:
            yield from screen.lines(screen.clean(f"in {places}"), "dim", GAP, GAP * 2)
        yield from wrap(names(screen, group, most), screen.width, GAP)
    if hidden := [cell for _, group in shown[len(shown[:most]) :] for cell in group]:
        yield ""
        text = f"{len(shown) - MANY} more causes, {count(hidden)}: matrix.json"
        yield from screen.lines(text, "bad", hanging=GAP)
        yield from wrap(names(screen, hidden, most), screen.width, GAP)
    for problem, group in stale.items():
        yield ""
        yield from screen.lines(f"stale known entry, {count(group)}", "bad", hanging=GAP)
        yield from wrap(screen.clean(problem or ""), screen.width, GAP)
        yield from wrap(names(screen, group, most), screen.width, GAP)


def _alike(cell: CellView) -> str:
    """The reason without the kv_cache_dtype that was passed, so that all that were refused in the
    same words are one cause."""
    if cell.kv_cache_dtype in AUTO:
        return cell.reason
    word = rf"(?<!\w){re.escape(cell.kv_cache_dtype)}(?!\w)"
    return re.sub(word, "<kv_cache_dtype>", cell.reason)


def known(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """The known failures, by bug link."""
    links = grouped((c for c in cells if c.known and not c.stale), lambda c: c.known)
    if not links:
        return
    text = f"Known failures: {count([c for group in links.values() for c in group])}"
    yield from screen.lines(text, "known")
    for link, group in links.items():
        counts = Counter(cell.verdict for cell in group)
        what = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        yield from wrap(screen.clean(f"{link}: {what}"), screen.width, GAP, GAP * 2)
        yield from screen.lines(names(screen, group, BRIEF), "dim", GAP * 2)


def skipped(screen: Screen, cells: Sequence[CellView]) -> Iterator[str]:
    """What could not run, by reason."""
    reasons = grouped((c for c in cells if c.verdict == "skipped"), lambda c: c.reason)
    for reason, group in reasons.items():
        text = f"Skipped, {count(group)}: {reason or 'no reason given'}"
        yield from wrap(screen.clean(text), screen.width, hanging=GAP)
        yield from screen.lines(names(screen, group, BRIEF), "dim", GAP * 2)


def differences(screen: Screen, found: Sequence[Difference]) -> Iterator[list[str]]:
    """A paragraph for each two engines, a line for all that changed alike."""
    several = len({difference.device.spec for difference in found}) > 1
    for engines, group in grouped(found, lambda d: (d.old_engine, d.new_engine)).items():
        cells = {(d.case, d.device.spec) for d in group}
        title = "Differences between vLLM {} and {}: {}, in {}".format(
            *engines, len(group), f"{len(cells)} cell{'' if len(cells) == 1 else 's'}"
        )
        lines = screen.lines(screen.clean(title), "bold", hanging=GAP)
        for kind in grouped(group, lambda d: d.rank).values():
            alike = grouped(kind, _change)
            biggest = sorted(alike.items(), key=lambda item: -len(item[1]))
            for change, same in biggest[:MANY]:
                style = "bad" if same[0].breaks else "good" if same[0].fixes else ""
                cells_of = f", {len(same)} cells" if len(same) > 1 else ""
                text = f"{change}{cells_of}: {_cases(screen, same, several)}"
                lines += screen.lines(screen.clean(text), style, GAP, GAP * 2)
            if hidden := [d for _, same in biggest[MANY:] for d in same]:
                text = f"{len(biggest) - MANY} more changes of {hidden[0].what}: matrix.json"
                lines += screen.lines(text, "dim", GAP, GAP * 2)
        yield lines


def _change(difference: Difference) -> str:
    """What changed, in words that are the same for all that changed alike."""
    if difference.what == "runs":
        engine = difference.old_engine if difference.new is None else difference.new_engine
        return f"only {engine} has it ({difference.reason})"
    old, new = (
        ", ".join(map(str, value)) if isinstance(value, tuple) else value
        for value in (difference.old, difference.new)
    )
    return f"{'' if difference.what == 'verdict' else difference.what + ' '}{old} -> {new}"


def _cases(screen: Screen, found: Sequence[Difference], several: bool) -> str:
    ids = []
    for difference in found:
        case = difference.case
        tail = case.id.removeprefix(case.base) + (f"-{difference.device.id}" if several else "")
        ids.append((slug(case.model), slug(case.backend), slug(case.kv_cache_dtype), tail))
    return written(screen, ids, MANY if screen.large else None)
