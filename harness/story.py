"""The whole story of one cell, as text for a terminal and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from harness import matrix, room, safe
from harness.case import DEFAULT, UNSET, Case
from harness.device import Device
from harness.expect import Expectation
from harness.layout import Match
from harness.matrix import Outcome
from harness.record import Candidate, KVCache, Record
from harness.reproduce import Reproduction
from harness.sheet import LABEL, Sheet

MAX_MESSAGE = 4000
"""Characters of an error message; the JSON has all of it."""


@dataclass(frozen=True)
class Story:
    """All that is known of a cell that was run, or whose record was kept."""

    outcome: Outcome
    expectation: Expectation
    options: Mapping[str, Any]
    """What was passed to vLLM."""
    matches: tuple[Match, ...]
    """The caches beside the oracle's pages; () where it has no opinion."""
    no_opinion: str
    """Why the oracle has none; empty where it has."""
    reproduction: Reproduction


def to_json(story: Story) -> dict[str, Any]:
    """The cell as in matrix.json, and what only this command tells."""
    record, known = story.outcome.record, story.expectation.known
    explicit = story.expectation.explicit
    return {
        **matrix.cell_json(story.outcome),
        "passed": dict(story.options),
        "oracle": [
            {
                "role": match.cache.role if match.cache else match.page.role if match.page else "",
                "arithmetic": match.page.arithmetic if match.page else None,
                "page_size_bytes": match.page.page_size_bytes if match.page else None,
                "differences": list(match.differences),
            }
            for match in story.matches
        ],
        "no_opinion": story.no_opinion or None,
        "explicit": None if explicit is None else asdict(explicit),
        "known_entry": None
        if known is None
        else {name: str(value) for name, value in asdict(known).items()},
        "log": [] if record is None else list(record.log),
        "reproduce": asdict(story.reproduction),
    }


def render(story: Story, width: int) -> list[str]:
    """Lines of at most `width` columns, but for code, which is not broken. Texts of vLLM's are
    escaped: nothing in them reaches the terminal."""
    page = Sheet(width)
    cell, record = story.outcome.cell, story.outcome.record
    about = _about(cell.device)
    page.line(f"{cell.case.id} · {cell.device.spec} ({about}) · vLLM {cell.engine.version}")
    _verdict(page, story)
    _asked(page, cell.case, story)
    if record is not None:
        _selected(page, record)
        _resolved(page, record)
        _caches(page, record, story)
        _groups(page, record)
        _capacity(page, record)
        _error(page, record)
    _by_hand(page, story.reproduction)
    return page.lines


def _about(device: Device) -> str:
    parts = [device.name] if device.name not in ("", device.spec) else []
    if device.capability is not None:
        parts.append("SM{}{}".format(*device.capability))
    return ", ".join([*parts, device.kind])


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# ---- The verdict, and what it rests on -----------------------------------------------------------


def _verdict(page: Sheet, story: Story) -> None:
    judgement, record = story.outcome.judgement, story.outcome.record
    page.title("Verdict")
    page.row(judgement.verdict, judgement.reason or "no reason given")
    explicit, known = story.expectation.explicit, story.expectation.known
    page.row("expected", story.outcome.expected)
    if explicit is not None:
        page.row("", f"by hand: {explicit.outcome} ({explicit.why})")
    if record is not None:
        total = record.seconds.get("total")
        after = "" if total is None else f" in {total:.1f} s"
        page.row("stage", f"{record.stage}; {record.depth} was asked for{after}")
        if record.end != "finished":
            page.row("ended", f"{record.end}, exit code {record.exit_code}")
    vouched = (f"{name} ({_VOUCHED[name]})" for name in judgement.vouched)
    page.row("vouched for by", ", ".join(vouched) or "nothing")
    if judgement.remarks:
        page.row("remarks", ", ".join(judgement.remarks))
    if known is not None:
        state = "fulfilled" if judgement.known else "not fulfilled"
        page.row("known failure", f"{known.name} ({state}): {known.verdict} with")
        page.row("", repr(known.signature))
        page.row("", f"{known.link}, since {known.since}, expires {known.expires}")
        page.row("", " ".join(known.reason.split()))
    if judgement.stale:
        page.row("stale", judgement.stale)


_VOUCHED = {
    "explicit": "a case written by hand",
    "oracle": "the arithmetic below",
    "contract": "the backend's own declaration",
}


def _asked(page: Sheet, case: Case, story: Story) -> None:
    page.title("Asked")
    model = story.outcome.cell.model
    page.row("model", f"{case.model} ({model.architecture})")
    chosen = "the option is not passed: vLLM chooses"
    page.row("backend", f"{case.backend}: {chosen}" if case.backend == DEFAULT else case.backend)
    asked = case.kv_cache_dtype
    page.row("kv_cache_dtype", f"{asked}: the option is not passed" if asked == UNSET else asked)
    named = {"model", "attention_backend", "kv_cache_dtype"}
    more = [f"{name}={value!r}" for name, value in story.options.items() if name not in named]
    page.row("also passed", ", ".join(more))


# ---- What became of it ---------------------------------------------------------------------------


def _selected(page: Sheet, record: Record) -> None:
    page.title("Backend")
    resolved = record.resolved
    if resolved.selected is not None:
        page.row("selected", resolved.selected + _why(record))
    others = [name for name in resolved.backends if name != resolved.selected]
    if others:
        page.row("other caches", ", ".join(others))
    for asked, group in groupby(record.candidates, key=lambda candidate: candidate.asked):
        of = f" for layers with {asked}" if asked else ""
        page.line(f"considered by vLLM's selector, in its order{of}:", "  ", "    ")
        _candidates(page, list(group))
    if record.declared:
        page.line("declared by the backend's own class, for what was asked:", "  ", "    ")
    width = max((len(one.backend) + 2 for one in record.declared), default=LABEL)
    for entry in record.declared:
        dtypes = ", ".join(entry.kv_cache_dtypes)
        text = "; ".join(entry.reasons)
        text = f"not supported: {text}" if text else "supported"
        page.row(f"  {entry.backend}", f"{text}\nits kv_cache_dtypes: {dtypes or '-'}", width + 2)


def _why(record: Record) -> str:
    if record.backend != DEFAULT:
        return ", as asked"
    if record.candidates:
        return ", the first of those considered that refuses nothing"
    return ", by the model or the platform itself: vLLM's selector was not asked"


def _candidates(page: Sheet, candidates: Sequence[Candidate]) -> None:
    width = max(len(candidate.backend) for candidate in candidates) + 4
    for one in candidates:
        said = "selected" if one.selected else "not refused"
        if one.reasons:
            said = f"refused: {'; '.join(one.reasons)}"
        page.row(f"  {one.backend}", said, width)


def _resolved(page: Sheet, record: Record) -> None:
    resolved = record.resolved
    if resolved.kv_cache_dtype is None and resolved.cache_config is None:
        return
    page.title("kv_cache_dtype")
    page.row("asked", record.kv_cache_dtype)
    if resolved.kv_cache_dtype is not None:
        page.row("became", f"{resolved.kv_cache_dtype} (in the main attention layers)")
    page.row("cache_config", f"{resolved.cache_config} (what the engine's config says at the end)")
    if resolved.storage_dtype is not None:
        page.row("stored as", resolved.storage_dtype)


def _caches(page: Sheet, record: Record, story: Story) -> None:
    if not record.kv:
        return
    page.title(f"KV caches ({_plural(len(record.kv), 'kind')}), the oracle's arithmetic beside")
    pages = {id(match.cache): match for match in story.matches if match.cache is not None}
    for cache in record.kv:
        match = pages.get(id(cache))
        page.line(_named(cache), "  ", "      ")
        page.row("    seen", _seen(cache))
        if match is None or match.page is None:
            page.row("    oracle", story.no_opinion or "no such cache")
        else:
            page.row("    oracle", match.page.arithmetic)
        for line in match.differences if match is not None else ():
            page.row("    differs", line)
    for match in story.matches:
        if match.cache is None:
            for line in match.lines:
                page.row("differs", line)


def _named(cache: KVCache) -> str:
    ratio = f", {cache.compress_ratio} tokens a state" if cache.compress_ratio > 1 else ""
    kept = ""
    if cache.window is not None:
        kept = f", keeps {cache.window} tokens"
    elif not cache.grows:
        kept = ", does not grow with the context"
    of = f", {cache.backend}" if cache.backend else ""
    return f"{cache.role}: {_plural(cache.layers, 'layer')}, {cache.kind}{of}{ratio}{kept}"


def _seen(cache: KVCache) -> str:
    text = f"page of {cache.page_size_bytes} B for a block of {cache.block_size} tokens"
    if cache.content_bytes != cache.page_size_bytes:
        text += f", {cache.content_bytes} B of it content"
    if cache.shape is not None:
        shape = ", ".join("blocks" if side == -1 else str(side) for side in cache.shape)
        text += f"; tensor ({shape}) {cache.tensor_dtype}"
    return text


def _groups(page: Sheet, record: Record) -> None:
    if not record.groups:
        return
    page.title(f"Groups ({len(record.groups)})")
    for number, group in enumerate(record.groups):
        page.row(
            f"{number}",
            f"{_plural(group.layers, 'layer')}, {group.kind}, block of {group.block_size} tokens, "
            f"page of {group.page_size_bytes} B",
            4,
        )


def _capacity(page: Sheet, record: Record) -> None:
    rows = list(room.rows(record))
    if rows:
        page.title("Capacity")
    for label, text in rows:
        page.row(label, text)


# ---- What was said, and how to see it again ------------------------------------------------------


def _error(page: Sheet, record: Record) -> None:
    if record.error is not None:
        page.title(f"{record.error.type} at stage {record.stage}")
        page.line(f"in {record.error.where}", "  ", "    ")
        for line in safe.clip(record.error.message, MAX_MESSAGE).splitlines():
            page.line(line, "  ", "    ")
    if record.log:
        page.title("vLLM's log, where it speaks of the KV cache")
        for line in record.log:
            page.line(line.replace("\n", " "), "  ", "    ")
    if record.tail and record.end != "finished":
        page.title("The end of the child's output")
        page.code(record.tail, "  ")


def _by_hand(page: Sheet, found: Reproduction) -> None:
    page.title("By hand")
    page.line(f"with vLLM alone ({found.note}):", "  ", "    ")
    for name, value in found.environ.items():
        page.code(f"export {name}={value}")
    page.code(found.python)
    page.line("as a cell:", "  ")
    page.code(found.pytest)
