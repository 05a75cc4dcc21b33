"""KV kinds: what tells layers with a KV cache apart, and what one model has that another has not.
Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from harness.record import KVCache, Record

_KIND = (
    *("kind", "role", "block_size", "page_size_bytes", "content_bytes", "dtype", "cache_dtype"),
    *("compress_ratio", "alignment", "backend", "shape", "tensor_dtype"),
    *("window", "grows"),
)
"""What makes a kind of layers: not how many there are, nor strides, which depend on the blocks."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

_RESOLVED = ("kv_cache_dtype", "storage_dtype", "cache_config", "backends", "selected")


def differences(full: Record, reduced: Record) -> list[str]:
    """One line per KV kind that the reduced model lost, added or changed, and per other fact that
    differs; the numbers of layers may differ. Both records plan the same case on the same device.

    The same exception at the same stage is no difference: there is nothing to lose. A child that
    did not finish has shown nothing, and that is told as one.
    """
    if full.end != "finished" and full.end == reduced.end:
        return [f"could not be planned: {full.end} at stage {full.stage}"]
    if _end(full) != _end(reduced):
        return [f"ended differently: full {_said_end(full)}, reduced {_said_end(reduced)}"]
    if full.error is not None:
        return []
    lines = [
        f"resolved {name}: full {there!r}, reduced {here!r}"
        for name in _RESOLVED
        if (there := getattr(full.resolved, name)) != (here := getattr(reduced.resolved, name))
    ]
    there, here = _kinds(full.kv), _kinds(reduced.kv)
    lost = [kind for values, kind in there.items() if values not in here]
    added = [kind for values, kind in here.items() if values not in there]
    for old in lost:
        new = next((kind for kind in added if _name(kind) == _name(old)), None)
        if new is None:
            lines.append(f"lost {_said(old)}")
            continue
        added.remove(new)
        changes = (
            f"{name} {getattr(old, name)!r} -> {getattr(new, name)!r}"
            for name in _KIND
            if getattr(old, name) != getattr(new, name)
        )
        lines.append(f"changed {_said(old)}: {', '.join(changes)}")
    return lines + [f"added {_said(kind)}" for kind in added]


def _end(record: Record) -> tuple[str, str, str | None]:
    return record.end, record.stage, record.error.type if record.error else None


def _said_end(record: Record) -> str:
    if record.error is None:
        return f"{record.end} at stage {record.stage}"
    what = record.error.message.splitlines()[:1]
    return f"{record.error.type} at stage {record.stage} ({''.join(what)[:160]})"


def _kinds(kv: Sequence[KVCache]) -> dict[tuple[Any, ...], KVCache]:
    # A role may still hold a number that counts layers: Falcon-H1's mixers are numbered on behind
    # the last layer, as `model.44.mixer`.
    alike = (dataclasses.replace(one, role=_NUMBER.sub("N", one.role)) for one in kv)
    return {tuple(getattr(one, name) for name in _KIND): one for one in alike}


def _name(kind: KVCache) -> tuple[str, str, int]:
    return kind.kind, kind.role, kind.compress_ratio


def _said(kind: KVCache) -> str:
    return (
        f"{kind.kind} {kind.role} (ratio {kind.compress_ratio}, block {kind.block_size}, "
        f"{kind.page_size_bytes} B, {kind.backend}, {kind.shape})"
    )
