"""vLLM's platform object for a CUDA device that is described, not present."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability

from harness.engine.environ import device_of_environment
from harness.engine.seams import VIRTUAL_UUID

DEVICE = device_of_environment()


class VirtualCudaPlatform(CudaPlatformBase):
    """Answers from the device profile alone; every decision is CudaPlatformBase's own."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        assert DEVICE.capability is not None
        return DeviceCapability(*DEVICE.capability)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return DEVICE.name

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return VIRTUAL_UUID

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return DEVICE.memory_bytes

    @classmethod
    def device_count(cls) -> int:
        return int(torch.cuda.device_count())

    @classmethod
    def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
        return len(physical_device_ids) < 2

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        # CUDA's own would open NCCL and shared memory with ranks that are only named.
        base = "vllm.distributed.device_communicators.base_device_communicator"
        return f"{base}.DeviceCommunicatorBase"

    @classmethod
    def get_device_numa_node(cls, device_id: int = 0) -> int | None:
        return None

    @classmethod
    def get_all_device_numa_nodes(cls) -> list[int] | None:
        return None

    @classmethod
    def get_all_gpu_pci_bus_ids(cls) -> dict[int, str]:
        return {index: f"00000000:{index + 1:02x}:00.0" for index in range(cls.device_count())}

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def set_device(cls, device: Any) -> None:
        pass

    @classmethod
    def log_warnings(cls) -> None:
        pass
