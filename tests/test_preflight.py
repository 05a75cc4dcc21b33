"""The preflight: a device that torch or vLLM takes for another is not usable, and why is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.device import GIB, Device
from harness.preflight import problem, vllm_problem

SLICE = Device(
    spec="MIG-aaaa",
    kind="mig",
    name="NVIDIA H200 MIG 1g.18gb",
    capability=(9, 0),
    memory_bytes=16 * GIB,
    sm_count=16,
    shared_memory_bytes=0,
    uuid="MIG-aaaa",
    parent="GPU-p",
    mig="1g.18gb",
    index=0,
    slice_index=3,
)
GPU = replace(SLICE, spec="GPU-p", kind="gpu", name="NVIDIA H200", uuid="GPU-p", slice_index=None)


def told(**changes: Any) -> dict[str, Any]:
    # Of a slice, vLLM sees the GPU that it is part of.
    vllm = {"name": GPU.name, "capability": [9, 0], "uuid": "GPU-p"}
    data = {
        "count": 1,
        "free_bytes": 15 * GIB,
        "total_bytes": 16 * GIB,
        "name": SLICE.name,
        "capability": [9, 0],
        "sm_count": 16,
        "uuid": "",
        "vllm": vllm,
    }
    for key, value in changes.items():
        data = {**data, key: {**vllm, **value} if key == "vllm" else value}
    return data


@pytest.mark.parametrize("device", [SLICE, GPU])
def test_a_device_that_all_agree_on_is_usable(device: Device) -> None:
    assert problem(device, told()) is None
    assert vllm_problem(device, told(), "0.33.0") is None


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["0 devices"], {"count": 0}),
        (["capability", "(8, 0)", "(9, 0)"], {"capability": [8, 0]}),
        (["141.0 GiB", "16.0 GiB", "another device"], {"total_bytes": 141 * GIB}),
        (["14000 MiB of 16384 MiB", "90%", "nvidia-smi"], {"free_bytes": 14_000 << 20}),
    ],
)
def test_what_torch_sees_must_be_the_device(words: list[str], changes: dict[str, Any]) -> None:
    reason = problem(SLICE, told(**changes))
    assert reason is not None
    for word in ("MIG-aaaa", *words):
        assert word in reason


@pytest.mark.parametrize(
    "vllm",
    [
        {"name": "NVIDIA A100", "uuid": "GPU-other"},
        {"uuid": None, "uuid_error": "NVMLError_InvalidArgument: Invalid Argument"},
        {"name": None},
        {"capability": [8, 0]},
    ],
)
def test_a_slice_index_taken_for_a_gpu_index_is_named(vllm: dict[str, Any]) -> None:
    """vLLM 0.33.0: device_control_id_to_physical_device_id of a MIG UUID is nvmlDeviceGetIndex."""
    reason = vllm_problem(SLICE, told(vllm=vllm), "0.33.0")
    assert reason is not None
    for word in ("vLLM 0.33.0", "MIG-aaaa", "slice's index 3", "slice 0 of GPU 0"):
        assert word in reason


def test_another_gpu_than_the_one_that_was_named_is_told() -> None:
    reason = vllm_problem(GPU, told(vllm={"uuid": "GPU-other"}), "0.33.0")
    assert reason is not None
    assert "GPU-other" in reason
    assert "slice" not in reason


def test_little_differences_are_the_driver_s_own() -> None:
    assert problem(SLICE, told(total_bytes=int(15.6 * GIB))) is None


def test_a_device_of_unknown_memory_and_capability_is_taken_at_cuda_s_word() -> None:
    unknown = replace(GPU, memory_bytes=0, capability=None)
    assert problem(unknown, told()) is None
