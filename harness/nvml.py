"""NVML: the GPUs and MIG slices of this machine. CUDA is never touched.

`nvml` is the module `pynvml` (package nvidia-ml-py), or anything with its functions and names.
A question that NVML does not answer - not supported on this part, no permission inside a
container, a driver older than the function - leaves one number unknown and the device listed.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from harness.device import GIB, MIB, SHARED_MEMORY, Device, Discovery, Gpu
from harness.visible import hides_all, visible

CORES_PER_SM: Mapping[tuple[int, int | None], int] = MappingProxyType(
    {
        (7, None): 64,
        (8, 0): 64,
        (8, None): 128,
        (9, None): 128,
        (10, None): 128,
        (11, None): 128,
        (12, None): 128,
    }
)
"""Compute capability (minor None: any other) -> FP32 cores of one SM. CUDA programming guide,
throughput of native arithmetic instructions: results of 32-bit floating-point add per clock."""


def discover(nvml: Any | None = None, environ: Mapping[str, str] = os.environ) -> Discovery:
    """Every GPU and MIG slice that `environ` makes visible. Never raises for what NVML says.

    No `pynvml`, no NVML library or no driver is an empty Discovery; anything else that keeps
    a device from being seen is its `trouble`.
    """
    nvml = _module(nvml)
    if nvml is None:
        return Discovery()
    try:
        with _session(nvml):
            found = _Machine(nvml)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_LIBRARY_NOT_FOUND):
            return Discovery()
        trouble = None if hides_all(environ) else f"NVML: {_reason(nvml, error)}"
        return Discovery(trouble=trouble)
    devices, more = visible(found.counted, environ)
    if hides_all(environ):
        lines: list[str] = []
    else:
        # Without any GPU there is nothing that an entry could have named.
        lines = [*found.trouble, *(more if found.counted else ())]
    gpus = tuple(gpu for gpu in found.counted if gpu is not None)
    return Discovery(devices, found.driver, "; ".join(lines) or None, gpus)


def used_memory_bytes(uuid: str, nvml: Any | None = None) -> int | None:
    """Bytes in use on the device, by every process and the driver; None where NVML does not tell.

    Of a slice, NVML's answer for the slice itself. Of a GPU in MIG mode it needs privileges."""
    nvml = _module(nvml)
    if nvml is None:
        return None
    try:
        with _session(nvml):
            return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).used)
    except nvml.NVMLError:
        return None


def _module(nvml: Any | None) -> Any | None:
    if nvml is not None:
        return nvml
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _reason(nvml: Any, error: Any) -> str:
    """NVML's words, and the remedy where there is a usual one."""
    remedy = {
        nvml.NVML_ERROR_NO_PERMISSION: "may this user, or this container, open /dev/nvidiactl?",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated while it was loaded: "
        "load it anew, or reboot",
    }.get(error.value)
    return f"{error} ({remedy})" if remedy else str(error)


def _text(value: Any) -> str:
    """NVML's strings, which older versions of pynvml give as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class _Machine:
    """What NVML lists, read once, within a session."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.trouble: list[str] = []
        self.driver = self._told(nvml.nvmlSystemGetDriverVersion, read=_text)
        self.counted: list[Gpu | None] = []
        """The GPUs as CUDA counts them; None for one that counts but cannot be used."""
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                self.counted.append(self._gpu(index))
            except nvml.NVMLError as error:
                self.trouble.append(f"GPU {index}: {_reason(nvml, error)}")
                # A GPU that the caller may not open (the device cgroup of a batch system) is not
                # there for CUDA either, so those behind it move up.
                if error.value != nvml.NVML_ERROR_NO_PERMISSION:
                    self.counted.append(None)

    def _told(
        self, ask: Callable[..., Any], *arguments: Any, read: Callable[[Any], Any] = lambda v: v
    ) -> Any:
        """An answer, or None where NVML does not tell."""
        try:
            return read(ask(*arguments))
        except self.nvml.NVMLError:
            return None

    def _gpu(self, index: int) -> Gpu:
        nvml = self.nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        name = _text(nvml.nvmlDeviceGetName(handle))
        capability = self._told(nvml.nvmlDeviceGetCudaComputeCapability, handle, read=_capability)
        slots = self._told(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        mode = self._told(nvml.nvmlDeviceGetMigMode, handle, read=lambda modes: modes[0] == 1)
        # Where the mode is not told, there are slots only if it is on.
        mig_mode = bool(slots) if mode is None else mode
        if mig_mode:
            devices = tuple(self._slices(handle, uuid, name, index, capability, slots))
            if not devices:
                self.trouble.append(
                    f"GPU {index} ({uuid}) is in MIG mode and shows no slice "
                    "(`nvidia-smi mig -cgi <profile> -C` makes one)"
                )
        else:
            devices = (
                Device(
                    spec=uuid,
                    kind="gpu",
                    name=name,
                    capability=capability,
                    memory_bytes=self._memory(handle) or 0,
                    sm_count=sm_count(
                        capability, self._told(nvml.nvmlDeviceGetNumGpuCores, handle) or 0
                    ),
                    shared_memory_bytes=SHARED_MEMORY.get(capability, 0) if capability else 0,
                    uuid=uuid,
                    index=index,
                    driver=self.driver,
                ),
            )
        return Gpu(uuid, name, index, capability, mig_mode, devices)

    def _memory(self, handle: Any) -> int | None:
        memory = self._told(self.nvml.nvmlDeviceGetMemoryInfo, handle)
        return None if memory is None else int(memory.total)

    def _slices(
        self,
        gpu: Any,
        parent: str,
        gpu_name: str,
        index: int,
        capability: tuple[int, int] | None,
        slots: int,
    ) -> Iterator[Device]:
        nvml = self.nvml
        for slot in range(slots):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            except nvml.NVMLError as error:
                # Slots are sparse: an empty one has others behind it.
                if error.value != nvml.NVML_ERROR_NOT_FOUND:
                    self.trouble.append(f"GPU {index} slice {slot}: {_reason(nvml, error)}")
                continue
            attributes = self._told(nvml.nvmlDeviceGetAttributes, handle)
            name = self._told(nvml.nvmlDeviceGetName, handle, read=_text) or gpu_name
            match = re.search(r" MIG (\S+)$", name)
            profile = match[1] if match else mig_profile(attributes, self._memory(gpu))
            if match is None and profile is not None:
                name = f"{name} MIG {profile}"
            memory = self._memory(handle)
            if memory is None:
                memory = 0 if attributes is None else int(attributes.memorySizeMB) * MIB
            alias = self._alias(handle, parent)
            yield Device(
                spec=uuid,
                kind="mig",
                name=name,
                capability=capability,
                memory_bytes=memory,
                sm_count=0 if attributes is None else int(attributes.multiprocessorCount),
                shared_memory_bytes=SHARED_MEMORY.get(capability, 0) if capability else 0,
                uuid=uuid,
                parent=parent,
                mig=profile,
                index=index,
                slice_index=slot,
                driver=self.driver,
                alias=None if alias == uuid else alias,
            )

    def _alias(self, handle: Any, parent: str) -> str | None:
        instance = self._told(self.nvml.nvmlDeviceGetGpuInstanceId, handle)
        compute = self._told(self.nvml.nvmlDeviceGetComputeInstanceId, handle)
        return None if None in (instance, compute) else f"MIG-{parent}/{instance}/{compute}"


def _capability(told: Any) -> tuple[int, int]:
    major, minor = told
    return int(major), int(minor)


def sm_count(capability: tuple[int, int] | None, cores: int) -> int:
    """SMs of a whole GPU, of which NVML tells the cores only; 0 where that cannot be told."""
    if capability is None:
        return 0
    per_sm = CORES_PER_SM.get(capability) or CORES_PER_SM.get((capability[0], None))
    return cores // per_sm if per_sm and cores % per_sm == 0 else 0


def mig_profile(attributes: Any | None, gpu_memory_bytes: int | None) -> str | None:
    """The profile of a slice whose name does not tell it, such as `1g.35gb` or `1c.3g.71gb`.

    A profile's GB are the GPU's GiB, rounded up, times the slice's eighths of the memory
    (MIG user guide, "MIG device names")."""
    if attributes is None or not gpu_memory_bytes:
        return None
    eighths = math.ceil(8 * attributes.memorySizeMB * MIB / gpu_memory_bytes)
    gigabytes = math.floor(math.ceil(gpu_memory_bytes / GIB) * eighths / 8 + 0.5)
    gpu_slices, slices = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    compute = "" if slices == gpu_slices else f"{slices}c."
    return f"{compute}{gpu_slices}g.{gigabytes}gb"
