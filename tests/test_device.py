from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from harness.device import PROFILES, Device, parse, virtual_devices
from harness.errors import UsageError

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


def test_without_a_real_device_auto_is_the_h200() -> None:
    assert parse("virtual:h200") == parse("auto")


@pytest.mark.parametrize("device", virtual_devices(), ids=lambda d: d.id)
def test_a_device_is_found_again_by_its_spec_and_by_its_json(device: Device) -> None:
    assert device == parse(device.spec)
    assert {device} == {Device.from_json(json.loads(json.dumps(device.to_json())))}


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


@pytest.mark.parametrize("spec", ["cpu", "cuda:0", "CUDA:11", "GPU-1b2c", "MIG-GPU-1b2c/1/0"])
def test_a_real_device_is_refused_with_what_to_use(spec: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(spec)
    expected = f"device {spec!r}: real devices are not supported yet; use virtual:h200"
    assert expected == str(raised.value)


def test_the_parent_side_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, harness.cli, harness.device, harness.install\n"
        "print(sorted({'torch', 'vllm', 'pytest', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout
