"""Devices: what an engine starts on, real or described, and the SPECs that name them.

Pure. A `Device` crosses to the child as plain JSON data. Real devices come from a `Discovery`
(`nvml.py` makes one), virtual ones from the profiles.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.case import slug
from harness.errors import InfraError, UsageError, near, unknown
from harness.profile import GIB as GIB
from harness.profile import KIB as KIB
from harness.profile import MIB as MIB
from harness.profile import PROFILES as PROFILES
from harness.profile import SHARED_MEMORY as SHARED_MEMORY
from harness.profile import Profile as Profile

KINDS = ("virtual", "gpu", "mig", "cpu")

CPU_FEATURES = ("amx_tile", "avx512_bf16")
"""Instruction sets that vLLM's CPU build asks for, as Linux names them in /proc/cpuinfo."""

DEFAULT = "virtual:h200"
"""What `auto` means where there is no real device."""

_LISTS = "`kvmatrix devices` lists them"


@dataclass(frozen=True)
class Device:
    """What an engine starts on."""

    spec: str
    """The canonical SPEC: of a real device its UUID, of the CPU `cpu`."""
    kind: str
    """One of `KINDS`."""
    name: str
    """NVML's name."""
    capability: tuple[int, int] | None
    """Compute capability (major, minor); None on a CPU, and where NVML does not tell."""
    memory_bytes: int
    """Total; 0 where it cannot be told."""
    sm_count: int
    """0 on a CPU, and where NVML does not tell."""
    shared_memory_bytes: int
    """Bytes of shared memory that one block can opt in to; 0 where unknown."""
    profile: str | None = None
    """Name of the profile that describes a virtual device."""
    uuid: str | None = None
    """NVML's UUID: `GPU-...`, `MIG-...`, or the older `MIG-GPU-<uuid>/<gi>/<ci>`."""
    parent: str | None = None
    """UUID of the GPU that a slice is part of."""
    mig: str | None = None
    """A slice's MIG profile, such as `1g.35gb`."""
    index: int | None = None
    """NVML index of the GPU; of a slice, of its parent."""
    slice_index: int | None = None
    """NVML index of a slice within its parent."""
    driver: str | None = None
    """Version of the driver."""
    alias: str | None = None
    """The older form of a slice's UUID, where `uuid` is of the newer one: CUDA takes both."""
    features: tuple[str, ...] = ()
    """Instruction sets that a CPU has of `CPU_FEATURES`."""
    label: str | None = None
    """`id`, where the name alone does not tell this device from another of the run."""

    @property
    def real(self) -> bool:
        """True for a device that is there, the CPU too."""
        return self.kind != "virtual"

    @property
    def id(self) -> str:
        """The device in a test id, such as `virtual_h200_1g.35gb` or `NVIDIA_H200_MIG_1g.35gb`.

        A real device is called by its name, so that ids stay from machine to machine."""
        return self.label or slug(self.spec if self.uuid is None else self.name)

    def to_json(self) -> dict[str, Any]:
        """The device as plain JSON data."""
        data = dataclasses.asdict(self)
        data["capability"] = None if self.capability is None else list(self.capability)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Device:
        """Read what `to_json` gave. ValueError names the fields that are missing or unknown."""
        wrong = data.keys() ^ {f.name for f in dataclasses.fields(cls)}
        if wrong:
            raise ValueError(f"not a device: missing or unknown {sorted(wrong)}")
        capability = data["capability"]
        if capability is not None:
            major, minor = capability
            capability = (int(major), int(minor))
        features = tuple(str(each) for each in data["features"])
        return cls(**{**data, "capability": capability, "features": features})


@dataclass(frozen=True)
class Gpu:
    """A GPU that NVML lists: a device, or in MIG mode none, and its slices are."""

    uuid: str
    name: str
    index: int
    """NVML's."""
    capability: tuple[int, int] | None
    mig_mode: bool
    devices: tuple[Device, ...]
    """The GPU itself, or its slices by their index."""


@dataclass(frozen=True)
class Discovery:
    """What NVML shows of this machine."""

    devices: tuple[Device, ...] = ()
    """Those visible to the caller, in the caller's order: `cuda:0` is the first."""
    driver: str | None = None
    """Version of the driver."""
    trouble: str | None = None
    """One line: why nothing or not everything could be seen. None where there is no driver."""
    gpus: tuple[Gpu, ...] = ()
    """Every GPU that answered, visible to the caller or not, by index."""


@dataclass(frozen=True)
class Pool:
    """Devices that are alike: any of them may run a cell of this facet of the matrix."""

    device: Device
    """Stands for all of them, and names the facet."""
    members: tuple[Device, ...]


def virtual(profile: Profile, mig: str | None = None) -> Device:
    """The virtual device that is a whole `profile`, or one instance of its MIG profile `mig`."""
    spec, name = f"virtual:{profile.name}", profile.device_name
    memory, sms = profile.memory_bytes, profile.sm_count
    if mig is not None:
        spec, name = f"{spec}/{mig}", f"{name} MIG {mig}"
        memory, sms = profile.mig[mig]
    return Device(
        spec=spec,
        kind="virtual",
        name=name,
        capability=profile.capability,
        memory_bytes=memory,
        sm_count=sms,
        shared_memory_bytes=profile.max_shared_memory_per_block_optin,
        profile=profile.name,
    )


def virtual_devices() -> tuple[Device, ...]:
    """Every virtual device there is, the MIG instances of a profile behind it."""
    return tuple(
        virtual(profile, mig) for profile in PROFILES.values() for mig in (None, *profile.mig)
    )


def cpu(name: str = "CPU", memory_bytes: int = 0, features: tuple[str, ...] = ()) -> Device:
    """The CPU as a device; `host.cpu` is this one with the machine's own numbers."""
    return Device(
        spec="cpu",
        kind="cpu",
        name=name,
        capability=None,
        memory_bytes=memory_bytes,
        sm_count=0,
        shared_memory_bytes=0,
        features=features,
    )


def select(
    specs: Sequence[str],
    discover: Callable[[], Discovery],
    cpu: Callable[[], Device] = cpu,
) -> tuple[Pool, ...]:
    """The facets that SPECs name, in their order; no SPEC means `auto`.

    `auto` makes a pool of every kind of visible device, any other SPEC one of a single device. A
    device is in one pool only, the first that names it. `discover` is called once at most, and
    only for a SPEC that needs it. UsageError says what is near an unknown SPEC; InfraError where
    devices cannot be seen.
    """
    here = functools.cache(discover)
    pools: list[tuple[Device, ...]] = []
    taken: set[str] = set()
    for spec in specs or ["auto"]:
        text = spec.strip().lower()
        if text == "auto":
            groups = _auto(here())
        elif text == "cpu":
            groups = [(cpu(),)]
        elif re.fullmatch(r"cuda:[0-9]+|(gpu|mig)-.*[0-9a-f].*", text):
            groups = [(_real(spec, text, here()),)]
        else:
            groups = [(parse(spec),)]
        for group in groups:
            members = tuple(device for device in group if device.spec not in taken)
            taken.update(device.spec for device in members)
            if members:
                pools.append(members)
    return _told_apart(pools)


def parse(spec: str) -> Device:
    """The virtual device of a SPEC, in any case; `auto` is DEFAULT. UsageError names what is near
    an unknown one."""
    text = spec.strip().lower()
    if text == "auto":
        text = DEFAULT
    prefix, _, rest = text.rpartition(":")
    name, slash, mig = rest.partition("/")
    if prefix != "virtual" or name not in PROFILES:
        raise _unknown(spec, name, slash + mig)
    profile = PROFILES[name]
    if not slash:
        return virtual(profile)
    if not profile.mig:
        raise UsageError(f"device {spec!r}: {name} has no MIG profiles; use virtual:{name}")
    if mig not in profile.mig:
        raise unknown("MIG profile", mig, profile.mig, f"of virtual:{name}; {_LISTS}")
    return virtual(profile, mig)


def _unknown(spec: str, name: str, mig: str) -> UsageError:
    """For a SPEC whose profile is not one, or that lacks `virtual:`."""
    if name in PROFILES:
        close = [f"virtual:{name}{mig}"]
    elif re.match(r"(cuda|gpu|mig)\b", spec.strip().lower()):
        close = ["auto", "cuda:0"]
    else:
        close = [f"virtual:{found}" for found in near(name, PROFILES)]
        close = close or near(spec.strip(), ("auto", "cpu", "cuda:0"))
    hint = f" did you mean {' or '.join(map(repr, close))}?" if close else ""
    return UsageError(f"unknown device {spec!r}:{hint} {_LISTS}")


def answers_to(known: str | None, text: str) -> bool:
    """True where `text` is the UUID `known` or a beginning of it, in any case.

    Of the older form `MIG-GPU-<uuid>/<gi>/<ci>` the UUID may be cut short, the numbers not."""
    head, _, numbers = (known or "").casefold().partition("/")
    wanted, slash, wanted_numbers = text.casefold().partition("/")
    return head.startswith(wanted) and (not slash or numbers == wanted_numbers)


def named(devices: Iterable[Device], text: str) -> list[Device]:
    """The devices that a UUID, new or old, or a beginning of one names."""
    return [d for d in devices if answers_to(d.uuid, text) or answers_to(d.alias, text)]


def _auto(found: Discovery) -> list[tuple[Device, ...]]:
    if not found.devices:
        if found.trouble:
            raise InfraError(
                f"no device can be used: {found.trouble}; to go without, pass --device {DEFAULT}"
            )
        return [(parse(DEFAULT),)]
    alike: dict[tuple[str, str], list[Device]] = {}
    for device in found.devices:
        alike.setdefault((device.kind, device.name), []).append(device)
    return [tuple(group) for group in alike.values()]


def _real(spec: str, text: str, found: Discovery) -> Device:
    """The visible device that `cuda:N` or (a beginning of) a UUID names."""
    devices = found.devices
    if text.startswith("cuda:"):
        hits = list(devices[(n := int(text.removeprefix("cuda:"))) : n + 1])
    else:
        hits = named(devices, text)
    if len(hits) == 1:
        return hits[0]
    if hits:
        some = ", ".join(str(device.uuid) for device in hits[:3])
        raise UsageError(f"device {spec!r} could be any of {some}: give more of the UUID; {_LISTS}")
    for gpu in found.gpus:
        if gpu.mig_mode and answers_to(gpu.uuid, text):
            slices = ", ".join(str(d.uuid) for d in gpu.devices if d in devices) or "none is there"
            raise UsageError(
                f"device {spec!r} is a GPU in MIG mode: name one of its slices ({slices}); {_LISTS}"
            )
    if named((device for gpu in found.gpus for device in gpu.devices), text):
        raise UsageError(
            f"device {spec!r} is hidden by CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES; {_LISTS}"
        )
    if found.trouble:
        raise InfraError(f"device {spec!r} cannot be seen: {found.trouble}")
    if not devices:
        raise UsageError(
            f"unknown device {spec!r}: no GPU is visible here; use {DEFAULT} or cpu; {_LISTS}"
        )
    if text.startswith("cuda:"):
        last = f"cuda:{len(devices) - 1}"
        raise UsageError(f"unknown device {spec!r}: the last one visible is {last}; {_LISTS}")
    raise unknown("device", spec, [str(device.uuid) for device in devices], _LISTS)


def _told_apart(pools: Sequence[tuple[Device, ...]]) -> tuple[Pool, ...]:
    """Pools whose devices have distinct ids: two of one name get part of their UUID as well."""
    labels = [members[0].id for members in pools]
    for short in (True, False):
        often = Counter(labels)
        labels = [
            _label(members[0], short) if often[label] > 1 else label
            for members, label in zip(pools, labels, strict=True)
        ]
    return tuple(
        Pool(members[0] if label == members[0].id else replace(members[0], label=label), members)
        for members, label in zip(pools, labels, strict=True)
    )


def _label(device: Device, short: bool) -> str:
    """The name with the first 8 digits of the UUID, and in the older form the slice's numbers."""
    digits = re.sub(r"(?i)^(mig-)?(gpu-)?", "", device.uuid or device.spec)
    head, _, numbers = digits.partition("/")
    return "-".join(filter(None, (device.id, slug(head[:8] if short else head), slug(numbers))))
