"""Known failures: cases/known.yaml, its checks, and which entry speaks of a cell. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from typing import Any

import bracex
import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from harness.device import CPU_FEATURES
from harness.errors import UsageError, near
from harness.verdict import PASSING, VERDICTS

FAILURES = tuple(v for v in VERDICTS if v not in PASSING | {"infra", "skipped", "notrun"})
"""What an entry can expect: the verdicts by which the product fails."""

UNREPORTED = "vllm:unreported"
"""In place of a link, for a fault that has no public issue yet; such an entry must reproduce."""

LIMIT = 1000
"""Patterns that one word of `cells` may expand to."""

_REQUIRED = ("name", "cells", "verdict", "signature", "link", "since", "expires", "reason")
_OPTIONAL = ("engines", "python", "devices", "has", "lacks", "reproduce")


@dataclass(frozen=True)
class Known:
    """One known failure."""

    name: str
    cells: tuple[str, ...]
    """Case ids, or fnmatch patterns of them; braces of the file are expanded."""
    verdict: str
    signature: str
    """A part of the reason or of the error's message or place."""
    link: str
    since: date
    expires: date
    reason: str
    engines: str = ""
    """Version specifiers such as `>=0.30,<0.34`; empty means every engine."""
    python: str = ""
    """Version specifiers of the engine's Python, such as `<3.12`; empty means every Python."""
    devices: tuple[str, ...] = ()
    """Device SPECs (fnmatch) or capabilities such as `sm90`; empty means every device."""
    has: tuple[str, ...] = ()
    """Instruction sets (`Device.features`): it holds on CPUs that have all of them."""
    lacks: tuple[str, ...] = ()
    """As `has`: it holds on CPUs that have none of them."""
    reproduce: str = ""


def load(text: str, source: str = "cases/known.yaml") -> tuple[Known, ...]:
    """The entries of a YAML text. UsageError names the entry and what is wrong with it."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f" line {place.line + 1}" if place is not None else ""
        raise UsageError(f"{source}{line} is not YAML") from None
    except ValueError as error:
        # What looks like a date is made one at once, a thirteenth month too.
        raise UsageError(f"{source}: a date that is none: {error}") from None
    if data is None:
        return ()
    if not isinstance(data, list):
        raise UsageError(f"{source} must be a list of entries")
    entries = tuple(_entry(raw, f"{source} entry {at}") for at, raw in enumerate(data, 1))
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{source}: two entries are named {name!r}")
    return entries


def _entry(raw: Any, where: str) -> Known:
    if not isinstance(raw, dict):
        raise UsageError(f"{where} must be a mapping")
    where = f"{where} ({raw.get('name', 'no name')})"
    for key in raw:
        if key not in _REQUIRED + _OPTIONAL:
            close = near(str(key), _REQUIRED + _OPTIONAL)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{where}: unknown key {key!r}{hint}")
    # A signature of blanks would be found in every failure.
    missing = [key for key in _REQUIRED if not str(raw.get(key) or "").strip()]
    if missing:
        raise UsageError(f"{where}: {', '.join(missing)} missing")
    if raw["verdict"] not in FAILURES:
        raise UsageError(f"{where}: verdict {raw['verdict']!r} is not one of {', '.join(FAILURES)}")
    for key in ("since", "expires"):
        # A time of day makes it a datetime, which is a date that does not compare with one.
        if type(raw[key]) is not date:
            raise UsageError(f"{where}: {key} {raw[key]!r} is not a date such as 2026-12-01")
    if raw["since"] > raw["expires"]:
        raise UsageError(f"{where}: since {raw['since']} is after expires {raw['expires']}")
    engines = _specifiers(raw, "engines", ">=0.30,<0.34", where)
    python = _specifiers(raw, "python", "<3.12", where)
    link = str(raw["link"])
    if link == UNREPORTED:
        if not raw.get("reproduce"):
            raise UsageError(f"{where}: a fault that is not reported must say how to reproduce it")
    elif not re.fullmatch(r"https?://[^\s/]+\S*", link):
        raise UsageError(f"{where}: link {link!r} is neither a URL nor {UNREPORTED}")
    return Known(
        name=str(raw["name"]),
        cells=_patterns(_words(raw["cells"], f"{where}: cells"), f"{where}: cells"),
        verdict=str(raw["verdict"]),
        signature=str(raw["signature"]),
        link=link,
        since=raw["since"],
        expires=raw["expires"],
        reason=str(raw["reason"]).strip(),
        engines=engines,
        python=python,
        devices=_words(raw.get("devices", []), f"{where}: devices"),
        has=_features(raw, "has", where),
        lacks=_features(raw, "lacks", where),
        reproduce=str(raw.get("reproduce", "")).strip(),
    )


def _features(raw: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    found = _words(raw.get(key, []), f"{where}: {key}")
    if unheard := set(found) - set(CPU_FEATURES):
        raise UsageError(f"{where}: {key} {min(unheard)!r}, known are {', '.join(CPU_FEATURES)}")
    if found and raw.get("devices") != ["cpu"]:
        raise UsageError(f"{where}: {key} is of a CPU, so devices must be [cpu]")
    return found


def _specifiers(raw: Mapping[str, Any], key: str, such_as: str, where: str) -> str:
    text = str(raw.get(key, ""))
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise UsageError(f"{where}: {key} {text!r} is not like {such_as!r}") from None
    return text


def _patterns(words: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The words with their braces expanded, as a shell does: `a-{b,c}` is `a-b` and `a-c`."""
    try:
        return tuple(pattern for word in words for pattern in bracex.iexpand(word, limit=LIMIT))
    except bracex.ExpansionLimitException:
        raise UsageError(f"{where}: braces that mean more than {LIMIT} cells") from None


def _words(raw: Any, where: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(word, str) for word in raw):
        raise UsageError(f"{where} must be a list of words")
    return tuple(raw)


Start = tuple[str, str, "tuple[int, int] | None"]
"""What a run starts on: vLLM version, device SPEC, capability."""


def relevant(entries: Iterable[Known], starts: Iterable[Start]) -> tuple[Known, ...]:
    """The entries that speak of at least one of these starts: another release or device has other
    cells, and need not have those of an entry."""
    some = set(starts)
    return tuple(
        entry
        for entry in entries
        if any(_of_engine(entry, v) and _of_device(entry, device, sm) for v, device, sm in some)
    )


def _of_engine(entry: Known, version: str) -> bool:
    """True where `entry` speaks of a vLLM version."""
    return _within(entry.engines, version)


def _within(specifiers: str, version: str) -> bool:
    """True for any version where there are no specifiers; what is no version is in no range."""
    if not specifiers:
        return True
    try:
        return SpecifierSet(specifiers).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def check(entries: Iterable[Known], ids: Collection[str], today: date) -> list[str]:
    """What is wrong with the entries now: cells that do not exist, entries past their day."""
    problems = []
    for entry in entries:
        for pattern in entry.cells:
            if not any(fnmatchcase(name, pattern) for name in ids):
                close = near(pattern, ids)
                hint = f", did you mean {close[0]}?" if close else ""
                problems.append(f"{entry.name}: no cell {pattern!r}{hint}")
        if entry.expires < today:
            problems.append(
                f"{entry.name} expired on {entry.expires}: look at {entry.link} again, then remove "
                "the entry or move the day"
            )
    return problems


def find(
    entries: Iterable[Known],
    case_id: str,
    version: str,
    device: str,
    capability: tuple[int, int] | None,
    python: str = "",
    features: Collection[str] = (),
) -> Known | None:
    """The entry that speaks of a cell. UsageError where two do.

    `python` is "" where the engine's is not known: then entries speak whatever Python they are for.
    `features` are a CPU's (`Device.features`).
    """
    speaking = [
        entry
        for entry in entries
        if _speaks(entry, case_id, version, device, capability)
        and (not python or _within(entry.python, python))
        and set(entry.has) <= set(features)
        and not set(entry.lacks) & set(features)
    ]
    if len(speaking) > 1:
        names = " and ".join(repr(entry.name) for entry in speaking)
        raise UsageError(f"cases/known.yaml: {names} both speak of {case_id} on {device}")
    return speaking[0] if speaking else None


def _speaks(
    entry: Known, case_id: str, version: str, device: str, capability: tuple[int, int] | None
) -> bool:
    return (
        any(fnmatchcase(case_id, pattern) for pattern in entry.cells)
        and _of_engine(entry, version)
        and _of_device(entry, device, capability)
    )


def _of_device(entry: Known, device: str, capability: tuple[int, int] | None) -> bool:
    sm = "sm{}{}".format(*capability) if capability else ""
    return not entry.devices or any(fnmatchcase(device, d) or d == sm for d in entry.devices)
