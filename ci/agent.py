"""Calls of `buildkite-agent`, the only way to Buildkite that is meant for jobs.

No call raises, and none can fail a run: where the binary is absent, broken or hangs, `Told` says
so. The agent tries again by itself; each call has a time limit around that. Lists of arguments,
never a shell. What is told goes by stdin, since any process of the host can read arguments, and
with secrets masked; Buildkite's own redactor is for its log alone, and knows `*_TOKEN` already.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness import safe

BINARY = "buildkite-agent"

BODY_BYTES = 1 << 20
"""Most that an annotation may have; the agent itself refuses more."""

CONTEXT_CHARACTERS = 100
VALUE_BYTES = 100_000
"""Most that a value of the meta-data may have."""

STYLES = ("success", "info", "warning", "error")

ABSENT = 100
"""Exit code of `meta-data exists` for a key that is not there."""

SECONDS = 60.0
"""For one call. `annotate` retries 5 x 1 s and `meta-data get` 10 x 5 s."""

ARTIFACT_SECONDS = 300.0
"""For a transfer."""

_READ = 1 << 20
"""Bytes of an answer that are kept."""

_WHY = 300
"""Characters of what the agent says that are told."""


@dataclass(frozen=True)
class Told:
    """What became of a call."""

    ok: bool
    why: str = ""
    """A line; empty where it went well."""
    text: str = ""
    """What was asked for."""
    found: bool | None = None
    """Whether the key is there; None where that was not asked, or cannot be told."""


@dataclass(frozen=True)
class Agent:
    """The agent of this job."""

    environ: Mapping[str, str]
    """Whose secrets are masked; its PATH is where the binary is looked for."""
    seconds: float = SECONDS
    artifact_seconds: float = ARTIFACT_SECONDS

    @classmethod
    def here(cls) -> Agent:
        """That of this process."""
        return cls(dict(os.environ))

    def annotate(self, body: str, context: str, style: str) -> Told:
        """Show `body` (Markdown) in the build, in place of what `context` had before."""
        if not 0 < len(context) <= CONTEXT_CHARACTERS:
            return Told(
                False, f"annotate: a context has 1 to {CONTEXT_CHARACTERS} characters, not "
                f"{len(context)}"
            )  # fmt: skip
        if style not in STYLES:
            return Told(False, f"annotate: style {style!r} is none of {', '.join(STYLES)}")
        text = safe.mask(body, self.environ)
        if (size := len(_bytes(text))) > BODY_BYTES:
            return Told(False, f"annotate: {size} bytes are more than the {BODY_BYTES} that fit")
        return self._call(["annotate", "--context", context, "--style", style], text)

    def upload(self, pattern: str, seconds: float | None = None) -> Told:
        """Keep the files that match `pattern`, relative to the working folder, as artifacts."""
        return self._call(["artifact", "upload", pattern], limit=seconds or self.artifact_seconds)

    def download(
        self, pattern: str, folder: Path, step: str | None = None, build: str | None = None
    ) -> Told:
        """Fetch artifacts of this build, or of another one, of all parallel jobs of a step where
        one is named, into `folder`."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return Told(False, f"artifact download: {folder}: {error.strerror or error}")
        only = [*([] if step is None else ["--step", step])]
        only += [] if build is None else ["--build", build]
        return self._call(
            ["artifact", "download", pattern, str(folder), *only], limit=self.artifact_seconds
        )

    def set(self, key: str, value: str) -> Told:
        """Tell the rest of the build."""
        text = safe.mask(value, self.environ)
        if not text.strip():
            return Told(False, f"meta-data set: {key} has no value")
        if (size := len(_bytes(text))) > VALUE_BYTES:
            return Told(False, f"meta-data set: {size} bytes are more than {VALUE_BYTES}")
        return self._call(["meta-data", "set", key], text)

    def get(self, key: str) -> Told:
        """What was told, as `text`."""
        return self._call(["meta-data", "get", key])

    def exists(self, key: str) -> Told:
        """Whether `key` was told, as `found`."""
        told = self._call(["meta-data", "exists", key], answers=(0, ABSENT))
        return Told(told.ok, told.why, found=told.text == "0") if told.ok else told

    def _call(
        self,
        arguments: list[str],
        body: str = "",
        limit: float | None = None,
        answers: tuple[int, ...] = (0,),
    ) -> Told:
        """Run the agent. With several `answers` the text is the exit code that was given."""
        # The first arguments name what is done; a pattern or a key may be anything.
        title = " ".join(arguments[: 1 if arguments[0] == "annotate" else 2])
        limit = self.seconds if limit is None else limit
        binary = shutil.which(BINARY, path=self.environ.get("PATH", os.defpath))
        if binary is None:
            return Told(False, f"{title}: no {BINARY} on PATH that can be run")
        try:
            code, out, error = _run([binary, *arguments], _bytes(body), limit, self.environ)
        except (OSError, ValueError) as trouble:
            what = getattr(trouble, "strerror", None) or str(trouble)
            return Told(False, f"{title}: {self._line(f'{binary}: {what}')}")
        if code is None:
            return Told(False, f"{title}: {BINARY} gave no answer in {limit:g} s")
        if code not in answers:
            said = self._line(error.strip() or out.strip()) or "nothing"
            how = f"exited with {code}" if code >= 0 else f"was ended by signal {-code}"
            return Told(False, f"{title}: {BINARY} {how}: {said}")
        if len(_bytes(out)) >= _READ:
            return Told(False, f"{title}: {BINARY} said more than {_READ} bytes")
        return Told(True, text=out.rstrip("\n") if len(answers) == 1 else str(code))

    def _line(self, text: str) -> str:
        """What the agent says, safe to show: its last lines tell why."""
        masked = safe.printable(safe.mask(text[-4 * _WHY :], self.environ))
        return safe.clip(masked, _WHY)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")


def _run(
    command: list[str], body: bytes, limit: float, environ: Mapping[str, str]
) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr, as far as they are kept; the code is None past `limit` seconds,
    when the command and its whole group are killed."""
    until = time.monotonic() + limit
    with tempfile.TemporaryFile() as source:
        source.write(body)
        source.seek(0)
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            start_new_session=True,
        )
    assert process.stdout is not None and process.stderr is not None
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    try:
        with process.stdout, process.stderr:
            _read(process, kept, until)
            out, error = (bytes(said).decode("utf-8", errors="replace") for said in kept.values())
        return process.wait(max(0.0, until - time.monotonic())), out, error
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        # What it may have left behind as well.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(
    process: subprocess.Popen[bytes], kept: Mapping[IO[bytes], bytearray], until: float
) -> None:
    """Read until all pipes end, or the process has and left them to another, or time is up."""
    with selectors.DefaultSelector() as select:
        for pipe in kept:
            select.register(pipe, selectors.EVENT_READ, kept[pipe])
        while select.get_map():
            ended = process.poll() is not None
            left = until - time.monotonic()
            if left <= 0:
                return
            ready = select.select(0 if ended else min(left, 0.2))
            if ended and not ready:
                return
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if chunk:
                    # What is beyond is read too, so that the agent does not wait for a reader.
                    key.data.extend(chunk[: _READ - len(key.data)])
                else:
                    select.unregister(key.fileobj)
