"""A finished run as it lies on disk: matrix.json, read and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.matrix import SCHEMA
from harness.verdict import VERDICTS

_PARTS = {"run": dict, "engines": list, "devices": list, "cells": list}

_NAMES = ("id", "model", "backend", "kv_cache_dtype", "device", "engine", "verdict")
"""What every cell says in text."""

_NESTED: dict[str, tuple[type, ...]] = {
    "resolved": (dict,),
    "error": (dict,),
    "capacity": (dict,),
    "kv": (list,),
    "reason": (str,),
    "known": (str,),
    "stale": (str,),
    "stage": (str,),
    "end": (str,),
    "block_size": (int,),
    "tensor_parallel_size": (int,),
    "num_blocks": (int,),
    "kv_bytes_per_token": (int,),
    "remarks": (list,),
    "vouched": (list,),
    "declared": (list,),
    "candidates": (list,),
    "groups": (list,),
    "seconds": (dict,),
    "memory": (dict,),
    "tail": (str,),
}
"""What a cell may say, beside null."""

_RESOLVED: dict[str, tuple[type, ...]] = {
    "kv_cache_dtype": (str,),
    "storage_dtype": (str,),
    "cache_config": (str,),
    "selected": (str,),
    "backends": (list,),
}

_RUN: dict[str, tuple[type, ...]] = {
    "started": (str,),
    "seconds": (int, float),
    "counts": (dict,),
    "depth": (dict,),
    "vouched": (dict,),
    "shard": (dict,),
    "merged": (dict,),
}
"""What the run may say, beside null."""

_CACHE: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "role": (str,),
    "layers": (int,),
    "block_size": (int,),
    "page_size_bytes": (int,),
    "content_bytes": (int,),
}


class _FaultError(Exception):
    pass


def load(path: Path) -> dict[str, Any]:
    """The data of a matrix.json, or of the one in a folder, of the schema that `matrix.py` writes.

    UsageError is one line that names the file and what is wrong with it.
    """
    file = path / "matrix.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not a matrix.json: not UTF-8 text") from None
    except ValueError as error:
        raise UsageError(f"{file} is not a matrix.json: not JSON ({error})") from None
    except RecursionError:
        raise UsageError(f"{file} is not a matrix.json: nested too deeply") from None
    try:
        return _checked(data)
    except _FaultError as fault:
        raise UsageError(f"{file} is not a matrix.json that can be read: {fault}") from None


def _checked(data: Any) -> dict[str, Any]:
    _expect(data, (dict,), "the whole")
    if "schema" not in data:
        raise _FaultError("no schema")
    if data["schema"] != SCHEMA:
        raise _FaultError(f"schema {data['schema']!r} is not {SCHEMA}, the one read here")
    for name, kind in _PARTS.items():
        _expect(data.get(name), (kind,), name)
    for number, engine in enumerate(data["engines"]):
        _texts(engine, ("version",), f"engines[{number}]")
    for number, device in enumerate(data["devices"]):
        _texts(device, ("spec", "kind", "name"), f"devices[{number}]")
    _optional(data["run"], _RUN, "run")
    for name, depth in (data["run"].get("depth") or {}).items():
        _expect(depth, (str,), f"run.depth.{name}")
    if data.get("differences") is not None:
        _expect(data["differences"], (list,), "differences")
        for number, each in enumerate(data["differences"]):
            _texts(each, ("id", "device", "what"), f"differences[{number}]")
    if data.get("history") is not None:
        _history(data["history"])
    versions = {engine["version"] for engine in data["engines"]}
    specs = {device["spec"] for device in data["devices"]}
    seen = set()
    for number, cell in enumerate(data["cells"]):
        where = f"cells[{number}]"
        _cell(cell, where)
        key = (cell["id"], cell["device"], cell["engine"])
        if key in seen:
            raise _FaultError(f"{where}: {cell['id']!r} is there twice")
        if cell["device"] not in specs or cell["engine"] not in versions:
            raise _FaultError(f"{where}: its device or engine is not among those of the run")
        seen.add(key)
    return dict(data)


def _history(data: Any) -> None:
    """What `harness.history` told of earlier runs."""
    _expect(data, (dict,), "history")
    for part in ("runs", "cells", "missing"):
        _expect(data.get(part), (list,), f"history.{part}")
    for number, run in enumerate(data["runs"]):
        where = f"history.runs[{number}]"
        _expect(run, (dict,), where)
        _expect(run.get("engines"), (list,), f"{where}.engines")
        for engine in run["engines"]:
            _texts(engine, ("version",), f"{where}.engines")
            _optional(engine, {"commit": (str,)}, f"{where}.engines")
        _optional(run, {"started": (str,), "as": (dict,), "unselected": (int,)}, where)
        for name, version in (run.get("as") or {}).items():
            _expect(version, (str,), f"{where}.as.{name}")
    for part in ("cells", "missing"):
        for number, cell in enumerate(data[part]):
            _trace(cell, len(data["runs"]), f"history.{part}[{number}]")


def _trace(cell: Any, runs: int, where: str) -> None:
    _texts(cell, ("id", "device", "engine"), where)
    for name, kind in (("strip", list), ("flaky", list), ("gaps", int)):
        _expect(cell.get(name), (kind,), f"{where}.{name}")
    if len(cell["strip"]) != runs:
        raise _FaultError(f"{where}: its strip is not of {runs} runs")
    for told in cell["strip"]:
        if told is not None and str(told).partition(" ")[0] not in VERDICTS:
            raise _FaultError(f"{where}: unknown verdict {told!r}")
    since = cell.get("since", "")
    if since is not None and not (type(since) is int and 0 <= since < runs):
        raise _FaultError(f"{where}: since {since!r} is none of {runs} runs")


def _cell(cell: Any, where: str) -> None:
    _texts(cell, _NAMES, where)
    if cell["verdict"] not in VERDICTS:
        raise _FaultError(f"{where}: unknown verdict {cell['verdict']!r}")
    _optional(cell, _NESTED, where)
    _optional(cell.get("resolved") or {}, _RESOLVED, f"{where}.resolved")
    for name in ("remarks", "vouched"):
        for number, word in enumerate(cell.get(name) or ()):
            _expect(word, (str,), f"{where}.{name}[{number}]")
    for number, cache in enumerate(cell.get("kv") or ()):
        place = f"{where}.kv[{number}]"
        _expect(cache, (dict,), place)
        for name, kinds in _CACHE.items():
            _expect(cache.get(name), kinds, f"{place}.{name}")
        _optional(cache, {"shape": (list,)}, place)


def _texts(data: Any, names: tuple[str, ...], where: str) -> None:
    _expect(data, (dict,), where)
    for name in names:
        _expect(data.get(name), (str,), f"{where}.{name}")


def _optional(data: dict[str, Any], kinds: dict[str, tuple[type, ...]], where: str) -> None:
    for name, kind in kinds.items():
        if data.get(name) is not None:
            _expect(data[name], kind, f"{where}.{name}")


def _expect(value: Any, kinds: tuple[type, ...], where: str) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        want = " or ".join(_WORDS[kind] for kind in kinds)
        raise _FaultError(
            f"{where}: {want} expected, got {_WORDS.get(type(value), 'something else')}"
        )


_WORDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    float: "a fraction",
    type(None): "nothing",
}
