"""A stand-in for the module `pynvml`: the functions that the harness asks, over planned GPUs."""

# ruff: noqa: N802 - the names are NVML's

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MIB = 2**20


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return {
            3: "Not Supported",
            4: "Insufficient Permissions",
            6: "Not Found",
            9: "Driver Not Loaded",
            12: "NVML Shared Library Not Found",
            15: "GPU is lost",
            18: "RM has detected an NVML/RM version mismatch.",
        }[self.value]


@dataclass(frozen=True)
class Slice:
    uuid: str
    name: str
    mib: int
    sms: int
    gi: int = 1
    ci: int = 0
    gi_slices: int = 1
    ci_slices: int = 1
    used: int = 0
    memory_told: bool = True


@dataclass(frozen=True)
class Card:
    uuid: str
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    cores: int = 132 * 128
    mib: int = 143_771
    used: int = 0
    slices: Mapping[int, Slice] | None = None
    """Slot -> slice; None where MIG mode is off."""
    supports_mig: bool = True
    memory_told: bool | None = None
    """By default only a GPU in MIG mode keeps its memory from those without privileges."""
    error: int | None = None
    """What asking for the handle raises."""


@dataclass
class FakeNvml:
    cards: tuple[Card, ...] = ()
    init_error: int | None = None
    count_error: int | None = None
    as_bytes: bool = False
    sessions: list[str] = field(default_factory=list)

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18

    def _raise(self, value: int | None) -> None:
        assert self.sessions[-1:] != ["shutdown"]
        if value is not None:
            raise NVMLError(value)

    def _string(self, text: str) -> Any:
        return text.encode() if self.as_bytes else text

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.sessions.append("init")

    def nvmlShutdown(self) -> None:
        self.sessions.append("shutdown")

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._string("580.95.05")

    def nvmlDeviceGetCount(self) -> int:
        self._raise(self.count_error)
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self._raise(self.cards[index].error)
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for card in self.cards:
            for handle in (card, *(card.slices or {}).values()):
                if handle.uuid == uuid:
                    return handle
        raise NVMLError(6)

    def nvmlDeviceGetUUID(self, handle: Any) -> Any:
        return self._string(handle.uuid)

    def nvmlDeviceGetName(self, handle: Any) -> Any:
        return self._string(handle.name)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Card) -> tuple[int, int]:
        return handle.capability

    def nvmlDeviceGetNumGpuCores(self, handle: Card) -> int:
        return handle.cores

    def nvmlDeviceGetMigMode(self, handle: Card) -> list[int]:
        self._raise(None if handle.supports_mig else 3)
        return [0, 0] if handle.slices is None else [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Card) -> int:
        return 0 if handle.slices is None else 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Card, slot: int) -> Slice:
        if slot not in (handle.slices or {}):
            raise NVMLError(6)
        return (handle.slices or {})[slot]

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        told = handle.memory_told
        if told is None:
            told = handle.slices is None
        self._raise(None if told else 4)
        return SimpleNamespace(total=handle.mib * MIB, used=handle.used)

    def nvmlDeviceGetAttributes(self, handle: Slice) -> Any:
        return SimpleNamespace(
            multiprocessorCount=handle.sms,
            memorySizeMB=handle.mib,
            gpuInstanceSliceCount=handle.gi_slices,
            computeInstanceSliceCount=handle.ci_slices,
        )

    def nvmlDeviceGetGpuInstanceId(self, handle: Slice) -> int:
        return handle.gi

    def nvmlDeviceGetComputeInstanceId(self, handle: Slice) -> int:
        return handle.ci
