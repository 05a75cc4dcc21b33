"""The environment of a child with a virtual device: made from nothing.

A virtual record must not depend on the host, so nothing is inherited: no PATH, no
CUDA toolkit, no `VLLM_*` variable, no home directory. Standard library only: the
parent calls this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.engine import libcuda

SITE = Path(__file__).parent / "site"


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
        "KVMATRIX_DEVICE": json.dumps(device, sort_keys=True),
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
        # No weights and no tokenizer are ever needed: nothing may ask a hub.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # vLLM's own switch for the FlashInfer kernels that a GPU machine has installed: whether
        # they can be *built* (nvcc, ninja) is the host's affair and no part of a profile.
        "VLLM_HAS_FLASHINFER_CUBIN": "1",
        # Only this plugin: another one on the host would be another platform.
        "VLLM_PLUGINS": "kvmatrix",
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        # Every native thread alive at fork time is a lock that a child may wait for in vain.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "NUMEXPR_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
