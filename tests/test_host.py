from __future__ import annotations

import platform
from pathlib import Path

from harness import host


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def machine(root: Path) -> None:
    write(root, "proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC  9654\nflags\t: fpu\n" * 2)
    write(root, "proc/meminfo", "MemTotal:       24683652 kB\nMemFree:  1 kB\n")


def test_the_cpu_has_the_machines_name_and_memory(tmp_path: Path) -> None:
    machine(tmp_path)
    device = host.cpu(tmp_path)
    assert ("cpu", "cpu", "cpu") == (device.spec, device.kind, device.id)
    assert ("AMD EPYC 9654", 24683652 * 1024) == (device.name, device.memory_bytes)
    assert (None, 0, 0) == (device.capability, device.sm_count, device.shared_memory_bytes)


def test_instruction_sets_that_vllm_asks_for_are_found(tmp_path: Path) -> None:
    assert () == host.features(tmp_path)
    machine(tmp_path)
    assert () == host.cpu(tmp_path).features
    flags = "fpu avx512f avx512_bf16 amx_bf16 amx_tile amx_int8"
    write(tmp_path, "proc/cpuinfo", f"processor\t: 0\nflags\t\t: {flags}\n" * 2)
    assert ("amx_tile", "avx512_bf16") == host.cpu(tmp_path).features
    write(tmp_path, "proc/cpuinfo", "flags\t\t: fpu avx512_bf16_not amx_tiles\n")
    assert () == host.features(tmp_path)


def test_a_machine_that_tells_nothing_still_has_a_cpu(tmp_path: Path) -> None:
    assert (platform.machine(), 0) == (host.name(tmp_path), host.memory_bytes(tmp_path))


def test_a_limit_of_any_control_group_around_counts(tmp_path: Path) -> None:
    machine(tmp_path)
    write(tmp_path, "proc/self/cgroup", "0::/jobs/17\n")
    write(tmp_path, "sys/fs/cgroup/jobs/17/memory.max", "max\n")
    assert 24683652 * 1024 == host.memory_bytes(tmp_path)
    write(tmp_path, "sys/fs/cgroup/jobs/memory.max", f"{8 * 2**30}\n")
    assert 8 * 2**30 == host.memory_bytes(tmp_path)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    machine(tmp_path)
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{4 * 2**30}\n")
    assert 4 * 2**30 == host.memory_bytes(tmp_path)


def test_limits_of_version_1_are_read_and_its_no_limit_is_none(tmp_path: Path) -> None:
    machine(tmp_path)
    write(tmp_path, "proc/self/cgroup", "8:pids:/a\n4:cpu,memory:/docker/1\n0::/\n")
    file = "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes"
    write(tmp_path, file, "9223372036854771712\n")
    assert 24683652 * 1024 == host.memory_bytes(tmp_path)
    write(tmp_path, file, f"{2 * 2**30}\n")
    assert 2 * 2**30 == host.memory_bytes(tmp_path)
