"""A night from one end to the other: pipeline, shards in processes of their own, merge, annotation.

Buildkite's part is played by this test: it gives each job its environment, runs the commands that
the pipeline has, and uploads artifact paths; `buildkite-agent` is a stub on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ci import pipeline, settings
from tests import stub_agent
from tests.chaos.planted import plant

ROOT = Path(__file__).resolve().parent.parent
SHARDS = 3

SETTINGS = """\
python: "{python}"
nightly:
  steps:
    - key: h200
      queue: gpus
      devices: ["virtual:h200"]
      engine: "{engine}"
      pytest: -k "{chosen}"
      parallelism: 3
      timeout_in_minutes: 10
merge:
  key: merge
  queue: cpus
  history: "{history}"
  owners: ["@vllm-project/kv-cache"]
"""


class Night:
    """A checkout, an agent, and builds."""

    def __init__(self, folder: Path, chosen: str) -> None:
        self.folder = folder
        self.home = folder / "checkout"
        self.home.mkdir()
        self.build, self.branch = "build-1", "main"
        for part in ("conftest.py", "pyproject.toml", "cases", "ci", "harness", "tests"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, self.home / part)
        engine = plant(folder)
        text = SETTINGS.format(
            python=sys.executable, engine=engine, chosen=chosen, history=folder / "history"
        )
        self.steps = {
            step["key"]: step for step in pipeline.pipeline(settings.load(text), "nightly")["steps"]
        }
        stub_agent.install(folder / "bin", folder / "store")

    def begin(self, key: str, job: int | None = None) -> subprocess.Popen[str]:
        """Start a job of the step as the agent does: its commands in a shell of their own group."""
        step = self.steps[key]
        environ = {
            **os.environ,
            **step.get("env", {}),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "KVMATRIX_CACHE": str(self.folder / "cache"),
            "TMPDIR": str(self.folder),
            "BUILDKITE_BRANCH": self.branch,
            "BUILDKITE_BUILD_ID": self.build,
            "BUILDKITE_ARTIFACT_PATHS": ";".join(step.get("artifact_paths", ())),
        }
        if job is not None:
            environ["BUILDKITE_PARALLEL_JOB"] = str(job)
            environ["BUILDKITE_PARALLEL_JOB_COUNT"] = str(step["parallelism"])
        return subprocess.Popen(
            # The upload of the pipeline has made one $ of two.
            ["sh", "-e", "-c", "\n".join(step["commands"]).replace("$$", "$")],
            cwd=self.home,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, key: str, job: int | None = None) -> tuple[int, str]:
        process = self.begin(key, job)
        out, _ = process.communicate(timeout=200)
        return process.returncode, out

    def keep(self) -> None:
        """What the agent does when a job ends, however it did: upload its artifact paths."""
        store = self.folder / "store" / "artifacts"
        shutil.copytree(self.home / "shards", store / "shards", dirs_exist_ok=True)
        shutil.rmtree(self.home / "shards")

    def annotation(self) -> tuple[list[str], str]:
        return [call for call in stub_agent.calls(self.folder / "store") if "annotate" in call[0]][
            -1
        ]

    def told(self) -> dict[str, str]:
        found = stub_agent.calls(self.folder / "store")
        return {call[0][2]: call[1] for call in found if call[0][:2] == ["meta-data", "set"]}

    def next(self) -> None:
        """The next build: nothing of this one is left but the history."""
        self.build += "1"
        shutil.rmtree(self.folder / "store")
        shutil.rmtree(self.home / "matrix")
        stub_agent.install(self.folder / "bin", self.folder / "store")

    def matrix(self) -> dict[str, Any]:
        return json.loads((self.home / "matrix" / "matrix.json").read_text())  # type: ignore[no-any-return]


CHOSEN = " or ".join(f"dsv4-default-{act}" for act in ("fine", "half", "os_exit", "segfault"))


def test_a_night_with_a_shard_that_is_killed(tmp_path: Path) -> None:
    night = Night(tmp_path, f"{CHOSEN} or dsv4-default-hang")
    jobs = [night.begin("h200", job) for job in range(SHARDS)]
    victim = _holder(night, "hang")
    _until(lambda: (night.home / "shards" / f"h200-{victim + 1}" / "matrix.json").exists())
    os.killpg(jobs[victim].pid, signal.SIGKILL)
    ends = [(job.communicate(timeout=200)[0], job.returncode) for job in jobs]
    assert -signal.SIGKILL == ends[victim][1]
    assert {0, 1} >= {code for at, (_, code) in enumerate(ends) if at != victim}, ends
    night.keep()

    code, out = night.run("merge")
    data = night.matrix()
    verdicts = {cell["id"]: cell["verdict"] for cell in data["cells"]}
    assert 5 == len(verdicts)
    assert "notrun" == verdicts["dsv4-default-hang"]
    assert "crashed" in verdicts.values()
    # There is no earlier night, so every failure counts.
    assert 1 == code, out
    arguments, body = night.annotation()
    assert ["annotate", "--context", "kvmatrix", "--style", "error"] == arguments
    assert f"h200: shard {victim + 1} was cut off before its end" in body
    assert f"{[*verdicts.values()].count('notrun')} never reported" in body
    assert "](artifact://matrix/matrix.html)" in body
    assert (tmp_path / "store" / "artifacts" / "matrix" / "matrix.html").exists()
    assert "unknown" == night.told()["kvmatrix-new-failures"]


def _holder(night: Night, act: str) -> int:
    """The job whose shard has the cell: its planned cells are on disk before the first runs."""
    found: list[int] = []

    def look() -> bool:
        for path in (night.home / "shards").glob("h200-*/matrix.json"):
            cells = json.loads(path.read_text())["cells"]
            if any(cell["kv_cache_dtype"] == act for cell in cells):
                found.append(int(path.parent.name.rpartition("-")[2]) - 1)
        return bool(found)

    _until(look)
    return found[0]


def _until(what: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.05)


def test_the_second_night_is_red_only_for_what_is_new(tmp_path: Path) -> None:
    night = Night(tmp_path, CHOSEN)
    assert 1 == _shards(night)
    assert 1 == night.run("merge")[0]  # the first: nothing to compare with

    # The same again: it fails as before, and that is no news.
    night.next()
    _shards(night)
    code, out = night.run("merge")
    arguments, body = night.annotation()
    assert 0 == code, out
    assert "warning" == arguments[-1]
    assert "no new failure" in body
    assert "0" == night.told()["kvmatrix-new-failures"]
    assert "3 still failing" in body

    # What passed last night fails in this one.
    last = max((tmp_path / "history" / "main" / "last").iterdir())
    data = json.loads(last.read_text())
    for cell in data["cells"]:
        if cell["id"] == "dsv4-default-segfault":
            cell["verdict"] = "rejected"
    last.write_text(json.dumps(data))
    night.next()
    _shards(night)
    code, out = night.run("merge")
    arguments, body = night.annotation()
    assert 1 == code, out
    assert "error" == arguments[-1]
    assert body.startswith("### KV cache: 1 NEW FAILURE, 2 still failing")
    assert "#### New failures: @vllm-project/kv-cache, please look" in body
    head = body.partition("<details>")[0]
    assert "before" in head and "`rejected`" in head
    assert "test_cell[dsv4-default-segfault]' --device virtual:h200" in head  # to see it again
    assert "1" == night.told()["kvmatrix-new-failures"]
    assert 3 == len(list((tmp_path / "history" / "main").glob("*.jsonl")))

    # The same merge once more, as Buildkite tries one again: it is red as before.
    assert 1 == night.run("merge")[0]
    assert "1 NEW FAILURE" in night.annotation()[1]


def test_a_lost_shard_makes_no_old_failure_new(tmp_path: Path) -> None:
    """What a shard had that left nothing is compared with what it last was."""
    night = Night(tmp_path, CHOSEN)
    _shards(night)
    night.run("merge")
    for lost in (True, False):
        night.next()
        _shards(night)
        if lost:
            shutil.rmtree(tmp_path / "store" / "artifacts" / "shards" / "h200-2")
        code, out = night.run("merge")
        assert (75 if lost else 0) == code, out
        assert "no new failure" in night.annotation()[1]


def test_a_night_without_any_shard_is_told_in_red(tmp_path: Path) -> None:
    night = Night(tmp_path, "dsv4-default-fine")
    code, out = night.run("merge")
    assert 75 == code, out
    arguments, body = night.annotation()
    assert "error" == arguments[-1]
    assert "NO RESULT" in body
    assert "h200: no shard left anything" in body
    assert "unknown" == night.told()["kvmatrix-new-failures"]


def test_shards_of_another_build_are_not_merged(tmp_path: Path) -> None:
    night = Night(tmp_path, "dsv4-default-fine or dsv4-default-half")
    _shards(night)
    shutil.copytree(tmp_path / "store" / "artifacts" / "shards", night.home / "shards")
    left = json.loads((night.home / "shards" / "h200-1" / "matrix.json").read_text())
    for cell in left["cells"]:
        cell["verdict"] = "mismatch"
    (night.home / "shards" / "h200-1" / "matrix.json").write_text(json.dumps(left))
    night.run("merge")
    assert "mismatch" not in {cell["verdict"] for cell in night.matrix()["cells"]}


def test_another_branch_has_a_past_of_its_own(tmp_path: Path) -> None:
    night = Night(tmp_path, CHOSEN)
    _shards(night)
    night.run("merge")
    night.next()
    night.branch = "fix/thing"
    _shards(night)
    code, out = night.run("merge")
    assert 1 == code, out
    assert "There is no earlier run to compare with" in night.annotation()[1]


def _shards(night: Night) -> int:
    codes = [night.run("h200", job)[0] for job in range(SHARDS)]
    night.keep()
    return max(codes)


def test_without_an_agent_the_shards_that_are_there_are_merged(tmp_path: Path) -> None:
    night = Night(tmp_path, "dsv4-default-fine")
    (tmp_path / "bin" / "buildkite-agent").unlink()
    assert 0 == max(night.run("h200", job)[0] for job in range(SHARDS))
    code, out = night.run("merge")
    assert 0 == code, out
    assert "no buildkite-agent on PATH" in out
    assert "### KV cache: nothing fails" in (night.home / "matrix" / "annotation.md").read_text()


@pytest.mark.parametrize("job", [0, 2])
def test_a_shard_that_left_nothing_is_named_and_no_success(tmp_path: Path, job: int) -> None:
    night = Night(tmp_path, "dsv4-default-fine or dsv4-default-half")
    _shards(night)
    gone = tmp_path / "store" / "artifacts" / "shards" / f"h200-{job + 1}"
    shutil.rmtree(gone)
    code, out = night.run("merge")
    assert code in (1, 75), out
    assert f"h200: shard {job + 1} of 3 left nothing" in night.annotation()[1]
