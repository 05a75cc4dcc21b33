"""What vLLM was seen to do, kept small: `resources/observed/<model>.jsonl`.

Written from the records of whole runs of the matrix, never from the oracle:
`python -m tests.observed matrix/records.jsonl ...` keeps, of each model, one record for every
distinct cache. A record keeps what `harness.oracle.Oracle` looks at, and its id.

Some are of cells that are rightly red, and say so (`wrong`): an oracle that confirms one of them is
as wrong as one that denies another.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import plan
from harness.case import DEFAULT, UNSET
from harness.oracle import Oracle
from harness.record import KVCache, Record, Resolved, loads, parts

FOLDER = Path(__file__).parent / "resources" / "observed"

_CACHE = (
    *("kind", "role", "layers", "block_size", "page_size_bytes", "content_bytes", "dtype"),
    *("compress_ratio", "draft", "shape", "tensor_dtype", "window", "state_mode"),
)
_RESOLVED = ("kv_cache_dtype", "storage_dtype", "selected")
_RECORD = (
    *("id", "model", "backend", "kv_cache_dtype", "device", "device_kind", "capability", "engine"),
    *("depth", "stage", "block_size", "tensor_parallel_size"),
)
"""Fields that are kept, of those with a default only where it is another."""


@dataclass(frozen=True)
class Seen:
    """The caches of one cell."""

    record: Record
    wrong: bool
    """True where the cell is rightly red."""


@functools.cache
def models() -> dict[str, plan.Model]:
    """The shipped models, by key."""
    return {one.key: one for one in plan.models()}


def oracle(model: str) -> Oracle:
    """The oracle of the cells of `model`."""
    one = models()[model]
    return Oracle(one.config, one.start.drafts)


@functools.cache
def load(model: str) -> tuple[Seen, ...]:
    """What was seen of `model`; () where nothing was."""
    path = FOLDER / f"{model}.jsonl"
    if not path.is_file():
        return ()
    return tuple(_seen(json.loads(line)) for line in path.read_text().splitlines())


def right(model: str) -> tuple[Record, ...]:
    """The records of `model` that the oracle must confirm."""
    return tuple(seen.record for seen in load(model) if not seen.wrong)


def _seen(data: dict[str, Any]) -> Seen:
    wrong = data.pop("wrong", False)
    return Seen(Record(**parts(data)), wrong)


def _small(record: Record) -> dict[str, Any]:
    small = _said(record, _RECORD)
    small["resolved"] = _said(record.resolved, _RESOLVED)
    small["kv"] = [_said(kv, _CACHE) for kv in record.kv]
    if record.capacity is not None:
        small["capacity"] = dataclasses.asdict(record.capacity)
    return small


def _said(one: Record | Resolved | KVCache, names: Iterable[str]) -> dict[str, Any]:
    default = {field.name: field.default for field in dataclasses.fields(one)}
    values = {name: getattr(one, name) for name in names}
    return {name: value for name, value in values.items() if value != default[name]}


def pick(records: Iterable[Record]) -> dict[str, list[dict[str, Any]]]:
    """model -> the first record of every distinct cache, of every backend that serves its family,
    and the default on every generation; of those that are wrong, one for each complaint.

    Left out are those that did not go through or have no cache where the model has one.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    known: set[str] = set()
    # The defaults first, so that what is like them is not kept again.
    for record in sorted(records, key=lambda one: one.kv_cache_dtype != UNSET):
        model = models().get(record.model)
        if model is None or not record.complete:
            continue
        small = _small(record)
        lines = oracle(record.model)(record)
        if lines:
            complaint = f"{record.model} {lines[0].partition(' stored as ')[2] or record.id}"
            if complaint not in known:
                known.add(complaint)
                found.setdefault(record.model, []).append({**small, "wrong": True})
            continue
        own = _own(record, model, small)
        if not own <= known:
            known |= own
            found.setdefault(record.model, []).append(small)
    return found


def _own(record: Record, model: plan.Model, small: dict[str, Any]) -> set[str]:
    """What the record shows: the first to show something is kept."""
    generation = (record.capability or (0,))[0]
    asked = f"{record.block_size} {record.tensor_parallel_size}"
    shown = {
        f"{record.model} {record.resolved.storage_dtype} {asked} {json.dumps(small['kv'])}",
        f"{model.config['model_type']} {generation} {record.resolved.selected} {asked}",
    }
    if record.backend == DEFAULT and record.kv_cache_dtype == UNSET:
        shown.add(f"{record.id} {generation}")
    return shown


def main(paths: list[str]) -> None:
    """Write the files anew from the records in `paths`."""
    lines = [line for path in paths for line in Path(path).read_text().splitlines()]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model, kept in pick(map(loads, lines)).items():
        text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in kept)
        (FOLDER / f"{model}.jsonl").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
