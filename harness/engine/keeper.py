"""The keeper of one cell: a process between the server and the cell, so that nothing of a cell
outlives it.

The keeper watches the deadline, and is the one to whom the kernel hands every process that the
cell leaves behind, daemons in sessions of their own among them. When the server ends, however,
the keeper ends its cell and then itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from harness.engine.processes import adopt_orphans, die_with_parent, sweep

FORK_SECONDS = 10.0
"""A forked cell tells of its first stage before this has passed; else it hangs on a lock that some
native thread held at the fork, which a fresh interpreter does not inherit."""

IMPORT_SECONDS = 300.0
"""The same for a cell that has to import vLLM first, which is no part of what it may take."""

TERM_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""

DUMP_SECONDS = 0.1
"""What the cell gets to write its stacks to its log."""

LOG_BYTES = 64 << 20
"""A log that grows beyond this starts anew: what counts is its end."""

LOOK_SECONDS = 0.5
"""How often the log's size is looked at."""

Tell = Callable[[str], None]
Body = Callable[[Tell], None]
"""What the cell does; it is handed the function that tells of each stage before it runs."""


@dataclass(frozen=True)
class Keeper:
    """A keeper as its server sees it."""

    pid: int
    pipe: int
    """Readable: one JSON object, how the cell ended, just before the keeper ends."""


def start(body: Body, log: Path, timeout: float, *, warm: bool, close: tuple[int, ...]) -> Keeper:
    """Fork a keeper, which forks the cell. `timeout` counts, in seconds, from the first stage that
    it tells of. `warm` says that the cell inherits a warm process, and so may hang on one of its
    locks; `close` are descriptors that neither may hold."""
    readable, writable = os.pipe()
    server = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writable)
        return Keeper(pid, readable)
    try:
        for descriptor in (readable, *close):
            os.close(descriptor)
        signal.signal(signal.SIGTERM, _cancelled)
        die_with_parent(signal.SIGTERM)
        if os.getppid() != server:
            raise _Cancelled  # it ended before it could be told that we care
        _redirect(log)
        os.setsid()
        adopt_orphans()
        try:
            ended = _keep(body, log, timeout, writable, warm=warm)
        finally:
            # A sweep that has begun is finished, whoever else ends now.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            sweep()
        os.write(writable, json.dumps(ended).encode() + b"\n")
    except _Cancelled:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class _Cancelled(BaseException):
    """The server is gone, or wants the cell to end."""


def _cancelled(*args: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Cancelled


def _redirect(log: Path) -> None:
    """Everything that this process and its children print goes to `log`; there is no input."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, onto in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, onto)
    os.close(output)
    os.close(null)


def _cell(body: Body, stages: int) -> NoReturn:
    """The cell, from its first instruction to its last."""
    code = 70  # EX_SOFTWARE of sysexits.h
    try:
        die_with_parent()
        # A session of its own: what it starts dies with it, and a deadline hits it alone.
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The stacks of a crash, and those that the keeper asks for, go to the log.
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        body(lambda stage: _tell(stages, stage))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _tell(pipe: int, stage: str) -> None:
    os.write(pipe, stage.encode() + b"\n")


def _keep(body: Body, log: Path, timeout: float, writable: int, *, warm: bool) -> dict[str, Any]:
    readable, stages = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        os.close(readable)
        os.close(writable)
        _cell(body, stages)
    os.close(stages)
    watch = _Watch(pid, readable, log, timeout, warm=warm)
    status = watch.run()
    return {
        "code": os.waitstatus_to_exitcode(status),
        "verdict": watch.verdict,
        "stage": watch.stage,
        "seconds": round(time.monotonic() - began, 3),
    }


class _Watch:
    """Waits for one process: INT is the parent's affair; here a stack dump, TERM, KILL."""

    def __init__(self, pid: int, pipe: int, log: Path, timeout: float, *, warm: bool) -> None:
        self._pid = pid
        self._pipe = pipe
        self._log = log
        self._timeout = timeout
        self._warm = warm
        self._deadline = time.monotonic() + (FORK_SECONDS if warm else IMPORT_SECONDS)
        self._steps = [
            (signal.SIGUSR1, DUMP_SECONDS),
            (signal.SIGTERM, TERM_SECONDS),
            (signal.SIGKILL, float("inf")),
        ]
        self.stage: str | None = None
        self.verdict: str | None = None

    def run(self) -> int:
        """The wait status of the process, once it has ended."""
        with selectors.DefaultSelector() as select:
            select.register(self._pipe, selectors.EVENT_READ)
            ended = self._ended_by_descriptor(select)
            while True:
                # The descriptor of the process becomes readable when it ends.
                for key, _ in select.select(self._patience(polling=not ended)):
                    if key.fd == self._pipe and not self._read():
                        select.unregister(self._pipe)
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._read_rest()
                    return status
                self._escalate()
                self._bound_log()

    def _ended_by_descriptor(self, select: selectors.BaseSelector) -> bool:
        try:
            select.register(os.pidfd_open(self._pid), selectors.EVENT_READ)
        except (AttributeError, OSError):  # Linux before 5.3
            return False
        return True

    def _patience(self, *, polling: bool) -> float:
        now = time.monotonic()
        return max(0.0, min(self._deadline - now, 0.02 if polling else LOOK_SECONDS))

    def _escalate(self) -> None:
        now = time.monotonic()
        if now < self._deadline:
            return
        if self.verdict is None:
            self.verdict = "stuck" if self._warm and self.stage is None else "timeout"
        number, seconds = self._steps.pop(0)
        try:
            os.killpg(self._pid, number)
        except ProcessLookupError:
            # One that hangs in the fork itself has no group of its own yet.
            os.kill(self._pid, number)
        self._deadline = now + seconds

    def _read(self) -> bool:
        data = os.read(self._pipe, 4096)
        words = data.decode("ascii", "replace").split()
        if words:
            if self.stage is None and self.verdict is None:
                self._deadline = time.monotonic() + self._timeout
            self.stage = words[-1]
        return bool(data)

    def _read_rest(self) -> None:
        # A process that the cell left behind may hold the other end for ever.
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(BlockingIOError):
            while self._read():
                pass

    def _bound_log(self) -> None:
        with contextlib.suppress(OSError):
            if os.path.getsize(self._log) > LOG_BYTES:
                os.truncate(self._log, 0)
                os.write(2, f"[more than {LOG_BYTES >> 20} MiB of log: cut]\n".encode())
