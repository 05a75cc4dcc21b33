"""Ranks, model runners and drafters in the real thing: axes that are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Matrix

pytestmark = pytest.mark.engine

IDS = ("jamba-default-unset", "llama3-default-fp8_e4m3", "dsv4-mtp-default-unset")

Cells = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def cells(matrix: Matrix) -> Cells:
    done = matrix(
        *("-k", " or ".join(IDS), "--device", "virtual:h200"),
        *("--tensor-parallel-size", "1", "--tensor-parallel-size", "2"),
        *("--model-runner", "v1", "--model-runner", "v2"),
    )
    assert 0 == done.code, done.text
    return done.cells


def test_the_oracle_confirms_every_rank_and_runner(cells: Cells) -> None:
    assert {
        f"{one}{ranks}-{by}" for one in IDS for ranks in ("", "-tp2") for by in ("v1", "v2")
    } == (cells.keys())
    assert {("ok", True)} == {
        (cell["verdict"], "oracle" in cell["vouched"]) for cell in cells.values()
    }


@pytest.mark.parametrize("one", IDS)
def test_bug_47618_both_runners_store_the_same(cells: Cells, one: str) -> None:
    by_v1, by_v2 = cells[f"{one}-v1"], cells[f"{one}-v2"]
    assert ("v1", "v2") == (by_v1["model_runner"], by_v2["model_runner"])
    assert by_v1["kv"] and by_v1["kv"] == by_v2["kv"]
    assert by_v1["resolved"] == by_v2["resolved"]


def pages(cell: dict[str, Any]) -> dict[tuple[str, bool, int], int]:
    return {
        (kv["role"], kv["draft"], kv["compress_ratio"]): kv["content_bytes"] for kv in cell["kv"]
    }


def test_two_ranks_share_keys_and_values_and_states(cells: Cells) -> None:
    for one in ("jamba-default-unset", "llama3-default-fp8_e4m3"):
        whole, share = pages(cells[f"{one}-v2"]), pages(cells[f"{one}-tp2-v2"])
        assert whole == {what: 2 * size for what, size in share.items()}


def test_two_ranks_keep_the_latent_vector_whole(cells: Cells) -> None:
    one = "dsv4-mtp-default-unset"
    assert pages(cells[f"{one}-v2"]) == pages(cells[f"{one}-tp2-v2"])


def test_the_drafter_has_a_cache_of_its_own(cells: Cells) -> None:
    [own] = [kv for kv in cells["dsv4-mtp-default-unset-v2"]["kv"] if kv["draft"]]
    assert ("attn.swa_cache", 1) == (own["role"], own["layers"])
