"""Durations: how long cells took in earlier runs, so that the longest can come first.

A cache and no more: what is lost of it is measured again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import change, joined, output
from harness.case import slug
from harness.plan import Cell
from harness.record import Record

SCHEMA = 1
"""Version of the JSON form. Raised when a field changes its meaning or goes away."""

VIRTUAL_SECONDS = 1.0
REAL_SECONDS = 10.0
"""What a cell takes about which nothing is known."""

ENGINES_KEPT = 8
"""Engine versions in the file: a development build has a new one with every commit."""

Key = tuple[str, str, str]
"""Case id, device id, engine version."""


def key(cell: Cell) -> Key:
    """What `cell` is recorded under."""
    return (cell.case.id, cell.device.id, cell.engine.version)


def measured(cell: Cell, record: Record) -> dict[Key, float]:
    """The seconds that `record` tells of `cell`; nothing where its child did not finish."""
    seconds = _seconds(record.seconds.get("total"))
    return {} if record.end != "finished" or seconds is None else {key(cell): seconds}


@dataclass(frozen=True)
class Durations:
    """Recorded seconds per case, device and engine version."""

    seconds: Mapping[Key, float]
    """The versions that were recorded last come last."""

    def estimate(self, cell: Cell) -> float:
        """Seconds that `cell` will take: as recorded; else as another engine version took last;
        else the median of its model on its device; else `VIRTUAL_SECONDS` or `REAL_SECONDS`."""
        case, device, _ = key(cell)
        for known in (
            self.seconds.get(key(cell)),
            self._any_version.get((case, device)),
            self._median(slug(cell.case.model), device),
        ):
            if known is not None:
                return known
        return REAL_SECONDS if cell.device.real else VIRTUAL_SECONDS

    @functools.cached_property
    def _any_version(self) -> dict[tuple[str, str], float]:
        return {(case, device): seconds for (case, device, _), seconds in self.seconds.items()}

    def _median(self, model: str, device: str) -> float | None:
        """Of all models whose keys begin so: a key may have a `-`, too."""
        if (model, device) not in self._medians:
            alike = [
                seconds
                for (case, place, _), seconds in self.seconds.items()
                if place == device and case.startswith(f"{model}-")
            ]
            self._medians[model, device] = statistics.median(alike) if alike else None
        return self._medians[model, device]

    @functools.cached_property
    def _medians(self) -> dict[tuple[str, str], float | None]:
        return {}


@dataclass(frozen=True)
class Recorded:
    """The durations of a file that all shards of a run are given."""

    durations: Durations = field(default_factory=lambda: Durations({}))
    digest: str | None = None
    """SHA-256 of the file; None where there is none that can be read. Shards that were split by
    different ones are no partition."""
    trouble: str | None = None
    """Why it cannot be read, and what is done instead: a line."""


def recorded(path: Path) -> Recorded:
    """The durations in the file at `path`; never those of this machine's cache, which another
    shard's machine does not have."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return _unread(path, error.strerror or str(error))
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return _unread(path, "not JSON")
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        return _unread(path, f"schema {schema!r} is not {SCHEMA}, the one read here")
    found = loads(content.decode("utf-8"))
    return Recorded(Durations(found), hashlib.sha256(content).hexdigest())


def _unread(path: Path, why: str) -> Recorded:
    return Recorded(
        trouble=f"cannot use {path}: {why}; the shard is split by estimates, and fits only shards "
        "that are, too"
    )


def of_matrix(data: Mapping[str, Any]) -> dict[Key, float]:
    """The seconds that a matrix.json tells of, to be written with `dumps`. What did not finish is
    left out."""
    devices = {device["spec"]: joined.device_id(device) for device in data["devices"]}
    return {
        (change.case_of(cell).id, devices[cell["device"]], cell["engine"]): seconds
        for cell in data["cells"]
        if cell.get("end") == "finished"
        and (seconds := _seconds((cell.get("seconds") or {}).get("total"))) is not None
    }


def merged(old: Mapping[Key, float], new: Mapping[Key, float]) -> dict[Key, float]:
    """`old` overwritten by `new`, of the `ENGINES_KEPT` versions that were recorded last."""
    fresh = {version for _, _, version in new}
    # The order of the keys is the order in which versions were recorded.
    both = {k: old[k] for k in sorted(old, key=lambda k: k[2] in fresh)}
    both.update(new)
    versions = list(dict.fromkeys(version for _, _, version in both))
    kept = set(versions[-ENGINES_KEPT:])
    return {k: seconds for k, seconds in both.items() if k[2] in kept}


def loads(text: str) -> dict[Key, float]:
    """Read what `dumps` wrote. What cannot be read is left out, be it one number or all."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return {}
    return {
        (case, device, version): seconds
        for version, devices in _items(data.get("engines"))
        for device, cases in _items(devices)
        for case, value in _items(cases)
        if (seconds := _seconds(value)) is not None
    }


def dumps(seconds: Mapping[Key, float]) -> str:
    """The seconds as JSON: engine version -> device id -> case id -> seconds."""
    engines: dict[str, dict[str, dict[str, float]]] = {}
    for (case, device, version), value in seconds.items():
        engines.setdefault(version, {}).setdefault(device, {})[case] = round(value, 2)
    return json.dumps({"schema": SCHEMA, "engines": engines}, indent=0) + "\n"


def path(cache: Path) -> Path:
    """Where the durations lie in the cache folder."""
    return cache / "durations.json"


def load(cache: Path) -> Durations:
    """The durations that are kept in `cache`; none where the file is missing or corrupt."""
    try:
        text = path(cache).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    return Durations(loads(text))


def save(cache: Path, new: Mapping[Key, float]) -> None:
    """Keep `new` beside what is there by now. InfraError where the disk does not take it."""
    if new:
        output.write_whole(path(cache), dumps(merged(load(cache).seconds, new)))


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
