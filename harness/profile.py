"""Profiles: GPUs that virtual devices are made from, as their drivers report them.

Pure data. Sources of the numbers in `PROFILES`
- Memory: the total that `nvidia-smi` prints, MiB; of a MIG instance the GiB that
  `nvidia-smi mig -lgip` prints. Drivers differ by up to 1.5 GiB, and `torch` reports up to 0.5%
  less, so a virtual number of blocks is near the real one, not equal to it.
- SMs: the same listing for MIG; NVIDIA's architecture white papers for whole GPUs.
- Shared memory: CUDA programming guide, technical specifications per compute capability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SHARED_MEMORY: Mapping[tuple[int, int], int] = MappingProxyType(
    {
        (7, 5): 64 * KIB,
        (8, 0): 163 * KIB,
        (8, 6): 99 * KIB,
        (8, 9): 99 * KIB,
        (9, 0): 227 * KIB,
        (10, 0): 227 * KIB,
        (10, 3): 227 * KIB,
        (12, 0): 99 * KIB,
        (12, 1): 99 * KIB,
    }
)
"""Compute capability -> bytes of shared memory that one block can opt in to."""


@dataclass(frozen=True)
class Profile:
    """A GPU as its driver would report it."""

    name: str
    """What stands behind `virtual:`."""
    device_name: str
    """NVML's name."""
    capability: tuple[int, int]
    """Compute capability (major, minor)."""
    memory_bytes: int
    sm_count: int
    mig: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    """MIG profile -> (bytes of memory, SMs) of one instance."""

    @property
    def max_shared_memory_per_block_optin(self) -> int:
        """Bytes of shared memory that one block can opt in to."""
        return SHARED_MEMORY[self.capability]


def _mig(**instances: tuple[float, int]) -> Mapping[str, tuple[int, int]]:
    """`_1g_10gb=(GiB, SMs)` as `1g.10gb` -> (bytes, SMs)."""
    return MappingProxyType(
        {
            name.strip("_").replace("_", "."): (int(gib * GIB), sms)
            for name, (gib, sms) in instances.items()
        }
    )


# 98 of 108 SMs are left in MIG mode. The GiB of 1g.20gb, 4g.40gb and 7g.80gb are by analogy with
# the same slices of the H100.
_A100_MIG = _mig(
    _1g_10gb=(9.5, 14),
    _1g_20gb=(19.5, 14),
    _2g_20gb=(19.5, 2 * 14),
    _3g_40gb=(39.5, 3 * 14),
    _4g_40gb=(39.5, 4 * 14),
    _7g_80gb=(79.25, 7 * 14),
)
_H100_MIG = _mig(
    _1g_10gb=(9.75, 16),
    _1g_20gb=(19.625, 26),
    _2g_20gb=(19.625, 32),
    _3g_40gb=(39.5, 60),
    _4g_40gb=(39.5, 64),
    _7g_80gb=(79.25, 132),
)
# The SMs of 1g.35gb (26) and 4g.71gb (64) are by analogy with the H100, which is the same chip;
# the listing in NVIDIA/mig-parted#120 agrees.
_H200_MIG = _mig(
    _1g_18gb=(16.0, 16),
    _1g_35gb=(32.5, 26),
    _2g_35gb=(32.5, 32),
    _3g_71gb=(69.75, 60),
    _4g_71gb=(69.75, 64),
    _7g_141gb=(140.0, 132),
)
# 1g and 2g as listed in NVIDIA/mig-parted#166. 3g, 4g and 7g were not seen in a listing: by
# analogy with the H200 (half and all of the memory less about 0.4 GiB; 4g four times a 1g, 3g
# four SMs fewer, 7g all of them).
_B200_MIG = _mig(
    _1g_23gb=(22.0, 18),
    _1g_45gb=(44.25, 30),
    _2g_45gb=(44.25, 36),
    _3g_90gb=(89.0, 4 * 18 - 4),
    _4g_90gb=(89.0, 4 * 18),
    _7g_180gb=(178.5, 148),
)

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile("t4", "Tesla T4", (7, 5), 15_360 * MIB, 40),
            Profile("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 81_920 * MIB, 108, _A100_MIG),
            Profile("a10", "NVIDIA A10", (8, 6), 23_028 * MIB, 72),
            Profile("l4", "NVIDIA L4", (8, 9), 23_034 * MIB, 58),
            Profile("l40s", "NVIDIA L40S", (8, 9), 46_068 * MIB, 142),
            Profile("rtx-4090", "NVIDIA GeForce RTX 4090", (8, 9), 24_564 * MIB, 128),
            Profile("h100", "NVIDIA H100 80GB HBM3", (9, 0), 81_559 * MIB, 132, _H100_MIG),
            Profile("h200", "NVIDIA H200", (9, 0), 143_771 * MIB, 132, _H200_MIG),
            # The one with 96 GB of HBM3; its 480 GB are the CPU's.
            Profile("gh200", "NVIDIA GH200 480GB", (9, 0), 97_871 * MIB, 132),
            Profile("h20", "NVIDIA H20", (9, 0), 97_871 * MIB, 78),
            Profile("b200", "NVIDIA B200", (10, 0), 183_359 * MIB, 148, _B200_MIG),
            Profile("b300", "NVIDIA B300 SXM6 AC", (10, 3), 275_040 * MIB, 148),
            Profile(
                "rtx-pro-6000",
                "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                (12, 0),
                97_887 * MIB,
                188,
            ),
            Profile("rtx-5090", "NVIDIA GeForce RTX 5090", (12, 0), 32_607 * MIB, 170),
            # Memory is the system's, and NVML reports none: this is CUDA's total on one machine.
            Profile("gb10", "NVIDIA GB10", (12, 1), 130_602_405_888, 48),
        )
    }
)

SWEEP = ("t4", "a100", "a10", "l40s", "h200", "b200", "b300", "rtx-pro-6000", "gb10")
"""One profile for each compute capability, the one with the most memory where it matters."""
