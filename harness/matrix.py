"""The matrix of one run: outcomes of cells, and the JSON that scripts read. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.device import Device
from harness.expect import is_main
from harness.facts import EngineFacts
from harness.plan import Cell
from harness.record import Record
from harness.record import to_json as plain_json
from harness.verdict import Judgement
from harness.view import CellView

SCHEMA = 1
"""Version of matrix.json. Raised when a field changes its meaning or goes away."""

MAIN_KINDS = ("MLAAttentionSpec", "FullAttentionSpec")
"""Spec kinds whose page stands for a cell where a single number is shown."""


@dataclass(frozen=True)
class Outcome:
    """What became of one planned cell."""

    cell: Cell
    judgement: Judgement
    record: Record | None
    """None where no child ran: skipped, notrun."""
    expected: str
    """The verdict that was expected."""
    needs_bytes: int | None = None
    """Memory that the cell needs on a real device; None on a virtual one."""


def main_page(record: Record | None) -> int | None:
    """`page_size_bytes` that stands for a record: the largest page of its main attention layers."""
    return None if record is None else largest((kv.kind, kv.page_size_bytes) for kv in record.kv)


def largest(caches: Iterable[tuple[str, int]]) -> int | None:
    """Of caches, by kind and page, the largest page of a main one, else of any; None of none."""
    found = list(caches)
    main = [page for kind, page in found if kind in MAIN_KINDS] or [page for _, page in found]
    return max(main, default=None)


def main_storage(record: Record | None) -> str | None:
    """Element type of a record's main attention cache, several joined by `+`: as the layers say,
    or, where they do not (vLLM's MLA layers), as their specs do. None where none is one of its
    own, as states have none."""
    if record is None:
        return None
    if record.resolved.storage_dtype is not None or not record.kv:
        return record.resolved.storage_dtype
    main = [kv for kv in record.kv if kv.kind in MAIN_KINDS and is_main(kv)] or record.kv
    return "+".join(sorted({kv.dtype for kv in main} - {""})) or None


def view(outcome: Outcome) -> CellView:
    """An outcome as the terminal shows it."""
    record, judgement, case = outcome.record, outcome.judgement, outcome.cell.case
    return CellView(
        id=outcome.cell.id,
        model=case.model,
        backend=case.backend,
        kv_cache_dtype=case.kv_cache_dtype,
        device=outcome.cell.device.spec,
        engine=outcome.cell.engine.version,
        verdict=judgement.verdict,
        known=judgement.known,
        reason=judgement.reason,
        remarks=judgement.remarks,
        stale=judgement.stale,
        stage=record.stage if record else "",
        page=main_page(record),
        resolved=record.resolved.kv_cache_dtype if record else None,
        stored=main_storage(record),
        where=record.error.where if record and record.error else None,
        vouched=judgement.vouched,
    )


def cell_json(outcome: Outcome) -> dict[str, Any]:
    """One entry of `cells` in matrix.json."""
    record, judgement, case = outcome.record, outcome.judgement, outcome.cell.case
    data: dict[str, Any] = {
        "id": outcome.cell.id,
        "model": case.model,
        "backend": case.backend,
        "kv_cache_dtype": case.kv_cache_dtype,
        "block_size": case.block_size or None,
        "tensor_parallel_size": case.tensor_parallel_size,
        "device": outcome.cell.device.spec,
        "engine": outcome.cell.engine.version,
        "verdict": judgement.verdict,
        "expected": outcome.expected,
        "known": judgement.known,
        "stale": judgement.stale,
        "reason": judgement.reason,
        "remarks": list(judgement.remarks),
        "vouched": list(judgement.vouched),
        "stage": None,
        "resolved": None,
        "kv": [],
        "groups": [],
        "num_blocks": None,
        "kv_bytes_per_token": None,
        "capacity": None,
        "candidates": [],
        "declared": [],
        "memory": None,
        "needs_bytes": outcome.needs_bytes,
        "error": None,
        "seconds": {},
    }
    if record is not None:
        plain = plain_json(record)
        for name in (
            *("stage", "resolved", "kv", "groups", "num_blocks", "kv_bytes_per_token"),
            *("capacity", "candidates"),
            *("declared", "memory", "seconds", "end", "tail", "exit_code", "retried"),
            *("model_runner", "logits_finite", "settings", "leaked_bytes"),
        ):
            data[name] = plain[name]
        data["resolved"]["storage_dtype"] = main_storage(record)
        if record.error is not None:
            data["error"] = {
                "type": record.error.type,
                "message": record.error.message,
                "where": record.error.where,
            }
    return data


def to_json(
    run: dict[str, Any],
    engines: Sequence[EngineFacts],
    devices: Sequence[Device],
    outcomes: Iterable[Outcome],
    differences: Iterable[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The whole of matrix.json."""
    return {
        "schema": SCHEMA,
        "run": run,
        "engines": [engine.to_json() for engine in engines],
        "devices": [device.to_json() for device in devices],
        "differences": list(differences),
        "cells": [cell_json(outcome) for outcome in outcomes],
    }


def counts(judgements: Iterable[Judgement]) -> dict[str, int]:
    """How many of each verdict, `known` counted apart from it."""
    found: dict[str, int] = {}
    for judgement in judgements:
        key = "known" if judgement.known else judgement.verdict
        found[key] = found.get(key, 0) + 1
    return found


def vouched(judgements: Iterable[Judgement]) -> dict[str, int]:
    """How many `ok` cells each combination of expectations vouches for, such as
    `oracle+contract`; `nobody` where none does."""
    found = Counter("+".join(j.vouched) or "nobody" for j in judgements if j.verdict == "ok")
    return dict(found.most_common())
