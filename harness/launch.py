"""Children: one warm server per engine and device, one fork of it per cell, one record back.

The parent never waits for ever: each cell has a deadline that the server keeps, and behind it
one that the parent keeps for the server. Whatever becomes of a child, a Record comes back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import safe
from harness.case import Case
from harness.device import Device
from harness.facts import EngineFacts
from harness.record import Record, RecordError, loads

MAIN = Path(__file__).parent / "engine" / "__main__.py"

START_SECONDS = 300.0
"""Warming up takes 10-40 s (vLLM's imports, model inspection once); on a cold disk more."""

GRACE_SECONDS = 20.0
"""What a server gets beyond its cells' deadlines before it counts as hung itself."""

TAIL_BYTES = 8_000
"""How much of a dead child's output its record keeps."""


@dataclass(frozen=True)
class Request:
    """A case on a device with an engine."""

    case: Case
    device: Device
    engine: EngineFacts
    depth: str
    timeout: float
    """Seconds that the cell may take."""
    model_path: Path
    """Folder of the model's config.json."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells this request from all others of a run."""
        return (self.case.id, self.device.spec, self.engine.python)


@dataclass(frozen=True)
class Ended:
    """How a child ended, before its record is looked at."""

    end: str
    """One of `record.ENDS`."""
    code: int | None
    stage: str | None
    """The last stage that it told of."""
    seconds: float
    retried: bool = False


def observed(request: Request, ended: Ended, record: Path, log: Path) -> Record:
    """The child's own record where there is a whole one of this very cell; else one that tells
    how the child ended, with the last of its output."""
    complaint = ""
    if ended.end in ("finished", "exit", "signal") and record.is_file():
        try:
            found = loads(record.read_text(encoding="utf-8"))
            if found.id == request.case.id and ended.end == "finished":
                return _masked(dataclasses.replace(found, retried=ended.retried))
            if found.id != request.case.id:
                complaint = f"\n[the child wrote a record of {found.id!r} instead of its own]"
        except (RecordError, UnicodeDecodeError) as error:
            complaint = f"\n[the child's record cannot be read: {error}]"
    return Record(
        id=request.case.id,
        model=request.case.model,
        backend=request.case.backend,
        kv_cache_dtype=request.case.kv_cache_dtype,
        device=request.device.spec,
        device_kind=request.device.kind,
        capability=request.device.capability,
        engine=request.engine.version,
        depth=request.depth,
        stage=ended.stage or "import",
        end="silent" if ended.end == "finished" else ended.end,
        tail=_mask(tail(log) + complaint)[-TAIL_BYTES:].strip(),
        exit_code=ended.code,
        retried=ended.retried,
        seconds={"total": ended.seconds},
    )


def tail(log: Path) -> str:
    """The end of a log as text, more than TAIL_BYTES of it; empty where there is none."""
    try:
        with open(log, "rb") as file:
            # Twice what is kept: a secret that straddles the cut must be whole to be masked.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _masked(record: Record) -> Record:
    error = record.error
    if error is not None:
        error = dataclasses.replace(error, message=_mask(error.message))
    log = tuple(_mask(line) for line in record.log)
    return dataclasses.replace(record, error=error, log=log, tail=_mask(record.tail))


def _mask(text: str) -> str:
    return safe.mask(text, os.environ)


def end_of(code: int) -> str:
    """The `record.ENDS` word for an exit status."""
    return "signal" if code < 0 else "exit" if code > 0 else "finished"


class _Server:
    """One warm child process."""

    def __init__(self, request: Request, environ: Mapping[str, str], modules: Path, log: Path):
        self.log = log
        self.ready = False
        self.in_flight: dict[str, Request] = {}
        self.deadline = time.monotonic() + START_SECONDS
        with open(log, "wb") as stderr:
            self._process = subprocess.Popen(
                [
                    request.engine.python,
                    str(MAIN),
                    "serve",
                    str(request.model_path),
                    str(modules),
                ],
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=log.parent,
                # Ctrl-C is for the parent, which then ends its children in order.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self._buffer = b""

    def submit(self, request: Request, record: Path, log: Path) -> None:
        message = {
            "run": {
                "id": request.case.id,
                "model": request.case.model,
                "backend": request.case.backend,
                "kv_cache_dtype": request.case.kv_cache_dtype,
                "model_path": str(request.model_path),
                "depth": request.depth,
                "timeout": request.timeout,
                "record": str(record),
                "log": str(log),
            }
        }
        self.in_flight[request.case.id] = request
        self.touch(request.timeout)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end shows on its output
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def touch(self, timeout: float) -> None:
        """Move the deadline of the server itself behind that of a cell."""
        self.deadline = max(self.deadline, time.monotonic() + timeout + GRACE_SECONDS)

    def read(self) -> list[dict[str, Any]] | None:
        """The replies that have come; None where the server is gone."""
        try:
            data = os.read(self.output, 65536)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [reply for line in lines if (reply := _reply(line)) is not None]

    def close(self, seconds: float = 5.0) -> int:
        """End it and everything it runs; its exit status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill_group(self._process.pid)
            code = self._process.wait()
        self._process.stdout.close()
        return code


def _reply(line: bytes) -> dict[str, Any] | None:
    """The reply in a line; None for one that is none, which an engine printed in between."""
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Launcher:
    """Runs requests, up to `jobs` at a time, ahead of the one that is waited for."""

    def __init__(
        self,
        jobs: int,
        environ: Callable[[Request], Mapping[str, str]],
        modules: Callable[[Request], Path],
    ) -> None:
        self._jobs = max(1, jobs)
        self._environ = environ
        self._modules = modules
        self._scratch = Path(tempfile.mkdtemp(prefix="kvmatrix-"))
        self._queue: deque[Request] = deque()
        self._servers: dict[tuple[str, str], _Server] = {}
        self._dead: dict[tuple[str, str], tuple[Ended, Path]] = {}
        self._done: dict[tuple[str, str, str], Record] = {}
        self._select = selectors.DefaultSelector()

    def plan(self, requests: Iterable[Request]) -> None:
        """What is going to be asked for, in that order."""
        self._queue = deque(requests)

    def record(self, request: Request) -> Record:
        """The record of `request`, run now if it was not run ahead."""
        if request.key not in self._done and not self._running(request):
            with contextlib.suppress(ValueError):
                self._queue.remove(request)
            self._queue.appendleft(request)
        while request.key not in self._done:
            self._fill(request)
            if request.key not in self._done:
                self._wait()
        return self._done.pop(request.key)

    def close(self) -> None:
        """End every child and remove what they left on disk."""
        for server in self._servers.values():
            with contextlib.suppress(KeyError, ValueError):
                self._select.unregister(server.output)
            server.close()
        self._servers.clear()
        self._select.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _place(self, request: Request) -> tuple[str, str]:
        return (request.engine.python, request.device.spec)

    def _running(self, request: Request) -> bool:
        server = self._servers.get(self._place(request))
        return server is not None and request.case.id in server.in_flight

    def _files(self, request: Request) -> tuple[Path, Path]:
        name = "-".join((request.case.id, request.device.id, request.engine.version))
        return self._scratch / f"{name}.json", self._scratch / f"{name}.log"

    def _fill(self, wanted: Request) -> None:
        """Submit from the queue while there is room, but keep to one server: two warm children
        at once would fill the memory of a small machine."""
        while self._queue and self._place(self._queue[0]) == self._place(wanted):
            place = self._place(wanted)
            if place in self._dead:
                self._finish(self._queue.popleft(), *self._dead[place])
                continue
            server = self._servers.get(place)
            if server is None:
                server = self._start(wanted)
            if len(server.in_flight) >= self._jobs:
                return
            request = self._queue.popleft()
            server.submit(request, *self._files(request))

    def _start(self, request: Request) -> _Server:
        for place in list(self._servers):
            server = self._servers[place]
            if not server.in_flight:
                del self._servers[place]
                self._select.unregister(server.output)
                server.close()
        log = self._scratch / f"server-{len(self._dead)}-{time.monotonic_ns()}.log"
        server = _Server(request, self._environ(request), self._modules(request), log)
        self._servers[self._place(request)] = server
        self._select.register(server.output, selectors.EVENT_READ, self._place(request))
        return server

    def _wait(self) -> None:
        now = time.monotonic()
        first = min(server.deadline for server in self._servers.values())
        for key, _ in self._select.select(max(0.0, min(first - now, 5.0))):
            self._take(key.data)
        now = time.monotonic()
        for place, server in list(self._servers.items()):
            if server.in_flight and now > server.deadline:
                self._lose(place, "timeout")

    def _take(self, place: tuple[str, str]) -> None:
        server = self._servers[place]
        replies = server.read()
        if replies is None:
            self._lose(place, None)
            return
        for reply in replies:
            if "ready" in reply:
                server.ready = True
                server.deadline = time.monotonic()
                for request in server.in_flight.values():
                    server.touch(request.timeout)
            elif "done" in reply:
                done = reply["done"]
                request = server.in_flight.pop(done["id"])
                if done["verdict"] == "stuck":
                    self._done[request.key] = self.fresh(request, retried=True)
                    continue
                end = "timeout" if done["verdict"] == "timeout" else end_of(done["code"])
                code = None if end in ("finished", "timeout") else done["code"]
                self._finish(request, Ended(end, code, done["stage"], done["seconds"]), None)

    def _finish(self, request: Request, ended: Ended, log: Path | None) -> None:
        record, own_log = self._files(request)
        self._done[request.key] = observed(request, ended, record, log or own_log)
        for path in (record, own_log):
            path.unlink(missing_ok=True)

    def _lose(self, place: tuple[str, str], end: str | None) -> None:
        """A server is gone (`end` None) or hangs: its cells get records that say so."""
        server = self._servers.pop(place)
        self._select.unregister(server.output)
        code = server.close(0.0 if end else 5.0)
        ended = Ended(end or end_of(code), None if end else code, None, 0.0)
        if not server.ready:
            # It would not start for the next cell either: nobody waits for that twice.
            self._dead[place] = (ended, server.log)
        for request in server.in_flight.values():
            self._finish(request, ended, server.log)

    def fresh(self, request: Request, *, retried: bool = False) -> Record:
        """The record of `request` from an interpreter of its own, without a warm parent."""
        record, log = self._files(request)
        record.unlink(missing_ok=True)
        began = time.monotonic()
        case = request.case
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [
                    *(request.engine.python, str(MAIN), "cell"),
                    *(case.model, case.backend, case.kv_cache_dtype),
                    *(str(request.model_path), request.depth, str(record)),
                ],
                env=dict(self._environ(request)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._scratch,
                start_new_session=True,
            )
            try:
                code = process.wait(request.timeout + START_SECONDS)
                end = end_of(code)
            except subprocess.TimeoutExpired:
                end, code = "timeout", 0
            finally:
                _kill_group(process.pid)
                process.wait()
        seconds = round(time.monotonic() - began, 3)
        found = observed(
            request, Ended(end, code or None, None, seconds, retried=retried), record, log
        )
        for path in (record, log):
            path.unlink(missing_ok=True)
        return found
