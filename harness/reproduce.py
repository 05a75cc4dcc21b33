"""How to see a cell by hand: with vLLM alone, and with pytest. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.case import Case
from harness.engine import environ

TEST = "cases/test_matrix.py::test_cell"


@dataclass(frozen=True)
class Reproduction:
    """What to type."""

    note: str
    """What the Python needs."""
    environ: Mapping[str, str]
    """Environment variables for it."""
    python: str
    """Python that needs vLLM and the folder of the model's config.json, and nothing else."""
    pytest: str
    """A command line, for the root of the checkout."""


def python(options: Mapping[str, Any], *, config_only: bool) -> str:
    """Python that starts vLLM with `options`, as far as its config or all the way."""
    lines = [f"    {name}={value!r}," for name, value in options.items()]
    if config_only:
        start, end = "EngineArgs(", ").create_engine_config()"
        return "\n".join(["from vllm import EngineArgs", "", start, *lines, end])
    return "\n".join(["from vllm import LLM", "", "LLM(", *lines, ")"])


def pytest(case: Case, device: str, engine: str | None, more: Mapping[str, Any]) -> str:
    """The command line for one cell; `more` are options beyond those that the case names."""
    words = ["pytest", f"{TEST}[{case.id}]", "--device", device]
    if engine is not None:
        # pytest takes a path that stands alone for a test path.
        words += [f"--engine={engine}"] if "/" in engine else ["--engine", engine]
    passed: dict[str, Any] = {
        "block-size": case.block_size or None,
        "tensor-parallel-size": case.tensor_parallel_size
        if case.tensor_parallel_size > 1
        else None,
        "model-runner": case.model_runner or None,
        **more,
    }
    for name, value in passed.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)


def model_runner(case: Case) -> dict[str, str]:
    """The environment variable that chooses the case's model runner, where it names one."""
    return environ.runner(case.model_runner or None)
