"""The guard of real GPUs and MIG slices: one run at a time, fit for work, clean after each cell.

CPU and virtual devices need none: what their cells held is gone with their processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from harness import nvml, preflight, safe
from harness.case import slug
from harness.device import MIB, Device
from harness.preflight import Look
from harness.request import Place, Request

LOCK_SECONDS = 3600.0
"""How long a run waits for another that holds the device, before it is not usable."""

LEAK_BYTES = 256 * MIB
"""Memory above the baseline that counts as held: NVML's own figure wavers by less."""

SETTLE_SECONDS = 20.0
"""The driver gives memory back some time after a process has ended."""

Meter = Callable[[str], "int | None"]
"""UUID -> bytes in use on that device; None where it cannot be told."""

Preflight = Callable[[Request, Mapping[str, str]], Look]


class Guard:
    """Admits requests to their devices. One per process."""

    def __init__(
        self,
        meter: Meter = nvml.used_memory_bytes,
        look: Preflight = preflight.look,
        locks: Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._meter = meter
        self._look = look
        self._locks = Path(tempfile.gettempdir()) / "kvmatrix-locks" if locks is None else locks
        self._sleep = sleep
        self._held: dict[str, IO[str]] = {}
        self._admitted: dict[Place, str | None] = {}
        self._baseline: dict[str, int] = {}
        self._quarantine: dict[str, str] = {}
        self._unnamed: set[Place] = set()

    def refuses(
        self, request: Request, environ: Callable[[Request], Mapping[str, str]]
    ) -> str | None:
        """Why `request` cannot run on its device; None where it can.

        The first request of a place locks the device against other runs (waiting for them) and
        looks at it with a process of its own.
        """
        device = request.device
        if device.uuid is None:
            return None
        if device.uuid in self._quarantine:
            return self._quarantine[device.uuid]
        if request.place not in self._admitted:
            reason = self._lock(device)
            self._admitted[request.place] = reason or self._looked_at(request, environ(request))
        return self._admitted[request.place]

    def _looked_at(self, request: Request, environ: Mapping[str, str]) -> str | None:
        """Why the device is not usable for this engine; None where it is."""
        seen = self._look(request, environ)
        if seen.misled and seen.uuid:
            # Where it is the only device to be seen, it need not be named: then vLLM asks for GPU
            # 0, which is right. That it is the only one, CUDA says: it must be the same device.
            other = self._look(request, _unnamed(environ))
            if other.reason is None and other.uuid == seen.uuid:
                self._unnamed.add(request.place)
                return None
        return seen.reason

    def environ(self, request: Request, environ: Mapping[str, str]) -> Mapping[str, str]:
        """`environ` as the engine of an admitted request gets its device right."""
        return _unnamed(environ) if request.place in self._unnamed else environ

    def before(self, device: Device) -> None:
        """Take the baseline: what is in use on `device` before a cell."""
        if device.uuid is not None and (used := self._meter(device.uuid)) is not None:
            self._baseline[device.uuid] = used

    def after(self, device: Device, name: str) -> int | None:
        """Bytes above the baseline that the ended cell `name` left in use; None where there are
        none. A device that stays dirty is quarantined: it refuses all further requests."""
        if device.uuid is None or device.uuid not in self._baseline:
            return None
        baseline = self._baseline.pop(device.uuid)
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            used = self._meter(device.uuid)
            if used is None or used - baseline <= LEAK_BYTES:
                return None
            if time.monotonic() >= until:
                break
            self._sleep(0.2)
        left = used - baseline
        self._quarantine[device.uuid] = (
            f"{device.spec} is quarantined: {name} left {left // MIB} MiB in use "
            "after it had ended; see `nvidia-smi` for who holds it"
        )
        return left

    def close(self) -> None:
        """Let other runs have the devices."""
        for file in self._held.values():
            file.close()
        self._held.clear()

    def _lock(self, device: Device) -> str | None:
        """Why `device` cannot be had for this run alone; None where it is ours now."""
        assert device.uuid is not None
        if device.uuid in self._held:
            return None
        path = self._locks / f"{slug(device.uuid)}.lock"
        try:
            file = _open(path)
        except OSError as error:
            return f"cannot lock {device.spec}: {path}: {error.strerror}"
        until = time.monotonic() + LOCK_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= until:
                    file.close()
                    return f"{device.spec} is in use by another run of kvmatrix ({path})"
                if not told:
                    told = True
                    text = f"kvmatrix: waiting for another run that uses {device.spec}"
                    print(safe.printable(text), file=sys.stderr, flush=True)
                self._sleep(0.5)
            else:
                self._held[device.uuid] = file
                return None


def _unnamed(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"}


def _open(path: Path) -> IO[str]:
    """The lock file, made where there is none; runs of other users must be able to lock it, too,
    for which reading is enough."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o1777)
    with contextlib.suppress(FileNotFoundError):
        # Not O_CREAT: the kernel may forbid that for another's file in a folder like this.
        return os.fdopen(os.open(path, os.O_RDONLY), "r")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT, 0o644), "r")
