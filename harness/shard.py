"""Shards: a run split into parts that together are the whole, each cell in exactly one. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.errors import UsageError

T = TypeVar("T")


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


def members(items: Sequence[T], shard: Shard, group: Callable[[T], Hashable]) -> list[T]:
    """The items of `shard`, in their order.

    Items of one group (those that share what a child has imported) stay together as far as the
    parts can be even: groups go whole to the shard that has least, the largest first, and are cut
    where one is larger than a shard's fair share. The same items give the same parts anywhere.
    """
    if shard.count == 1:
        return list(items)
    fair = -(-len(items) // shard.count)
    groups: dict[Hashable, list[int]] = {}
    for at, item in enumerate(items):
        groups.setdefault(group(item), []).append(at)
    pieces = [
        whole[start : start + fair]
        for whole in groups.values()
        for start in range(0, len(whole), fair)
    ]
    load = [0] * shard.count
    mine: list[int] = []
    for piece in sorted(pieces, key=lambda piece: (-len(piece), piece[0])):
        least = load.index(min(load))
        load[least] += len(piece)
        if least == shard.index - 1:
            mine += piece
    return [items[at] for at in sorted(mine)]
