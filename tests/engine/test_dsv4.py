"""DeepSeek-V4 on virtual devices: the founding bug where it was, and gone where it is fixed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import session
from harness.options import options
from harness.record import loads
from tests.engine.conftest import Matrix

pytestmark = pytest.mark.engine

FOUNDING = "dsv4-default-unset or dsv4-default-auto or dsv4-default-fp8"


@pytest.mark.parametrize("device", ["virtual:h200", "virtual:rtx-pro-6000"])
def test_the_founding_bug_is_found_in_0_27_1(matrix: Matrix, device: str) -> None:
    """vLLM 47174, 45091, 55134: an assertion on a start with default options."""
    done = matrix("-k", FOUNDING, "--device", device, "--engine", "0.27.1")
    assert 1 == done.code, done.text
    for name in ("dsv4-default-unset", "dsv4-default-auto"):
        cell = done.cells[name]
        assert cell["error"], done.text
        assert ("broken", "AssertionError", "model") == (
            cell["verdict"],
            cell["error"]["type"],
            cell["stage"],
        )
    assert "ok" == done.cells["dsv4-default-fp8"]["verdict"]


def test_it_is_fixed_in_this_engine_on_hopper(matrix: Matrix) -> None:
    done = matrix("-k", FOUNDING, "--device", "virtual:h200")
    assert 0 == done.code, done.text
    cell = done.cells["dsv4-default-unset"]
    assert ("ok", ["explicit", "oracle", "contract"]) == (cell["verdict"], cell["vouched"])
    assert {37440, 1728, 8640, 32832} == {kv["page_size_bytes"] for kv in cell["kv"]}
    main = [kv for kv in cell["kv"] if kv["dtype"] == "uint8" and "indexer" not in kv["role"]]
    assert [584, 584, 584] == [kv["shape"][-1] for kv in main]


@pytest.mark.parametrize("device", ["virtual:h200", "virtual:rtx-pro-6000"])
def test_flashinfer_with_nothing_passed_is_unguarded(matrix: Matrix, device: str) -> None:
    done = matrix("-k", "dsv4-FLASHINFER_MLA_SPARSE_DSV4-unset", "--device", device)
    assert 0 == done.code, done.text
    cell = done.cells["dsv4-FLASHINFER_MLA_SPARSE_DSV4-unset"]
    assert "unguarded" == cell["verdict"]
    assert cell["known"]


def test_a_child_that_does_not_write_back_is_a_mismatch(tmp_path: Path) -> None:
    """vLLM's resolver itself broken in a real child: the window's page comes out too small."""
    run = session.resolve(options(["virtual:h200"], []))
    cell = next(c for c in run.cells if c.id == "dsv4-default-unset")
    path = tmp_path / "record.json"
    script = Path(__file__).parent / "lost_write_back.py"
    done = subprocess.run(
        [sys.executable, str(script), str(cell.model.path), str(path)],
        env=dict(session.launch_environ(run, run.request(cell))),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    judgement = run.judge(cell, loads(path.read_text())).judgement
    assert "mismatch" == judgement.verdict
    assert "written back" in judgement.reason


def timeless(records: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps({**record, "seconds": {}}, sort_keys=True) for record in records)


def test_two_hosts_give_the_same_records(matrix: Matrix, tmp_path: Any) -> None:
    """Host leaks: another PATH, HOME, CUDA_HOME and VLLM_* must not show in a virtual record."""
    tools = tmp_path / "cuda" / "bin"
    tools.mkdir(parents=True)
    for tool in ("nvcc", "ninja"):
        (tools / tool).write_text("#!/bin/sh\necho release 99.9\n")
        (tools / tool).chmod(0o755)
    cells = "default-unset or dsv4-default-fp8 or dsv4-default-bfloat16 or FLASHMLA_SPARSE-nvfp4"
    here = matrix("-k", cells)
    there = matrix(
        "-k",
        cells,
        environ={
            "PATH": f"{tools}:{os.path.dirname(sys.executable)}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "CUDA_HOME": str(tools.parent),
            "CUDA_VISIBLE_DEVICES": "3",
            "VLLM_ATTENTION_BACKEND": "TRITON_MLA",
            "VLLM_USE_DEEP_GEMM": "0",
            "VLLM_HAS_FLASHINFER_CUBIN": "0",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "KVMATRIX_CACHE": str(tmp_path / "cache"),
        },
    )
    assert 8 < len(here.records), here.text
    assert timeless(here.records) == timeless(there.records)


def test_xdist_reports_every_cell_once(matrix: Matrix) -> None:
    done = matrix("-k", "dsv4-default-fp8 or dsv4-default-unset", "-n", "2")
    assert 0 == done.code, done.text
    assert len(done.cells) == len(done.records) > 4
    assert {"notrun"}.isdisjoint(cell["verdict"] for cell in done.cells.values())


def test_a_deadline_is_kept(matrix: Matrix) -> None:
    done = matrix("-k", "dsv4-FLASHMLA_SPARSE-unset", "--case-timeout", "0.05")
    assert 1 == done.code, done.text
    assert "timeout" == done.cells["dsv4-FLASHMLA_SPARSE-unset"]["verdict"]


def test_a_disk_that_takes_nothing_costs_the_files_alone(matrix: Matrix, tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    done = matrix("-k", "dsv4-default-nvfp4", f"--matrix-out={tmp_path}/file/out")
    assert 75 == done.code, done.text
    assert "cannot write" in done.text
    assert "INTERNALERROR" not in done.text
