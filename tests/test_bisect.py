"""The search through versions, and the command around it; engines are our own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import bisect, commits, releases
from harness.bisect import Change, Trial
from harness.cli import main
from harness.errors import InfraError, UsageError
from harness.report import bisection
from harness.view import Screen
from tests.chaos.planted import plant
from tests.test_plan import FACTS
from tests.test_versus import outcome, page

VERSIONS = ["0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]


# ---- The search ----------------------------------------------------------------------------------


@given(st.integers(2, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_the_change_is_found_in_no_more_steps_than_were_told(case: tuple[int, int]) -> None:
    count, first = case
    versions = [str(at) for at in range(count)]
    asked: list[str] = []

    def alike(version: str) -> bool:
        asked.append(version)
        return int(version) < first

    assert Change(str(first - 1), str(first)) == bisect.search(versions, alike)
    assert len(asked) <= bisect.steps(count)
    assert len(set(asked)) == len(asked)
    assert not {versions[0], versions[-1]} & set(asked)


@given(st.data())
def test_what_cannot_be_told_is_named_and_no_more_than_that(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 40))
    first = data.draw(st.integers(1, count - 1))
    unclear = data.draw(st.sets(st.integers(1, count - 1).filter(lambda at: at != count - 1)))
    versions = [str(at) for at in range(count)]
    found = bisect.search(
        versions, lambda version: None if int(version) in unclear else int(version) < first
    )
    # The change lies behind the last that is surely old, and not behind the first surely new one.
    last = max(at for at in range(first) if at not in unclear)
    new = min(at for at in range(first, count) if at not in unclear)
    assert (str(last), str(new)) == (found.before, found.after)
    assert tuple(versions[last + 1 : new]) == found.untestable


def test_eight_releases_need_three_steps() -> None:
    assert [0, 0, 1, 2, 2, 3] == [bisect.steps(n) for n in (1, 2, 3, 4, 5, 8)]


# ---- The hunt ------------------------------------------------------------------------------------

Attempt = Callable[[str, bool], Trial]


def trial(version: str, verdict: str = "ok", reason: str = "", size: int = 0) -> Trial:
    kv = (page(size),) if size else ()
    return Trial(outcome(replace(FACTS, version=version), verdict, reason, kv=kv))


def fixed_in(release: str, log: list[tuple[str, bool]]) -> Attempt:
    def attempt(version: str, again: bool) -> Trial:
        log.append((version, again))
        old = VERSIONS.index(version) < VERSIONS.index(release)
        return trial(version, "broken" if old else "ok")

    return attempt


def test_a_fix_is_found_and_both_sides_are_run_again() -> None:
    log: list[tuple[str, bool]] = []
    found = bisect.hunt("c", VERSIONS, "0.33.0", "0.27.0", fixed_in("0.29.0", log))
    assert ("0.28.0", "0.29.0") == (found.change.before, found.change.after)
    assert found.fix
    assert found.certain
    assert "passes" == found.what
    assert {"0.33.0", "0.27.0", "0.28.0", "0.29.0"} == {name for name, again in log if again}
    # Both ends and log2 of the rest: what is run again is installed already.
    assert len({name for name, _ in log}) <= 2 + bisect.steps(len(VERSIONS))


def test_a_change_that_fails_nothing_is_found_too() -> None:
    def attempt(version: str, again: bool) -> Trial:
        return trial(version, size=1024 if version < "0.30" else 2048)

    found = bisect.hunt("c", VERSIONS, "0.27.0", "0.33.0", attempt)
    assert ("page_size_bytes", "0.30.0", False) == (found.what, found.change.after, found.fix)


def test_a_known_failure_is_no_pass() -> None:
    def attempt(version: str, again: bool) -> Trial:
        found = trial(version, "broken" if version < "0.30" else "ok")
        assert found.outcome is not None
        judged = found.outcome.judgement
        known = "bug" if judged.verdict == "broken" else None
        return Trial(replace(found.outcome, judgement=replace(judged, known=known)))

    found = bisect.hunt("c", VERSIONS, "0.33.0", "0.27.0", attempt)
    assert ("passes", "0.30.0") == (found.what, found.change.after)


@pytest.mark.parametrize("flaky", ["0.33.0", "0.28.0"])
def test_a_version_that_wavers_is_named_and_no_change_is(flaky: str) -> None:
    log: list[tuple[str, bool]] = []
    steady = fixed_in("0.29.0", log)

    def attempt(version: str, again: bool) -> Trial:
        found = steady(version, again)
        return trial(version, "timeout") if again and version == flaky else found

    # At 0.28.0, `timeout` and `broken` both fail: by whether it passes, that is no change.
    found = bisect.hunt("c", VERSIONS, "0.33.0", "0.27.0", attempt)
    assert ((flaky,) if flaky == "0.33.0" else ()) == found.wavering
    assert (flaky != "0.33.0") == found.certain


def test_between_ends_that_waver_nothing_is_tried() -> None:
    log: list[tuple[str, bool]] = []
    steady = fixed_in("0.29.0", log)

    def attempt(version: str, again: bool) -> Trial:
        found = steady(version, again)
        return trial(version, "ok") if again else found

    bisect.hunt("c", VERSIONS, "0.33.0", "0.27.0", attempt)
    assert {"0.33.0", "0.27.0"} == {name for name, _ in log}


def test_a_version_without_a_result_is_passed_over() -> None:
    def attempt(version: str, again: bool) -> Trial:
        if version == "0.29.0":
            return Trial(None, "no such cell")
        if version == "0.30.0":
            return trial(version, "skipped", "no room")
        return trial(version, "broken" if version < "0.29" else "ok")

    found = bisect.hunt("c", VERSIONS, "0.33.0", "0.27.0", attempt)
    assert Change("0.28.0", "0.31.0", ("0.29.0", "0.30.0")) == found.change
    assert not found.certain
    text = "\n".join(bisection.render(found, Screen(80, color=False, unicode=True)))
    assert "0.29.0  cannot be tried: no such cell" in text
    assert "0.30.0  skipped: no room" in text


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        (("0.27.0", "broken"), ("0.33.0", "ok"), "exchange them"),
        (("0.27.0", "ok"), ("0.33.0", "ok"), "nothing to search for"),
        (("0.27.0", "ok"), ("0.33.0", "infra"), "the end 0.33.0 tells nothing"),
        (("0.27.0", "skipped"), ("0.33.0", "ok"), "the end 0.27.0 tells nothing"),
    ],
)
def test_ends_that_are_no_ends_are_one_line(
    good: tuple[str, str], bad: tuple[str, str], words: str
) -> None:
    verdicts = dict([good, bad])
    with pytest.raises(UsageError, match=words):
        bisect.hunt("c", [good[0], bad[0]], good[0], bad[0], lambda v, _: trial(v, verdicts[v]))


def test_hostile_text_is_one_line_of_text() -> None:
    def attempt(version: str, again: bool) -> Trial:
        return trial(version, "broken" if version < "0.30" else "ok", "\x1b[31m\0<b>\nx" * 20)

    found = bisect.hunt("c", VERSIONS, "0.33.0", "0.27.0", attempt)
    lines = bisection.render(found, Screen(60, color=False, unicode=True))
    assert all(line.isprintable() and len(line) <= 60 for line in lines)
    assert "<b>" in "".join(lines)


# ---- Releases and commits ------------------------------------------------------------------------


def test_releases_between_the_ends_that_are_supported() -> None:
    listed = ["0.34.0", "0.33.0", "0.28.0", "0.27.1", "0.9.2", "0.28.0rc1", "nonsense", "0.31.0"]
    between = releases.between(("0.33.0", "0.27.1"), listed)
    assert ["0.27.1", "0.28.0", "0.31.0", "0.33.0"] == between


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo boom >&2; exit 3", "boom"),
        ("echo '{}'", "no list"),
        ("exit 0", "no list"),
    ],
)
def test_an_index_that_does_not_answer_is_one_line(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\n{script}\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(InfraError, match=f"cannot list the releases of vLLM: {words}.*--versions"):
        releases.listed(tmp_path)


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> tuple[Path, list[str]]:
    """A checkout with five commits."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    names = []
    for number in range(5):
        git(folder, "commit", "-q", "--allow-empty", "-m", str(number))
        names.append(git(folder, "rev-parse", "HEAD"))
    return folder, names


def test_commits_between_two_whichever_is_older(repo: tuple[Path, list[str]]) -> None:
    folder, names = repo
    assert names[1:4] == commits.between(folder, names[3], names[1])
    assert names == commits.between(folder, names[0], "main")


def test_commits_that_are_none_are_one_line(repo: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, names = repo
    with pytest.raises(UsageError, match="no commit 'mian'"):
        commits.between(folder, names[0], "mian")
    with pytest.raises(UsageError, match="no commit '--help'"):
        commits.named(folder, "--help")
    git(folder, "checkout", "-q", "--orphan", "other")
    git(folder, "commit", "-q", "--allow-empty", "-m", "other")
    with pytest.raises(UsageError, match="neither descends"):
        commits.between(folder, names[0], "other")
    with pytest.raises(UsageError, match="is not a folder"):
        commits.named(tmp_path / "none", "main")


def test_a_failed_installation_is_one_line_and_keeps_no_secret(
    repo: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s" * 30)
    with pytest.raises(InfraError, match="--install exits 7: no compiler"):
        commits.install("echo $HF_TOKEN; echo no compiler; exit 7", repo[0], repo[1][0])
    assert "hf_sss" not in capsys.readouterr().err


# ---- The command, with engines of our own --------------------------------------------------------

CELL = "dsv4-default-fine"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVMATRIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def commanded(*arguments: str) -> Sequence[str]:
    return ["bisect", CELL, "--device", "virtual:h200", *arguments]


@pytest.fixture
def install(repo: tuple[Path, list[str]], tmp_path: Path, cache: Path) -> tuple[list[str], str]:
    """The options of a search of commits in which, from the fourth on, the cell dies."""
    folder, names = repo
    python = plant(tmp_path)
    wrapper = python.read_text()
    python.write_text(wrapper.replace("shift;", f'shift; . "{tmp_path}/state";'))
    state = tmp_path / "state"
    state.write_text("")
    new = "|".join(names[3:])
    command = (
        f'case "$KVMATRIX_COMMIT" in {new}) w=segfault;; *) w=;; esac; '
        f'echo "export CHAOS_BECOMES=$w" > "{state}"; echo "$KVMATRIX_COMMIT" >> "{tmp_path}/log"'
    )
    options = ["--install", command, "--repo", str(folder), "--python", str(python)]
    return [*options, "--good", names[0], "--bad", names[4]], names[3]


def test_a_commit_is_found_with_an_install_command(
    install: tuple[list[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, first = install
    assert 0 == main([*commanded(*options), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert first == data["after"]
    assert "crashed" == data["trials"][1]["cell"]["verdict"]
    assert {data["before"], data["after"]} == data["records"].keys()
    installed = (tmp_path / "log").read_text().split()
    assert len(set(installed)) <= 2 + bisect.steps(5)


def test_what_a_version_gave_is_kept(
    install: tuple[list[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, _ = install
    main([*commanded(*options), "--repeat", "0"])
    before = capsys.readouterr().err.count("kvmatrix: starting")
    main([*commanded(*options), "--repeat", "0"])
    again = capsys.readouterr().err.count("kvmatrix: starting")
    # A child that died is none that finished: it is run each time.
    assert (4, 2) == (before, again)
    main([*commanded(*options), "--repeat", "0", "--fresh"])
    assert before == capsys.readouterr().err.count("kvmatrix: starting")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--good", "0.33.0", "--bad", "0.33"], "are both 0.33.0: there is nothing between"),
        (["--good", "new", "--bad", "0.27.1"], "--good: 'new' is no release"),
        (["--good", "0.33.0", "--bad", "0.20.0"], "0.20.0"),
        (
            ["--good", "0.33.0", "--bad", "0.27.1", "--repo", "x"],
            "--repo is of a search",
        ),
        (["--good", "a", "--bad", "b", "--install", "x"], "--repo DIR"),
        (["--good", "0.33.0", "--bad", "0.27.1", "--repeat", "-1"], "--repeat -1"),
        (["--good", "0.33.0", "--bad", "0.27.1", "--versions", "0.28.0,x"], "'x' is no release"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], words: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(commanded(*arguments))
    err = capsys.readouterr().err
    assert words in err
    assert 1 == len(err.splitlines())
