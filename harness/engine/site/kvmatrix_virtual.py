"""vLLM's way in: the platform plugin of the virtual CUDA device.

Only the child's PYTHONPATH holds this folder. vLLM finds the entry point beside
this file in the child and in each process that vLLM starts from it, such as the
one in which it inspects model classes.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def load_harness() -> None:
    """Make the package `harness` importable without putting its neighbours on `sys.path`.

    The engine's interpreter is not the parent's: nothing but this one package may come along.
    """
    if "harness" in sys.modules:
        return
    folder = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(
        "harness", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module
    spec.loader.exec_module(module)


def register() -> str | None:
    """The platform class for vLLM, by its qualified name.

    None, and nothing is replaced, where torch has no CUDA: vLLM then takes its own platform, the
    CPU's."""
    import torch

    if torch.version.cuda is None:
        return None
    load_harness()
    from harness.engine import seams
    from harness.engine.environ import device_of_environment

    seams.install(device_of_environment())
    return "harness.engine.platform.VirtualCudaPlatform"
