"""Warming up: what a server imports before it forks, so that cells need not.

Nothing here may touch CUDA: a process that has cannot fork a cell that uses it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.device import Device
from harness.engine import hugepages
from harness.engine.processes import die_with_parent

_QUIET = ("torch.", "transformers.", "vllm.")
"""Packages whose modules were seen not to start anything when imported (0.27.1 - 0.33.0); on a
GPU only these are imported ahead."""


def kept_names(path: Path) -> list[str]:
    """The module names that an earlier run left at `path`; [] where there are none."""
    try:
        return [str(name) for name in json.loads(path.read_text())]
    except (OSError, ValueError):
        return []


def _version(path: Path) -> tuple[int, int] | None:
    """Tells what is at `path` from what comes there later; None where there is nothing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def add_names(path: Path, names: Iterable[str]) -> None:
    """Add module names to those at `path` for later cells and runs, whole or not at all; a full
    disk costs time.

    Added, since a cell tells only what its server did not have: less behind another model's cells
    than in a run of its own.
    """
    names = list(names)
    if not names:  # the usual case, a cell of a warm model: the list is long, so it is not read
        return
    kept = kept_names(path)
    all_names = list(dict.fromkeys((*kept, *names)))
    if all_names == kept:
        return
    temporary = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(all_names))
        os.replace(temporary, path)


def scout(device: Device, request: Mapping[str, Any], engine: str) -> list[str]:
    """Modules that the cell of `request` imports beyond those of this process, in the order of
    import.

    Found in a fork, so that this process keeps vLLM's caches and one-time log lines untouched, and
    every cell starts from the same state.
    """
    before = set(sys.modules)
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(readable)
            die_with_parent()
            from harness.engine import probe

            path, given = Path(request["model_path"]), request["engine_args"]
            probe.run(Case("scout"), path, given, device, "allocate", engine)
            with os.fdopen(writable, "w") as file:
                json.dump(new_modules(before), file)
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return [str(name) for name in json.loads(text)] if text else []


def new_modules(before: Iterable[str]) -> list[str]:
    """Names of the modules imported since `before` was taken, in the order of import."""
    known = set(before)
    return [name for name in list(sys.modules) if name not in known]


def preload(names: Iterable[str]) -> None:
    """Import what cells turn out to import. What does not import here fails in the cell, where it
    is part of what is observed."""
    for name in names:
        if name not in sys.modules and not name.startswith("__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def prime() -> None:
    """Let DeepGEMM, where it has been imported, be made ready here: each fork of a model that uses
    it would do so again, for 0.13 s. It depends on the device alone, and touches none."""
    module = sys.modules.get("vllm.utils.deep_gemm")
    with contextlib.suppress(Exception):  # what fails here fails in the cell, and is told there
        getattr(module, "_lazy_init", lambda: None)()


def settle() -> None:
    """Before forking: keep a fork's collector from touching, and so copying, all pages of this
    process, and let the pages be few."""
    gc.collect()
    gc.freeze()
    hugepages.collapse()


def learner(device: Device, engine: str) -> Callable[[Mapping[str, Any]], None]:
    """What to do before the fork of each request, so that what its model needs is imported once.

    The names lie in the request's `modules`, left by earlier runs and by the model's cells.
    On a virtual device, where cells are many and short, the first is preceded by a scout.
    """
    tried: set[str] = set()
    scouted: set[str] = set()
    read: dict[str, tuple[int, int] | None] = {}

    def before(request: Mapping[str, Any]) -> None:
        path = Path(request["modules"])
        if not device.real and str(path) not in scouted:
            scouted.add(str(path))
            if not path.exists():
                add_names(path, scout(device, request, engine))
        # A long list is not read again for each cell, only when one has added to it.
        version = _version(path)
        if version == read.get(str(path)):
            return
        read[str(path)] = version
        names = [name for name in kept_names(path) if name not in tried]
        tried.update(names)
        names = [name for name in names if name not in sys.modules]
        if device.kind not in ("cpu", "virtual"):
            names = [name for name in names if name.startswith(_QUIET)]
            if names and not _stays_off_cuda(names):
                return
        if not names:
            return
        preload(names)
        if not device.real:
            prime()
        settle()

    return before


def _stays_off_cuda(names: list[str]) -> bool:
    """True where importing `names` does not touch CUDA; tried in a fork."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent()
            preload(names)
            code = int(on_cuda())
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def on_cuda() -> bool:
    """True where this process has a CUDA context, or has started to make one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    held = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held.append(os.readlink(f"/proc/self/fd/{name}"))
    # Unlike nvidiactl, which NVML holds too, only CUDA opens this one.
    return any(name.startswith("/dev/nvidia-uvm") for name in held)
