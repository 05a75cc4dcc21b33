"""The preflight of a GPU or MIG slice: is it what NVML says, to torch and to vLLM?"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from harness.child import MAIN
from harness.device import GIB, MIB, Device
from harness.request import Request

SECONDS = 180.0
"""Starting CUDA takes seconds; importing torch and vLLM's platform from a cold disk more."""

TOLERANCE = 0.05
"""Share by which two counts of one device's memory may differ: what the driver reserves."""

MIN_FREE_BYTES = GIB
"""Less than a CUDA context and the smallest model need."""


def look(request: Request, environ: Mapping[str, str]) -> str | None:
    """Why the device is not usable for this engine, in one line; None where it is."""
    try:
        done = subprocess.run(
            [request.engine.python, str(MAIN), "preflight"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"{request.device.spec} did not answer a preflight in {SECONDS:.0f} s"
    except OSError as error:
        return f"{request.engine.python} cannot be started: {error.strerror}"
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    try:
        told = json.loads(lines[-1])
    except (IndexError, ValueError):
        told = None
    if done.returncode or not isinstance(told, dict):
        last = [
            line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()
        ]
        why = last[-1].strip() if last else f"exit status {done.returncode}"
        return f"{request.device.spec} is not usable: {why}"
    return problem(request.device, told, request.engine.version)


def problem(device: Device, told: Mapping[str, Any], version: str) -> str | None:
    """What is wrong with `device` by what the preflight `told`; None where nothing is."""
    if told["count"] != 1:
        return f"{device.spec}: CUDA shows {told['count']} devices where one was asked for"
    if (capability := tuple(told["capability"])) != (device.capability or capability):
        return f"{device.spec}: CUDA says capability {capability}, NVML {device.capability}"
    if device.memory_bytes and _differ(told["total_bytes"], device.memory_bytes):
        return (
            f"{device.spec}: CUDA counts {_gib(told['total_bytes'])}, "
            f"NVML {_gib(device.memory_bytes)}: another device answers"
        )
    if told["free_bytes"] < MIN_FREE_BYTES:
        return (
            f"{device.spec}: {told['free_bytes'] // MIB} MiB of "
            f"{told['total_bytes'] // MIB} MiB are free; see `nvidia-smi` for who holds the rest"
        )
    return _vllm_problem(device, told, version)


def _vllm_problem(device: Device, told: Mapping[str, Any], version: str) -> str | None:
    """vLLM asks NVML by an index. Where it takes a slice's index within its GPU for that of a GPU
    (0.33.0), another GPU answers, or none."""
    vllm = told["vllm"]
    asked = f"vLLM {version} asks NVML for another device than {device.spec}"
    remedy = (
        f"it takes the slice's index {device.slice_index} for that of a GPU; use slice 0 of GPU 0"
        if device.kind == "mig"
        else "unset CUDA_VISIBLE_DEVICES, or name the device by its index"
    )
    for name in ("total_bytes", "name", "capability"):
        if vllm.get(name) is None:
            why = vllm.get(f"{name}_error", "no answer")
            return f"{asked}: {why}; {remedy}"
    if _differ(vllm["total_bytes"], told["total_bytes"]):
        return (
            f"{asked}: {vllm['name']} with {_gib(vllm['total_bytes'])} instead of "
            f"{_gib(told['total_bytes'])}; {remedy}"
        )
    if list(vllm["capability"]) != list(told["capability"]):
        return f"{asked}: capability {vllm['capability']} instead of {told['capability']}; {remedy}"
    return None


def _differ(one: int, other: int) -> bool:
    return abs(one - other) > TOLERANCE * max(one, other)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
