"""What is passed to vLLM for a case: the options that it names, and what makes a start small."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.case import DEFAULT, UNSET, Case

MAX_MODEL_LEN = 4096
"""Tokens of context that the KV cache is planned for; pages do not depend on it."""


def options(model_path: Path, case: Case, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `EngineArgs` and `LLM`: dummy weights, no tokenizer, no compilation, then
    `engine_args`. What the case leaves unset is not passed at all."""
    passed: dict[str, Any] = {}
    if case.kv_cache_dtype != UNSET:
        passed["kv_cache_dtype"] = case.kv_cache_dtype
    if case.backend != DEFAULT:
        passed["attention_backend"] = case.backend
    if case.block_size:
        passed["block_size"] = case.block_size
    if case.tensor_parallel_size > 1:
        passed["tensor_parallel_size"] = case.tensor_parallel_size
    return {
        "model": str(model_path),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        **engine_args,
        **passed,
    }


def config(model_path: Path, case: Case, engine_args: Mapping[str, Any]) -> Any:
    """The VllmConfig of a case."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**options(model_path, case, engine_args)).create_engine_config()
