"""The annotation of a build: what is new and who is to look, before all the rest. Pure.

Buildkite takes CommonMark with tables, and sanitised HTML such as `details`
(facts/buildkite.md); texts of a run are code spans, as in matrix.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness import diff
from harness.change import Change, case_of, state
from harness.diff import Diff
from harness.errors import EXIT_INFRA
from harness.report import changes, differences, markdown, strips
from harness.report.bisection import COMPARE
from harness.report.changes import code
from harness.view import Screen

LIMIT = 1024 * 1024 - 1024
"""Bytes. Buildkite takes 1 MiB (facts/buildkite.md)."""

HEAD = LIMIT // 2
"""Bytes that what is new may have: behind it comes the whole matrix, in what is left."""

NEWS = 20
"""Causes of new failures that are told one by one."""

_SCREEN = Screen(0, color=False, unicode=True)
_COMMIT = re.compile(r"g?([0-9a-f]{7,40})")
"""As `git describe` has it, and so vLLM's version: behind a `g`."""
_OWNER = re.compile(r"@[A-Za-z0-9](?:[A-Za-z0-9/_.-]{0,80}[A-Za-z0-9])?")


@dataclass(frozen=True)
class About:
    """What is told beside the matrix itself."""

    missing: tuple[str, ...] = ()
    """Shards that left nothing, and cells that two shards have; a line each."""
    owners: tuple[str, ...] = ()
    """Who is to look at a new failure, such as `@vllm-project/kv-cache`."""
    links: Mapping[str, str] | None = None
    """What an artifact is, and its path."""


def style(data: Mapping[str, Any], news: Diff | None, about: About) -> str:
    """Buildkite's style: `error` for news that fails a build, `warning` where results are missing
    or cells fail as before, else `success`."""
    found = exit_code(data, news, about)
    if found == 1:
        return "error"
    failing = any(state(cell) in ("failing", "lost") for cell in data["cells"])
    # What vanished is no failure, and no success either.
    gone = news is not None and any(c.kind == diff.VANISHED for c in news.changes)
    return "warning" if found or failing or gone else "success"


def exit_code(data: Mapping[str, Any], news: Diff | None, about: About) -> int:
    """That of the merge: 1 for failures that are new (for any, where there is nothing to compare
    with), 75 where results are missing, else 0. That a cell never reported is no news of vLLM's:
    its shard was cut off."""
    states = {state(cell) for cell in data["cells"] if cell["verdict"] != "notrun"}
    if "failing" in states if news is None else bool(failures(news)):
        return 1
    whole = data["cells"] and all(cell["verdict"] != "notrun" for cell in data["cells"])
    return EXIT_INFRA if about.missing or "lost" in states or not whole else 0


def failures(news: Diff) -> list[Change]:
    """New failures that a cell itself reported."""
    return [c for c in news.changes if c.kind == diff.NEW and c.new != "notrun"]


def render(
    data: Mapping[str, Any],
    news: Diff | None,
    old: Mapping[str, Any] | None,
    about: About,
    limit: int = LIMIT,
) -> str:
    """The annotation in at most `limit` bytes of UTF-8, which are at least 32 KiB. `news` are the
    differences from `old`, the run before; both None where there is none."""
    lines = [*_headline(data, news, old, about), *_links(about)]
    if about.missing:
        lines += ["", "#### Missing", ""]
        lines += [f"- {_code(text)}" for text in about.missing[: changes.MANY]]
        lines += _more(len(about.missing) - changes.MANY)
    if news is not None and old is not None:
        lines += _within(_new(data, news, old, about), limit // 2 - _size(lines))
        lines += _within(_rest(news, old, data), limit // 2 + limit // 8 - _size(lines))
    head = "\n".join(lines) + "\n"
    before, after = "\n<details><summary>The whole matrix</summary>\n\n", "\n</details>\n"
    left = limit - sum(len(text.encode()) for text in (head, before, after))
    if left < markdown.LEAST:
        return head
    return head + before + markdown.render(data, left) + after


def nothing(missing: Sequence[str]) -> str:
    """The annotation of a build of which no shard left anything."""
    lines = ["### KV cache: NO RESULT, no shard left anything", ""]
    lines.append("Nothing is known of this build: neither a pass nor a failure.")
    return "\n".join([*lines, "", *(f"- {_code(text)}" for text in missing)]) + "\n"


def _headline(
    data: Mapping[str, Any], news: Diff | None, old: Mapping[str, Any] | None, about: About
) -> list[str]:
    counts = news.counts() if news is not None else {}
    if news is not None:
        counts = {**counts, diff.NEW: len(failures(news))}
    lost = sum(cell["verdict"] == "notrun" for cell in data["cells"])
    parts = [f"{counts[kind]} {name}" for kind, name in _COUNTED.items() if counts.get(kind)]
    if fresh := counts.get(diff.NEW):
        parts.insert(0, f"{fresh} NEW FAILURE{'' if fresh == 1 else 'S'}")
    if news is None:
        failing = sum(state(cell) == "failing" for cell in data["cells"]) - lost
        parts = [f"{failing} failing" if failing else "nothing fails"]
    elif not counts.get(diff.NEW):
        parts.insert(0, "no new failure")
    parts += [f"{lost} never reported"] if lost else []
    parts += ["some of it is missing"] if about.missing else []
    lines = [f"### KV cache: {', '.join(parts)}", ""]
    lines.append(f"{_plain(differences.run(data))}: {len(data['cells'])} cells.")
    if old is not None:
        lines[-1] += f" Compared with {_plain(differences.run(old))}{_between(data, old)}."
    elif news is None:
        lines[-1] += " There is no earlier run to compare with, so every failure counts."
    return lines


_COUNTED = {
    diff.LOST: "without a result",
    diff.FIXED: "fixed",
    diff.STILL: "still failing",
    diff.CHANGED: "changed, none of it a failure",
    diff.VANISHED: "vanished",
}


def _between(data: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    """A link to the commits between the two runs' engines, where both tell one."""
    ends = [
        next((str(e["commit"]) for e in each["engines"] if e.get("commit")), "")
        for each in (old, data)
    ]
    one, other = (_COMMIT.fullmatch(end) for end in ends)
    if one is None or other is None or one[1] == other[1]:
        return ""
    return f" ([the commits between]({COMPARE}/{one[1]}...{other[1]}))"


def _links(about: About) -> list[str]:
    links = about.links or {}
    shown = [f"[{name}](artifact://{path})" for name, path in links.items()]
    return ["", " · ".join(shown)] if shown else []


def _new(
    data: Mapping[str, Any], news: Diff, old: Mapping[str, Any], about: About
) -> list[list[str]]:
    """Blocks of lines: the causes of new failures, those of most cells first."""
    keys = {(c.case, c.device, c.engine): c for c in failures(news)}
    cells = [
        cell for cell in data["cells"] if (case_of(cell), cell["device"], cell["engine"]) in keys
    ]
    if not cells:
        return []
    engines = {engine["version"]: engine for engine in data["engines"]}
    several = len(engines) > 1 or len(data["devices"]) > 1
    owners = " ".join(each for each in about.owners if _OWNER.fullmatch(each))
    blocks = [["", "#### New failures" + (f": {owners}, please look" if owners else "")]]
    found = markdown.causes(cells, several, engines, lambda group: _seen(data, old, keys, group))
    blocks += [["", block] for block, _ in found[:NEWS]]
    return [*blocks, ["", *_more(len(found) - NEWS)]]


def _seen(
    data: Mapping[str, Any],
    old: Mapping[str, Any],
    keys: Mapping[Any, Change],
    group: Sequence[Mapping[str, Any]],
) -> str:
    """What cells that fail alike were before, and when they were so for the last time."""
    was = [keys[case_of(c), c["device"], c["engine"]].old for c in group]
    before = ", ".join(dict.fromkeys("not there" if w is None else str(w) for w in was))
    first, last = data["run"].get("started"), old["run"].get("started")
    past = strips.told(data)
    words = {
        past[key]["since"]
        for c in group
        if (key := (case_of(c).id, c["device"], c["engine"])) in past
    } - {"", "since this run"}
    seen = f"first seen {_code(first)}" if first else "first seen in this run"
    if words:
        seen = f"failing {_code(min(words))}"
    return f"{seen}; before{f' ({_code(last)})' if last else ''}: {_code(before)}"


def _rest(news: Diff, old: Mapping[str, Any], data: Mapping[str, Any]) -> list[list[str]]:
    """Blocks of lines: what is news and no new failure."""
    told = set(failures(news))
    others = replace(news, changes=tuple(c for c in news.changes if c not in told))
    if not others.changes:
        return []
    text = changes.markdown(differences.sheet(others, old, data))
    return [["", "<details><summary>What else changed</summary>", "", text, "</details>"]]


def _within(blocks: Sequence[Sequence[str]], budget: int) -> list[str]:
    """The lines of the first blocks, as many as fit in so many bytes, and how many do not."""
    lines: list[str] = []
    for number, block in enumerate(blocks):
        if _size([*lines, *block]) > budget:
            return [*lines, "", *_more(len(blocks) - number)]
        lines += block
    return lines


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode("utf-8")) + 1 for line in lines)


def _more(number: int) -> list[str]:
    return [f"- {number} more, which the page has"] if number > 0 else []


def _code(text: object) -> str:
    return code(_SCREEN.clean(str(text)))


def _plain(text: str) -> str:
    """A text outside of code, without what Markdown would act upon."""
    return re.sub(r"([\\`*_\[\]<>|#@&~])", r"\\\1", _SCREEN.clean(text))
