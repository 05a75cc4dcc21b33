"""The server of cells: a warm process that forks one keeper, and so one cell, per request.

Protocol: one JSON object a line. In (stdin): `{"run": {...}}` per cell, as many at a time as the
parent likes; end of input ends the server and whatever it runs. Out (a descriptor of its own, so
that nothing printed by vLLM can get into it): `{"ready": {...}}` once, then `{"done": {...}}` per
cell. A cell's record goes to a file, written whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.engine import keeper
from harness.engine.keeper import Keeper, Tell
from harness.engine.processes import adopt_orphans, die_with_parent, sweep
from harness.record import Record, dumps

Body = Callable[[dict[str, Any], Tell], None]
"""What a cell does with its request."""


class Server:
    """Runs requests until its input ends."""

    def __init__(
        self,
        body: Body,
        replies: int,
        *,
        warm: bool,
        before: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`warm` where this process has imported vLLM; `before` is told of each
        cell before it runs."""
        self._body = body
        self._replies = replies
        self._warm = warm
        self._before = before
        self._cells: dict[int, tuple[str, Keeper, bytes]] = {}
        self._select = selectors.DefaultSelector()
        self._buffer = b""
        self._open = True

    def say(self, message: dict[str, Any]) -> None:
        """One message to the parent."""
        os.write(self._replies, json.dumps(message).encode() + b"\n")

    def serve(self) -> None:
        """Run until stdin ends; then end what still runs."""
        die_with_parent()
        # A keeper that is killed itself cannot sweep: then it is done here.
        adopt_orphans()
        os.set_blocking(0, False)
        self._select.register(0, selectors.EVENT_READ)
        while self._open:
            for key, _ in self._select.select():
                if key.fd == 0:
                    self._read_requests()
                else:
                    self._read_keeper(key.fd)
        for _, cell, _ in self._cells.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(cell.pid, signal.SIGTERM)
        for _, cell, _ in self._cells.values():
            os.waitpid(cell.pid, 0)

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
        if self._before is not None:
            self._before(request)
        cell = keeper.start(
            lambda tell: self._body(request, tell),
            Path(request["log"]),
            request["timeout"],
            warm=self._warm,
            # Nothing that vLLM prints, in whatever process, may get between the replies.
            close=(self._replies, *self._cells),
        )
        self._cells[cell.pipe] = (request["id"], cell, b"")
        self._select.register(cell.pipe, selectors.EVENT_READ)

    def _read_keeper(self, pipe: int) -> None:
        name, cell, told = self._cells[pipe]
        data = os.read(pipe, 4096)
        if data:
            self._cells[pipe] = (name, cell, told + data)
            return
        self._select.unregister(pipe)
        os.close(pipe)
        del self._cells[pipe]
        _, status = os.waitpid(cell.pid, 0)
        if told:
            ended = json.loads(told)
        else:
            code = os.waitstatus_to_exitcode(status)
            ended = {"code": code or 70, "verdict": None, "stage": None, "seconds": 0.0}
            sweep({other.pid for _, other, _ in self._cells.values()})
        self.say({"done": {"id": name, **ended}})


def write_record(record: Record, path: Path) -> None:
    """Put the record at `path` whole or not at all. OSError where the disk does not take it."""
    temporary = path.with_suffix(".part")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
