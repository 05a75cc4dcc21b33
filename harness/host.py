"""The host: its CPU as a device."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from harness import device
from harness.device import Device


def cpu(root: Path = Path("/")) -> Device:
    """The CPU of this machine, with the memory that this process may use."""
    return device.cpu(name(root), memory_bytes(root), features(root))


def name(root: Path = Path("/")) -> str:
    """The processor's name; on parts that have none there (Arm), the architecture's."""
    match = re.search(r"^model name\s*:\s*(\S.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return " ".join(match[1].split()) if match else platform.machine() or "CPU"


def features(root: Path = Path("/")) -> tuple[str, ...]:
    """Those of `device.CPU_FEATURES` that the processor has."""
    match = re.search(r"^flags\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    flags = match[1].split() if match else []
    return tuple(each for each in device.CPU_FEATURES if each in flags)


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory, or of the control group's limit where that is less; 0 if not told."""
    match = re.search(r"^MemTotal:\s*([0-9]+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    total = [int(match[1]) * device.KIB] if match else []
    return min((*total, *_limits(root)), default=0)


def cores() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _limits(root: Path) -> Iterator[int]:
    """The limits of this process's control groups (versions 1 and 2) and of those around them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            # `max` is no limit.
            if (text := _read(base / folder / file).strip()).isdecimal():
                yield int(text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
