"""The environment of a child: for a virtual device made from nothing, for a real one the caller's.

A virtual record must not depend on the host, so nothing is inherited: no PATH, no
CUDA toolkit, no `VLLM_*` variable, no home directory. A real engine runs as it would for the
caller, in one process, without a network, and without the caller's secrets. Standard library
only: the parent calls this.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import safe
from harness.device import Device
from harness.engine import libcuda

SITE = Path(__file__).parent / "site"

DEVICE_VARIABLE = "KVMATRIX_DEVICE"
"""Environment variable that carries the device, as JSON, to the child and its own children."""

_NO_NETWORK = {
    # No weights and no tokenizer are ever needed: nothing may ask a hub.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

_FEW_THREADS = {
    # Every native thread alive at fork time is a lock that a child may wait for in vain.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
}

_SETTINGS = re.compile(r"(VLLM|PYTORCH|TORCH|TORCHINDUCTOR|CUDA|NVIDIA|NCCL|FLASHINFER|OMP|MKL)_")


def device_of_environment(environ: Mapping[str, str] = os.environ) -> Device:
    """The device that the parent chose. KeyError where there is none."""
    return Device.from_json(json.loads(environ[DEVICE_VARIABLE]))


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Those variables that vLLM, torch, CUDA and its libraries read, by name, secrets masked."""
    return {
        name: safe.mask(value, environ)
        for name, value in sorted(environ.items())
        if _SETTINGS.match(name) and not safe.is_secret(name)
    }


def real(device: Device, environ: Mapping[str, str], model_runner: str | None) -> dict[str, str]:
    """Environment variables of a child that starts a real engine on `device`, for a caller whose
    own are `environ`; `model_runner` is `v1`, `v2`, or None for vLLM's own choice."""
    found = {name: value for name, value in environ.items() if not safe.is_secret(name)}
    # It would override what is passed to the engine.
    found.pop("VLLM_CPU_KVCACHE_SPACE", None)
    found |= {
        DEVICE_VARIABLE: json.dumps(device.to_json(), sort_keys=True),
        **_NO_NETWORK,
        "PYTHONFAULTHANDLER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_COLOR": "0",
        # Left as they are where the caller has set them.
        **{name: environ.get(name, value) for name, value in _FEW_THREADS.items()},
    }
    # Where torch keeps compiled kernels, said here since the temporary folder is the run's own
    # (the default of torch/_inductor/runtime/cache_dir_utils.py).
    kept = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    found.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
    if device.kind == "cpu":
        # Bound to cores, all cells would share the first.
        found.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        found["CUDA_VISIBLE_DEVICES"] = ""
    elif device.uuid is not None:
        # By UUID: an index means another device to each of CUDA, NVML and a container.
        found["CUDA_VISIBLE_DEVICES"] = device.uuid
    if device.kind == "mig":
        # The allocator's expandable segments ask NVML what it does not tell of a slice.
        found.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    found |= runner(model_runner)
    return found


def runner(model_runner: str | None) -> dict[str, str]:
    """What chooses vLLM's model runner: `v1`, `v2`, or None for its own choice."""
    if model_runner is None:
        return {}
    return {"VLLM_USE_V2_MODEL_RUNNER": str(int(model_runner == "v2"))}


def virtual(device: dict[str, Any], cache: Path) -> dict[str, str]:
    """Environment variables of a child that is `device` (a `Device` as JSON data).

    `cache` is a folder of one engine, kept between runs: vLLM's model inspection lies there.
    OSError where it cannot be written.
    """
    library = libcuda.write(cache / "lib").parent
    empty = cache / "empty"
    home = cache / "home"
    for folder in (empty, home):
        folder.mkdir(parents=True, exist_ok=True)
    return {
        DEVICE_VARIABLE: json.dumps(device, sort_keys=True),
        # The stand-in comes first even where a real driver is installed.
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": str(SITE),
        "PYTHONNOUSERSITE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONFAULTHANDLER": "1",
        "PATH": str(empty),
        # An explicit CUDA_HOME keeps vLLM and FlashInfer from looking into /usr/local/cuda.
        "CUDA_HOME": str(empty),
        "CUDA_PATH": str(empty),
        "HOME": str(home),
        "TMPDIR": str(home),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        **_NO_NETWORK,
        # vLLM's own switch for the FlashInfer kernels that a GPU machine has installed: whether
        # they can be *built* (nvcc, ninja) is the host's affair and no part of a profile.
        "VLLM_HAS_FLASHINFER_CUBIN": "1",
        # Only this plugin: another one on the host would be another platform.
        "VLLM_PLUGINS": "kvmatrix",
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        # Humming starts two builds of its kernels, in processes of their own, when imported.
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
        # Its log is configured by `logs.py`.
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        **_FEW_THREADS,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
