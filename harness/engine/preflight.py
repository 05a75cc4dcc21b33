"""A look at the device by a process of its own: what torch and vLLM take it for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TRIAL_BYTES = 64 << 20
"""What is allocated and given back: less than any cell needs, more than a broken context gives."""


def look() -> dict[str, Any]:
    """The device as torch sees it, and as vLLM's platform object answers for it, as plain data.

    Bytes throughout. RuntimeError and its like where CUDA does not start or gives no memory.
    """
    import torch

    free, total = torch.cuda.mem_get_info(0)
    properties = torch.cuda.get_device_properties(0)
    trial = torch.ones(TRIAL_BYTES, dtype=torch.uint8, device="cuda")
    assert int(trial.sum(dtype=torch.int64)) == TRIAL_BYTES
    from vllm.platforms import current_platform

    told: dict[str, Any] = {
        "count": torch.cuda.device_count(),
        "free_bytes": free,
        "total_bytes": total,
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "sm_count": properties.multi_processor_count,
        "uuid": str(getattr(properties, "uuid", "")),
        "vllm": {},
    }
    # What cannot be asked is told as None: the parent decides what that means.
    asks: dict[str, Callable[[], Any]] = {
        "name": lambda: current_platform.get_device_name(0),
        "uuid": lambda: current_platform.get_device_uuid(0),
        "capability": lambda: list(current_platform.get_device_capability(0)[:2]),
    }
    for name, ask in asks.items():
        try:
            told["vllm"][name] = ask()
        except Exception as error:
            told["vllm"][name] = None
            told["vllm"][f"{name}_error"] = f"{type(error).__name__}: {error}"
    return told
