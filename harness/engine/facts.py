"""What this engine is and knows: read once per installation, cached by the parent."""

from __future__ import annotations

import ast
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import vllm

from harness.engine import compat, seams
from harness.facts import KINDS, cpu_backends

_OTHER_DEVICES = frozenset({"amd", "cpu", "xpu"})


def read() -> dict[str, Any]:
    """The facts as plain data (see `harness.facts.EngineFacts`)."""
    cuda = torch.version.cuda
    backends = compat.backend_names()
    return {
        "python": sys.executable,
        "python_version": platform.python_version(),
        # Built from source, the CPU build is `0.32.0+cpu`; the platform says that already.
        "version": vllm.__version__.removesuffix("+cpu"),
        "commit": compat.commit(),
        "torch": torch.__version__,
        "cuda": cuda,
        "flashinfer": _version("flashinfer-python"),
        "transformers": _version("transformers"),
        "kv_cache_dtypes": list(compat.kv_cache_dtypes()),
        "backends": list(backends),
        "model_backends": model_backends(),
        "platform": "cpu" if cuda is None else "cuda",
        "cpu_backends": list(cpu_backends(backends)) if cuda is None else [],
        "kind_backends": kind_backends() if cuda is not None else {},
        "architectures": sorted(compat.model_modules()),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def kind_backends() -> dict[str, list[str]]:
    """One of `harness.facts.KINDS` -> backends that vLLM's CUDA platform considers for it on any
    compute capability, in the order of the enum."""
    order = list(compat.backend_names())
    found: dict[str, set[str]] = {kind: set() for kind in KINDS}
    # Some backends allocate a workspace where they are imported.
    with seams.META, seams.OnMeta():
        for use_mla in (False, True):
            for name in compat.considered_backends(use_mla):
                sparse = use_mla and bool(compat.backend_class(name).is_sparse())
                found["sparse" if sparse else "mla" if use_mla else "regular"].add(name)
    return {kind: sorted(names, key=order.index) for kind, names in found.items()}


def model_backends() -> dict[str, list[str]]:
    """Architecture -> CUDA backends that its own package names, in the order of vLLM's registry.

    Only architectures with a package of their own name backends; all others leave the choice
    to vLLM's selector.
    """
    order = list(compat.backend_names())
    found: dict[str, list[str]] = {}
    for architecture, module in compat.model_modules().items():
        parts = module.split(".")
        if parts[:2] != ["vllm", "models"] or len(parts) < 3:
            continue
        folder = Path(vllm.__file__).parent / "models" / parts[2]
        named = _alike(named_backends(folder) & set(order))
        if named:
            found[architecture] = sorted(named, key=order.index)
    return found


def _alike(names: set[str]) -> set[str]:
    """Those of `names` that are for MLA where any is: a package that has a vision tower names the
    tower's backends too, which keep no KV cache."""
    return {name for name in names if _is_mla(name)} or names


def _is_mla(name: str) -> bool:
    try:
        with seams.META, seams.OnMeta():
            return bool(compat.backend_class(name).is_mla())
    except Exception:
        # Its module needs what this engine lacks, or it has no class of its own.
        return "MLA" in name


def named_backends(folder: Path) -> set[str]:
    """`X` of every `AttentionBackendEnum.X`, and of every backend's `get_name`, in the Python
    files of a model's package, those for other devices than CUDA left out."""
    names: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        if _OTHER_DEVICES & set(path.relative_to(folder).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id="AttentionBackendEnum"), attr=name):
                    names.add(name)
                case ast.FunctionDef(
                    name="get_name", body=[*_, ast.Return(value=ast.Constant(value=str(name)))]
                ):
                    names.add(name)
    return names
