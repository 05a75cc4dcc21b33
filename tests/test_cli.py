from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import cli, explain, install, nvml, plan
from harness.cli import main
from harness.device import Device, virtual_devices
from harness.errors import InfraError
from harness.install import Found
from harness.table import table
from tests.fake_nvml import Card, FakeNvml, Slice

COMMANDS = tuple(
    name
    for action in cli._parser()._actions
    if isinstance(action, argparse._SubParsersAction)
    for name in action.choices
)
"""All that there are, so that a new one is tested too."""


def model(folder: Path, key: str, **config: Any) -> None:
    (folder / key).mkdir(parents=True)
    text = json.dumps({"architectures": ["LlamaForCausalLM"], **config})
    (folder / key / "config.json").write_text(text)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A GPU, one in MIG mode with two slices in sparse slots, one in MIG mode with none."""
    slices = {
        slot: Slice(f"MIG-bbbbbbb{slot}", "NVIDIA H200 MIG 1g.35gb", 32 * 1024 + 512, 26)
        for slot in (0, 3)
    }
    fake = FakeNvml(
        (Card("GPU-a0"), Card("GPU-a1", slices=slices), Card("GPU-a2", slices={}), Card("GPU-a3"))
    )
    discover = nvml.discover
    monkeypatch.setattr(nvml, "discover", lambda: discover(fake, {}))
    return fake


@pytest.fixture
def no_driver(board: FakeNvml) -> None:
    board.init_error = board.NVML_ERROR_DRIVER_NOT_LOADED


@pytest.mark.usefixtures("no_driver")
def test_devices_lists_every_spec_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["devices"])
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert "" == err
    assert ["device", "kind", "capability", "memory", "SMs", "name"] == rows[0]
    assert ["cpu", *(device.spec for device in virtual_devices())] == [row[0] for row in rows[1:]]
    numbers = ["virtual:h200/1g.35gb", "virtual", "9.0", "32.5", "GiB", "26", "NVIDIA", "H200"]
    assert [*numbers, "MIG", "1g.35gb"] in rows


@pytest.mark.usefixtures("board")
def test_devices_lists_gpus_and_slices_as_nvidia_smi_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert 0 == main(["devices"])
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()[1:8]]
    whole, heading = ["9.0", "140.4", "GiB", "132"], ["gpu", "(MIG", "mode)", "9.0", "-", "-"]
    carved = ["mig", "9.0", "32.5", "GiB", "26", "NVIDIA", "H200", "MIG", "1g.35gb"]
    assert [
        ["GPU-a0", "gpu", *whole, "NVIDIA", "H200"],
        ["GPU-a1", *heading, "NVIDIA", "H200"],
        ["MIG-bbbbbbb0", *carved],
        ["MIG-bbbbbbb3", *carved],
        ["GPU-a2", *heading, "NVIDIA", "H200"],
        ["GPU-a3", "gpu", *whole, "NVIDIA", "H200"],
        lines[6],
    ] == lines
    assert "cpu" == lines[6][0]
    (line,) = err.splitlines()
    assert line.startswith("kvmatrix: GPU 2 (GPU-a2) is in MIG mode and shows no slice")


@pytest.mark.usefixtures("board")
def test_devices_as_json_are_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["devices", "--json"])
    out, err = capsys.readouterr()
    found = [Device.from_json(item) for item in json.loads(out)]
    # A GPU in MIG mode is itself no device.
    assert ["GPU-a0", "MIG-bbbbbbb0", "MIG-bbbbbbb3", "GPU-a3", "cpu"] == [
        device.spec for device in found[:5]
    ]
    assert list(virtual_devices()) == found[5:]
    assert 1 == len(err.splitlines())


def test_devices_with_nvml_denied_says_so_and_lists_the_rest(
    board: FakeNvml, capsys: pytest.CaptureFixture[str]
) -> None:
    board.init_error = board.NVML_ERROR_NO_PERMISSION
    assert 0 == main(["devices"])
    out, err = capsys.readouterr()
    assert "cpu" == out.splitlines()[1].split()[0]
    (line,) = err.splitlines()
    assert line.startswith("kvmatrix: NVML: Insufficient Permissions")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "engines" / "vllm-0.27.1-py3.11"
    (folder / "bin").mkdir(parents=True)
    (folder / ".complete").touch()
    monkeypatch.setenv("KVMATRIX_CACHE", str(tmp_path))
    return tmp_path


def test_engines_lists_the_one_here_and_those_in_the_cache(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "find", lambda _: Found("0.24.0", "/vllm", 0))
    assert 0 == main(["engines", "--json"])
    python = str(cache / "engines" / "vllm-0.27.1-py3.11" / "bin" / "python")
    assert [
        {
            "spec": "current",
            "version": "0.24.0",
            "supported": False,
            "python": sys.executable,
        },
        {"spec": "0.27.1", "version": "0.27.1", "supported": True, "python": python},
    ] == json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ("none", None),
        ("unknown (not supported)", Found("", "/vllm", 0)),
        ("0.24.0 (not supported)", Found("0.24.0", "/vllm", 0)),
        ("0.33.0", Found("0.33.0", "/vllm", 0)),
    ],
)
def test_engines_says_what_the_environment_has(
    shown: str,
    found: Found | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(install, "find", lambda _: found)
    assert 0 == main(["engines"])
    line = capsys.readouterr().out.splitlines()[1]
    assert ["current", *shown.split(), sys.executable] == line.split()


def test_models_lists_key_type_and_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MODELS", tmp_path)
    model(tmp_path, "llama3", model_type="llama", num_hidden_layers=32)
    model(tmp_path, "nested", model_type="vision", text_config={"num_hidden_layers": 48})
    model(tmp_path, "odd")
    assert 0 == main(["models"])
    assert [
        ["key", "model_type", "layers", "kv"],
        ["llama3", "llama", "32", "-"],
        ["nested", "vision", "48", "-"],
        ["odd", "-", "-", "-"],
    ] == [line.split() for line in capsys.readouterr().out.splitlines()]


def test_models_as_json_name_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MODELS", tmp_path)
    model(tmp_path, "llama3", model_type="llama", num_hidden_layers=32)
    assert 0 == main(["models", "--json"])
    assert [
        {
            "key": "llama3",
            "model_type": "llama",
            "layers": 32,
            "kv": None,
            "path": str(tmp_path / "llama3"),
        }
    ] == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("key", "kv"),
    [
        ("bge-base", set()),
        ("whisper", {"full attention", "cross attention"}),
        ("dsv3", {"MLA latent vector"}),
        ("dsv32", {"MLA latent vector", "indexer keys"}),
        (
            "dsv4",
            {"sliding window", "compressed 4 and 128", "indexer keys", "compressor state"},
        ),
        ("gemma3", {"sliding window", "full attention"}),
        ("llama3", {"full attention"}),
        ("llama4", {"chunked attention", "full attention"}),
        ("mamba2", {"Mamba state"}),
        ("jamba", {"Mamba state", "full attention"}),
        ("kimi-linear", {"linear-attention state", "MLA latent vector"}),
        ("qwen3-next", {"linear-attention state", "full attention"}),
    ],
)
def test_models_are_listed_with_the_kinds_of_their_kv_caches(
    key: str, kv: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == main(["models", "--json"])
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["key"] == key]
    assert kv == set(row["kv"])
    assert len(kv) == len(row["kv"])


def test_the_last_column_is_wrapped_where_a_terminal_is_narrow() -> None:
    rows = [("a", "one two three"), ("b", "four")]
    assert ["k  v", "a  one two", "   three", "b  four"] == table(("k", "v"), rows, width=10)
    assert ["k  v", "a  one two three", "b  four"] == table(("k", "v"), rows)


def test_without_models_it_says_where_they_are_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MODELS", tmp_path / "none")
    assert 0 == main(["models"])
    out, err = capsys.readouterr()
    assert "" == out
    assert err.startswith("kvmatrix: no models in ")


def test_control_characters_of_a_config_are_shown_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MODELS", tmp_path)
    model(tmp_path, "evil", model_type="\x1b[2Jllama\n", num_hidden_layers=1)
    assert 0 == main(["models"])
    assert r"evil  \x1b[2Jllama\n  1       -" == capsys.readouterr().out.splitlines()[1]


def test_columns_are_aligned_by_what_a_terminal_shows() -> None:
    assert ["key  n", "段   1", "abc  22"] == table(("key", "n"), [("段", "1"), ("abc", "22")])


def test_a_usage_error_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MODELS", tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert 2 == main(["models"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvmatrix: model config broken/config.json cannot be used: ")


@pytest.mark.usefixtures("cache")
def test_an_infrastructure_error_is_one_line_and_exit_code_75(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(_: Path) -> None:
        raise InfraError("disk\ngone")

    monkeypatch.setattr(install, "find", find)
    assert 75 == main(["engines"])
    assert "kvmatrix: disk\\ngone\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("passed", "arguments"),
    [
        ([], []),
        (["-k", "dsv4", "--device", "virtual:b200"], ["-k", "dsv4", "--device", "virtual:b200"]),
        (["--help"], ["--", "--help"]),
        (["--", "--help"], ["--", "--", "--help"]),
    ],
)
def test_run_becomes_pytest_with_the_remaining_arguments(
    passed: list[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReplacedError(Exception):
        pass

    seen: list[Any] = []

    def execv(path: str, argv: list[str]) -> None:
        seen.append((path, argv))
        raise ReplacedError

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(ReplacedError):
        main(["run", *arguments])
    assert [(sys.executable, [sys.executable, "-m", "pytest", *passed])] == seen


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_with_an_example_and_its_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main([command, "--help"])
    assert 0 == raised.value.code
    out = capsys.readouterr().out
    assert f"usage: kvmatrix {command}" in out
    assert f"example: kvmatrix {command}" in out
    assert "exit code: 0" in " ".join(out.split())


@pytest.mark.parametrize("arguments", [[], ["device"], ["devices", "--jason"]])
def test_arguments_that_do_not_exist_are_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert 2 == raised.value.code
    assert "kvmatrix" in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "run", interrupted)
    assert 130 == main(["explain", "dsv4-default-unset"])


def test_a_reader_that_stops_early_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "devices"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (0, b"") == (done.returncode, done.stderr)
