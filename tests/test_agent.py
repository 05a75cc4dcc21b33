"""Calls of buildkite-agent, with stand-ins for the binary: whatever it does, a call comes back."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from ci.agent import BODY_BYTES, VALUE_BYTES, Agent, Told

RECORDS = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/argv
cat > {folder}/stdin
"""


def agent(folder: Path, script: str | None, mode: int = 0o755, **more: str) -> Agent:
    """An agent whose binary is `script`; None for no binary."""
    if script is not None:
        binary = folder / "buildkite-agent"
        binary.write_text(script.format(folder=folder))
        binary.chmod(mode)
    path = f"{folder}:/usr/bin:/bin"
    return Agent({"PATH": path, **more}, seconds=1.0, artifact_seconds=1.0)


def argv(folder: Path) -> list[str]:
    return (folder / "argv").read_text().splitlines()


def test_an_annotation_goes_by_stdin(tmp_path: Path) -> None:
    body = "# *2* new\n" + "é" * 200_000
    assert Told(True) == agent(tmp_path, RECORDS).annotate(body, "kvmatrix", "error")
    assert ["annotate", "--context", "kvmatrix", "--style", "error"] == argv(tmp_path)
    assert body == (tmp_path / "stdin").read_text(encoding="utf-8")


def test_nothing_is_given_to_a_shell(tmp_path: Path) -> None:
    told = agent(tmp_path, RECORDS).upload("$(touch no); `x` & *")
    assert told.ok
    assert ["artifact", "upload", "$(touch no); `x` & *"] == argv(tmp_path)


def test_secrets_are_masked_in_what_is_told(tmp_path: Path) -> None:
    here = agent(tmp_path, RECORDS, BUILDKITE_ANALYTICS_TOKEN="s3cr3tvalue")
    assert here.annotate("token s3cr3tvalue and hf_abcdefghijklmnopqrstuv", "c", "info").ok
    assert "token *** and ***" == (tmp_path / "stdin").read_text()
    assert here.set("key", "s3cr3tvalue").ok
    assert ["meta-data", "set", "key"] == argv(tmp_path)
    assert "***" == (tmp_path / "stdin").read_text()


def test_secrets_are_masked_in_what_the_agent_says(tmp_path: Path) -> None:
    script = "#!/bin/sh\nprintf 'bad \\033[31mtoken s3cr3tvalue' >&2\nexit 1\n"
    here = agent(tmp_path, script, BUILDKITE_AGENT_ACCESS_TOKEN="s3cr3tvalue")
    told = here.upload("x")
    assert not told.ok
    assert "artifact upload: buildkite-agent exited with 1: bad \\x1b[31mtoken ***" == told.why


@pytest.mark.parametrize(
    ("body", "context", "style", "why"),
    [
        ("x" * (BODY_BYTES + 1), "c", "info", f"{BODY_BYTES + 1} bytes are more than"),
        # Bytes count, not characters.
        ("é" * (BODY_BYTES // 2 + 1), "c", "info", f"{BODY_BYTES + 2} bytes are more than"),
        ("x", "c" * 101, "info", "1 to 100 characters, not 101"),
        ("x", "", "info", "1 to 100 characters, not 0"),
        ("x", "c", "red", "style 'red' is none of success, info, warning, error"),
    ],
)
def test_what_buildkite_would_refuse_is_not_sent(
    tmp_path: Path, body: str, context: str, style: str, why: str
) -> None:
    told = agent(tmp_path, RECORDS).annotate(body, context, style)
    assert not told.ok
    assert why in told.why
    assert not (tmp_path / "argv").exists()


def test_what_just_fits_is_sent(tmp_path: Path) -> None:
    assert agent(tmp_path, RECORDS).annotate("x" * BODY_BYTES, "c" * 100, "success").ok
    assert agent(tmp_path, RECORDS).set("k", "x" * VALUE_BYTES).ok
    assert not agent(tmp_path, RECORDS).set("k", "x" * (VALUE_BYTES + 1)).ok


def test_artifacts_are_fetched_of_one_step(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    assert agent(tmp_path, RECORDS).download("shards/**", folder, "h200").ok
    assert ["artifact", "download", "shards/**", str(folder), "--step", "h200"] == argv(tmp_path)
    assert folder.is_dir()
    (tmp_path / "file").touch()
    told = agent(tmp_path, RECORDS).download("x", tmp_path / "file" / "folder")
    assert "Not a directory" in told.why


def test_meta_data_is_read(tmp_path: Path) -> None:
    told = agent(tmp_path, "#!/bin/sh\necho noise >&2\necho value\n").get("key")
    assert Told(True, text="value") == told


@pytest.mark.parametrize(
    ("code", "ok", "found"), [(0, True, True), (100, True, False), (1, False, None)]
)
def test_a_key_that_is_absent_is_no_failure(
    tmp_path: Path, code: int, ok: bool, found: bool | None
) -> None:
    told = agent(tmp_path, f"#!/bin/sh\nexit {code}\n").exists("key")
    assert (ok, found) == (told.ok, told.found)


@pytest.mark.parametrize(
    ("script", "mode", "why"),
    [
        (None, 0, "no buildkite-agent on PATH that can be run"),
        ("#!/bin/sh\n", 0o644, "no buildkite-agent on PATH that can be run"),
        ("#!/nowhere/sh\n", 0o755, "No such file or directory"),
        ("\x00\x01", 0o755, "Exec format error"),
        ("#!/bin/sh\nexit 3\n", 0o755, "exited with 3: nothing"),
        ("#!/bin/sh\necho why\necho ; exit 1\n", 0o755, "exited with 1: why"),
        ("#!/bin/sh\nkill -9 $$\n", 0o755, "was ended by signal 9"),
        ("#!/bin/sh\nsleep 600\n", 0o755, "gave no answer in 1 s"),
        ("#!/bin/sh\nexec >&- 2>&-\nsleep 600\n", 0o755, "gave no answer in 1 s"),
        ("#!/bin/sh\ntrap '' TERM\nwhile :; do echo x; done\n", 0o755, "gave no answer in 1 s"),
        ("#!/bin/sh\nhead -c 3000000 /dev/zero\n", 0o755, "said more than 1048576 bytes"),
        ("#!/bin/sh\nhead -c 3000000 /dev/zero >&2\nexit 1\n", 0o755, "exited with 1: "),
    ],
)
def test_a_broken_agent_is_one_line(
    tmp_path: Path, script: str | None, mode: int, why: str
) -> None:
    told = agent(tmp_path, script, mode).get("key")
    assert not told.ok
    assert told.why.startswith("meta-data get: ")
    assert why in told.why
    assert 1 == len(told.why.splitlines())
    assert len(told.why) < 600


def test_what_an_agent_leaves_running_is_ended(tmp_path: Path) -> None:
    """It keeps the pipes open, and may not be waited for."""
    told = agent(tmp_path, "#!/bin/sh\nsleep 600 & echo $! > {folder}/pid\necho done\n").get("key")
    assert Told(True, text="done") == told
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while running(pid) and time.monotonic() < until:
        os.sched_yield()
    assert not running(pid)


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
