"""The launcher: runs cells in children, a few at a time, and gives back one Record for each.

The parent never waits for ever: each cell has a deadline that its keeper keeps, and behind it
one that the launcher keeps for the child. Whatever becomes of a child, a Record comes back.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.child import Child
from harness.device import Device
from harness.guard import Guard
from harness.record import Record
from harness.request import Ended, Place, Request, end_of, infra, observed
from harness.scratch import Scratch

ISOLATIONS = ("fork", "spawn")
"""`fork`: one warm child per engine and device, forked per cell. `spawn`: a fresh interpreter per
cell."""


class Launcher:
    """Runs requests, up to `jobs(device)` at a time, ahead of the one that is waited for."""

    def __init__(
        self,
        jobs: Callable[[Device], int],
        environ: Callable[[Request], Mapping[str, str]],
        modules: Callable[[Request], Path],
        *,
        isolation: str = ISOLATIONS[0],
        guard: Guard | None = None,
    ) -> None:
        self._jobs = jobs
        self._environ = environ
        self._modules = modules
        self._isolation = isolation
        self._guard = Guard() if guard is None else guard
        self._scratch = Scratch()
        self._logs = 0
        self._queue: deque[Request] = deque()
        self._children: dict[int, Child] = {}
        self._dead: dict[Place, tuple[Ended, Path]] = {}
        self._cannot_fork: set[Place] = set()
        self._done: dict[tuple[str, ...], Record] = {}
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
        for child in self._children.values():
            child.finish()
        for output in list(self._children):
            self._drop(output).close()
        self._select.close()
        self._guard.close()
        self._scratch.close()

    def _running(self, request: Request) -> bool:
        return any(request in child.in_flight.values() for child in self._children.values())

    def _files(self, request: Request) -> tuple[Path, Path]:
        parts = (request.case.id, request.device.id, request.engine.version, request.depth)
        name = "-".join((*parts, request.model_path.name))
        return self._scratch.path / f"{name}.json", self._scratch.path / f"{name}.log"

    def _fill(self, wanted: Request) -> None:
        """Submit from the queue while there is room, but keep to one place: the warm children of
        two would fill the memory of a small machine."""
        place = wanted.place
        while self._queue and self._queue[0].place == place:
            if place in self._dead:
                self._finish(self._queue.popleft(), *self._dead[place])
                continue
            busy = sum(len(c.in_flight) for c in self._children.values() if c.place == place)
            if busy >= self._jobs(wanted.device):
                return
            request = self._queue.popleft()
            reason = self._guard.refuses(request, self._environ)
            if reason is not None:
                self._done[request.key] = infra(request, reason)
                continue
            self._guard.before(request.device)
            self._submit(self._child(request), request)

    def _child(self, request: Request) -> Child:
        """The child for one more cell of its place, started where there is none."""
        if self._isolation == "spawn" or request.place in self._cannot_fork:
            return self._start(request, warm=False)
        for child in self._children.values():
            if child.place == request.place and child.warm:
                return child
        return self._start(request, warm=True)

    def _submit(self, child: Child, request: Request) -> None:
        child.submit(request, *self._files(request), self._modules(request))

    def _start(self, request: Request, *, warm: bool) -> Child:
        for output, child in list(self._children.items()):
            if not child.in_flight and child.place != request.place:
                self._drop(output).close()
        self._logs += 1
        log = self._scratch.path / f"child-{self._logs}.log"
        environ = self._guard.environ(request, self._environ(request))
        child = Child(request, environ, log, warm=warm)
        self._children[child.output] = child
        self._select.register(child.output, selectors.EVENT_READ)
        return child

    def _drop(self, output: int) -> Child:
        self._select.unregister(output)
        return self._children.pop(output)

    def _wait(self) -> None:
        now = time.monotonic()
        first = min(child.deadline for child in self._children.values())
        for key, _ in self._select.select(max(0.0, min(first - now, 5.0))):
            self._take(key.fd)
        now = time.monotonic()
        for output, child in list(self._children.items()):
            if child.in_flight and now > child.deadline:
                self._lose(output, "timeout")

    def _take(self, output: int) -> None:
        child = self._children[output]
        replies = child.read()
        if replies is None:
            self._lose(output, None)
            return
        for reply in replies:
            if "ready" in reply:
                self._ready(child, reply["ready"])
            elif "done" in reply:
                self._end(child, reply["done"])
        if not child.warm and not child.in_flight:
            self._drop(output).close()

    def _ready(self, child: Child, told: dict[str, Any]) -> None:
        child.ready = True
        if not told.get("forks", True):
            # It ends by itself, and its cells are run in interpreters of their own.
            self._cannot_fork.add(child.place)
            self._queue.extendleft(reversed(child.in_flight.values()))
            child.in_flight.clear()
            return
        if child.warm:
            child.deadline = time.monotonic()
            for request in child.in_flight.values():
                child.touch(request.timeout)

    def _end(self, child: Child, done: dict[str, Any]) -> None:
        request = child.in_flight.pop(done["id"])
        if done["verdict"] == "stuck":
            # It hangs on a lock of the warm process: once more, without one.
            fresh = self._start(request, warm=False)
            fresh.retried = True
            self._submit(fresh, request)
            return
        end = "timeout" if done["verdict"] == "timeout" else end_of(done["code"])
        code = None if end in ("finished", "timeout") else done["code"]
        leaked = self._guard.after(request.device, request.case.id)
        ended = Ended(end, code, done["stage"], done["seconds"], child.retried, leaked)
        self._finish(request, ended, None)

    def _finish(self, request: Request, ended: Ended, log: Path | None) -> None:
        record, own_log = self._files(request)
        self._done[request.key] = observed(request, ended, record, log or own_log)
        for path in (record, record.with_suffix(".part"), own_log):
            path.unlink(missing_ok=True)

    def _lose(self, output: int, end: str | None) -> None:
        """A child is gone (`end` None) or hangs: its cells get records that say so."""
        child = self._drop(output)
        code = child.close(0.0) if end else child.close()
        ended = Ended(end or end_of(code), None if end else code)
        if child.warm and not child.ready:
            # It would not start for the next cell either: nobody waits for that twice.
            self._dead[child.place] = (ended, child.log)
        for request in child.in_flight.values():
            self._guard.after(request.device, request.case.id)
            self._finish(request, ended, child.log)
