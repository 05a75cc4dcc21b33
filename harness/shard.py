"""Shards: a run split into parts that together are the whole, each cell in exactly one. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, counted from 1."""

    index: int = 1
    count: int = 1


def parse(text: str | None) -> Shard:
    """The shard that `I/N` names; the whole for None. UsageError where it is none."""
    if text is None:
        return Shard()
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"--shard {text!r} is not I/N with I from 1 to N, such as 1/4")
    return Shard(int(found[1]), int(found[2]))
