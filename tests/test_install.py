from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import install
from harness.errors import InfraError, UsageError
from harness.install import cache_folder, facts_for, find, interpreter, known_engines, resolve

TOLD: dict[str, Any] = {
    "python": "/elsewhere/python",
    "version": "0.33.0",
    "commit": None,
    "torch": "2.14.0+cu130",
    "cuda": "13.0",
    "flashinfer": None,
    "transformers": "5.0.0",
    "python_version": "3.11.7",
    "kv_cache_dtypes": ["auto", "fp8"],
    "backends": ["FLASH_ATTN"],
    "model_backends": {},
}
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


def environ(python: Path) -> Mapping[str, str]:
    return {"MARK": python.name}


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class Venv:
    """A virtual environment with a vLLM and an interpreter that counts how often it is started."""

    def __init__(self, folder: Path, version: str = "0.33.0", told: Any = None) -> None:
        self.folder = folder
        site = folder / "lib" / "python3.11" / "site-packages"
        self.info = site / f"vllm-{version}.dist-info"
        self.info.mkdir(parents=True)
        (site / "vllm").mkdir()
        (site / "vllm" / "__init__.py").touch()
        (folder / "pyvenv.cfg").touch()
        text = told if isinstance(told, str) else json.dumps({**TOLD, **(told or {})})
        self.python = self.answers(f"echo noise\nprintf '%s\\n' '{text}'")

    def answers(self, body: str) -> Path:
        return script(self.folder / "bin" / "python", f"echo $2 >> {self.folder}/starts\n{body}")

    @property
    def starts(self) -> int:
        path = self.folder / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


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
            "unknown engine 'curent': did you mean 'current'? name current, a release such as "
            "0.33.0, or the path of a Python interpreter; `kvmatrix engines` lists those here",
            "curent",
        ),
        (
            "unknown engine '': name current, a release such as 0.33.0, or the path of a Python "
            "interpreter; `kvmatrix engines` lists those here",
            "",
        ),
        (
            "engine 'cpu:0.32.0': vLLM's CPU build is not supported yet; use current, a release "
            "such as 0.33.0, or the path of a Python interpreter",
            "cpu:0.32.0",
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


def test_whole_releases_are_known_oldest_first(tmp_path: Path) -> None:
    for name in ("vllm-0.33.0-py3.11", "vllm-0.27.1-py3.10", "vllm-0.3.0-py3.9"):
        (tmp_path / "engines" / name).mkdir(parents=True)
        (tmp_path / "engines" / name / ".complete").touch()
    (tmp_path / "engines" / "vllm-0.30.0-py3.11").mkdir()
    assert ["0.3.0", "0.27.1", "0.33.0"] == [engine.version for engine in known_engines(tmp_path)]


# --- facts ---


def test_facts_are_read_by_the_engine_once(venv: Venv, tmp_path: Path) -> None:
    first = resolve(str(venv.python), tmp_path / "cache", environ)
    second = resolve(str(venv.python), tmp_path / "cache", environ)
    assert first == second
    assert 1 == venv.starts
    assert ("0.33.0", ("auto", "fp8")) == (first.version, first.kv_cache_dtypes)


def test_facts_name_the_interpreter_that_was_asked_for(venv: Venv, tmp_path: Path) -> None:
    assert str(venv.python) == facts_for(venv.python, tmp_path, environ).python


def test_the_engine_gets_the_environment_it_is_given_and_no_other(
    venv: Venv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    told = json.dumps({**TOLD, "commit": "COMMIT"}).replace(
        "COMMIT", "'$MARK$VLLM_USE_V2_MODEL_RUNNER'"
    )
    venv.answers(f"printf '%s\\n' '{told}'")
    assert "python" == facts_for(venv.python, tmp_path, environ).commit


def test_facts_are_read_again_after_a_new_installation(venv: Venv, tmp_path: Path) -> None:
    facts_for(venv.python, tmp_path, environ)
    os.utime(venv.info, ns=(1, 1))
    facts_for(venv.python, tmp_path, environ)
    assert 2 == venv.starts


def test_facts_are_read_again_when_an_editable_checkout_changes(venv: Venv, tmp_path: Path) -> None:
    checkout = tmp_path / "my vllm"
    source = checkout / "vllm" / "v1" / "attention.py"
    source.parent.mkdir(parents=True)
    source.touch()
    (checkout / "vllm" / "__init__.py").touch()
    (venv.info.parent / "vllm" / "__init__.py").unlink()
    direct = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    (venv.info / "direct_url.json").write_text(json.dumps(direct))
    facts_for(venv.python, tmp_path, environ)
    facts_for(venv.python, tmp_path, environ)
    assert 1 == venv.starts
    later = source.stat().st_mtime_ns + 10**12
    os.utime(source, ns=(later, later))
    facts_for(venv.python, tmp_path, environ)
    assert 2 == venv.starts


def test_facts_are_read_again_when_the_code_that_reads_them_changes(
    venv: Venv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "ENGINE", tmp_path / "engine")
    (tmp_path / "engine").mkdir()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "engine" / "compat.py").write_text(text)
        facts_for(venv.python, tmp_path, environ)
    assert 2 == venv.starts


@pytest.mark.parametrize("damage", [b"", b'{"schema": 1, "pyth', b"\xff\xfe", b"[]"])
def test_a_damaged_cache_is_written_anew(venv: Venv, tmp_path: Path, damage: bytes) -> None:
    whole = facts_for(venv.python, tmp_path, environ)
    (path,) = (tmp_path / "facts").iterdir()
    path.write_bytes(damage)
    assert whole == facts_for(venv.python, tmp_path, environ)
    assert whole == facts_for(venv.python, tmp_path, environ)
    assert 2 == venv.starts


def test_a_cache_that_cannot_be_written_only_costs_time(venv: Venv, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert "0.33.0" == facts_for(venv.python, blocked, environ).version
    assert "0.33.0" == facts_for(venv.python, blocked, environ).version
    assert 2 == venv.starts


def test_an_unsupported_vllm_is_not_even_started(tmp_path: Path) -> None:
    venv = Venv(tmp_path / "old", version="0.24.0")
    with pytest.raises(UsageError, match=r"vLLM 0\.24\.0 is not supported"):
        facts_for(venv.python, tmp_path, environ)
    assert 0 == venv.starts


def test_the_version_that_vllm_tells_counts_from_the_cache_too(tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv", told={"version": "0.34.0"})
    for _ in range(2):
        with pytest.raises(UsageError, match=r"vLLM 0\.34\.0 is not supported"):
            facts_for(venv.python, tmp_path, environ)


def test_a_vllm_that_does_not_start_is_told_by_its_last_line(venv: Venv, tmp_path: Path) -> None:
    venv.answers(r"printf 'Traceback\nImportError: no \033[31mlibcuda\n\n' >&2; exit 1")
    with pytest.raises(UsageError) as raised:
        facts_for(venv.python, tmp_path, environ)
    assert (rf"the vLLM of {venv.python} cannot be used: ImportError: no \x1b[31mlibcuda") == str(
        raised.value
    )


def test_a_secret_in_the_last_line_is_masked(
    venv: Venv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "open-sesame")
    venv.answers("echo 'login with open-sesame failed' >&2; exit 1")
    with pytest.raises(UsageError, match=r"login with \*\*\* failed"):
        facts_for(venv.python, tmp_path, environ)


@pytest.mark.parametrize("told", ["", "not json", "[1]", '{"version": "0.33.0"}'])
def test_an_engine_that_tells_no_facts_is_a_usage_error(told: str, tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv", told=told)
    venv.answers(f"printf '%s\\n' '{told}'")
    with pytest.raises(UsageError, match=r"the facts of .* cannot be read"):
        facts_for(venv.python, tmp_path, environ)


def test_an_environment_that_cannot_be_made_is_not_the_engines_fault(
    venv: Venv, tmp_path: Path
) -> None:
    def refuses(_: Path) -> Mapping[str, str]:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(InfraError, match="Permission denied"):
        facts_for(venv.python, tmp_path, refuses)


# --- finding a vLLM without importing it ---


def test_the_vllm_of_this_interpreter_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "vllm-0.31.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.4\n")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = find(Path(sys.executable))
    assert found is not None
    assert ("0.31.4", str(tmp_path / "vllm")) == (found.version, found.package)
    assert "vllm" not in sys.modules


def test_an_interpreter_outside_a_virtual_environment_is_asked(tmp_path: Path) -> None:
    python = script(tmp_path / "bin" / "python", """echo '["0.33.0", "/opt/vllm/__init__.py"]'""")
    found = find(python)
    assert found is not None
    assert ("0.33.0", "/opt/vllm") == (found.version, found.package)


def test_no_vllm_is_told_with_the_ways_to_get_one(tmp_path: Path) -> None:
    python = script(tmp_path / "bin" / "python", """echo '["", null]'""")
    with pytest.raises(UsageError) as raised:
        facts_for(python, tmp_path, environ)
    assert (
        f"no vLLM in {python}: `pip install kvmatrix[vllm]` or `uv run --extra vllm pytest`, "
        "or name one with --engine 0.33.0"
    ) == str(raised.value)


@pytest.mark.parametrize("body", ["exit 2", "echo hello", "echo '[1]'"])
def test_a_program_that_is_no_interpreter_is_told(body: str, tmp_path: Path) -> None:
    python = script(tmp_path / "ls", body)
    with pytest.raises(UsageError, match="is not a Python interpreter that can be used"):
        find(python)


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
    assert "installing vLLM 0.27.1 needs uv, which is not here: `pip install uv`" == str(
        raised.value
    )


def test_a_second_run_waits_for_the_first_and_installs_nothing(
    uv: Uv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    monkeypatch.setattr(install, "_say", lambda _: waiting.set())
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
