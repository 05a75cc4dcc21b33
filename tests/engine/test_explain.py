"""What the selector considered, and what fits: read from vLLM itself, and told as vLLM does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.conftest import ROOT, Matrix

pytestmark = pytest.mark.engine

PER_TOKEN = {
    # Layers that keep every token x what each keeps of it.
    "llama4-default-unset": 12 * 2 * 8 * 128 * 2,
    "dsv3-default-bfloat16": 61 * (512 + 64) * 2,
    "kimi-linear-default-unset": 7 * (512 + 64) * 2,
    "gemma3-default-unset": 4 * 2 * 1 * 256 * 2,
    # All layers have a window; all have a state.
    "mistral-default-unset": 0,
    "mamba2-default-unset": 0,
}


@pytest.fixture(scope="module")
def cells(matrix: Matrix) -> dict[str, dict[str, Any]]:
    done = matrix("-k", " or ".join(PER_TOKEN), "--device", "virtual:h200")
    assert set(PER_TOKEN) == done.cells.keys(), done.text
    return done.cells


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_token_costs_what_layers_keep_that_keep_all(
    name: str, cells: dict[str, dict[str, Any]]
) -> None:
    assert PER_TOKEN[name] == cells[name]["kv_bytes_per_token"]


@pytest.mark.parametrize("name", PER_TOKEN)
def test_one_request_at_the_least_fits_and_tokens_are_requests_of_the_longest_context(
    name: str, cells: dict[str, dict[str, Any]]
) -> None:
    capacity = cells[name]["capacity"]
    assert 1 <= capacity["concurrency"]
    assert int(capacity["concurrency"] * 4096) == capacity["tokens"]
    assert 4096 == capacity["max_model_len"]


def test_mla_is_stored_as_its_spec_says(cells: dict[str, dict[str, Any]]) -> None:
    assert "bfloat16" == cells["dsv3-default-bfloat16"]["resolved"]["storage_dtype"]


def test_windows_are_told_apart_by_the_selector_and_by_their_caches(
    cells: dict[str, dict[str, Any]],
) -> None:
    cell = cells["gemma3-default-unset"]
    assert {"has_sliding_window=True", "has_sliding_window=False"} == {
        one["asked"] for one in cell["candidates"]
    }
    assert [("SlidingWindowSpec", 512, False), ("FullAttentionSpec", None, True)] == [
        (kv["kind"], kv["window"], kv["grows"]) for kv in cell["kv"]
    ]


def test_explain_tells_what_vllm_logs() -> None:
    """The selector's log line names those that it did not refuse, the chosen one first; the line of
    the capacity has tokens and concurrency."""
    name = "dsv3-default-fp8"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "harness.cli", "explain", name),
            *("--device", "virtual:h200", "--json"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 0 == done.returncode, done.stderr
    cell = json.loads(done.stdout)
    log = "\n".join(cell["log"])
    chosen = re.search(r"Using (\w+) attention backend out of potential backends: \[(.*?)\]", log)
    assert chosen is not None
    candidates = cell["candidates"]
    assert re.findall(r"\w+", chosen[2]) == [
        one["backend"] for one in candidates if not one["reasons"]
    ]
    assert [chosen[1]] == [one["backend"] for one in candidates if one["selected"]]
    assert any(one["reasons"] == ["kv_cache_dtype not supported"] for one in candidates)
    said = re.search(r"KV cache size: ([\d,]+) tokens.* per request: ([\d.]+)x", log)
    assert said is not None
    assert int(said[1].replace(",", "")) == cell["capacity"]["tokens"]
    assert said[2] == f"{cell['capacity']['concurrency']:.2f}"
