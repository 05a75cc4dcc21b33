"""Runs of the real thing: vLLM's own code on virtual devices, through pytest as users start it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """A finished run of the matrix."""

    code: int
    text: str
    cells: dict[str, dict[str, Any]]
    records: list[dict[str, Any]]


Matrix = Callable[..., Finished]


@pytest.fixture
def environ() -> dict[str, str]:
    """The environment of these tests."""
    return dict(os.environ)


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Run pytest on the cells in a process of its own: `matrix("-k", "dsv4", environ={...})`."""
    if importlib.util.find_spec("vllm") is None:
        pytest.fail(
            "no vLLM here: run `uv run --extra vllm --extra dev pytest tests`, or leave "
            "these out with -m 'not engine'"
        )

    def run(*arguments: str, environ: dict[str, str] | None = None) -> Finished:
        out = tmp_path_factory.mktemp("matrix")
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", f"--matrix-out={out}", *arguments],
            cwd=ROOT,
            env=os.environ if environ is None else environ,
            capture_output=True,
            text=True,
            timeout=900,
        )
        whole = out / "matrix.json"
        cells = json.loads(whole.read_text())["cells"] if whole.is_file() else []
        lines = out / "records.jsonl"
        records = (
            [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
        )
        return Finished(
            finished.returncode,
            finished.stdout + finished.stderr,
            {cell["id"]: cell for cell in cells},
            records,
        )

    return run
