"""Which of the GPUs that NVML lists the caller's environment lets the caller use. Pure.

Sources: CUDA programming guide, "CUDA environment variables" (CUDA_VISIBLE_DEVICES); NVIDIA
container toolkit, "GPU enumeration" (NVIDIA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from harness.device import Device, Gpu, answers_to, named

CUDA = "CUDA_VISIBLE_DEVICES"
CONTAINER = "NVIDIA_VISIBLE_DEVICES"

_NUMBER = re.compile(r"[0-9]+")
_SLICE = re.compile(r"([0-9]+):([0-9]+)")


def visible(
    gpus: Sequence[Gpu | None], environ: Mapping[str, str]
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """The devices that the caller may use, in the caller's order, and a line for each entry that
    names none.

    `gpus` are the GPUs in the order in which CUDA counts them; None for one that counts but
    cannot be used. That is NVML's order, and CUDA's own under CUDA_DEVICE_ORDER=PCI_BUS_ID:
    where GPUs differ, CUDA counts the fastest first by default, which NVML does not tell.
    """
    usable = [gpu for gpu in gpus if gpu is not None]
    devices, trouble = _by_cuda(gpus, environ.get(CUDA))
    allowed, more = _by_container(usable, environ.get(CONTAINER))
    return tuple(device for device in devices if device in allowed), (*trouble, *more)


def hides_all(environ: Mapping[str, str]) -> bool:
    """True where the caller asked for no GPU at all."""
    first = environ.get(CUDA, "0").partition(",")[0]
    return _ends(first) or environ.get(CONTAINER, "").strip().lower() == "none"


def _ends(entry: str) -> bool:
    """True for an entry that is meant to name nothing; NoDevFiles is what Slurm writes."""
    entry = entry.strip().lower()
    return entry in ("", "nodevfiles") or re.fullmatch(r"-[0-9]+", entry) is not None


def _by_cuda(
    gpus: Sequence[Gpu | None], value: str | None
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """As CUDA reads the variable, but for one thing: a process of CUDA's sees one slice only,
    while here each device gets a process of its own, so every slice that is named counts."""
    if value is None:
        return tuple(device for gpu in gpus if gpu is not None for device in gpu.devices), ()
    found: list[Device] = []
    for entry in value.split(","):
        if _ends(entry):
            break
        device = _cuda_entry(gpus, entry.strip())
        if device is None:
            told = (
                f"{CUDA}={value!r}: {entry.strip()!r} names no usable device, and CUDA stops there"
            )
            return tuple(dict.fromkeys(found)), (told,)
        found.append(device)
    return tuple(dict.fromkeys(found)), ()


def _cuda_entry(gpus: Sequence[Gpu | None], entry: str) -> Device | None:
    usable = [gpu for gpu in gpus if gpu is not None]
    if _NUMBER.fullmatch(entry):
        hits = [gpu for gpu in gpus[int(entry) : int(entry) + 1] if gpu is not None]
    elif entry.casefold().startswith("mig-"):
        slices = named((device for gpu in usable for device in gpu.devices), entry)
        return slices[0] if len(slices) == 1 else None
    elif entry.casefold().startswith("gpu-"):
        hits = [gpu for gpu in usable if answers_to(gpu.uuid, entry)]
    else:
        return None
    # Of a GPU in MIG mode, CUDA uses the first slice.
    return hits[0].devices[0] if len(hits) == 1 and hits[0].devices else None


def _by_container(
    gpus: Sequence[Gpu], value: str | None
) -> tuple[frozenset[Device], tuple[str, ...]]:
    """What the container runtime's variable allows, where it is the caller's to read.

    Inside a container the runtime has applied it already, and NVML counts anew from 0. So an
    index restricts only where every index of the list is there: a container that was given k
    GPUs shows the indices below k, and a list of k others has one that is missing. UUIDs do
    not change. `void` is what CDI leaves in containers that do have GPUs
    (NVIDIA/nvidia-container-toolkit#395), so like an empty value it restricts nothing; other
    words (`all`, CDI names, paths) are between the caller and the runtime.
    """
    everything = frozenset(device for gpu in gpus for device in gpu.devices)
    text = (value or "").strip()
    if text.lower() == "none":
        return frozenset(), ()
    allowed: set[Device] = set()
    trouble = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        hits = _container_entry(gpus, entry)
        if hits is None:
            return everything, ()
        if not hits:
            trouble.append(f"{CONTAINER}={value!r}: {entry!r} names no device here")
        allowed |= set(hits)
    return (frozenset(allowed) if allowed or trouble else everything), tuple(trouble)


def _container_entry(gpus: Sequence[Gpu], entry: str) -> tuple[Device, ...] | None:
    """The devices of one entry; None for one that must not restrict."""
    devices = tuple(device for gpu in gpus for device in gpu.devices)
    if _NUMBER.fullmatch(entry):
        return next((gpu.devices for gpu in gpus if gpu.index == int(entry)), None)
    if match := _SLICE.fullmatch(entry):
        place = (int(match[1]), int(match[2]))
        hits = tuple(d for d in devices if (d.index, d.slice_index) == place)
        return hits or None
    if entry.casefold().startswith("mig-"):
        return tuple(named(devices, entry))
    if entry.casefold().startswith("gpu-"):
        return tuple(d for gpu in gpus if answers_to(gpu.uuid, entry) for d in gpu.devices)
    return None
