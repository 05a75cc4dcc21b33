from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.shard import Shard, members, parse

ITEMS = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 999)), unique=True, max_size=80)


def group(item: tuple[str, int]) -> str:
    return item[0]


@given(ITEMS, st.integers(1, 9))
def test_each_item_is_in_exactly_one_shard(items: list[tuple[str, int]], count: int) -> None:
    parts = [members(items, Shard(n, count), group) for n in range(1, count + 1)]
    assert sorted(items) == sorted(item for part in parts for item in part)


@given(ITEMS, st.integers(1, 9))
def test_shards_are_even_to_a_fair_share(items: list[tuple[str, int]], count: int) -> None:
    sizes = [len(members(items, Shard(n, count), group)) for n in range(1, count + 1)]
    assert max(sizes) - min(sizes) <= -(-len(items) // count)


def test_a_group_stays_together_where_it_fits() -> None:
    items = [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [("a", 1), ("a", 2)] == members(items, Shard(1, 2), group)
    assert [("b", 1), ("b", 2)] == members(items, Shard(2, 2), group)


def test_a_group_larger_than_a_share_is_cut() -> None:
    items = [("a", n) for n in range(4)]
    assert [("a", 0), ("a", 1)] == members(items, Shard(1, 2), group)


def test_no_option_is_the_whole() -> None:
    assert Shard(1, 1) == parse(None)
    assert Shard(2, 4) == parse("2/4")


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b", "1 / 4"])
def test_what_is_no_shard_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not I/N with I from 1 to N, such as 1/4"):
        parse(text)
