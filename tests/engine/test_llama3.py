"""Llama 3 on virtual devices: a plain cache, block by block."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Matrix

pytestmark = pytest.mark.engine

# 16 tokens x K and V x 8 heads x 128 values; per-token-head formats add an fp32 scale to each head.
PAGES = {
    "llama3-default-unset": 16 * 2 * 8 * 128 * 2,
    "llama3-default-fp8": 16 * 2 * 8 * 128,
    "llama3-default-int8_per_token_head": 16 * 2 * 8 * (128 + 4),
}


def test_a_plain_cache_is_confirmed_by_the_oracle(matrix: Matrix) -> None:
    cells = "llama3-default-unset or llama3-default-fp8 or int8_per_token_head or octave"
    done = matrix("-k", f"llama3- and ({cells}) and not fp8kv", "--device", "virtual:h200")
    assert 0 == done.code, done.text
    for name, page in PAGES.items():
        cell = done.cells[name]
        assert ("ok", [page]) == (cell["verdict"], [kv["page_size_bytes"] for kv in cell["kv"]])
        assert "oracle" in cell["vouched"]
    # An engine that refuses before a layer has its backend is no crash of ours.
    assert "rejected" == done.cells["llama3-default-octave_k3v4"]["verdict"]
