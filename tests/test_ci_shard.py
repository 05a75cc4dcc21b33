"""`python -m ci.shard` as a CI machine starts it, with a planted engine and a stand-in agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ci import shard
from ci.shard import check, exit_code, shard_of
from harness import durations
from harness.errors import UsageError
from harness.shard import Shard
from tests.chaos.planted import plant

ROOT = Path(__file__).resolve().parent.parent

AGENT = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$2" in
upload) ls {folder}/shards/* >> {folder}/uploaded ;;
download) test ! -e {folder}/recorded.json || cp {folder}/recorded.json "$4/durations.json" ;;
esac
"""


def environ(folder: Path, script: str | None = AGENT, **more: str) -> dict[str, str]:
    """The environment of a job whose agent is `script`; None for no agent."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    if script is not None:
        (binaries / "buildkite-agent").write_text(script.format(folder=folder))
        (binaries / "buildkite-agent").chmod(0o755)
    mine = {k: v for k, v in os.environ.items() if not k.startswith("BUILDKITE")}
    cache = str(folder / "cache")
    path = f"{binaries}:/usr/bin:/bin"
    return {**mine, "KVMATRIX_CACHE": cache, "TMPDIR": str(folder), "PATH": path, **more}


def command(python: Path, *arguments: str, own: tuple[str, ...] = ()) -> list[str]:
    return [
        *(sys.executable, "-m", "ci.shard", "--step", "nightly", f"--out={python.parent}/shards"),
        *(*own, "--", f"--engine={python}", "--device=virtual:h200", "--case-timeout=30"),
        *arguments,
    ]


def run(
    python: Path,
    *arguments: str,
    own: tuple[str, ...] = (),
    script: str | None = AGENT,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(python, *arguments, own=own),
        cwd=ROOT,
        env=environ(python.parent, script, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout
    return done


def matrix(python: Path, index: int) -> dict[str, Any]:
    text = (python.parent / "shards" / f"nightly-{index}" / "matrix.json").read_text()
    return dict(json.loads(text))


THREE = "dsv4-default-fine or dsv4-default-daemon or dsv4-pro-default-fine"
"""Three cells that pass."""


def test_a_parallel_job_runs_its_part_and_uploads_it(tmp_path: Path) -> None:
    python = plant(tmp_path)
    ids = []
    for job in (0, 1):
        buildkite = {"BUILDKITE_PARALLEL_JOB": str(job), "BUILDKITE_PARALLEL_JOB_COUNT": "2"}
        done = run(python, "-k", THREE, **buildkite)
        assert 0 == done.returncode, done.stdout
        found = matrix(python, job + 1)
        assert {"index": job + 1, "count": 2, "durations": None} == found["run"]["shard"]
        ids += [cell["id"] for cell in found["cells"]]
    assert [
        f"artifact upload {tmp_path}/shards/nightly-{n}/**/*" for n in (1, 2)
    ] == (tmp_path / "calls").read_text().splitlines()  # fmt: skip
    assert ["dsv4-default-daemon", "dsv4-default-fine", "dsv4-pro-default-fine"] == sorted(ids)


def test_failures_exit_with_1_and_are_uploaded_too(tmp_path: Path) -> None:
    python = plant(tmp_path)
    done = run(python, "-k", "dsv4-default-segfault")
    assert 1 == done.returncode, done.stdout
    assert "shard" not in matrix(python, 1)["run"]
    assert "matrix.json" in (tmp_path / "uploaded").read_text()


@pytest.mark.parametrize("more", [(), ("-n", "2")])
def test_a_shard_without_a_cell_passes_and_says_so(tmp_path: Path, more: tuple[str, ...]) -> None:
    python = plant(tmp_path)
    done = run(python, "-k", "dsv4-default-fine", *more, own=("--shard", "2/2"))
    assert 0 == done.returncode, done.stdout
    found = matrix(python, 2)
    assert [] == found["cells"]
    assert {"index": 2, "count": 2, "durations": None} == found["run"]["shard"]
    assert "matrix.json" in (tmp_path / "uploaded").read_text()


@pytest.mark.parametrize("own", [(), ("--shard", "2/2")])
def test_an_expression_that_selects_nothing_is_a_usage_error(
    tmp_path: Path, own: tuple[str, ...]
) -> None:
    done = run(plant(tmp_path), "-k", "dsv4-nothing-like-it", own=own)
    assert 2 == done.returncode, done.stdout
    assert "kvmatrix: no cell is selected, in no shard" in done.stdout


@pytest.mark.parametrize("script", [None, "#!/bin/sh\necho no token >&2\nexit 1\n"])
def test_without_an_agent_the_run_is_what_it_is(tmp_path: Path, script: str | None) -> None:
    python = plant(tmp_path)
    done = run(python, "-k", "dsv4-default-fine", script=script)
    assert 0 == done.returncode, done.stdout
    assert f"; the files stay in {tmp_path}/shards/nightly-1" in done.stdout
    assert 1 == len(matrix(python, 1)["cells"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_cancelled_shard_still_uploads(tmp_path: Path, number: signal.Signals) -> None:
    python = plant(tmp_path)
    process = subprocess.Popen(
        command(python, "-k", "dsv4-default-fine or dsv4-default-hang", own=("--grace=60",)),
        cwd=ROOT,
        env=environ(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A job of a shell that is in the background ignores SIGINT, and so would this one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    records = tmp_path / "shards" / "nightly-1" / "records.jsonl"
    until = time.monotonic() + 60
    while not (records.exists() and records.stat().st_size) and time.monotonic() < until:
        os.sched_yield()
    # As an agent does, the whole group; and it may do so again.
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=90)
    assert 128 + number == process.returncode, out
    assert f"kvmatrix: cancelled by {number.name}" in out
    verdicts = {cell["id"]: cell["verdict"] for cell in matrix(python, 1)["cells"]}
    assert {"dsv4-default-fine": "rejected", "dsv4-default-hang": "notrun"} == verdicts
    # pytest was told once, and so came to write everything.
    assert "junit.xml" in (tmp_path / "uploaded").read_text()


DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({file!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""


def test_a_pytest_that_does_not_end_is_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pid"
    with shard.Cancel() as cancel:
        code = cancel.wait([sys.executable, "-c", DEAF.format(file=str(file))], 0.5)
    assert (-signal.SIGKILL, signal.SIGTERM) == (code, cancel.signal)
    assert not Path(f"/proc/{file.read_text()}").exists()
    assert "pytest has not ended 0.5 s after SIGTERM: it is killed" in capfd.readouterr().out


def test_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with shard.Cancel():
        assert before != signal.getsignal(signal.SIGTERM)
    assert before == signal.getsignal(signal.SIGTERM)


# ---- Durations -----------------------------------------------------------------------------------


def record(folder: Path, name: str) -> str:
    """Durations by which `fine` takes as long as the two others together; their digest."""
    import hashlib

    seconds = {"dsv4-default-fine": 20.0, "dsv4-default-daemon": 9.0, "dsv4-pro-default-fine": 9.0}
    text = durations.dumps({(n, "virtual_h200", "0.29.0"): s for n, s in seconds.items()})
    (folder / name).write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("own", [("--durations={}/recorded.json",), ("--durations-step=plan",)])
def test_recorded_durations_decide_who_runs_what(tmp_path: Path, own: tuple[str, ...]) -> None:
    python = plant(tmp_path)
    digest = record(tmp_path, "recorded.json")
    own = tuple(each.format(tmp_path) for each in own)
    done = run(python, "-k", THREE, own=("--shard=1/2", *own))
    assert 0 == done.returncode, done.stdout
    found = matrix(python, 1)
    assert ["dsv4-default-fine"] == [cell["id"] for cell in found["cells"]]
    assert digest == found["run"]["shard"]["durations"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "recorded.json: No such file or directory"),
        ("{", "recorded.json: not JSON"),
        ('{"schema": 99}', "recorded.json: schema 99 is not 1"),
    ],
)
def test_durations_that_cannot_be_read_are_named(
    tmp_path: Path, text: str | None, words: str
) -> None:
    python = plant(tmp_path)
    if text is not None:
        (tmp_path / "recorded.json").write_text(text)
    own = ("--shard=1/2", f"--durations={tmp_path}/recorded.json")
    done = run(python, "-k", THREE, own=own)
    assert 0 == done.returncode, done.stdout
    lines = [line for line in done.stdout.splitlines() if words in line]
    assert 1 == len(lines), done.stdout
    assert "split by estimates" in lines[0]
    assert matrix(python, 1)["run"]["shard"]["durations"] is None


def test_a_step_without_durations_is_no_failure(tmp_path: Path) -> None:
    """As on the first night."""
    python = plant(tmp_path)
    done = run(python, "-k", THREE, own=("--shard=1/2", "--durations-step=plan"))
    assert 0 == done.returncode, done.stdout
    assert "step plan has no durations.json; the shard is split by estimates" in done.stdout


# ---- Test Engine ---------------------------------------------------------------------------------

COLLECTOR = """
import json, os

class Collector:
    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":
            tags = dict(mark.args for mark in item.iter_markers("execution_tag"))
            with open(os.environ["TAGS"], "a") as file:
                file.write(json.dumps(tags) + "\\n")

def pytest_configure(config):
    config.addinivalue_line("markers", "execution_tag(key, value): a tag")
    config.pluginmanager.register(Collector(), "buildkite-test-collector")
"""


def collected(tmp_path: Path, token: str) -> tuple[str, Path]:
    python = plant(tmp_path)
    (tmp_path / "buildkite_test_collector.py").write_text(COLLECTOR)
    more = {"PYTHONPATH": str(tmp_path), "TAGS": str(tmp_path / "tags")}
    done = run(
        *(python, "-p", "buildkite_test_collector", "-k"),
        "dsv4-default-fine or dsv4-default-secret",
        **more,
        BUILDKITE_ANALYTICS_TOKEN=token,
    )
    assert 1 == done.returncode, done.stdout
    return done.stdout, tmp_path / "tags"


def test_the_collector_is_told_verdict_and_known_apart(tmp_path: Path) -> None:
    token = "analytics-0123456789"
    out, tags = collected(tmp_path, token)
    told = [json.loads(line) for line in tags.read_text().splitlines()]
    assert ["crashed", "rejected"] == sorted(each["kvmatrix.verdict"] for each in told)
    assert {"no"} == {each["kvmatrix.known"] for each in told}
    files = [path for path in (tmp_path / "shards").rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not [path for path in files if token in path.read_text(errors="replace")]
    assert token not in out


@pytest.mark.parametrize("token", ["", "analytics 0123456789\n"])
def test_without_a_token_nothing_is_collected(tmp_path: Path, token: str) -> None:
    out, tags = collected(tmp_path, token)
    assert not tags.exists()
    assert "0123456789" not in out
    assert bool(token) == ("nothing is sent to Test Engine" in out)


# ---- What it is told -----------------------------------------------------------------------------


def test_buildkite_counts_jobs_from_0() -> None:
    job = {"BUILDKITE_PARALLEL_JOB": "2", "BUILDKITE_PARALLEL_JOB_COUNT": "3"}
    assert Shard(3, 3) == shard_of(None, job)
    assert Shard(1, 1) == shard_of(None, {})
    # What is said outweighs what is there.
    assert Shard(1, 2) == shard_of("1/2", job)


@pytest.mark.parametrize(
    ("job", "count"), [("3", "3"), ("-1", "3"), ("x", "3"), ("0", ""), ("", "3"), ("0", "0")]
)
def test_a_job_that_cannot_be_is_named(job: str, count: str) -> None:
    environ = {"BUILDKITE_PARALLEL_JOB": job, "BUILDKITE_PARALLEL_JOB_COUNT": count}
    with pytest.raises(UsageError, match=r"BUILDKITE_PARALLEL_JOB=.*pass --shard I/N"):
        shard_of(None, environ)


@pytest.mark.parametrize("step", ["", "a/b", "../x", "a b", ".", "$x"])
def test_a_key_that_names_no_folder_is_refused(step: str) -> None:
    with pytest.raises(UsageError, match="--step"):
        check(step, [])


@pytest.mark.parametrize("argument", ["--shard", "--shard=1/2", "--matrix-out=x"])
def test_what_this_command_passes_is_not_passed_twice(argument: str) -> None:
    with pytest.raises(UsageError, match="leave it out"):
        check("nightly", ["-k", "x", argument])


@pytest.mark.parametrize(
    ("code", "cancelled", "found"),
    [
        *[(0, None, 0), (1, None, 1), (2, None, 2), (75, None, 75)],
        *[(3, None, 2), (4, None, 2), (5, None, 2), (-9, None, 75), (-11, None, 75)],
        # A result that was there before the signal came is one.
        *[(0, 15, 0), (1, 15, 1), (75, 15, 75)],
        *[(2, 15, 143), (-9, 15, 143), (2, 2, 130)],
    ],
)
def test_exit_codes(code: int, cancelled: int | None, found: int) -> None:
    assert found == exit_code(code, cancelled)[0]


def test_what_an_earlier_run_left_is_not_uploaded_as_this_ones(tmp_path: Path) -> None:
    python = plant(tmp_path)
    old = tmp_path / "shards" / "nightly-1"
    old.mkdir(parents=True)
    (old / "matrix.json").write_text("{}")
    done = run(python, "--depth=nonsense")
    assert 2 == done.returncode, done.stdout
    assert not (old / "matrix.json").exists()


def test_help_tells_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        shard.main(["--help"])
    out = capsys.readouterr().out
    for word in ("python -m ci.shard --step", "--durations-step", "exit code:", "75", "143"):
        assert word in out


@pytest.mark.parametrize("more", [["--grace=-1"], ["--grace=nan"], ["--shard=3/2"]])
def test_bad_input_is_one_line(more: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert 2 == shard.main(["--step", "nightly", *more])
    assert 1 == len(capfd.readouterr().err.splitlines())
