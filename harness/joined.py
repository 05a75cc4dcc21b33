"""What parts of a run have in common, made one: engines, devices, the run itself. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from harness.case import DEFAULT, UNSET, Case, slug
from harness.verdict import PASSING, VERDICTS
from harness.versus import WHATS

Data = Mapping[str, Any]
Key = tuple[Case, str, str]
"""Case, device SPEC and vLLM version of a cell."""


def text(data: Any) -> str:
    """JSON data as the one text that it has."""
    return json.dumps(data, sort_keys=True)


def run(matrices: Sequence[Data], cells: Sequence[Data]) -> dict[str, Any]:
    """`run` of matrix.json, of all parts together; counted anew."""
    runs = [matrix["run"] for matrix in matrices]
    found: dict[str, Any] = dict(runs[0]) if len(runs) == 1 else {}
    started = [run["started"] for run in runs if run.get("started")]
    depths: dict[str, set[str]] = {}
    for run in runs:
        for device, depth in (run.get("depth") or {}).items():
            depths.setdefault(device, set()).update(depth.split("+"))
    found["started"] = min(started, default=None)
    # Of all parts together: what the run cost, not how long it took.
    found["seconds"] = round(math.fsum(run.get("seconds") or 0 for run in runs), 1)
    found["depth"] = {device: "+".join(sorted(names)) for device, names in sorted(depths.items())}
    found["counts"] = counts(cells)
    found["vouched"] = dict(
        sorted(
            Counter(
                "+".join(cell.get("vouched") or ()) or "nobody"
                for cell in cells
                if cell["verdict"] == "ok"
            ).items(),
            key=lambda item: (-item[1], item[0]),
        )
    )
    return found


def counts(cells: Iterable[Data]) -> dict[str, int]:
    """How many of each verdict, in their order, `known` counted apart from it."""
    found = Counter("known" if cell.get("known") else str(cell["verdict"]) for cell in cells)
    return {name: found[name] for name in (*VERDICTS, "known") if found[name]}


def differences(matrices: Sequence[Data]) -> list[Any]:
    """`differences` of all parts, each once."""
    every = {text(each): each for matrix in matrices for each in matrix.get("differences") or ()}
    return sorted(every.values(), key=_difference)


def _difference(each: Data) -> tuple[int, bool, bool, str]:
    """The most important first, as `versus` has them."""
    what, old, new = each.get("what"), each.get("old"), each.get("new")
    place = WHATS.index(what) if what in WHATS else len(WHATS)
    breaks = what == "verdict" and old in PASSING and new not in PASSING
    fixes = what == "verdict" and old not in PASSING and new in PASSING
    return place, not breaks, not fixes, text(each)


def distinct(
    found: Iterable[dict[str, Any]], name: str, same: Sequence[str], kind: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Each engine, or device, once, and what differs among those of one name."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        groups.setdefault(each[name], []).append(each)
    faults = []
    for title, group in groups.items():
        for field in same:
            values = sorted({text(each[field]) for each in group if each.get(field) is not None})
            if len(values) > 1:
                faults.append(f"{kind}{title}: parts differ in its {field}: {', '.join(values)}")
    rank = _version if name == "version" else lambda name: (0, name)
    # The fullest tells most: of an engine of which a record alone tells, little is known.
    chosen = [
        max(groups[title], key=lambda each: (len(text(each)), text(each)))
        for title in sorted(groups, key=rank)
    ]
    return chosen, faults


def _version(text: str) -> tuple[int, Any]:
    try:
        return 0, (Version(text), text)
    except InvalidVersion:
        return 1, text


def order_of(engines: Sequence[Data], devices: Sequence[Data]) -> Callable[[Key], Any]:
    """Sorts cells as a run plans them, as far as its matrix.json says how."""
    versions = {engine["version"]: place for place, engine in enumerate(engines)}
    specs = {device["spec"]: place for place, device in enumerate(devices)}
    names = {
        engine["version"]: (
            _places((DEFAULT, *engine.get("backends", ()))),
            _places((UNSET, *engine.get("kv_cache_dtypes", ()))),
        )
        for engine in engines
    }

    def order(key: Key) -> Any:
        case, device, engine = key
        backends, dtypes = names[engine]
        return (
            *(versions[engine], specs[device], case.model),
            *(case.block_size, case.tensor_parallel_size, case.model_runner),
            *(backends.get(case.backend, len(backends)), case.backend),
            *(dtypes.get(case.kv_cache_dtype, len(dtypes)), case.kv_cache_dtype),
        )

    return order


def _places(names: Iterable[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def ids_of(keys: Sequence[Key], engines: Sequence[Data], devices: Sequence[Data]) -> Iterator[str]:
    """Ids as the plan gives them: device and engine are named where there are several."""
    called = {device["spec"]: device_id(device) for device in devices}
    often = Counter(called.values())
    for case, device, engine in keys:
        short = called[device]
        parts = [case.id]
        if len(devices) > 1:
            parts.append(short if often[short] == 1 else slug(device))
        if len(engines) > 1:
            parts.append(slug(engine))
        yield "-".join(parts)


def device_id(device: Data) -> str:
    """What a device is called in ids (`Device.id`)."""
    return device.get("label") or slug(device["spec"] if not device.get("uuid") else device["name"])
