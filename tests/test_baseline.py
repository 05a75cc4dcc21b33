"""`pytest --baseline` as users start it, with a planted engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.diff import diff
from harness.result import load
from tests.chaos.planted import plant

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, python: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", f"--engine={python}", "--device", "virtual:h200"),
            *(f"--matrix-out={folder}/out", *arguments),
        ],
        cwd=ROOT,
        env={**os.environ, "KVMATRIX_CACHE": f"{folder}/cache", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads((folder / "out" / "matrix.json").read_text())


def test_what_changed_since_the_baseline_is_told(tmp_path: Path) -> None:
    """The baseline may be the very file that the run will replace."""
    python = plant(tmp_path)
    both = "dsv4-default-fine or dsv4-default-segfault"
    code, out, before = run(tmp_path, python, "-k", both)
    assert 1 == code, out
    assert "baseline" not in before
    assert [0, 0, 0, 1, 0, 0, 0] == [*diff(before, load(tmp_path / "out")).counts().values()]

    file = tmp_path / "out" / "matrix.json"
    code, out, after = run(tmp_path, python, "-k", both, f"--baseline={file}")
    assert 1 == code, out  # of this run, in which a cell still fails
    assert "Still failing: 1 cell\n  crashed -> crashed: dsv4-default-segfault" in out
    assert [("still failing", "dsv4-default-segfault")] == [
        (change["kind"], change["id"]) for change in after["baseline"]["changes"]
    ]

    # Had it passed before, it would fail anew. What -k leaves out has not vanished; what is no
    # longer planned has.
    fine, segfault = before["cells"]
    segfault["verdict"] = "ok"
    gone = {**fine, "id": "dsv4-default-gone", "kv_cache_dtype": "gone"}
    file.write_text(json.dumps({**before, "cells": [fine, segfault, gone]}))
    code, out, after = run(
        tmp_path, python, "-k", "dsv4-default-segfault", f"--baseline={file.parent}", "-n1"
    )
    assert 1 == code, out
    assert [("new failure", "dsv4-default-segfault"), ("vanished", "dsv4-default-gone")] == [
        (change["kind"], change["id"]) for change in after["baseline"]["changes"]
    ]
    assert "New failures: 1 cell" in out
