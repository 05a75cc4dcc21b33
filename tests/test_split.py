"""The split of a run into shards: each cell in exactly one, alike on every machine, and even."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import durations, plan, split
from harness.backlog import WARM_UP
from harness.shard import Shard
from harness.split import MODEL_SECONDS, Piece, members

RESOURCE = Path(__file__).parent / "resources" / "durations.json"
"""Seconds of the 5,267 cells of virtual:h200 with vLLM 0.33.0, recorded in one run on two cores;
written by `durations.dumps(durations.of_matrix(...))` of its matrix.json."""

PIECES = st.lists(
    st.builds(
        Piece,
        st.text("abcdefgh", min_size=1, max_size=4),
        st.floats(0, 100),
        st.sampled_from(
            [
                *[(), (("x", 25.0),), (("y", 0.0),)],
                *[(("x", 25.0), ("m", 2.0)), (("x", 25.0), ("n", 2.0)), (("y", 0.0), ("m", 2.0))],
            ]
        ),
    ),
    unique_by=lambda piece: piece.name,
    max_size=40,
)
COUNTS = st.integers(1, 9)

EQUAL = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 999)), unique=True, max_size=80)


def equal(item: tuple[str, int]) -> Piece:
    """Items that all take a second, in groups that cost nothing to begin."""
    return Piece(f"{item[0]}{item[1]:03}", 1.0, ((item[0], 0.0),))


def parts(pieces: list[Piece], count: int) -> list[list[Piece]]:
    return [members(pieces, Shard(n, count), lambda piece: piece) for n in range(1, count + 1)]


@given(PIECES, COUNTS)
def test_each_piece_is_in_exactly_one_shard(pieces: list[Piece], count: int) -> None:
    found = [piece.name for part in parts(pieces, count) for piece in part]
    assert sorted(piece.name for piece in pieces) == sorted(found)
    assert set(split.split(pieces, count)) <= set(range(1, count + 1))


@given(PIECES, COUNTS, st.randoms(use_true_random=False))
def test_the_order_of_the_pieces_changes_nothing(
    pieces: list[Piece], count: int, random: object
) -> None:
    shuffled = list(pieces)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    names = [{piece.name for piece in part} for part in parts(pieces, count)]
    assert names == [{piece.name for piece in part} for part in parts(shuffled, count)]


@given(PIECES, COUNTS)
def test_a_shard_keeps_the_order_that_it_was_given(pieces: list[Piece], count: int) -> None:
    for part in parts(pieces, count):
        assert part == [piece for piece in pieces if piece in part]


@given(PIECES, COUNTS)
def test_no_shard_takes_longer_than_all_in_one(pieces: list[Piece], count: int) -> None:
    whole = split.cost(pieces)
    assert all(split.cost(part) <= whole for part in parts(pieces, count))


@given(EQUAL, COUNTS)
def test_shards_are_even_to_a_fair_share(items: list[tuple[str, int]], count: int) -> None:
    sizes = [len(members(items, Shard(n, count), equal)) for n in range(1, count + 1)]
    assert max(sizes) - min(sizes) <= -(-len(items) // count)


@given(st.integers(1, 40), COUNTS)
def test_alike_pieces_are_spread_to_one(size: int, count: int) -> None:
    sizes = [len(p) for p in parts([Piece(f"{n:02}", 1.0) for n in range(size)], count)]
    assert max(sizes) - min(sizes) <= 1


def test_a_group_stays_together_where_it_fits() -> None:
    items = [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [("a", 1), ("a", 2)] == members(items, Shard(1, 2), equal)
    assert [("b", 1), ("b", 2)] == members(items, Shard(2, 2), equal)


def test_a_group_larger_than_a_share_is_cut() -> None:
    items = [("a", n) for n in range(4)]
    assert [("a", 0), ("a", 1)] == members(items, Shard(1, 2), equal)


def test_the_longest_piece_has_a_shard_of_its_own() -> None:
    pieces = [Piece("long", 100.0), *(Piece(f"short{n}", 10.0) for n in range(10))]
    assert [1, 10] == sorted(len(part) for part in parts(pieces, 2))


def test_few_long_pieces_that_share_a_warm_up_are_dealt_out_one_by_one() -> None:
    """They do not fit below any ceiling that counts the warm-up for each of them."""
    warm = (("x", 25.0), ("m", 2.0))
    pieces = [Piece("a", 20.0, warm), Piece("b", 10.0, warm), Piece("c", 10.0, warm)]
    assert [["a"], ["b", "c"]] == [[piece.name for piece in part] for part in parts(pieces, 2)]


def test_what_is_warmed_up_is_not_warmed_up_twice() -> None:
    """Four devices with one vLLM import each: two a shard cost 2 * 26 s; spread, all four 25 s."""
    pieces = [
        Piece(f"{place}{n}", 0.1, ((place, 25.0),)) for place in "abcd" for n in range(10)
    ]  # fmt: skip
    for part in parts(pieces, 2):
        assert 2 == len({piece.name[0] for piece in part})


def test_more_shards_than_pieces_leave_some_empty() -> None:
    found = parts([Piece("a", 1.0), Piece("b", 1.0)], 5)
    assert [1, 1, 0, 0, 0] == [len(part) for part in found]
    # No memory or time for a number that makes no sense.
    assert [] == members([Piece("a", 1.0)], Shard(999_999, 999_999), lambda piece: piece)


# ---- Recorded durations --------------------------------------------------------------------------


def recorded() -> list[Piece]:
    found = durations.loads(RESOURCE.read_text())
    assert 5267 == len(found)
    models = [model.key for model in plan.models()]

    def model(case: str) -> str:
        return max((m for m in models if case.startswith(f"{m}-")), key=len)

    return [
        Piece(case, seconds, ((device, WARM_UP), (model(case), MODEL_SECONDS)))
        for (case, device, _), seconds in found.items()
    ]


@pytest.mark.parametrize("count", [2, 3, 5, 9, 14])
def test_recorded_durations_are_split_within_a_tenth_of_the_ideal(count: int) -> None:
    pieces = recorded()
    ideal = sum(piece.seconds for piece in pieces) / count
    models = len({piece.warm[1] for piece in pieces})
    # Each shard imports vLLM, and somebody each model.
    whole = ideal + WARM_UP + models * MODEL_SECONDS / count
    found = parts(pieces, count)
    for part in found:
        assert abs(split.cost(part) - whole) <= 0.1 * whole
        assert sum(piece.seconds for piece in part) <= 1.1 * ideal


@given(st.sets(st.integers(0, 5266), max_size=60), st.integers(2, 14))
def test_another_list_of_cells_is_split_as_well(at: set[int], count: int) -> None:
    """As with -k, or a model that is new."""
    pieces = [*(RECORDED[n] for n in sorted(at)), Piece("new-default-unset", 1.0)]
    found = [piece.name for part in parts(pieces, count) for piece in part]
    assert sorted(piece.name for piece in pieces) == sorted(found)


RECORDED = recorded() if RESOURCE.exists() else []


def test_the_resource_is_what_this_version_writes() -> None:
    assert durations.SCHEMA == json.loads(RESOURCE.read_text())["schema"]
