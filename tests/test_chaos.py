"""Chaos: whatever a cell does, each cell gets its verdict and nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import nights
from tests.chaos.engine import ACTS
from tests.chaos.planted import plant

ROOT = Path(__file__).resolve().parent.parent

DSV4 = tuple(f"dsv4-default-{name}" for name in ACTS)

BY_VERDICT = {
    "rejected": {"fine", "daemon", "flood", "stuck"},
    "timeout": {"spin", "hang", "bomb"},
    "crashed": {
        *("segfault", "os_exit", "killed", "kills_its_keeper", "half", "other_id", "full_disk"),
        "secret",
    },
}


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Path]:
    """The interpreter of a planted engine. What it started is told by its home, which lies in the
    cache of this test alone: none of it may be left."""
    yield plant(tmp_path)
    assert [] == left(tmp_path)


def left(tmp_path: Path) -> list[str]:
    """Processes that were started for this test and still run, given a moment to end."""
    until = time.monotonic() + 10
    while True:
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"HOME={tmp_path}/".encode() in environ.read_bytes():
                    found.append((environ.parent / "cmdline").read_bytes().decode())
        if not found or time.monotonic() > until:
            return found
        os.sched_yield()


def command(planted: Path, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest", f"--engine={planted}", "--device", "virtual:h200"),
        *(f"--matrix-out={planted.parent}/out", "--case-timeout", "4", *arguments),
    ]


def environ(planted: Path) -> dict[str, str]:
    cache = str(planted.parent / "cache")
    # A killed run cannot remove its scratch folder: it lies where pytest removes it.
    return {**os.environ, "KVMATRIX_CACHE": cache, "TMPDIR": str(planted.parent)}


def finished(planted: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(planted, *arguments),
        cwd=ROOT,
        env=environ(planted),
        capture_output=True,
        text=True,
        timeout=300,
    )


def cells(planted: Path) -> dict[str, dict[str, Any]]:
    whole = json.loads((planted.parent / "out" / "matrix.json").read_text())
    found = {cell["id"]: cell for cell in whole["cells"]}
    assert len(found) == len(whole["cells"])
    return found


def check(planted: Path, text: str) -> dict[str, dict[str, Any]]:
    """Planned = reported, and each has the verdict that what it did deserves."""
    found = cells(planted)
    assert {*DSV4, "dsv4-default-unset"} == set(found), text
    seen = {name: found[f"dsv4-default-{name}"]["verdict"] for name in ACTS}
    expected = {name: verdict for verdict, names in BY_VERDICT.items() for name in names}
    assert expected == seen, text
    return found


@pytest.mark.parametrize("isolation", ["fork", "spawn"])
def test_each_gets_its_verdict_and_nothing_is_left(planted: Path, isolation: str) -> None:
    done = finished(planted, "-k", "dsv4-default", "--isolation", isolation)
    assert 1 == done.returncode, done.stdout + done.stderr
    found = check(planted, done.stdout)
    reasons = {name: found[f"dsv4-default-{name}"]["reason"] for name in ACTS}
    assert "SIGSEGV" in reasons["segfault"]
    assert "SIGKILL" in reasons["killed"]
    assert "exited with 3" in reasons["os_exit"]
    assert "cannot be read" in found["dsv4-default-half"]["tail"]
    assert "dsv4-default-fine" in found["dsv4-default-other_id"]["tail"]
    # The stacks of a cell that hangs are in its log.
    assert "hang" in found["dsv4-default-hang"]["tail"]
    assert "model" == found["dsv4-default-segfault"]["stage"]
    # One that hangs at once in a fork is tried again in an interpreter of its own.
    assert (isolation == "fork") == found["dsv4-default-stuck"]["retried"]
    for name in ("flood", "secret"):
        assert len(found[f"dsv4-default-{name}"]["tail"]) <= 8_000
    assert "hf_abc" not in json.dumps(found)
    assert "\x1b[31m" not in done.stdout
    records = (planted.parent / "out" / "records.jsonl").read_text().splitlines()
    assert len(found) == len(records)


def test_xdist_workers_report_them_too(planted: Path) -> None:
    done = finished(planted, "-k", "dsv4-default", "-n", "2")
    assert 1 == done.returncode, done.stdout + done.stderr
    check(planted, done.stdout)


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            if int(text.rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


@contextlib.contextmanager
def running(planted: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """pytest on the planted engine, once its first record is there."""
    process = subprocess.Popen(
        command(planted, *arguments),
        cwd=ROOT,
        env=environ(planted),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    records = planted.parent / "out" / "records.jsonl"
    try:
        until = time.monotonic() + 60
        while not (records.is_file() and records.stat().st_size):
            assert process.poll() is None and time.monotonic() < until
            os.sched_yield()
        yield process
    finally:
        process.kill()
        process.communicate()


SOME = "dsv4-default-fine or dsv4-default-hang or dsv4-default-spin or dsv4-default-daemon"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_cancelled_run_reports_what_it_planned(
    planted: Path, number: signal.Signals, workers: tuple[str, ...]
) -> None:
    history = planted.parent / "history"
    with running(planted, "-k", SOME, *workers, f"--history={history}") as process:
        os.kill(process.pid, number)
        text, _ = process.communicate(timeout=60)
    assert 2 == process.returncode, text
    found = cells(planted)
    ((night,), faults) = nights.read(history)
    assert ([c["verdict"] for c in found.values()], []) == (
        [c["verdict"] for c in night.cells],
        faults,
    )
    assert {"fine", "hang", "spin", "daemon"} == {c["kv_cache_dtype"] for c in found.values()}
    verdicts = [cell["verdict"] for cell in found.values()]
    assert "notrun" in verdicts, text
    assert {"notrun", "rejected"} >= set(verdicts), text


def test_a_run_whose_parent_is_killed_leaves_nothing(planted: Path) -> None:
    with running(planted, "-k", SOME) as process:
        process.kill()
        process.communicate(timeout=60)
    assert [] == left(planted.parent)


@pytest.mark.parametrize("restart", [(), ("--max-worker-restart=0",)])
def test_a_killed_worker_loses_no_cell(planted: Path, restart: tuple[str, ...]) -> None:
    with running(planted, "-k", SOME, "-n", "2", *restart) as process:
        workers = children(process.pid)
        assert workers
        os.kill(workers[0], signal.SIGKILL)
        text, _ = process.communicate(timeout=120)
    assert 1 == process.returncode, text
    found = cells(planted)
    assert {"fine", "hang", "spin", "daemon"} == {c["kv_cache_dtype"] for c in found.values()}
