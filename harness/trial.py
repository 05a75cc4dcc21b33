"""One cell tried with one version after another; what a version gave is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from harness import explain, output, proof
from harness.bisect import Trial
from harness.errors import InfraError, UsageError
from harness.plan import Cell
from harness.record import Record, RecordError, dumps, loads
from harness.session import Run


def run(
    cell: str, devices: Sequence[str], engine: str, label: str = "", *, fresh: bool = False
) -> Trial:
    """Try `cell` with the engine that the SPEC names, installed first where it is a release.

    `label` tells builds of one interpreter apart, such as a commit. With `fresh` it is run whatever
    is kept. An engine that cannot be had, or that knows no such cell, is a Trial without outcome.
    """
    try:
        this, found = explain.prepare(cell, devices=devices, engines=[engine])
    except (UsageError, InfraError) as error:
        return Trial(None, str(error))
    place = this.cache / "trials" / f"{_key(this, found, label)}.json"
    if not fresh and (record := _kept(place)) is not None:
        return Trial(this.judge(found, record), kept=True)
    outcome = explain.launch(this, found)
    if outcome.record is not None and outcome.record.end == "finished":
        with suppress(InfraError):  # it is run again another time
            output.write_whole(place, dumps(outcome.record) + "\n")
    return Trial(outcome)


def _key(this: Run, cell: Cell, label: str) -> str:
    """Names what a record depends on."""
    place = replace(cell.device, index=None, slice_index=None)
    request = this.request(cell)
    parts = (
        *(label, cell.engine.python, cell.engine.version, str(cell.engine.commit)),
        *(cell.case.id, request.depth, json.dumps(place.to_json(), sort_keys=True)),
        json.dumps(dict(cell.model.config), sort_keys=True),
        json.dumps(dict(request.engine_args), sort_keys=True, default=str),
    )
    digest = hashlib.sha256(proof.code())
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _kept(path: Path) -> Record | None:
    with suppress(OSError, UnicodeDecodeError, RecordError):
        return loads(path.read_text(encoding="utf-8"))
    return None
