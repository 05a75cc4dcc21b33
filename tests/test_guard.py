"""The guard of GPUs and slices: locked, looked at, clean after each cell, or quarantined."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness import device, guard
from harness.case import Case
from harness.device import GIB, MIB, Device
from harness.facts import EngineFacts
from harness.guard import Guard
from harness.preflight import Look
from harness.request import Request

UUID = "GPU-11111111-2222-3333-4444-555555555555"
H200 = Device(UUID, "gpu", "NVIDIA H200", (9, 0), 141 * GIB, 132, 0, uuid=UUID)
ENGINE = EngineFacts(
    python="/e/bin/python",
    version="0.33.0",
    commit=None,
    torch="2",
    cuda="13.0",
    flashinfer=None,
    transformers=None,
    python_version="3.11",
    kv_cache_dtypes=(),
    backends=(),
    model_backends={},
)


def request(on: Device = H200, python: str = "/e/bin/python") -> Request:
    engine = replace(ENGINE, python=python)
    return Request(Case("llama3"), on, engine, "warmup", 60.0, Path("/m"))


class Memory:
    """A meter that tells one figure after the other, and the last one for ever."""

    def __init__(self, *used: int | None) -> None:
        self.used = list(used)

    def __call__(self, uuid: str) -> int | None:
        assert UUID == uuid
        return self.used.pop(0) if len(self.used) > 1 else self.used[0]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Guard]:
    def make(*used: int | None, looks: list[str | None] | None = None) -> Guard:
        answers = [None] if looks is None else looks

        def look(request: Request, environ: object) -> Look:
            return Look(answers.pop(0))

        return Guard(Memory(*used), look, tmp_path / "locks", lambda seconds: None)

    monkeypatch.setattr(guard, "SETTLE_SECONDS", 0.0)
    return make


def test_memory_that_comes_back_is_no_leak(made: Callable[..., Guard]) -> None:
    kept = made(10 * MIB, 200 * MIB)
    kept.before(H200)
    assert kept.after(H200, "llama3-default-unset") is None
    assert kept.refuses(request(), lambda r: {}) is None


def test_the_driver_may_take_its_time(
    made: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "SETTLE_SECONDS", 60.0)
    kept = made(10 * MIB, 9 * GIB, 5 * GIB, 20 * MIB)
    kept.before(H200)
    assert kept.after(H200, "llama3-default-unset") is None


def test_a_leak_is_told_and_the_device_quarantined(made: Callable[..., Guard]) -> None:
    kept = made(10 * MIB, 10 * MIB + 3 * GIB)
    kept.before(H200)
    assert 3 * GIB == kept.after(H200, "llama3-default-unset")
    reason = kept.refuses(request(), lambda r: {})
    assert reason is not None
    for word in (UUID, "llama3-default-unset", "3072 MiB"):
        assert word in reason


def test_memory_that_nobody_can_tell_is_no_leak(made: Callable[..., Guard]) -> None:
    kept = made(None)
    kept.before(H200)
    assert kept.after(H200, "x") is None


def test_a_device_is_looked_at_once_per_engine(made: Callable[..., Guard]) -> None:
    kept = made(0, looks=["broken", None])
    assert "broken" == kept.refuses(request(), lambda r: {})
    assert "broken" == kept.refuses(request(), lambda r: {})
    assert kept.refuses(request(python="/other/python"), lambda r: {}) is None


def test_a_lock_keeps_a_second_run_off_and_is_given_back(
    made: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guard, "LOCK_SECONDS", 0.0)
    first, second = made(0), made(0)
    assert first.refuses(request(), lambda r: {}) is None
    reason = second.refuses(request(), lambda r: {})
    assert reason is not None
    assert "another run" in reason
    first.close()
    (path,) = (tmp_path / "locks").iterdir()
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_of_locks_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "locks").touch()
    kept = Guard(Memory(0), lambda r, e: Look(None), tmp_path / "locks")
    reason = kept.refuses(request(), lambda r: {})
    assert reason is not None
    assert str(tmp_path) in reason


@pytest.mark.parametrize("spec", ["virtual:h200"])
def test_virtual_and_cpu_devices_need_no_guard(made: Callable[..., Guard], spec: str) -> None:
    kept = made(0, looks=[])
    for on in (device.parse(spec), device.cpu()):
        kept.before(on)
        assert kept.refuses(request(on), lambda r: {}) is None
        assert kept.after(on, "x") is None


MISLED = Look("vLLM asks for another", "7f", misled=True)


@pytest.mark.parametrize(
    ("usable", "unnamed"),
    [
        (True, Look(None, "7f")),
        (False, Look(None, "another slice")),
        (False, Look("no device")),
    ],
)
def test_a_device_that_is_alone_need_not_be_named(
    tmp_path: Path, usable: bool, unnamed: Look
) -> None:
    """vLLM 0.33.0 takes a slice's index for that of a GPU, but only where the slice is named."""
    named = {"CUDA_VISIBLE_DEVICES": UUID, "PATH": "/bin"}

    def look(request: Request, environ: Mapping[str, str]) -> Look:
        return MISLED if "CUDA_VISIBLE_DEVICES" in environ else unnamed

    kept = Guard(Memory(0), look, tmp_path / "locks")
    reason = kept.refuses(request(), lambda r: named)
    assert (None if usable else MISLED.reason) == reason
    assert ({"PATH": "/bin"} if usable else named) == kept.environ(request(), named)
