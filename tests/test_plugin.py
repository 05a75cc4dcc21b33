"""pytest as users start it: bad input is one line and exit 2; the parent stays light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_guard import ENGINE

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        # What is meant by a SPEC must not depend on the GPUs of this machine.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "virtual:h20O"], ["'virtual:h20O'", "h200", "kvmatrix devices"]),
        (["--device", "virtual:h200/1g.36gb"], ["1g.36gb", "1g.35gb"]),
        (["--device", "cuda:7"], ["cuda:7", "kvmatrix devices"]),
        (["--device", "GPU-00000000"], ["GPU-00000000", "kvmatrix devices"]),
        (["--device", "MIG-00000000"], ["MIG-00000000", "kvmatrix devices"]),
        (["--device", "cpu", "--depth", "plan"], ["plan", "cpu", "warmup", "generate"]),
        (["--isolation", "frok"], ["'frok'", "fork", "spawn"]),
        (["--device", "cpu", "--model-runner", "v3"], ["'v3'", "v1", "v2"]),
        (
            ["--device", "cpu", "--tensor-parallel-size", "2"],
            ["--tensor-parallel-size 2", "virtual"],
        ),
        (["--engine", "0.24.0"], ["0.24.0", "0.27", "0.33"]),
        (["--engine", "curent"], ["'curent'", "current", "kvmatrix engines"]),
        (["--depth", "alocate"], ["'alocate'", "allocate"]),
        (["--depth", "generate"], ["generate", "virtual", "allocate"]),
        (["--case-timeout", "soon"], ["--case-timeout", "soon"]),
        (["--matrix-out=README.md"], ["README.md", "folder"]),
        (["--baseline=README.md"], ["README.md", "not JSON"]),
        (["--baseline=nowhere"], ["nowhere", "No such file"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], words: list[str]) -> None:
    done = run(*arguments)
    assert 2 == done.returncode, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert 1 == len(lines), done.stderr
    for word in words:
        assert word in lines[0]


PLANTED = """#!/bin/sh
case "$1" in
-I) echo '["0.29.0", "{folder}/vllm/__init__.py"]' ;;
*) echo '{facts}' ;;
esac
"""


@pytest.mark.parametrize(
    ("platform", "arguments", "words"),
    [
        ("cuda", ["--device", "cpu"], ["device cpu", "0.29.0", "--engine cpu:0.32.0"]),
        ("cpu", ["--device", "virtual:h200"], ["virtual:h200", "0.29.0", "--device cpu"]),
        ("cuda", ["--device", "cpu", "--device", "virtual:b200"], ["cpu:0.32.0"]),
    ],
)
def test_an_engine_that_does_not_serve_a_device_is_named(
    tmp_path: Path, platform: str, arguments: list[str], words: list[str]
) -> None:
    told = {**ENGINE.to_json(), "version": "0.29.0", "platform": platform}
    told["cuda"] = None if platform == "cpu" else "13.0"
    del told["schema"]
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(PLANTED.format(folder=tmp_path, facts=json.dumps(told)))
    python.chmod(0o755)
    done = run(f"--engine={python}", *arguments)
    assert 2 == done.returncode, done.stdout + done.stderr
    last = [line for line in done.stderr.splitlines() if line.strip()][-1]
    for word in words:
        assert word in last


def test_the_parent_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, harness.plugin, harness.cli, harness.session;"
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "[]" == done.stdout.strip()


def test_only_the_engine_folder_names_them() -> None:
    guilty = [
        path.relative_to(ROOT).as_posix()
        for folder in ("harness", "cases", "conftest.py")
        for path in ([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
        if "engine" not in path.parts
        and any(
            line.lstrip().startswith((f"import {name}", f"from {name}"))
            for line in path.read_text().splitlines()
            for name in ("vllm", "torch")
        )
    ]
    assert [] == guilty


def test_own_tests_need_no_engine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_plugin.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "KVMATRIX_CACHE": "/nonexistent"},
        timeout=60,
    )
    assert 0 == done.returncode, done.stdout


def test_a_run_needs_nothing_of_the_projects_own_tests(tmp_path: Path) -> None:
    # `--device VALUE`: pytest takes VALUE for a path, and, where there is none, reads tests/ too.
    (tmp_path / "hypothesis.py").write_text("raise ImportError('not installed')\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--device", "virtual:h2O0", "-k", "none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert "unknown device 'virtual:h2O0'" in done.stderr, done.stdout + done.stderr
    assert 2 == done.returncode
