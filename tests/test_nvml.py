from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import nvml
from harness.device import Device, Discovery, select
from harness.errors import InfraError, UsageError
from harness.nvml import discover, mig_profile, sm_count, used_memory_bytes
from tests.fake_nvml import Card, FakeNvml, Slice

MIB, GIB = 2**20, 2**30


def gpu(n: int) -> str:
    return f"GPU-{n:08x}-aaaa-bbbb-cccc-000000000000"


def mig(n: int) -> str:
    return f"MIG-{n:08x}-dddd-eeee-ffff-000000000000"


def small(n: int, **changes: object) -> Slice:
    """The 1g.18gb with the UUID `mig(n)`."""
    made = Slice(mig(n), "NVIDIA H200 MIG 1g.18gb", 16 * 1024, 16, gi=7 + n)
    return replace(made, **changes)  # type: ignore[arg-type]


def chip(device: Device) -> tuple[object, ...]:
    return device.capability, device.shared_memory_bytes


def box() -> FakeNvml:
    """GPU 0 whole, 1 and 3 in MIG mode, 2 an L4, which knows no MIG."""
    return FakeNvml(
        (
            Card(gpu(0xA0)),
            Card(gpu(0xA1), slices={1: small(0xB1), 4: small(0xB4)}),
            Card(gpu(0xA2), "NVIDIA L4", (8, 9), 58 * 128, 23_034, supports_mig=False),
            Card(gpu(0xA3), slices={0: small(0xC0)}),
        )
    )


EVERYTHING = [gpu(0xA0), mig(0xB1), mig(0xB4), gpu(0xA2), mig(0xC0)]


def test_eight_gpus_are_eight_devices_in_order() -> None:
    fake = FakeNvml(tuple(Card(gpu(n)) for n in range(8)))
    found = discover(fake, {})
    assert [gpu(n) for n in range(8)] == [device.spec for device in found.devices]
    assert list(range(8)) == [device.index for device in found.devices]
    assert ("580.95.05", None) == (found.driver, found.trouble)
    last = found.devices[7]
    assert ("gpu", "NVIDIA H200", (9, 0)) == (last.kind, last.name, last.capability)
    assert (143_771 * MIB, 132, 227 * 1024) == (
        last.memory_bytes,
        last.sm_count,
        last.shared_memory_bytes,
    )
    assert (gpu(7), None, None, None) == (last.uuid, last.parent, last.mig, last.slice_index)
    assert "580.95.05" == last.driver
    assert ["init", "shutdown"] == fake.sessions


def test_alike_gpus_share_one_facet() -> None:
    fake = FakeNvml(tuple(Card(gpu(n)) for n in range(8)))
    (pool,) = select(["auto"], lambda: discover(fake, {}))
    assert "NVIDIA_H200" == pool.device.id
    assert [gpu(n) for n in range(8)] == [device.uuid for device in pool.members]


def test_seven_slices_are_the_devices_and_their_gpu_is_none() -> None:
    slices = {slot: small(slot, used=slot * GIB) for slot in range(7)}
    fake = FakeNvml((Card(gpu(1), slices=slices),))
    found = discover(fake, {})
    assert [mig(n) for n in range(7)] == [device.spec for device in found.devices]
    assert list(range(7)) == [device.slice_index for device in found.devices]
    assert {("mig", "1g.18gb", gpu(1), 0, 16 * GIB, 16, (9, 0), 227 * 1024)} == {
        (d.kind, d.mig, d.parent, d.index, d.memory_bytes, d.sm_count, *chip(d))
        for d in found.devices
    }
    assert found.trouble is None
    (pool,) = select(["auto"], lambda: found)
    assert "NVIDIA_H200_MIG_1g.18gb" == pool.device.id


def test_slices_behind_empty_slots_are_found() -> None:
    made = [
        Slice(mig(n), "NVIDIA H200 MIG 1g.35gb", 32 * 1024 + 512, 26, gi=n) for n in range(3, 7)
    ]
    found = discover(
        FakeNvml((Card(gpu(1), slices=dict(zip((0, 2, 3, 6), made, strict=True))),)), {}
    )
    assert [(0, mig(3)), (2, mig(4)), (3, mig(5)), (6, mig(6))] == [
        (device.slice_index, device.uuid) for device in found.devices
    ]
    assert {(65 * 2**29, 26, "1g.35gb")} == {
        (device.memory_bytes, device.sm_count, device.mig) for device in found.devices
    }


def test_whole_gpus_and_slices_stand_side_by_side() -> None:
    found = discover(box(), {})
    assert EVERYTHING == [device.spec for device in found.devices]
    assert [0, 1, 1, 2, 3] == [device.index for device in found.devices]
    assert 58 == found.devices[3].sm_count
    pools = select(["auto"], lambda: found)
    assert ["NVIDIA_H200", "NVIDIA_H200_MIG_1g.18gb", "NVIDIA_L4"] == [p.device.id for p in pools]
    assert [1, 3, 1] == [len(pool.members) for pool in pools]
    assert [gpu(0xA0), gpu(0xA1), gpu(0xA2), gpu(0xA3)] == [each.uuid for each in found.gpus]


def test_a_gpu_in_mig_mode_without_slices_is_nothing_and_says_so() -> None:
    found = discover(FakeNvml((Card(gpu(1), slices={}),)), {})
    assert () == found.devices
    assert found.trouble is not None
    assert found.trouble.startswith(f"GPU 0 ({gpu(1)}) is in MIG mode and shows no slice")
    with pytest.raises(InfraError, match=r"no device can be used: GPU 0 .* is in MIG mode"):
        select(["auto"], lambda: found)
    with pytest.raises(UsageError, match=r"name one of its slices \(none is there\)"):
        select([gpu(1)], lambda: found)


def test_where_the_mode_is_not_told_the_slots_tell_it() -> None:
    card = Card(gpu(1), slices={2: small(3)}, supports_mig=False)
    assert [mig(3)] == [device.uuid for device in discover(FakeNvml((card,)), {}).devices]


def test_slices_that_are_hidden_are_not_offered() -> None:
    found = discover(box(), {"CUDA_VISIBLE_DEVICES": mig(0xB4)})
    with pytest.raises(UsageError, match=re.escape(f"one of its slices ({mig(0xB4)});")):
        select([gpu(0xA1)], lambda: found)


def test_uuids_of_older_drivers_are_addressed_as_they_are() -> None:
    old = [f"MIG-{gpu(1)}/{gi}/0" for gi in (7, 8)]
    slices = {n: small(n, uuid=uuid, gi=7 + n) for n, uuid in enumerate(old)}
    found = discover(FakeNvml((Card(gpu(1), slices=slices),)), {})
    assert old == [device.spec for device in found.devices]
    assert [None, None] == [device.alias for device in found.devices]
    assert [old[1]] == [p.device.uuid for p in select(["MIG-GPU-00000001/8/0"], lambda: found)]
    both = select(old, lambda: found)
    assert [
        "NVIDIA_H200_MIG_1g.18gb-00000001-7_0",
        "NVIDIA_H200_MIG_1g.18gb-00000001-8_0",
    ] == [pool.device.id for pool in both]


def test_a_slice_is_found_by_the_older_form_on_a_newer_driver_too() -> None:
    found = discover(FakeNvml((Card(gpu(1), slices={0: small(2, gi=9), 1: small(3, gi=13)}),)), {})
    (pool,) = select([f"MIG-{gpu(1)}/13/0"], lambda: found)
    assert mig(3) == pool.device.spec


@pytest.mark.parametrize("code", [9, 12])
def test_without_driver_or_library_there_is_simply_no_gpu(code: int) -> None:
    fake = FakeNvml(init_error=code)
    assert Discovery() == discover(fake, {"CUDA_VISIBLE_DEVICES": "0"})
    (pool,) = select(["auto"], lambda: discover(fake, {}))
    assert "virtual:h200" == pool.device.spec
    assert [] == fake.sessions


def test_a_driver_without_gpus_has_no_trouble_whatever_the_variables_say() -> None:
    found = discover(FakeNvml(), {"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "GPU-1"})
    assert Discovery(driver="580.95.05") == found


def test_without_the_module_there_is_simply_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Discovery() == discover(environ={})
    assert used_memory_bytes(gpu(1)) is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            4,
            "NVML: Insufficient Permissions (may this user, or this container, open /dev/nvidiactl",
        ),
        (18, "NVML: RM has detected an NVML/RM version mismatch. (the driver was updated"),
        (15, "NVML: GPU is lost"),
    ],
)
def test_nvml_that_refuses_is_told_and_never_silently_virtual(code: int, message: str) -> None:
    found = discover(FakeNvml(init_error=code), {})
    assert () == found.devices
    assert found.trouble is not None and found.trouble.startswith(message)
    for spec in ("auto", "cuda:0", gpu(1)):
        with pytest.raises(InfraError, match=re.escape(message)):
            select([spec], lambda: found)


def test_who_hides_every_gpu_is_not_bothered_with_nvml() -> None:
    for environ in ({"CUDA_VISIBLE_DEVICES": ""}, {"NVIDIA_VISIBLE_DEVICES": "none"}):
        assert discover(FakeNvml(init_error=4), environ).trouble is None
        assert discover(FakeNvml((Card(gpu(1), slices={}),)), environ).trouble is None


def test_the_session_is_closed_when_counting_fails() -> None:
    fake = FakeNvml(count_error=4)
    assert discover(fake, {}).trouble is not None
    assert ["init", "shutdown"] == fake.sessions


def test_memory_that_is_not_told_leaves_the_device() -> None:
    cards = (Card(gpu(1), memory_told=False), Card(gpu(2), slices={0: small(3, memory_told=False)}))
    found = discover(FakeNvml(cards), {})
    # Of a slice the attributes tell it as well.
    assert [0, 16 * GIB] == [device.memory_bytes for device in found.devices]
    assert found.trouble is None


@pytest.mark.parametrize(
    ("profile", "memory_told"), [("1c.4g.71gb", True), (None, False)], ids=["told", "denied"]
)
def test_a_name_without_the_profile_is_completed_from_attributes(
    profile: str | None, memory_told: bool
) -> None:
    bare = Slice(mig(1), "NVIDIA H200", 71_424, 16, gi_slices=4, ci_slices=1)
    card = Card(gpu(1), slices={0: bare}, memory_told=memory_told)
    (device,) = discover(FakeNvml((card,)), {}).devices
    assert profile == device.mig
    assert "NVIDIA H200" + (f" MIG {profile}" if profile else "") == device.name


def test_strings_may_be_bytes() -> None:
    fake = box()
    as_text = discover(fake, {})
    assert as_text == discover(replace(fake, as_bytes=True, sessions=[]), {})


def test_a_lost_gpu_keeps_its_number_and_one_that_may_not_be_opened_has_none() -> None:
    cards = (Card(gpu(1), error=15), Card(gpu(2), error=4), Card(gpu(3)), Card(gpu(4)))
    found = discover(FakeNvml(cards), {"CUDA_VISIBLE_DEVICES": "1"})
    assert [gpu(3)] == [device.uuid for device in found.devices]
    assert found.trouble is not None
    assert "GPU 0: GPU is lost" in found.trouble
    assert "GPU 1: Insufficient Permissions" in found.trouble


@pytest.mark.parametrize(
    ("visible", "value"),
    [
        ([gpu(0xA0)], "0"),
        ([gpu(0xA2), gpu(0xA0)], "2,0"),
        ([gpu(0xA2), gpu(0xA0)], " 2 , 0 "),
        ([gpu(0xA0)], "0,0"),
        # Of a GPU in MIG mode, CUDA uses the first slice.
        ([mig(0xB1), mig(0xC0)], "1,3"),
        ([mig(0xB1)], gpu(0xA1)),
        ([gpu(0xA2)], gpu(0xA2)),
        ([gpu(0xA2)], "GPU-000000a2"),
        ([gpu(0xA2)], "gpu-000000A2"),
        ([mig(0xC0), mig(0xB4)], f"{mig(0xC0)},{mig(0xB4)}"),
        ([mig(0xB4)], "MIG-000000b4"),
        ([mig(0xB4)], f"MIG-{gpu(0xA1)}/{7 + 0xB4}/0"),
        ([], ""),
        ([], "-1"),
        ([], "NoDevFiles"),
        ([gpu(0xA0), gpu(0xA2)], "0,2,-1,1"),
        ([gpu(0xA0)], "0,"),
    ],
)
def test_cuda_visible_devices(visible: list[str], value: str) -> None:
    found = discover(box(), {"CUDA_VISIBLE_DEVICES": value})
    assert visible == [device.uuid for device in found.devices]
    assert found.trouble is None


@pytest.mark.parametrize(
    ("visible", "value", "entry"),
    [
        ([gpu(0xA0)], "0,9,2", "9"),
        ([], "GPU-0badbad0,0", "GPU-0badbad0"),
        ([gpu(0xA2)], "2,GPU-000000,0", "GPU-000000"),
        ([], "MIG-000000", "MIG-000000"),
        ([], f"MIG-{gpu(0xA1)}/1/0", f"MIG-{gpu(0xA1)}/1/0"),
        ([], "all", "all"),
        ([gpu(0xA0)], "0,1x", "1x"),
    ],
)
def test_cuda_stops_at_an_entry_that_names_nothing(
    visible: list[str], value: str, entry: str
) -> None:
    found = discover(box(), {"CUDA_VISIBLE_DEVICES": value})
    assert visible == [device.uuid for device in found.devices]
    expected = f"CUDA_VISIBLE_DEVICES={value!r}: {entry!r} names no usable device"
    assert f"{expected}, and CUDA stops there" == found.trouble


@pytest.mark.parametrize(
    ("visible", "value"),
    [
        (EVERYTHING, "all"),
        (EVERYTHING, ""),
        ([], "none"),
        # CDI leaves it in containers whose GPUs it has put there itself.
        (EVERYTHING, "void"),
        (EVERYTHING, "nvidia.com/gpu=all"),
        (EVERYTHING, "/var/run/nvidia-container-devices"),
        ([gpu(0xA0), gpu(0xA2)], "2,0"),
        ([mig(0xB1), mig(0xB4)], "1"),
        ([mig(0xB1), mig(0xB4)], gpu(0xA1)),
        ([gpu(0xA0)], "GPU-000000a0"),
        ([mig(0xB4), mig(0xC0)], f"{mig(0xC0)},{mig(0xB4)}"),
        ([mig(0xB4)], f"MIG-{gpu(0xA1)}/{7 + 0xB4}/0"),
        ([mig(0xB4), mig(0xC0)], "1:4,3:0"),
        # Inside a container that was given GPUs 5 and 6 of its host, or a slice, NVML counts anew.
        (EVERYTHING, "0,6"),
        (EVERYTHING, "1:0"),
    ],
)
def test_nvidia_visible_devices(visible: list[str], value: str) -> None:
    found = discover(box(), {"NVIDIA_VISIBLE_DEVICES": value})
    assert visible == [device.uuid for device in found.devices]
    assert found.trouble is None


def test_a_uuid_that_the_container_has_not_is_told() -> None:
    value = f"{gpu(0xA0)},GPU-0badbad0"
    found = discover(box(), {"NVIDIA_VISIBLE_DEVICES": value})
    assert [gpu(0xA0)] == [device.uuid for device in found.devices]
    expected = f"NVIDIA_VISIBLE_DEVICES={value!r}: 'GPU-0badbad0' names no device here"
    assert expected == found.trouble
    with pytest.raises(InfraError, match="GPU-0badbad0"):
        select(["auto"], lambda: discover(box(), {"NVIDIA_VISIBLE_DEVICES": "GPU-0badbad0"}))


def test_both_variables_together_leave_what_both_allow_in_cudas_order() -> None:
    both = {"CUDA_VISIBLE_DEVICES": "3,2,0", "NVIDIA_VISIBLE_DEVICES": "0,3"}
    found = discover(box(), both)
    assert [mig(0xC0), gpu(0xA0)] == [device.uuid for device in found.devices]
    (pool,) = select(["cuda:1"], lambda: found)
    assert gpu(0xA0) == pool.device.uuid


def test_memory_in_use_is_the_slices_own() -> None:
    slices = {0: small(1, used=3 * GIB), 1: small(2, used=0), 2: small(3, memory_told=False)}
    fake = FakeNvml((Card(gpu(1), used=9 * GIB, slices=slices), Card(gpu(2), used=5 * GIB)))

    def used(uuid: str) -> int | None:
        fake.sessions.clear()
        answer = used_memory_bytes(uuid, fake)
        assert ["init", "shutdown"] == fake.sessions
        return answer

    assert [3 * GIB, 0, None] == [used(mig(n)) for n in (1, 2, 3)]
    # The parent needs privileges; the whole GPU does not.
    assert [None, 5 * GIB, None] == [used(gpu(1)), used(gpu(2)), used(gpu(3))]
    assert used_memory_bytes(gpu(1), FakeNvml(init_error=9)) is None


@pytest.mark.parametrize(
    ("sms", "capability", "cores"),
    [
        (40, (7, 5), 2_560),  # T4
        (108, (8, 0), 6_912),  # A100
        (72, (8, 6), 9_216),  # A10
        (142, (8, 9), 18_176),  # L40S
        (132, (9, 0), 16_896),  # H200
        (188, (12, 0), 24_064),  # RTX PRO 6000
        (0, (9, 0), 100),
        (0, (6, 1), 3_840),
        (0, (9, 0), 0),
        (0, None, 16_896),
    ],
)
def test_sms_come_from_the_cores(sms: int, capability: tuple[int, int] | None, cores: int) -> None:
    assert sms == sm_count(capability, cores)


@pytest.mark.parametrize(
    ("profile", "gpu_mib", "mib", "slices"),
    [
        ("1g.18gb", 143_771, 16 * 1024, 1),  # of 141 GiB
        ("1g.35gb", 143_771, 32 * 1024 + 512, 1),
        ("3g.71gb", 143_771, 71_424, 3),
        ("7g.141gb", 143_771, 140 * 1024, 7),
        ("1g.10gb", 81_559, 9 * 1024 + 768, 1),  # of 80 GiB
        ("2g.45gb", 183_359, 44 * 1024 + 256, 2),  # of 180 GiB
        ("1g.23gb", 183_359, 22 * 1024, 1),
    ],
)
def test_a_profiles_gb_are_eighths_of_the_gpu(
    profile: str, gpu_mib: int, mib: int, slices: int
) -> None:
    attributes = SimpleNamespace(
        memorySizeMB=mib, gpuInstanceSliceCount=slices, computeInstanceSliceCount=slices
    )
    assert profile == mig_profile(attributes, gpu_mib * MIB)


def test_all_that_is_asked_of_nvml_is_in_its_module() -> None:
    import pynvml

    asked = set(re.findall(r"nvml\.(nvml\w+|NVML\w+)", Path(nvml.__file__).read_text()))
    assert "nvmlDeviceGetMigMode" in asked
    assert set() == {name for name in asked if not hasattr(pynvml, name)}
