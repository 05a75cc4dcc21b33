"""matrix.md: the matrix for a comment or an annotation, in no more bytes than it may have. Pure.

Most important first. What does not fit is summed up, and never cut in the middle. Texts from a run
are code spans: nothing in them is a link, a mention or a tag.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.case import slug
from harness.change import case_of, state
from harness.report import strips
from harness.report.changes import code
from harness.report.command import command
from harness.safe import printable
from harness.verdict import VERDICTS
from harness.view import GLYPHS, Screen, grouped, written

Data = Mapping[str, Any]

LIMIT = 1024 * 1024 - 16 * 1024
"""Bytes. A Buildkite annotation holds 1 MiB; the rest is for what a script puts around it."""

LEAST = 8 * 1024
"""Bytes: the smallest budget, which the head and what is said of all the rest fit in."""

COMMENT = 65_536
"""Characters of a comment on GitHub; so many bytes are never more."""

_RESERVED = 1024
"""Bytes kept for the last lines, which tell what was left out."""

_NAMES = 12
_PLACES = 4
_SCREEN = Screen(0, color=False, unicode=True)
_LINK = re.compile(r"https://[A-Za-z0-9./_#-]+")

Section = tuple[str, list[tuple[str, int]], str]
"""Title, its blocks each with how many cells it is of, and what a block is."""


def render(data: Data, limit: int = LIMIT) -> str:
    """The text of matrix.md for a matrix.json, in at most `limit` bytes of UTF-8."""
    out = [*_head(data)]
    left = limit - _RESERVED - _size(out)
    hidden = []
    for title, blocks, unit in _sections(data):
        if not blocks:
            continue
        heading = f"\n### {title}\n"
        left -= _size([heading])
        shown = []
        for block, _ in blocks:
            left -= _size([block])
            if left < 0:
                left += _size([block])
                break
            shown.append(block)
        if shown:
            out += [heading, *shown]
        else:
            left += _size([heading])
        if missing := blocks[len(shown) :]:
            cells = sum(number for _, number in missing)
            many = f" ({_count(cells)})" if cells else ""
            hidden.append(f'{len(missing)} of {len(blocks)} {unit} in "{title}"{many}')
            # What comes behind is less important than what has just been left out.
            left = 0
    if hidden:
        out.append("\nLeft out for its size; matrix.json and matrix.html have it:\n")
        out += [f"- {text}" for text in hidden]
    return "\n".join(out) + "\n"


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode("utf-8")) + 1 for line in lines)


def _count(cells: int) -> str:
    return f"{cells} cell{'' if cells == 1 else 's'}"


# ---- The head ------------------------------------------------------------------------------------


def _head(data: Data) -> Iterator[str]:
    cells = data["cells"]
    states = Counter(state(cell) for cell in cells)
    yield f"## KV cache matrix: {_outcome(states, len(cells))}"
    if found := (data["run"].get("merged") or {}).get("conflicts"):
        yield ""
        yield f"**{_count(len(found))} came out differently in the parts that were merged.**"
    yield ""
    yield f"- vLLM {_some([engine['version'] for engine in data['engines']])}"
    yield f"- on {_some([_device(device) for device in data['devices']])}"
    run = data["run"]
    if run.get("started"):
        took = f", {run['seconds']:.0f} s" if isinstance(run.get("seconds"), (int, float)) else ""
        yield f"- started {_code(run['started'])}{took}"
    yield ""
    yield "| verdict | cells | of them known | meaning |"
    yield "|---|--:|--:|---|"
    found = Counter(cell["verdict"] for cell in cells)
    known = Counter(cell["verdict"] for cell in cells if cell.get("known"))
    for name in VERDICTS:
        if found[name]:
            glyph, _, meaning = GLYPHS[name]
            # One of the glyphs would strike through.
            glyph = glyph.replace("~", "\\~")
            yield f"| {glyph} {name} | {found[name]} | {known[name] or ''} | {meaning} |"


def _outcome(states: Mapping[str, int], total: int) -> str:
    if not total:
        return "no cells"
    told = []
    if states["failing"]:
        told.append(f"{states['failing']} of {_count(total)} FAILED")
    if states["lost"]:
        told.append(f"{_count(states['lost'])} without a result, the host was not usable")
    known, skipped = states["known"], states["skipped"]
    told = told or [f"none of {_count(total)} failed"]
    told += [f"{known} known to fail"] if known else []
    return ", ".join([*told, *([f"{skipped} skipped"] if skipped else [])])


def _device(device: Data) -> str:
    kind = device["kind"]
    what = "virtual: computed, not measured" if kind == "virtual" else f"{kind}, measured"
    return f"{device['spec']} ({device['name']}, {what})"


def _some(texts: Sequence[str]) -> str:
    shown = ", ".join(_code(text, 120) for text in texts[:_PLACES])
    return shown + (f" and {len(texts) - _PLACES} more" if len(texts) > _PLACES else "")


# ---- The sections --------------------------------------------------------------------------------


def _sections(data: Data) -> Iterator[Section]:
    engines = {engine["version"]: engine for engine in data["engines"]}
    cells = data["cells"]
    several = len(engines) > 1 or len(data["devices"]) > 1
    by = grouped(cells, state)
    failed = by.get("failing", [])
    yield f"Failures: {_count(len(failed))}", causes(failed, several, engines), "causes"
    lost = by.get("lost", [])
    yield f"No result: {_count(len(lost))}", causes(lost, several, engines), "causes"
    merged = data["run"].get("merged") or {}
    yield "Merged parts contradict each other", _merged(merged, "conflicts"), "cells"
    if history := data.get("history"):
        for title, rows in strips.markdown(history):
            yield title, rows, "cells"
    faults = [(f"- {_code(text)}", 0) for text in merged.get("faults", ())]
    yield "Not whole", faults, "faults"
    yield "Known failures", [*_known(by.get("known", []), several)], "links"
    yield "Skipped", [*_skipped(by.get("skipped", []), several)], "reasons"
    yield "In several parts, and alike", _merged(merged, "duplicates"), "cells"
    yield "Models", _models(cells), "models"


def causes(
    cells: Sequence[Data],
    several: bool,
    engines: Mapping[str, Data],
    more: Callable[[Sequence[Data]], str] = lambda _: "",
) -> list[tuple[str, int]]:
    """A block for each verdict and reason, and of how many cells it is; those of most first. `more`
    says in Markdown what else is to be told of such cells."""
    groups = grouped(cells, lambda c: (c["verdict"], c.get("stale") or "", _alike(c)))
    blocks = []
    for (verdict, stale, alike), group in sorted(groups.items(), key=lambda item: -len(item[1])):
        first = group[0]
        reasons = {str(cell.get("reason") or "") for cell in group}
        stages = " or ".join(dict.fromkeys(_code(c["stage"]) for c in group if c.get("stage")))
        what = f"stale known entry, {verdict}" if stale else verdict
        lines = [f"- **{what}**, {_count(len(group))}{f', stage {stages}' if stages else ''}: "]
        lines[0] += _code(stale or (reasons.pop() if len(reasons) == 1 else alike) or "no reason")
        places = dict.fromkeys(
            str(c["error"]["where"]) for c in group if (c.get("error") or {}).get("where")
        )
        if places:
            lines.append(f"  <br>in {_some([*places])}")
        lines.append(f"  <br>{code(_ids(group, several))}")
        lines += [f"  <br>{told}"] if (told := more(group)) else []
        lines += _fenced(command(first, engines[first["engine"]]))
        blocks.append(("\n".join(lines), len(group)))
    return blocks


def _alike(cell: Data) -> str:
    """The reason without the kv_cache_dtype, which many that fail alike differ in."""
    reason, dtype = str(cell.get("reason") or ""), cell["kv_cache_dtype"]
    if dtype in ("unset", "auto"):
        return reason
    return re.sub(rf"(?<!\w){re.escape(dtype)}(?!\w)", "<kv_cache_dtype>", reason)


def _fenced(text: str) -> list[str]:
    """A command in a block of its own, which nothing in it can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return ["", f"  {fence}sh", f"  {printable(text)}", f"  {fence}"]


def _merged(merged: Data, name: str) -> list[tuple[str, int]]:
    blocks = []
    for each in merged.get(name, ()):
        where = f"{each['id']} on {each['device']} with vLLM {each['engine']}"
        told = ", ".join(f"{verdict} in {part}" for part, verdict in each["parts"])
        what = f" ({_code(each['what'])} differs; the worst is kept)" if "what" in each else ""
        blocks.append((f"- {_code(where)}{what}: {_code(told)}", 1))
    return blocks


def _known(cells: Sequence[Data], several: bool) -> Iterator[tuple[str, int]]:
    for link, group in grouped(cells, lambda c: str(c["known"])).items():
        counts = Counter(cell["verdict"] for cell in group)
        what = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        shown = f"<{link}>" if _LINK.fullmatch(link) and len(link) < 200 else _code(link)
        yield f"- {shown}: {what}\n  <br>{code(_ids(group, several))}", len(group)


def _skipped(cells: Sequence[Data], several: bool) -> Iterator[tuple[str, int]]:
    for reason, group in grouped(cells, lambda c: str(c.get("reason") or "")).items():
        head = f"- {_count(len(group))}: {_code(reason or 'no reason')}"
        yield f"{head}\n  <br>{code(_ids(group, several))}", len(group)


def _models(cells: Sequence[Data]) -> list[tuple[str, int]]:
    """A table, a block of which is one row: each is of a model on one device with one engine."""
    head = "| model | device | vLLM | ok | rejected | known | failed | skipped | no result |\n"
    head += "|---|---|---|--:|--:|--:|--:|--:|--:|\n"
    rows = []
    for names, group in grouped(cells, lambda c: (c["model"], c["device"], c["engine"])).items():
        states = Counter(state(cell) for cell in group)
        good = Counter(c["verdict"] for c in group if state(c) == "passing")
        numbers = [good["ok"], good["rejected"], states["known"], states["failing"]]
        numbers += [states["skipped"], states["lost"]]
        texts = [_code(name, 120).replace("|", "\\|") for name in names]
        rows.append(f"| {' | '.join([*texts, *(str(n) if n else '' for n in numbers)])} |")
    return [((head if not place else "") + row, 0) for place, row in enumerate(rows)]


def _ids(cells: Sequence[Data], several: bool) -> str:
    ids = []
    for cell in cells:
        case = case_of(cell)
        tail = case.id.removeprefix(case.base)
        tail += f"-{slug(cell['device'])}-{slug(cell['engine'])}" if several else ""
        ids.append((slug(case.model), slug(case.backend), slug(case.kv_cache_dtype), tail))
    return written(_SCREEN, ids, _NAMES)


def _code(text: object, most: int = 600) -> str:
    return code(_SCREEN.clean(str(text))[:most])
