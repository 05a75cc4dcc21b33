"""`torch.cuda` and allocation, answered by a device profile instead of a driver.

Two of the three seams of the virtual device; the third is `platform.py`. What is
replaced here only *answers* or *places*: no decision of vLLM is touched.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from harness.device import Device

VIRTUAL_UUID = "GPU-00000000-0000-0000-0000-000000000000"

META = torch.device("meta")

_installed: Device | None = None

_count = 1
"""Devices like the installed one that this host has."""


def repeat(count: int) -> None:
    """Let this host have `count` devices of the installed kind, one for each rank of a group."""
    global _count
    _count = count


class _Event:
    """A CUDA event on a device without a clock: always done, never any time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream(_Event):
    """A CUDA stream on a device that runs nothing."""

    cuda_stream = 0
    device = torch.device("cuda:0")

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, other: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


class _TritonDriver:
    """Triton's active driver, as far as modules ask it when imported or constructed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def _properties(self, index: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._device.shared_memory_bytes,
            "multiprocessor_count": self._device.sm_count,
            "max_num_regs": 65536,  # 32-bit registers per SM, the same from SM70 to SM121
            "warpSize": 32,
        }

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self._device.capability or (0, 0)
        return GPUTarget("cuda", major * 10 + minor, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_device_capability(self, index: int = 0) -> tuple[int, int]:
        return self._device.capability or (0, 0)

    def get_current_stream(self, index: int = 0) -> int:
        return 0

    def is_active(self) -> bool:
        return True


def without_cuda() -> None:
    """For a plan on a CPU build: events and streams that can be made. vLLM's CPU worker puts
    such stand-ins there too, but there is no worker in a plan."""
    torch.cuda.Event = _Event
    torch.cuda.Stream = _Stream


def install(device: Device) -> None:
    """Let torch and Triton answer for `device` in this process, once and for good.

    ValueError where another device was installed before: facts that modules took when they
    were imported cannot be taken back.
    """
    global _installed
    if _installed == device:
        return
    if _installed is not None:
        raise ValueError(f"this process already is a {_installed.spec}, not a {device.spec}")
    _installed = device
    assert device.capability is not None
    major, minor = device.capability
    properties = SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.memory_bytes,
        multi_processor_count=device.sm_count,
        shared_memory_per_block_optin=device.shared_memory_bytes,
        # CUDA programming guide, table of technical specifications
        shared_memory_per_block=48 * 1024,
        shared_memory_per_multiprocessor=device.shared_memory_bytes + 1024,
        max_threads_per_multi_processor=1536 if (major, minor) in _SMALL_SM else 2048,
        regs_per_multiprocessor=65536,
        warp_size=32,
        L2_cache_size=50 * 1024 * 1024,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid=VIRTUAL_UUID,
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )
    stream = _Stream()

    @contextmanager
    def nothing(*args: Any, **kwargs: Any) -> Any:
        yield stream

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "_is_compiled": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: _count,
        "_device_count_nvml": lambda: _count,
        "current_device": lambda: 0,
        "set_device": lambda d: None,
        "get_device_capability": lambda d=None: (major, minor),
        "get_device_name": lambda d=None: device.name,
        "get_device_properties": lambda d=None: properties,
        "mem_get_info": lambda d=None: (device.memory_bytes, device.memory_bytes),
        "memory_stats": lambda d=None: {},
        "memory_allocated": lambda d=None: 0,
        "memory_reserved": lambda d=None: 0,
        "max_memory_allocated": lambda d=None: 0,
        "reset_peak_memory_stats": lambda d=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda d=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "is_bf16_supported": lambda including_emulation=True: major >= 8,
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda d=None: stream,
        "default_stream": lambda d=None: stream,
        "set_stream": lambda s: None,
        "stream": nothing,
        "device": nothing,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        for name, answer in {
            "is_available": lambda: True,
            "device_count": lambda: _count,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "current_device_index": lambda: 0,
            "current_device_idx": lambda: 0,
            "set_device_index": lambda d: None,
            "set_device_idx": lambda d: None,
            "current_stream": lambda d=None: stream,
            "synchronize": lambda d=None: None,
            "empty_cache": lambda: None,
            "max_memory_allocated": lambda d=None: 0,
            "memory_stats": lambda d=None: {},
            "reset_peak_memory_stats": lambda d=None: None,
        }.items():
            setattr(accelerator, name, answer)
    try:
        from triton.runtime import driver
    except ImportError:
        return
    driver.set_active(_TritonDriver(device))


# Parts with 1536 threads an SM (CUDA programming guide); the others here have 2048, Turing 1024.
_SMALL_SM = frozenset({(8, 6), (8, 9), (11, 0), (12, 0), (12, 1)})


class OnMeta(TorchFunctionMode):
    """Tensors that would lie on a CUDA device come out on the meta device: shape, no memory."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = META
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0].to(META)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], META, *args[2:])
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **kwargs)


def _is_cuda(place: Any) -> bool:
    # torch reads an integer device as that CUDA device.
    if isinstance(place, bool):
        return False
    if isinstance(place, int):
        return True
    return str(place).startswith("cuda") if isinstance(place, (str, torch.device)) else False
