"""Runs on real devices as pytest sees them, with a fake NVML and a planted engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.planted import plant

ROOT = Path(__file__).resolve().parent.parent

SLICES = [f"MIG-{number}0000000-0000-0000-0000-000000000000" for number in range(4)]

PYNVML = """
from tests.fake_nvml import Card, FakeNvml, Slice

slices = {{
    slot: Slice(uuid, "NVIDIA H200 MIG 1g.35gb", 33_280, 26)
    for slot, uuid in zip((0, 2, 4, 6), {uuids!r})
}}
fake = FakeNvml((Card("GPU-parent", slices=slices),), init_error={init_error!r})
for name in dir(fake):
    if not name.startswith("__"):
        globals()[name] = getattr(fake, name)
"""

DTYPES = " ".join(f"f{number}" for number in range(8))


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    cells: dict[str, dict[str, Any]]
    records: list[dict[str, Any]]
    devices: list[dict[str, Any]]


def run(tmp_path: Path, *arguments: str, init_error: int | None = None, **variables: str) -> Done:
    python = plant(tmp_path, CHAOS_DTYPES=DTYPES, **variables)
    (tmp_path / "pynvml.py").write_text(PYNVML.format(uuids=SLICES, init_error=init_error))
    environ = {name: value for name, value in os.environ.items() if "VISIBLE" not in name}
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", f"--engine={python}"),
            *(f"--matrix-out={tmp_path}/out", "-k", "dsv4-default-f", *arguments),
        ],
        cwd=ROOT,
        env={
            **environ,
            "KVMATRIX_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    whole, lines = tmp_path / "out" / "matrix.json", tmp_path / "out" / "records.jsonl"
    matrix = json.loads(whole.read_text()) if whole.is_file() else {"cells": [], "devices": []}
    records = lines.read_text().splitlines() if lines.is_file() else []
    return Done(
        finished.returncode,
        finished.stdout,
        finished.stderr,
        {cell["id"]: cell for cell in matrix["cells"]},
        [json.loads(line) for line in records],
        matrix["devices"],
    )


def test_slices_of_one_kind_share_the_cells_a_worker_each(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "auto")
    assert 0 == done.code, done.out + done.err
    assert {f"dsv4-default-f{number}" for number in range(8)} == set(done.cells)
    assert set(SLICES) == {record["device"] for record in done.records}
    assert 8 == len(done.records)
    assert ["NVIDIA H200 MIG 1g.35gb"] == [device["name"] for device in done.devices]
    assert {"mig"} == {record["device_kind"] for record in done.records}


def test_one_process_uses_the_first_of_them(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert 0 == done.code, done.out + done.err
    assert {SLICES[0]} == {record["device"] for record in done.records}
    visible = {record["settings"].get("CUDA_VISIBLE_DEVICES") for record in done.records}
    assert visible <= {SLICES[0], None}


def test_more_workers_than_devices_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "5")
    assert 2 == done.code, done.out + done.err
    (line,) = [line for line in done.err.splitlines() if "-n 5" in line]
    assert "4 devices" in line


def test_a_slice_that_vllm_takes_for_another_device_is_infra(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", SLICES[2], CHAOS_MISLED="1")
    assert 75 == done.code, done.out + done.err
    assert {"infra"} == {cell["verdict"] for cell in done.cells.values()}
    assert "8 errors" in done.out
    for cell in done.cells.values():
        assert SLICES[2] in cell["reason"]
        assert "slice's index" in cell["reason"]


def test_nvml_that_is_denied_is_not_taken_for_no_gpu(tmp_path: Path) -> None:
    done = run(tmp_path, init_error=4)
    assert 75 == done.code, done.out + done.err
    assert "Insufficient Permissions" in done.err
    assert "virtual:h200" in done.err


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_reduction_that_changes_a_kind_fails_its_cells_alone(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    """It once ended the whole run: no other model was judged."""
    done = run(tmp_path, *workers, CHAOS_LOSES="1")
    assert 1 == done.code, done.out + done.err
    assert {f"dsv4-default-f{number}" for number in range(8)} == set(done.cells)
    for cell in done.cells.values():
        assert "notrun" == cell["verdict"]
        assert "reduction of dsv4" in cell["reason"]
        assert "1024" in cell["reason"]
    assert [] == done.records


def test_cells_that_do_not_fit_are_skipped_with_the_numbers(tmp_path: Path) -> None:
    done = run(tmp_path, "-rs", CHAOS_WEIGHTS=str(64 * 2**30))
    assert 0 == done.code, done.out + done.err
    assert {"skipped"} == {cell["verdict"] for cell in done.cells.values()}
    (reason,) = {cell["reason"] for cell in done.cells.values()}
    for words in ("weights 64.0 GiB", "NVIDIA H200 MIG 1g.35gb has 32.5 GiB"):
        assert words in reason
    assert all(cell["needs_bytes"] > 64 * 2**30 for cell in done.cells.values())


def test_cells_of_a_cpu_state_the_memory_they_need(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "cpu", CHAOS_PLATFORM="cpu")
    assert 0 == done.code, done.out + done.err
    assert {"cpu"} == {record["device"] for record in done.records}
    assert all(cell["needs_bytes"] > 1000 for cell in done.cells.values())
