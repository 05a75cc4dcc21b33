"""What a night is compared with: the last run of its branch, kept whole beside the history."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import diff, output, result
from harness.case import slug
from harness.change import case_of
from harness.errors import UsageError
from harness.interpreter import say

KEPT = 3
"""Runs of a branch that are kept whole: a merge that is tried again must not meet its own."""

NO_RESULT = ("notrun", "infra")
"""Verdicts of cells whose shard was cut off, or whose host was not usable."""


def home(history: Path, branch: str) -> Path:
    """The history folder of one branch: what fails on another is no past of its cells."""
    return history / (slug(branch) or "no-branch")


def load(folder: Path, build: str, started: str) -> dict[str, Any] | None:
    """The last run in a branch's folder that is neither of this `build` nor `started` at the same
    time; None where there is none. One that cannot be read is named and passed over."""
    own = _name(build, started)
    for path in sorted((folder / "last").glob("*.json"), reverse=True):
        same_build = bool(build) and path.stem.partition("-")[2] == slug(build)
        if path.stem == own or same_build:
            continue
        try:
            return result.load(path)
        except UsageError as error:
            say(f"{error}; an earlier run is compared with")
    return None


def keep(folder: Path, build: str, data: Mapping[str, Any]) -> None:
    """Keep the run for the next one to be compared with. InfraError where the disk does not take
    it."""
    kept = {name: value for name, value in data.items() if name not in ("history", "baseline")}
    path = folder / "last" / f"{_name(build, str(data['run'].get('started') or ''))}.json"
    output.write_whole(path, json.dumps(kept) + "\n")
    for old in sorted(path.parent.glob("*.json"))[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()


def _name(build: str, started: str) -> str:
    return f"{re.sub(r'[^0-9TZ]', '', started) or '0'}-{slug(build) or 'local'}"


def carried(data: Mapping[str, Any], old: Mapping[str, Any] | None) -> dict[str, Any]:
    """The run with what the `old` one knew of cells that this one has no result of: what a lost
    shard had is compared with what it last was, not with nothing."""
    if old is None:
        return dict(data)
    devices, engines = diff.pairs(old, data)
    cells = {(case_of(c), c["device"], c["engine"]): c for c in data["cells"]}
    more: dict[str, dict[str, Any]] = {"devices": {}, "engines": {}}
    for cell in old["cells"]:
        device = devices.get(cell["device"], cell["device"])
        engine = engines.get(cell["engine"], cell["engine"])
        key = (case_of(cell), device, engine)
        if key in cells and cells[key]["verdict"] not in NO_RESULT:
            continue
        if cell["verdict"] in NO_RESULT and key in cells:
            continue
        cells[key] = {**cell, "device": device, "engine": engine}
        more["devices"] |= {d["spec"]: d for d in old["devices"] if d["spec"] == device}
        more["engines"] |= {e["version"]: e for e in old["engines"] if e["version"] == engine}
    for name, key_of in (("devices", "spec"), ("engines", "version")):
        have = {each[key_of] for each in data[name]}
        more[name] = {k: each for k, each in more[name].items() if k not in have}
    return {
        **data,
        "devices": [*data["devices"], *more["devices"].values()],
        "engines": [*data["engines"], *more["engines"].values()],
        "cells": [*cells.values()],
    }
