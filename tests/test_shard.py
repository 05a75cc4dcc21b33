from __future__ import annotations

import pytest

from harness.errors import UsageError
from harness.shard import Shard, parse


def test_no_option_is_the_whole() -> None:
    assert Shard(1, 1) == parse(None)
    assert Shard(2, 4) == parse("2/4")


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b", "1 / 4"])
def test_what_is_no_shard_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not I/N with I from 1 to N, such as 1/4"):
        parse(text)
