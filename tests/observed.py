"""What vLLM was seen to do, kept small: `resources/observed/<model>.jsonl`.

Written from the records of whole runs of the matrix, never from the oracle:
`python -m tests.observed matrix/records.jsonl ...` keeps, of each model, one record for every
distinct cache. A record keeps what `harness.layout.compare` looks at, and its id.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import layout, plan
from harness.case import DEFAULT, UNSET
from harness.layouts.page import Capability
from harness.record import KVCache, Record, Resolved, loads, parts

FOLDER = Path(__file__).parent / "resources" / "observed"

KEPT = ("kind", "role", "layers", "block_size", "page_size_bytes", "content_bytes", "dtype")
KEPT_IF_SAID = ("compress_ratio", "shape", "tensor_dtype")


@dataclass(frozen=True)
class Seen:
    """The caches of one cell."""

    id: str
    model: str
    device: str
    engine: str
    capability: Capability | None
    resolved: Resolved
    kv: tuple[KVCache, ...]


def whole(model: str) -> Mapping[str, Any]:
    """The shipped config of `model`."""
    return _configs()[model]


@functools.cache
def _configs() -> dict[str, Mapping[str, Any]]:
    return {one.key: one.config for one in plan.models()}


def load(model: str) -> tuple[Seen, ...]:
    """What was seen of `model`; () where nothing was."""
    path = FOLDER / f"{model}.jsonl"
    if not path.is_file():
        return ()
    return tuple(_seen(json.loads(line)) for line in path.read_text().splitlines())


def _seen(data: dict[str, Any]) -> Seen:
    fields = ("capability", "resolved", "kv")
    told = parts({name: data[name] for name in fields})
    rest = {name: value for name, value in data.items() if name not in fields}
    return Seen(**rest, **told)


def _small(record: Record) -> dict[str, Any]:
    resolved = record.resolved
    return {
        "id": record.id,
        "model": record.model,
        "device": record.device,
        "engine": record.engine,
        "capability": record.capability,
        "resolved": {
            "kv_cache_dtype": resolved.kv_cache_dtype,
            "storage_dtype": resolved.storage_dtype,
        },
        "kv": [_cache(kv) for kv in record.kv],
    }


def _cache(kv: KVCache) -> dict[str, Any]:
    every = dataclasses.asdict(kv)
    default = {field.name: field.default for field in dataclasses.fields(KVCache)}
    return {
        name: every[name]
        for name in (*KEPT, *KEPT_IF_SAID)
        if name in KEPT or every[name] != default[name]
    }


def pick(records: Iterable[Record]) -> dict[str, list[dict[str, Any]]]:
    """model -> the first record of every distinct cache, and the default on every generation.

    Left out are those that did not go through, have no cache, or are wrong already: a cell that is
    red cannot turn red.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    known: set[str] = set()
    # The defaults first, so that what is like them is not kept again.
    for record in sorted(records, key=lambda one: one.kv_cache_dtype != UNSET):
        if not record.complete or not record.kv or record.tensor_parallel_size > 1:
            continue
        small = _small(record)
        what = f"{record.model} {record.resolved.storage_dtype} {json.dumps(small['kv'])}"
        generation = (record.capability or (0,))[0]
        default = f"{record.id} {generation}" if record.backend == DEFAULT else what
        new = what not in known or (record.kv_cache_dtype == UNSET and default not in known)
        if new and not _wrong(record):
            known |= {what, default}
            found.setdefault(record.model, []).append(small)
    return found


def _wrong(record: Record) -> bool:
    try:
        found = layout.compare(whole(record.model), record.kv, record.resolved, record.capability)
    except layout.UnknownLayout:
        # Kept: it counts from the day on that the format is written down.
        return False
    return bool(found)


def main(paths: list[str]) -> None:
    """Write the files anew from the records in `paths`."""
    lines = [line for path in paths for line in Path(path).read_text().splitlines()]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model, kept in pick(map(loads, lines)).items():
        text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in kept)
        (FOLDER / f"{model}.jsonl").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
