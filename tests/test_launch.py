"""Children that go wrong, against planted engines: a verdict each, and nothing left running."""

from __future__ import annotations

import os
import stat
import sys
import textwrap
import time
from pathlib import Path

import pytest

from harness import device, guard
from harness.case import Case
from harness.device import GIB, MIB
from harness.facts import EngineFacts
from harness.guard import Guard
from harness.launch import Launcher
from harness.preflight import Look
from harness.record import Record
from harness.request import Request
from tests.test_guard import H200

# A server that speaks the protocol and does PLANTED with each cell.
SERVER = """
import json, os, sys, time
if sys.argv[2] != "serve":
    sys.exit(9)
say = lambda m: print(json.dumps(m), flush=True)
{start}
say({{"ready": {{}}}})
for line in sys.stdin:
    run = json.loads(line)["run"]
    def done(code=0, verdict=None):
        say({{"done": {{"id": run["id"], "code": code, "verdict": verdict, "stage": "model",
                       "seconds": 0.1}}}})
    log = open(run["log"], "w")
{planted}
"""


def planted(tmp_path: Path, body: str, start: str = "") -> EngineFacts:
    """An engine whose interpreter runs our own server in place of the child."""
    program = tmp_path / "server.py"
    program.write_text(
        SERVER.format(planted=textwrap.indent(textwrap.dedent(body), "    "), start=start)
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return EngineFacts(
        python=str(python),
        version="0.33.0",
        commit=None,
        torch="2",
        cuda=None,
        flashinfer=None,
        transformers=None,
        python_version="3.11",
        kv_cache_dtypes=("auto",),
        backends=(),
        model_backends={},
    )


def outcome(engine: EngineFacts, tmp_path: Path, cases: int = 1) -> list[Record]:
    launcher = Launcher(
        lambda device: 2, lambda request: os.environ, lambda request: tmp_path / "modules"
    )
    requests = [
        Request(
            Case("dsv4", "default", f"d{number}"),
            device.parse("virtual:h200"),
            engine,
            "allocate",
            5.0,
            tmp_path,
        )
        for number in range(cases)
    ]
    launcher.plan(requests)
    try:
        return [launcher.record(request) for request in requests]
    finally:
        launcher.close()


@pytest.mark.parametrize(
    ("end", "code", "body"),
    [
        ("signal", -11, "log.write('boom'); log.flush(); done(-11)"),
        ("exit", 70, "log.write('boom'); log.flush(); done(70)"),
        ("timeout", None, "log.write('boom'); log.flush(); done(-9, 'timeout')"),
        ("silent", None, "log.write('boom'); log.flush(); done(0)"),
        (
            "silent",
            None,
            "open(run['record'], 'w').write('{\"half'); log.write('boom'); log.flush(); done(0)",
        ),
    ],
)
def test_a_child_without_a_record_is_told_by_its_end(
    tmp_path: Path, end: str, code: int | None, body: str
) -> None:
    (record,) = outcome(planted(tmp_path, body), tmp_path)
    assert (end, code, "model") == (record.end, record.exit_code, record.stage)
    assert "boom" in record.tail


def test_a_server_that_dies_takes_only_its_cells_in_flight(tmp_path: Path) -> None:
    engine = planted(tmp_path, "print('last words', file=sys.stderr, flush=True); os._exit(3)")
    records = outcome(engine, tmp_path, cases=3)
    assert ["exit"] * 3 == [record.end for record in records]
    assert "last words" in records[0].tail


def test_a_server_that_does_not_start_is_waited_for_once(tmp_path: Path) -> None:
    engine = planted(
        tmp_path, "pass", start=f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); sys.exit(4)"
    )
    records = outcome(engine, tmp_path, cases=5)
    assert [("exit", 4)] * 5 == [(record.end, record.exit_code) for record in records]
    assert "x" == (tmp_path / "starts").read_text()


def test_what_an_engine_prints_between_replies_is_no_reply(tmp_path: Path) -> None:
    """vLLM 0.27.1 logs to stdout while it is imported."""
    (record,) = outcome(
        planted(tmp_path, "done(7)", start="print('INFO ready {', flush=True)"), tmp_path
    )
    assert ("exit", 7) == (record.end, record.exit_code)


def test_nothing_is_left_running(tmp_path: Path) -> None:
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); done(1)"
    outcome(planted(tmp_path, body), tmp_path)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        os.sched_yield()
    assert not Path(f"/proc/{pid}").exists()


def test_secrets_of_the_caller_do_not_reach_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "very-secret-value")
    engine = planted(tmp_path, "log.write('key very-secret-value'); log.flush(); done(1)")
    (record,) = outcome(engine, tmp_path)
    assert "key ***" == record.tail


def test_memory_held_after_a_cell_is_charged_to_it_and_the_device_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "SETTLE_SECONDS", 0.0)
    used = [10 * MIB, 2 * GIB]
    guardian = Guard(lambda uuid: used.pop(0), lambda r, e: Look(None), tmp_path / "locks")
    launcher = Launcher(
        lambda device: 1, lambda r: os.environ, lambda r: tmp_path / "modules", guard=guardian
    )
    engine = planted(tmp_path, "done(0)")
    leaking, next_one = (
        Request(Case("llama3", "default", name), H200, engine, "warmup", 5.0, tmp_path)
        for name in ("first", "second")
    )
    launcher.plan([leaking, next_one])
    try:
        first, second = launcher.record(leaking), launcher.record(next_one)
    finally:
        launcher.close()
    assert 2 * GIB - 10 * MIB == first.leaked_bytes
    assert "infra" == second.end
    assert leaking.case.id in second.tail


def test_a_process_that_cannot_fork_has_its_cells_run_one_by_one(tmp_path: Path) -> None:
    """A warm process that has touched CUDA, whatever made it do so."""
    program = tmp_path / "server.py"
    engine = planted(tmp_path, "done(7)")
    text = program.read_text()
    text = text.replace('if sys.argv[2] != "serve":', 'if sys.argv[2] == "serve":').replace(
        "    sys.exit(9)", '    print(json.dumps({"ready": {"forks": False}})); sys.exit(0)'
    )
    program.write_text(text)
    assert [("exit", 7)] * 3 == [(r.end, r.exit_code) for r in outcome(engine, tmp_path, cases=3)]
