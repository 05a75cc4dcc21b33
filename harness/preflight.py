"""The preflight of a GPU or MIG slice: is it what NVML says, to torch and to vLLM?"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.child import MAIN
from harness.device import GIB, MIB, Device
from harness.request import Request

SECONDS = 180.0
"""Starting CUDA takes seconds; importing torch and vLLM's platform from a cold disk more."""

TOLERANCE = 0.05
"""Share by which two counts of one device's memory may differ: what the driver reserves."""

MIN_FREE = 0.9
"""Share of the memory that must be free: with less, vLLM refuses to start with its default
`gpu_memory_utilization`, and that would be no fault of its own."""


@dataclass(frozen=True)
class Look:
    """What a preflight showed."""

    reason: str | None
    """Why the device is not usable for this engine, in one line; None where it is."""
    uuid: str = ""
    """Which device CUDA started on, as torch writes it; empty where it did not."""
    misled: bool = False
    """True where CUDA has the right device, and vLLM asks NVML for another."""


def look(request: Request, environ: Mapping[str, str]) -> Look:
    """Look at the device of `request` with a process of its own."""
    device = request.device
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
        return Look(f"{device.spec} did not answer a preflight in {SECONDS:.0f} s")
    except OSError as error:
        return Look(f"{request.engine.python} cannot be started: {error.strerror}")
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    try:
        told = json.loads(lines[-1])
    except (IndexError, ValueError):
        told = None
    if done.returncode or not isinstance(told, dict):
        text = done.stderr.decode("utf-8", "replace")
        last = [line for line in text.splitlines() if line.strip()]
        why = last[-1].strip() if last else f"exit status {done.returncode}"
        return Look(f"{device.spec} is not usable: {why}")
    reason = problem(device, told)
    if reason is not None:
        return Look(reason, told["uuid"])
    reason = vllm_problem(device, told, request.engine.version)
    return Look(reason, told["uuid"], misled=reason is not None)


def problem(device: Device, told: Mapping[str, Any]) -> str | None:
    """What is wrong with `device` by what torch `told` of it; None where nothing is."""
    if told["count"] != 1:
        return f"{device.spec}: CUDA shows {told['count']} devices where one was asked for"
    if (capability := tuple(told["capability"])) != (device.capability or capability):
        return f"{device.spec}: CUDA says capability {capability}, NVML {device.capability}"
    if device.memory_bytes and _differ(told["total_bytes"], device.memory_bytes):
        return (
            f"{device.spec}: CUDA counts {_gib(told['total_bytes'])}, "
            f"NVML {_gib(device.memory_bytes)}: another device answers"
        )
    if told["free_bytes"] < MIN_FREE * told["total_bytes"]:
        return (
            f"{device.spec}: {told['free_bytes'] // MIB} MiB of {told['total_bytes'] // MIB} MiB "
            f"are free, and vLLM wants {MIN_FREE:.0%}; see `nvidia-smi` for who holds the rest"
        )
    return None


def vllm_problem(device: Device, told: Mapping[str, Any], version: str) -> str | None:
    """What is wrong with the answers of vLLM's platform object; None where nothing is.

    vLLM asks NVML by index. Of a slice it never sees more than the GPU that it is part of, and
    works with that; but where it takes the slice's index within its GPU for the index of a GPU
    (0.33.0), another GPU answers, or none.
    """
    vllm = told["vllm"]
    asked = f"vLLM {version} asks NVML for another device than {device.spec}"
    remedy = (
        f"it takes the slice's index {device.slice_index} for that of a GPU; let this slice be "
        "the only device that is visible, or use slice 0 of GPU 0"
        if device.kind == "mig"
        else "unset CUDA_VISIBLE_DEVICES, or name the device by its index"
    )
    for name in ("uuid", "name", "capability"):
        if vllm.get(name) is None:
            why = vllm.get(f"{name}_error", "no answer")
            return f"{asked}: {why}; {remedy}"
    if vllm["uuid"] not in (device.uuid, device.alias, device.parent):
        return f"{asked}: {vllm['name']}, {vllm['uuid']}; {remedy}"
    if list(vllm["capability"]) != list(told["capability"]):
        return f"{asked}: capability {vllm['capability']} instead of {told['capability']}; {remedy}"
    return None


def _differ(one: int, other: int) -> bool:
    return abs(one - other) > TOLERANCE * max(one, other)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
