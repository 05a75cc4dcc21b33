"""Two releases in one run, where a second one is at hand; `tests/test_two_engines.py` has the same
from kept records."""

from __future__ import annotations

import json
import os

import pytest

from harness import install
from tests.engine.conftest import Matrix

pytestmark = pytest.mark.engine

OLD = "0.27.1"


def test_the_founding_fix_leads_the_differences(matrix: Matrix) -> None:
    """vLLM 47174. Installs nothing: `--engine 0.27.1` or another test has done that."""
    installed = install.known_engines(install.cache_folder(os.environ))
    if OLD not in [engine.version for engine in installed]:
        pytest.skip(f"vLLM {OLD} is not installed: run `pytest --engine {OLD} -k dsv4-default`")
    both = ("--engine", OLD, "--engine", "current")
    done = matrix("-k", "dsv4-default-unset", "--device", "virtual:h200", *both)
    assert 1 == done.code, done.text
    verdicts = {name: cell["verdict"] for name, cell in done.cells.items()}
    assert ["broken", "ok"] == [verdicts[name] for name in sorted(verdicts)], json.dumps(verdicts)
    title, first = done.text[done.text.index("Differences between vLLM") :].splitlines()[:2]
    assert f"Differences between vLLM {OLD} and " in title
    assert "  broken -> ok: dsv4-default-unset" == first
