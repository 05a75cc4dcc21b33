"""The split: which shard runs which cell, the longest first. Pure.

Shards run on machines that know nothing of each other, so the split hangs on nothing but its input:
whole numbers, no clock, no order of a set, and names where costs are alike.

What a child imports is paid once in each shard that has any cell of it. The pieces therefore form a
tree (place, model, cell) and go whole, the largest first, to the shard that has least. What does
not fit below a ceiling is cut into its parts; the ceiling is the lowest below which all fits. Where
a few cells take most of the time, dealing out single cells may be better: then that is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from harness.backlog import WARM_UP
from harness.plan import Cell
from harness.shard import Shard

T = TypeVar("T")

MODEL_SECONDS = 2.0
"""What the first cell of a model costs beyond its own seconds: its modules are imported once. The
least of the 2 - 20 s that the first cells of a process were seen to need (vLLM 0.27.1 - 0.33.0)."""

OTHER_SECONDS = 1.0
"""What a test that is no cell is taken to need."""

_SINGLES = 1_000_000
"""Pieces times shards up to which single pieces are dealt out, for comparison: a second or so."""


@dataclass(frozen=True)
class Piece:
    """What is dealt out: a test."""

    name: str
    """Decides among pieces that cost the same."""
    seconds: float
    warm: tuple[tuple[Hashable, float], ...] = ()
    """What is there once for all that share it, the outermost first, with its seconds."""


def piece(cell: Cell, seconds: float) -> Piece:
    """`cell`, which by itself takes so long (`Durations.estimate`)."""
    place = (cell.engine.python, cell.device.spec)
    warm = ((place, WARM_UP), (cell.model.key, MODEL_SECONDS))
    return Piece(cell.id, seconds, warm)


def members(items: Sequence[T], shard: Shard, piece: Callable[[T], Piece]) -> list[T]:
    """The items of `shard`, in their order; each item is in exactly one shard."""
    if shard.count == 1:
        return list(items)
    shards = split([piece(item) for item in items], shard.count)
    return [item for item, index in zip(items, shards, strict=True) if index == shard.index]


def split(pieces: Sequence[Piece], count: int) -> list[int]:
    """The shard, from 1 to `count`, of each piece. The same pieces in any order are split alike, as
    long as no two have the same name."""
    count = min(count, len(pieces))
    if count < 2:
        return [1] * len(pieces)
    found = [0] * len(pieces)
    roots = _tree(pieces)
    total = sum(root.cost for root in roots)
    lowest = max(-(-total // count), *(root.longest for root in roots))
    best, highest = _pack(roots, count, total), total
    while lowest < highest:
        middle = (lowest + highest) // 2
        if (packed := _pack(roots, count, middle)) is None:
            lowest = middle + 1
        else:
            best, highest = packed, middle
    assert best is not None  # below the sum of all, all fits
    if len(pieces) * count <= _SINGLES:
        best = min(best, _singles(pieces, count), key=lambda shards: _worth(pieces, shards))
    for index, items in enumerate(best, 1):
        for item in items:
            found[item] = index
    return found


def _worth(pieces: Sequence[Piece], shards: list[list[int]]) -> tuple[int, int]:
    """Sorts the better split first: the longest shard, then all together, in milliseconds."""
    costs = [sum(root.cost for root in _tree([pieces[i] for i in items])) for items in shards]
    return max(costs), sum(costs)


def cost(pieces: Iterable[Piece]) -> float:
    """Seconds of a shard that has these pieces, one after the other."""
    return sum(root.cost for root in _tree([*pieces])) / 1000


# ---- The tree ------------------------------------------------------------------------------------


@dataclass
class _Node:
    """Pieces that share something; or, with an item, one piece. Costs are in milliseconds: sums of
    whole numbers are the same in any order."""

    own: int
    name: str
    """The first of those below it."""
    parts: list[_Node] = field(default_factory=list)
    """The most expensive first."""
    item: int | None = None
    cost: int = 0
    """With all that is below it."""
    longest: int = 0
    """What the most expensive single piece costs alone."""

    def close(self) -> _Node:
        """The node, now that its parts are all there."""
        self.parts.sort(key=_largest_first)
        self.cost = self.own + sum(part.cost for part in self.parts)
        self.longest = self.own + max((part.longest for part in self.parts), default=0)
        self.name = min([self.name] if self.item is not None else [p.name for p in self.parts])
        return self

    def without(self, left: list[_Node]) -> _Node:
        """The node with only these of its parts."""
        return _Node(self.own, "", left).close()

    def items(self) -> list[int]:
        """The pieces below it."""
        if self.item is not None:
            return [self.item]
        return [item for part in self.parts for item in part.items()]


def _largest_first(node: _Node) -> tuple[int, str, int]:
    return -node.cost, node.name, -1 if node.item is None else node.item


def _tree(pieces: Sequence[Piece]) -> list[_Node]:
    every = [(piece, index) for index, piece in enumerate(pieces)]
    return sorted(_level(every, 0), key=_largest_first)


def _level(pieces: list[tuple[Piece, int]], depth: int) -> list[_Node]:
    nodes: list[_Node] = []
    groups: dict[tuple[Hashable, float], list[tuple[Piece, int]]] = {}
    for each in pieces:
        piece, index = each
        if len(piece.warm) == depth:
            nodes.append(_Node(_milliseconds(piece.seconds), piece.name, item=index).close())
        else:
            groups.setdefault(piece.warm[depth], []).append(each)
    for (_, seconds), group in groups.items():
        nodes.append(_Node(_milliseconds(seconds), "", _level(group, depth + 1)).close())
    return nodes


def _milliseconds(seconds: float) -> int:
    # At least one: what costs nothing would all go to one shard.
    return max(1, round(seconds * 1000))


# ---- Packing -------------------------------------------------------------------------------------


class _Shards:
    """What each shard has so far."""

    def __init__(self, count: int) -> None:
        self.items: list[list[int]] = [[] for _ in range(count)]
        self.loads = [(0, index) for index in range(count)]
        """A heap: the one that has least comes first, and of several the first."""

    def give(self, items: Iterable[int], cost: int) -> None:
        """To the one that has least."""
        load, index = self.loads[0]
        heapq.heapreplace(self.loads, (load + cost, index))
        self.items[index] += items

    def even(self, cost: int, own: int) -> int:
        """The load that the emptiest would have in common if `cost`, cut at will, were poured over
        them, each of them paying `own` as well."""
        level = poured = 0
        for number, (load, _) in enumerate(sorted(self.loads), 1):
            poured += load + own
            if number > 1 and level <= load + own:
                break
            level = -(-(cost + poured) // number)
        return level


def _pack(roots: Sequence[_Node], count: int, ceiling: int) -> list[list[int]] | None:
    """The items of each shard, none above `ceiling`; None where no way is found."""
    shards = _Shards(count)
    for node in roots:
        if shards.loads[0][0] + node.cost <= ceiling:
            shards.give(node.items(), node.cost)
        elif node.item is not None or not _cut(node, shards, ceiling):
            return None
    return shards.items


def _cut(node: _Node, shards: _Shards, ceiling: int) -> bool:
    """Deal out the parts of `node`, each shard that gets any paying for the node itself."""
    left = node.parts
    # As even as can be, and what is then left wherever it fits.
    for level in (min(ceiling, shards.even(node.cost - node.own, node.own)), ceiling):
        while left:
            taken, cost, rest = _fill(left, level - shards.loads[0][0] - node.own)
            if not taken:
                break
            shards.give(taken, node.own + cost)
            left = rest
    return not left


def _fill(parts: list[_Node], room: int) -> tuple[list[int], int, list[_Node]]:
    """Items that fit, what they cost, and the parts that are left: whole parts first, then one is
    cut."""
    items: list[int] = []
    used = 0
    left: list[_Node] = []
    for part in parts:
        if part.cost <= room - used:
            items += part.items()
            used += part.cost
        else:
            left.append(part)
    for place, part in enumerate(left):
        some, cost, rest = _fill(part.parts, room - used - part.own)
        if some:
            left[place] = part.without(rest)
            items += some
            used += part.own + cost
            left.sort(key=_largest_first)
            break
    return items, used, left


def _singles(pieces: Sequence[Piece], count: int) -> list[list[int]]:
    """The items of each shard, dealt out one by one, the longest first, each to the shard that has
    least when it has it."""
    every = sorted(range(len(pieces)), key=lambda i: (-pieces[i].seconds, pieces[i].name))
    shards: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    paid: list[set[tuple[tuple[Hashable, float], ...]]] = [set() for _ in range(count)]
    for item in every:
        piece = pieces[item]
        # Each thing that is shared is known by the path to it.
        paths = [piece.warm[: depth + 1] for depth in range(len(piece.warm))]
        costs = [_milliseconds(path[-1][1]) for path in paths]
        after = [
            load + sum(cost for path, cost in zip(paths, costs, strict=True) if path not in has)
            for load, has in zip(loads, paid, strict=True)
        ]
        least = after.index(min(after))
        loads[least] = after[least] + _milliseconds(piece.seconds)
        paid[least].update(paths)
        shards[least].append(item)
    return shards
