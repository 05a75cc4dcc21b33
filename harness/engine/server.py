"""The warm child: imports vLLM once, then forks once per cell.

Protocol: one JSON object a line. In (stdin): `{"run": {...}}` per cell, as many at a time as the
parent likes; end of input ends the server and whatever it runs. Out (a descriptor of its own, so
that nothing printed by vLLM can get into it): `{"ready": {...}}` once, then `{"done": {...}}` per
cell. A cell's record goes to a file, written whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.device import Device
from harness.record import Record, dumps

START_SECONDS = 10.0
"""A forked cell says that it runs before this has passed; else it hangs on a lock that some
native thread held at the fork, which a fresh interpreter does not inherit."""

GRACE_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""


_SET_PDEATHSIG = 1
"""`PR_SET_PDEATHSIG` of linux/prctl.h."""


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent is gone (Linux; elsewhere stdin's end must do)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class _Cell:
    """A forked cell that has not been reported yet."""

    id: str
    pid: int
    pipe: int
    started: float
    deadline: float
    stage: str | None = None
    term_at: float | None = None
    verdict: str | None = None


class Server:
    """Serves one device under one engine until its input ends."""

    def __init__(self, device: Device, engine: str, replies: int) -> None:
        self._device = device
        self._engine = engine
        self._replies = replies
        self._cells: dict[int, _Cell] = {}
        self._select = selectors.DefaultSelector()
        self._buffer = b""
        self._open = True

    def say(self, message: dict[str, Any]) -> None:
        os.write(self._replies, json.dumps(message).encode() + b"\n")

    def serve(self) -> None:
        """Run until stdin ends."""
        os.set_blocking(0, False)
        self._select.register(0, selectors.EVENT_READ)
        while self._open:
            for key, _ in self._select.select(self._patience()):
                if key.fd == 0:
                    self._read_requests()
                else:
                    self._read_stage(key.data)
            self._watch()
        for cell in self._cells.values():
            _kill(cell.pid, signal.SIGKILL)

    def _patience(self) -> float | None:
        if not self._cells:
            return None
        now = time.monotonic()
        return max(0.0, min(self._next(cell) for cell in self._cells.values()) - now)

    def _next(self, cell: _Cell) -> float:
        if cell.term_at is not None:
            return cell.term_at + GRACE_SECONDS
        if cell.stage is None:
            return min(cell.deadline, cell.started + START_SECONDS)
        return cell.deadline

    def _read_requests(self) -> None:
        data = os.read(0, 65536)
        if not data:
            self._open = False
            return
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._start(json.loads(line)["run"])

    def _start(self, request: dict[str, Any]) -> None:
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.close(readable)
                self._become(request, writable)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(writable)
        now = time.monotonic()
        cell = _Cell(request["id"], pid, readable, now, now + request["timeout"])
        self._cells[pid] = cell
        self._select.register(readable, selectors.EVENT_READ, cell)

    def _become(self, request: dict[str, Any], stages: int) -> None:
        """The forked cell, from its first instruction to its record."""
        die_with_parent()
        # A group of its own: what it starts dies with it, and a deadline hits it alone.
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Nothing that vLLM prints, in whatever process, may get between the replies.
        os.close(self._replies)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        from harness.engine import probe

        record = probe.run(
            Case(request["model"], request["backend"], request["kv_cache_dtype"]),
            Path(request["model_path"]),
            self._device,
            request["depth"],
            self._engine,
            tell=lambda stage: _tell(stages, stage),
        )
        write_record(record, Path(request["record"]))

    def _read_stage(self, cell: _Cell) -> None:
        data = os.read(cell.pipe, 4096)
        if data:
            cell.stage = data.decode().split()[-1]
        else:
            # The last holder of the pipe is gone: the cell has ended, or is just about to.
            self._select.unregister(cell.pipe)
            os.close(cell.pipe)
            cell.pipe = -1
            self._reap(cell)

    def _watch(self) -> None:
        now = time.monotonic()
        for cell in list(self._cells.values()):
            if now < self._next(cell):
                continue
            if cell.term_at is None:
                cell.verdict = "timeout" if now >= cell.deadline else "stuck"
                _kill(cell.pid, signal.SIGUSR1)  # its stacks go to its log
                time.sleep(0.05)
                _kill(cell.pid, signal.SIGTERM)
                cell.term_at = now
            else:
                _kill(cell.pid, signal.SIGKILL)
                self._reap(cell)

    def _reap(self, cell: _Cell) -> None:
        if cell.pid not in self._cells:
            return
        _, status = os.waitpid(cell.pid, 0)
        _kill(cell.pid, signal.SIGKILL)  # what it left in its group
        del self._cells[cell.pid]
        if cell.pipe >= 0:
            self._select.unregister(cell.pipe)
            os.close(cell.pipe)
        self.say(
            {
                "done": {
                    "id": cell.id,
                    "code": os.waitstatus_to_exitcode(status),
                    "verdict": cell.verdict,
                    "stage": cell.stage,
                    "seconds": round(time.monotonic() - cell.started, 3),
                }
            }
        )


def _tell(pipe: int, stage: str) -> None:
    os.write(pipe, stage.encode() + b"\n")


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def write_record(record: Record, path: Path) -> None:
    """Put the record at `path` whole or not at all. OSError where the disk does not take it."""
    temporary = path.with_suffix(".part")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def scout(device: Device, model_path: Path, engine: str) -> list[str]:
    """Modules that one cell imports beyond those of this process, in the order of import.

    Found by a cell in a fork, so that this process keeps vLLM's caches and one-time log lines
    untouched, and every cell starts from the same state.
    """
    before = set(sys.modules)
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(readable)
            die_with_parent()
            from harness.engine import probe

            probe.run(Case("scout"), model_path, device, "allocate", engine)
            new = [name for name in list(sys.modules) if name not in before]
            with os.fdopen(writable, "w") as file:
                json.dump(new, file)
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return [str(name) for name in json.loads(text)] if text else []


def preload(names: list[str]) -> None:
    """Import what cells turn out to import. What does not import here fails in the cell, where it
    is part of what is observed."""
    for name in names:
        if name not in sys.modules and not name.startswith("__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def threads() -> int:
    """Native threads of this process; 0 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def main(device: Device, engine: str, model_path: Path, modules: Path, replies: int) -> None:
    """Warm up for `device` and serve. `model_path` is what the scout builds, `modules` keeps what
    it found between runs, `replies` is the descriptor that the parent reads."""
    die_with_parent()
    began = time.perf_counter()
    try:
        names = [str(n) for n in json.loads(modules.read_text())]
    except (OSError, ValueError):
        names = scout(device, model_path, engine)
        if names:  # a scout that died knows nothing worth keeping
            temporary = modules.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(names))
            os.replace(temporary, modules)
    preload(names)
    gc.collect()
    # Keeps the collector of a fork from touching, and so copying, every page of the parent.
    gc.freeze()
    server = Server(device, engine, replies)
    seconds = round(time.perf_counter() - began, 3)
    server.say({"ready": {"engine": engine, "seconds": seconds, "threads": threads()}})
    server.serve()
