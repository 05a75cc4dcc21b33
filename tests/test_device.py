from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from harness.device import (
    PROFILES,
    Device,
    Discovery,
    Gpu,
    cpu,
    parse,
    select,
    virtual_devices,
)
from harness.errors import InfraError, UsageError

LISTS = "`kvmatrix devices` lists them"


@pytest.mark.parametrize(
    ("spec", "capability", "memory_bytes", "sm_count", "shared_memory_bytes"),
    [
        ("virtual:t4", (7, 5), 15360 * 2**20, 40, 64 * 1024),
        ("virtual:a100", (8, 0), 81920 * 2**20, 108, 163 * 1024),
        ("virtual:a10", (8, 6), 23028 * 2**20, 72, 99 * 1024),
        ("virtual:l40s", (8, 9), 46068 * 2**20, 142, 99 * 1024),
        ("virtual:h200", (9, 0), 143771 * 2**20, 132, 227 * 1024),
        ("virtual:h200/1g.18gb", (9, 0), 16 * 2**30, 16, 227 * 1024),
        ("virtual:h200/1g.35gb", (9, 0), 65 * 2**29, 26, 227 * 1024),
        ("virtual:b200", (10, 0), 183359 * 2**20, 148, 227 * 1024),
        ("virtual:b300", (10, 3), 275040 * 2**20, 148, 227 * 1024),
        ("virtual:rtx-pro-6000", (12, 0), 97887 * 2**20, 188, 99 * 1024),
        ("virtual:gb10", (12, 1), 130602405888, 48, 99 * 1024),
    ],
)
def test_a_virtual_device_has_the_numbers_of_its_profile(
    spec: str,
    capability: tuple[int, int],
    memory_bytes: int,
    sm_count: int,
    shared_memory_bytes: int,
) -> None:
    device = parse(spec)
    assert ("virtual", spec, capability) == (device.kind, device.spec, device.capability)
    assert memory_bytes == device.memory_bytes
    assert sm_count == device.sm_count
    assert shared_memory_bytes == device.shared_memory_bytes


def test_the_promised_profiles_are_there() -> None:
    names = "t4 a100 a10 l4 l40s rtx-4090 h100 h200 gh200 h20 b200 b300 rtx-pro-6000 rtx-5090 gb10"
    assert set(names.split()) == set(PROFILES)


@pytest.mark.parametrize(
    ("profile", "names"),
    [
        ("a100", "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h100", "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h200", "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
        ("b200", "1g.23gb 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
    ],
)
def test_mig_instances_fit_into_their_gpu_as_often_as_nvidia_says(profile: str, names: str) -> None:
    gpu = PROFILES[profile]
    assert names.split() == list(gpu.mig)
    for count, (memory_bytes, sm_count) in zip((7, 4, 3, 2, 1, 1), gpu.mig.values(), strict=True):
        assert count * memory_bytes < gpu.memory_bytes
        assert count * sm_count <= gpu.sm_count


def test_memory_of_an_instance_is_at_most_what_its_name_says() -> None:
    for gpu in PROFILES.values():
        for name, (memory_bytes, _) in gpu.mig.items():
            gigabytes = int(name.partition(".")[2].removesuffix("gb"))
            assert 0.85 * gigabytes * 2**30 < memory_bytes <= gigabytes * 2**30


def test_a_slice_is_named_as_nvml_names_it() -> None:
    assert "NVIDIA H200 MIG 1g.35gb" == parse("virtual:h200/1g.35gb").name


def test_a_spec_is_read_in_any_case_and_kept_in_one() -> None:
    assert "virtual:h200/1g.35gb" == parse(" Virtual:H200/1G.35GB ").spec


@pytest.mark.parametrize("device", virtual_devices(), ids=lambda d: d.id)
def test_a_device_is_found_again_by_its_spec_and_by_its_json(device: Device) -> None:
    assert device == parse(device.spec)
    assert {device} == {Device.from_json(json.loads(json.dumps(device.to_json())))}


def test_a_real_device_is_found_again_by_its_json() -> None:
    assert CARVED == Device.from_json(json.loads(json.dumps(CARVED.to_json())))


def test_a_cpu_is_found_again_by_its_json() -> None:
    one = cpu("A CPU", 2**34, ("amx_tile",))
    assert one == Device.from_json(json.loads(json.dumps(one.to_json())))


def test_ids_are_distinct_and_fit_for_test_ids() -> None:
    assert "virtual_h200_1g.35gb" == parse("virtual:h200/1g.35gb").id
    ids = [device.id for device in virtual_devices()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", text) for text in ids)


def test_json_that_is_no_device_names_the_field() -> None:
    data = parse("virtual:h200").to_json()
    del data["sm_count"]
    with pytest.raises(ValueError, match=r"\['sm_count'\]"):
        Device.from_json(data)


@pytest.mark.parametrize(
    ("message", "spec"),
    [
        (f"unknown device 'h200': did you mean 'virtual:h200'? {LISTS}", "h200"),
        (
            f"unknown device 'h200/1g.35gb': did you mean 'virtual:h200/1g.35gb'? {LISTS}",
            "h200/1g.35gb",
        ),
        (f"unknown device 'vitual:l40s': did you mean 'virtual:l40s'? {LISTS}", "vitual:l40s"),
        (
            f"unknown device 'virtual:rtx-6000': did you mean 'virtual:rtx-pro-6000' or "
            f"'virtual:rtx-5090' or 'virtual:rtx-4090'? {LISTS}",
            "virtual:rtx-6000",
        ),
        (f"unknown device 'virtual:': {LISTS}", "virtual:"),
        (f"unknown device '': {LISTS}", ""),
        (
            f"unknown MIG profile '1g.36gb': did you mean '1g.35gb' or '2g.35gb' or '1g.18gb'? "
            f"of virtual:h200; {LISTS}",
            "virtual:h200/1g.36gb",
        ),
        ("device 'virtual:l4/1g.5gb': l4 has no MIG profiles; use virtual:l4", "virtual:l4/1g.5gb"),
    ],
)
def test_an_unknown_device_is_told_with_what_is_near(message: str, spec: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(spec)
    assert message == str(raised.value)


def real(uuid: str, name: str = "NVIDIA H200", **more: Any) -> Device:
    kind = "mig" if uuid.startswith("MIG-") else "gpu"
    return Device(uuid, kind, name, (9, 0), 2**37, 132, 227 * 1024, uuid=uuid, **more)


ONE, TWO = real("GPU-11111111-aaaa"), real("GPU-22222222-bbbb")
CARVED = real("MIG-33333333-cccc", "NVIDIA H200 MIG 1g.35gb", parent="GPU-44444444-dddd")
HIDDEN = real("GPU-55555555-eeee")
GPUS = (
    *(Gpu(str(d.uuid), d.name, 0, (9, 0), False, (d,)) for d in (ONE, TWO, HIDDEN)),
    Gpu("GPU-44444444-dddd", "NVIDIA H200", 3, (9, 0), True, (CARVED,)),
)
HERE = Discovery((ONE, TWO, CARVED), "580.95.05", None, GPUS)


def names(specs: list[str], found: Discovery = HERE) -> list[list[str]]:
    """The SPECs of the members of each pool."""
    return [[m.spec for m in pool.members] for pool in select(specs, lambda: found)]


def no_discovery() -> Discovery:
    raise AssertionError("nothing real was asked for")


def test_auto_makes_a_pool_of_each_kind_of_visible_device() -> None:
    expected = [[ONE.spec, TWO.spec], [CARVED.spec]]
    assert expected == names(["auto"])
    assert expected == names([])


def test_without_a_real_device_auto_is_the_h200() -> None:
    assert [["virtual:h200"]] == names(["auto"], Discovery())
    assert [["virtual:h200"]] == names(["auto"], Discovery(driver="580.95.05"))


def test_auto_does_not_go_virtual_over_trouble() -> None:
    expected = "no device can be used: NVML: denied; to go without, pass --device virtual:h200"
    with pytest.raises(InfraError) as raised:
        names(["auto"], Discovery(trouble="NVML: denied"))
    assert expected == str(raised.value)
    # What can be seen is used.
    assert [[ONE.spec]] == names(["auto"], Discovery((ONE,), None, "GPU 1: GPU is lost"))


def test_virtual_devices_and_the_cpu_need_no_discovery() -> None:
    pools = select(["virtual:b200", "CPU"], no_discovery)
    assert ["virtual:b200", "cpu"] == [pool.device.spec for pool in pools]
    mine = parse("virtual:t4")
    assert mine == select(["cpu"], no_discovery, lambda: mine)[0].device


def test_discovery_is_asked_once() -> None:
    asked: list[int] = []

    def discover() -> Discovery:
        asked.append(1)
        return HERE

    select(["auto", "cuda:0", "cuda:2"], discover)
    assert [1] == asked


@pytest.mark.parametrize(
    ("device", "spec"),
    [
        (ONE, "cuda:0"),
        (CARVED, "CUDA:2"),
        (TWO, "GPU-22222222-bbbb"),
        (TWO, "gpu-2222"),
        (CARVED, "MIG-33333333-CCCC"),
        (CARVED, "mig-3"),
    ],
)
def test_a_real_device_is_named_by_number_or_uuid(device: Device, spec: str) -> None:
    (pool,) = select([spec], lambda: HERE)
    assert (device, (device,)) == (pool.device, pool.members)
    assert device.real


def test_a_device_is_in_one_pool_only() -> None:
    assert [[TWO.spec]] == names(["cuda:1", "GPU-2222", TWO.spec])
    assert [[TWO.spec], [ONE.spec], [CARVED.spec]] == names(["cuda:1", "auto"])
    assert [[ONE.spec, TWO.spec], [CARVED.spec]] == names(["auto", "cuda:1"])
    assert [["virtual:h200"]] == names(["virtual:h200", "Virtual:H200", "auto"], Discovery())


def test_devices_of_one_name_are_told_apart_by_their_uuids() -> None:
    pools = select(["cuda:0", "cuda:1", "cuda:2"], lambda: HERE)
    assert ["NVIDIA_H200-11111111", "NVIDIA_H200-22222222", "NVIDIA_H200_MIG_1g.35gb"] == [
        pool.device.id for pool in pools
    ]
    assert [ONE, TWO, CARVED] == [pool.members[0] for pool in pools]


def test_devices_whose_uuids_begin_alike_are_told_apart_by_all_of_them() -> None:
    alike = Discovery((real("GPU-11111111-aaaa"), real("GPU-11111111-bbbb")))
    ids = [pool.device.id for pool in select(["cuda:0", "cuda:1"], lambda: alike)]
    assert ["NVIDIA_H200-11111111-aaaa", "NVIDIA_H200-11111111-bbbb"] == ids


@pytest.mark.parametrize(
    ("message", "spec"),
    [
        (f"unknown device 'cuda:3': the last one visible is cuda:2; {LISTS}", "cuda:3"),
        (
            "device 'GPU-44444444' is a GPU in MIG mode: name one of its slices "
            f"(MIG-33333333-cccc); {LISTS}",
            "GPU-44444444",
        ),
        (
            "device 'GPU-55555555-eeee' is hidden by CUDA_VISIBLE_DEVICES or "
            f"NVIDIA_VISIBLE_DEVICES; {LISTS}",
            "GPU-55555555-eeee",
        ),
        (
            "unknown device 'GPU-11111112-aaaa': did you mean 'GPU-11111111-aaaa'? " + LISTS,
            "GPU-11111112-aaaa",
        ),
        (f"unknown device 'cup': did you mean 'cpu'? {LISTS}", "cup"),
        (f"unknown device 'cuda': did you mean 'auto' or 'cuda:0'? {LISTS}", "cuda"),
        (f"unknown device 'GPU-': did you mean 'auto' or 'cuda:0'? {LISTS}", "GPU-"),
        (f"unknown device 'gpu:0': did you mean 'auto' or 'cuda:0'? {LISTS}", "gpu:0"),
    ],
)
def test_an_unknown_real_device_is_told_with_what_is_there(message: str, spec: str) -> None:
    with pytest.raises(UsageError) as raised:
        select([spec], lambda: HERE)
    assert message == str(raised.value)


def test_a_beginning_that_fits_several_devices_names_them() -> None:
    alike = Discovery((real("GPU-11111111-aaaa"), real("GPU-11111111-bbbb")))
    with pytest.raises(UsageError) as raised:
        names(["GPU-1"], alike)
    expected = (
        "device 'GPU-1' could be any of GPU-11111111-aaaa, GPU-11111111-bbbb: give more of the UUID"
    )
    assert f"{expected}; {LISTS}" == str(raised.value)


def test_without_a_gpu_a_real_device_is_refused_with_what_to_use() -> None:
    for spec in ("cuda:0", "GPU-1b2c", "MIG-GPU-1b2c/1/0"):
        with pytest.raises(UsageError) as raised:
            names([spec], Discovery())
        expected = f"unknown device {spec!r}: no GPU is visible here; use virtual:h200 or cpu"
        assert f"{expected}; {LISTS}" == str(raised.value)


def test_a_device_that_trouble_may_hide_is_no_usage_error() -> None:
    with pytest.raises(InfraError) as raised:
        names(["GPU-9"], Discovery((ONE,), None, "GPU 1: GPU is lost"))
    assert "device 'GPU-9' cannot be seen: GPU 1: GPU is lost" == str(raised.value)


def test_the_parent_side_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, harness.cli, harness.device, harness.install, harness.nvml\n"
        "print(sorted({'torch', 'vllm', 'pytest', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout
