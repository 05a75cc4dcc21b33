"""A child process that serves cells, as the parent sees it: the other end of `engine/server.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.request import Request

MAIN = Path(__file__).parent / "engine" / "__main__.py"

START_SECONDS = 300.0
"""Warming up takes 10-40 s (vLLM's imports, model inspection once); on a cold disk more."""

GRACE_SECONDS = 30.0
"""What a child gets beyond its cells' deadlines before it counts as hung itself: a keeper needs
up to 2 s for TERM and KILL, and up to 10 s for what a cell left behind."""

CLOSE_SECONDS = 15.0
"""How long a child may take to end its cells when it is closed."""


class Child:
    """One process that runs cells: a warm one that forks (`serve`), or one that runs a single
    cell in an interpreter of its own (`once`)."""

    def __init__(
        self, request: Request, environ: Mapping[str, str], log: Path, *, warm: bool
    ) -> None:
        """A `warm` child forks a process per cell; any other runs one cell itself."""
        self.place = request.place
        self.log = log
        self.warm = warm
        self.ready = False
        self.retried = False
        self.in_flight: dict[str, Request] = {}
        """What it has been sent and has not told the end of, by the name that replies use."""
        self._sent = 0
        self.deadline = time.monotonic() + START_SECONDS
        with open(log, "wb") as stderr:
            self._process = subprocess.Popen(
                [request.engine.python, str(MAIN), "serve" if warm else "once"],
                # vLLM leaves a file per start in the temporary folder; here it goes with the run.
                env={**environ, "TMPDIR": str(log.parent)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=log.parent,
                # Ctrl-C is for the parent, which then ends its children in order.
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input = self._process.stdin
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self._buffer = b""

    def submit(self, request: Request, record: Path, log: Path, modules: Path) -> None:
        """Send one request; its record and its log go to these files, and `modules` keeps between
        runs what its cell imports."""
        # Two requests of one case may be under way, for the full and for the reduced model.
        self._sent += 1
        name = str(self._sent)
        message = {
            "run": {
                "id": name,
                "case": asdict(request.case),
                "engine_args": dict(request.engine_args),
                "modules": str(modules),
                "model_path": str(request.model_path),
                "depth": request.depth,
                "timeout": request.timeout,
                "record": str(record),
                "log": str(log),
            }
        }
        self.in_flight[name] = request
        # Where the cell itself imports vLLM, that comes before what it may take.
        self.touch(request.timeout + (0.0 if self.warm else START_SECONDS))
        with contextlib.suppress(BrokenPipeError):  # its end shows on its output
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    def touch(self, timeout: float) -> None:
        """Move the deadline of the child itself behind that of a cell."""
        self.deadline = max(self.deadline, time.monotonic() + timeout + GRACE_SECONDS)

    def read(self) -> list[dict[str, Any]] | None:
        """The replies that have come; None where the child is gone."""
        try:
            data = os.read(self.output, 65536)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [reply for line in lines if (reply := _reply(line)) is not None]

    def finish(self) -> None:
        """Ask it to end with what it runs, without waiting."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def close(self, seconds: float = CLOSE_SECONDS) -> int:
        """End it and everything it runs; its exit status."""
        self.finish()
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            # Its keepers are told by the kernel, and end their cells.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code


def _reply(line: bytes) -> dict[str, Any] | None:
    """The reply in a line; None for one that is none, which an engine printed in between."""
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None
