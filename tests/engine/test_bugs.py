"""Public bugs in the real thing: the cell that each would turn red, run on a virtual device."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.engine.conftest import Matrix

pytestmark = pytest.mark.engine

CELLS = {
    "virtual:h200": (
        *("dsv4-default-unset", "dsv32-default-unset", "dsv32-default-fp8"),
        *("llama3-default-fp8_ds_mla", "llama3-default-fp8_e5m2", "llama3-default-fp8_inc"),
        *(
            "llama3-default-bfloat16",
            "llama3-fp8kv-fp8-default-unset",
            "llama3-fp8kv-default-unset",
        ),
        *("jamba-default-fp8", "qwen3-next-default-fp8", "kimi-linear-default-fp8"),
        *("bge-base-default-fp8", "qwen3-embed-default-fp8"),
        "glm52-FLASHINFER_MLA_SPARSE_SM90-fp8",
    ),
    "virtual:b200": (
        *("dsv3-default-fp8", "dsv4-FLASHINFER_MLA_SPARSE_DSV4-fp8", "glm5-default-unset"),
        "dsv3-default-unset",
    ),
    "virtual:rtx-pro-6000": ("dsv4-default-unset", "dsv3-default-unset"),
    "virtual:t4": ("llama3-default-fp8", "llama3-FLASHINFER-fp8"),
}
"""Device -> what runs on it, together."""

Cells = dict[str, Any]


@pytest.fixture(scope="module")
def on(matrix: Matrix) -> Any:
    """`on("virtual:b200")` -> the cells of CELLS there, by id; a device starts once."""

    @functools.cache
    def run(device: str) -> Cells:
        done = matrix("-k", " or ".join(CELLS[device]), "--device", device)
        missing = set(CELLS[device]) - done.cells.keys()
        assert not missing, done.text
        return {"text": done.text, **done.cells}

    return run


def confirmed(cell: Cells) -> None:
    assert "ok" == cell["verdict"], cell["reason"]
    assert "oracle" in cell["vouched"]


@pytest.mark.parametrize("device", ["virtual:h200", "virtual:rtx-pro-6000"])
def test_bug_47174_45091_55134_the_default_of_dsv4_resolves_and_is_written_back(
    on: Any, device: str
) -> None:
    cell = on(device)["dsv4-default-unset"]
    resolved = cell["resolved"]
    assert ("fp8_ds_mla", "fp8_ds_mla") == (resolved["kv_cache_dtype"], resolved["cache_config"])
    assert cell["error"] is None


def test_bug_47228_54233_the_validator_of_sm120_refuses_what_was_resolved(on: Any) -> None:
    cell = on("virtual:rtx-pro-6000")["dsv4-default-unset"]
    assert ("unguarded", True) == (cell["verdict"], cell["known"].endswith("/54233"))


def test_bug_25988_an_override_of_the_default_is_applied_and_told(on: Any) -> None:
    """GLM-5 on SM10x is fp8 by its own rule; V3.2 leaves the default to the model's dtype, and
    makes fp8 its packed record."""
    glm = on("virtual:b200")["glm5-default-unset"]["resolved"]
    assert ("fp8_e4m3", "fp8_e4m3") == (glm["kv_cache_dtype"], glm["cache_config"])
    hopper = on("virtual:h200")
    confirmed(hopper["dsv32-default-unset"])
    assert "auto" == hopper["dsv32-default-unset"]["resolved"]["kv_cache_dtype"]
    assert "fp8_ds_mla" == hopper["dsv32-default-fp8"]["resolved"]["cache_config"]


def test_bug_33021_what_the_default_became_is_shown(on: Any) -> None:
    became = on("virtual:h200")["text"].partition("What kv_cache_dtype became")[2]
    assert re.search(r"unset \(\d+\)[^>]*-> fp8_ds_mla, stored as uint8", became), became


def test_bug_14221_a_checkpoints_fp8_cache_that_is_ignored_is_a_mismatch(on: Any) -> None:
    cells = on("virtual:h200")
    cell = cells["llama3-fp8kv-fp8-default-unset"]
    assert ("mismatch", True) == (cell["verdict"], cell["known"].endswith("/14221"))
    assert {"bfloat16"} == {kv["tensor_dtype"] for kv in cell["kv"]}
    # That of ModelOpt is followed: a byte a value.
    confirmed(cells["llama3-fp8kv-default-unset"])
    assert {"uint8"} == {kv["tensor_dtype"] for kv in cells["llama3-fp8kv-default-unset"]["kv"]}


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "fp8_e5m2", "fp8_inc", "bfloat16"])
def test_bug_42587_a_dtype_works_or_is_refused_clearly(on: Any, dtype: str) -> None:
    cell = on("virtual:h200")[f"llama3-default-{dtype}"]
    assert cell["verdict"] in ("ok", "rejected"), cell["reason"]


@pytest.mark.parametrize("device", ["virtual:b200", "virtual:rtx-pro-6000"])
def test_bug_32732_deepseek_has_a_backend_on_blackwell(on: Any, device: str) -> None:
    cell = on(device)["dsv3-default-unset"]
    confirmed(cell)
    assert cell["resolved"]["selected"]


def test_bug_47549_fp8_on_turing_is_refused_or_stored_and_never_unsaid(on: Any) -> None:
    for name in ("llama3-default-fp8", "llama3-FLASHINFER-fp8"):
        cell = on("virtual:t4")[name]
        assert cell["verdict"] in ("ok", "rejected"), cell["reason"]
        assert cell["declared"] or cell["error"]


def test_bug_47610_plain_fp8_on_sm100_has_plain_rows(on: Any) -> None:
    cells = on("virtual:b200")
    for name, width in (
        ("dsv3-default-fp8", 512 + 64),
        ("dsv4-FLASHINFER_MLA_SPARSE_DSV4-fp8", 512),
    ):
        confirmed(cells[name])
        main = [kv for kv in cells[name]["kv"] if kv["role"] in ("attn", "self_attn.attn")]
        assert {width} == {kv["shape"][-1] for kv in main}


def test_bug_51041_a_token_of_dsv4_costs_what_its_pages_cost(on: Any) -> None:
    cell = on("virtual:h200")["dsv4-default-unset"]
    # Ratio 4, ratio 128, indexers: layers x page / 256 tokens.
    assert (21 * 65 + 20 * 3 + 21 * 15) * 576 // 256 == cell["kv_bytes_per_token"]


@pytest.mark.parametrize("model", ["jamba", "qwen3-next", "kimi-linear"])
def test_bug_45207_42927_pages_of_a_hybrid_in_fp8_are_unified(on: Any, model: str) -> None:
    cell = on("virtual:h200")[f"{model}-default-fp8"]
    confirmed(cell)
    assert 1 == len({kv["page_size_bytes"] for kv in cell["kv"]}) < len(cell["kv"])


@pytest.mark.parametrize("model", ["bge-base", "qwen3-embed"])
def test_bug_55046_an_embedding_model_has_a_backend_for_fp8(on: Any, model: str) -> None:
    cell = on("virtual:h200")[f"{model}-default-fp8"]
    assert "ok" == cell["verdict"], cell["reason"]
    assert cell["resolved"]["selected"]


def test_bug_55221_the_cell_is_planned_for_a_real_device_to_start(on: Any) -> None:
    """A plan cannot show what the kernel refuses: it says that the backend takes it."""
    cell = on("virtual:h200")["glm52-FLASHINFER_MLA_SPARSE_SM90-fp8"]
    confirmed(cell)
    assert "allocate" == cell["stage"]
    assert ["FLASHINFER_MLA_SPARSE_SM90"] == [d["backend"] for d in cell["declared"]]
