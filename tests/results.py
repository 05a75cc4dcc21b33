"""matrix.json as plain data, made by hand: what tests of reports read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

H200 = {"spec": "virtual:h200", "kind": "virtual", "name": "NVIDIA H200", "capability": [9, 0]}


def gpu(number: int, name: str = "NVIDIA H200", **more: Any) -> dict[str, Any]:
    return {"spec": f"GPU-{number}", "kind": "gpu", "name": name, "capability": [9, 0], **more}


def cache(page: int = 65536, role: str = "attn", **more: Any) -> dict[str, Any]:
    return {
        "kind": "FullAttentionSpec",
        "role": role,
        "layers": 32,
        "block_size": 16,
        "page_size_bytes": page,
        "content_bytes": page,
        "dtype": "bfloat16",
        "compress_ratio": 1,
        "draft": False,
        "backend": "FLASH_ATTN",
        "shape": [-1, 2, 16, 8, 128],
        "tensor_dtype": "bfloat16",
        **more,
    }


def cell(
    verdict: str = "ok",
    dtype: str = "auto",
    *,
    model: str = "llama3",
    backend: str = "default",
    device: str = "virtual:h200",
    engine: str = "0.33.0",
    **more: Any,
) -> dict[str, Any]:
    """A cell; one that is `ok` has a cache."""
    good = verdict == "ok"
    return {
        "id": f"{model}-{backend}-{dtype}",
        "model": model,
        "backend": backend,
        "kv_cache_dtype": dtype,
        "block_size": None,
        "tensor_parallel_size": 1,
        "device": device,
        "engine": engine,
        "verdict": verdict,
        "known": None,
        "stale": None,
        "reason": "" if good else f"why it is {verdict}",
        "stage": "allocate" if good else "config",
        "resolved": {
            "kv_cache_dtype": "auto" if good else None,
            "storage_dtype": "bfloat16" if good else None,
            "backends": ["FLASH_ATTN"] if good else [],
            "selected": "FLASH_ATTN" if good else None,
        },
        "kv": [cache()] if good else [],
        "num_blocks": 1000 if good else None,
        "kv_bytes_per_token": 131072 if good else None,
        "capacity": {"tokens": 16000, "max_model_len": 4096, "gpu_memory_utilization": 0.92}
        if good
        else None,
        "error": None,
        **more,
    }


def matrix(
    *cells: dict[str, Any],
    devices: tuple[dict[str, Any], ...] = (H200,),
    engines: tuple[str, ...] = ("0.33.0",),
) -> dict[str, Any]:
    return {
        "schema": 1,
        "run": {"started": "2026-01-01T00:00:00Z"},
        "engines": [{"version": version, "platform": "cuda"} for version in engines],
        "devices": list(devices),
        "differences": [],
        "cells": list(cells),
    }


def write(path: Path, data: dict[str, Any]) -> Path:
    """`data` as the matrix.json of a folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "matrix.json").write_text(json.dumps(data))
    return path
