"""The whole story of a cell, from records alone and from an engine that is our own."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import explain, plan, story
from harness.case import Case
from harness.cli import main
from harness.errors import UsageError
from harness.plan import Axes
from harness.record import Candidate, Capacity, Fault, KVCache, Record, Resolved, dumps, loads
from harness.reproduce import pytest as command
from harness.reproduce import python
from tests.chaos.planted import plant

ROOT = Path(__file__).resolve().parent.parent
PACKED = loads((ROOT / "tests" / "resources" / "dsv4-default-unset.json").read_text())
CELL = "dsv4-default-unset"
ROOM = Capacity(336591, 82.1757, 1350221760, 4096, 0.92)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMATRIX_CACHE", str(tmp_path / "cache"))


def written(folder: Path, *records: Record) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(dumps(record) + "\n" for record in records))
    return path


def told(folder: Path, record: Record, width: int = 100) -> list[str]:
    return story.render(explain.read(written(folder, record), record.id), width)


def part(lines: list[str], title: str) -> list[str]:
    """The lines below a title, stripped."""
    start = next(at for at, line in enumerate(lines) if line.startswith(title))
    below = lines[start + 1 :]
    end = below.index("") if "" in below else len(below)
    return [line.strip() for line in below[:end]]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("dsv4-default-unset", (CELL, Axes(), None, None)),
        ("cases/test_matrix.py::test_cell[dsv4-default-unset]", (CELL, Axes(), None, None)),
        (
            "dsv4-default-unset-virtual_h200_1g.35gb-0.33.0",
            (CELL, Axes(), "virtual:h200/1g.35gb", "0.33.0"),
        ),
        ("dsv4-default-unset-virtual_b200", (CELL, Axes(), "virtual:b200", None)),
        (
            "llama3-FLASH_ATTN-fp8-block64-tp8-v2",
            ("llama3-FLASH_ATTN-fp8-block64-tp8-v2", Axes((64,), (8,), ("v2",)), None, None),
        ),
        (
            "a-b-c-tp2-0.33.0rc1.dev4",
            ("a-b-c-tp2", Axes((0,), (2,), ("",)), None, "0.33.0rc1.dev4"),
        ),
    ],
)
def test_an_id_is_read_as_pytest_shows_it(text: str, asked: tuple[Any, ...]) -> None:
    assert explain.Asked(*asked) == explain.parse(text)


def test_each_cache_stands_beside_the_arithmetic_of_its_page(tmp_path: Path) -> None:
    caches = part(told(tmp_path, PACKED, 400), "KV caches (7 kinds)")
    at = caches.index("attn: 20 layers, MLAAttentionSpec, FLASHMLA_SPARSE_DSV4, 128 tokens a state")
    seen, oracle = caches[at + 1 : at + 3]
    assert seen.startswith("seen")
    assert "page of 1728 B for a block of 256 tokens, 1168 B of it content" in seen
    assert oracle.startswith("oracle")
    # 256 / 128 states of 448 + 64 x 2 + 8 bytes, in pages of 576.
    assert "2 states x 584 B" in oracle
    assert oracle.endswith("= 1168, up to a multiple of 576 = 1728")


def test_what_was_not_passed_is_said_and_what_it_became(tmp_path: Path) -> None:
    lines = told(tmp_path, PACKED)
    assert "kv_cache_dtype  unset: the option is not passed" in part(lines, "Asked")
    assert "became          fp8_ds_mla (in the main attention layers)" in part(
        lines, "kv_cache_dtype"
    )
    (verdict, *_) = part(lines, "Verdict")
    assert "ok              confirmed by explicit, oracle, contract" == verdict
    assert 0 == main(["explain", CELL, "--from", str(written(tmp_path, PACKED))])


@pytest.mark.parametrize("width", [40, 60, 100])
def test_no_line_but_code_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    lines = told(tmp_path, PACKED, width)
    prose = lines[: lines.index("By hand")]
    assert len(prose) > 40
    assert [] == [line for line in prose if len(line) > width]


def test_a_wrong_page_is_told_where_it_stands_and_is_exit_code_1(tmp_path: Path) -> None:
    at = next(n for n, kv in enumerate(PACKED.kv) if kv.role == "attn.indexer.k_cache")
    wrong = replace(PACKED.kv[at], content_bytes=8704)
    record = replace(PACKED, kv=(*PACKED.kv[:at], wrong, *PACKED.kv[at + 1 :]))
    lines = told(tmp_path, record, 400)
    differing = [line for line in lines if line.strip().startswith("differs")]
    assert 1 == len(differing)
    assert "content bytes 8704, must be 8448" in differing[0]
    assert 1 == main(["explain", CELL, "--from", str(written(tmp_path, record))])


def test_a_missing_cache_is_told(tmp_path: Path) -> None:
    lines = told(tmp_path, replace(PACKED, kv=PACKED.kv[1:]), 400)
    assert any("attn.swa_cache" in line and "missing" in line for line in lines)


LLAMA = replace(
    PACKED,
    id="llama3-default-fp8",
    model="llama3",
    kv_cache_dtype="fp8",
    resolved=Resolved("fp8", "uint8", "fp8", ("FLASHINFER",), "FLASHINFER"),
    kv=(
        KVCache(
            "FullAttentionSpec",
            "self_attn.attn",
            32,
            16,
            16 * 2 * 8 * 128,
            16 * 2 * 8 * 128,
            "uint8",
        ),
    ),
    groups=(),
    declared=(),
    candidates=(
        Candidate("FLASH_ATTN", ("kv_cache_dtype not supported", "no sinks")),
        Candidate("FLASHINFER", (), True),
        Candidate("TRITON_ATTN", ()),
    ),
    capacity=ROOM,
)


def test_the_selectors_candidates_are_told_in_order_with_its_reasons(tmp_path: Path) -> None:
    shown = part(told(tmp_path, LLAMA), "Backend")
    assert [
        "selected        FLASHINFER, the first of those considered that refuses nothing",
        "considered by vLLM's selector, in its order:",
        "FLASH_ATTN   refused: kv_cache_dtype not supported; no sinks",
        "FLASHINFER   selected",
        "TRITON_ATTN  not refused",
    ] == shown


def test_layers_that_asked_for_different_things_are_told_apart(tmp_path: Path) -> None:
    first, second = (f"has_sliding_window={value}" for value in (True, False))
    record = replace(
        LLAMA,
        candidates=(
            Candidate("FLASH_ATTN", ("sliding window not supported",), asked=first),
            Candidate("FLASHINFER", (), True, first),
            Candidate("FLASH_ATTN", (), True, second),
        ),
    )
    text = "\n".join(part(told(tmp_path, record), "Backend"))
    before, between, after = text.split(
        "considered by vLLM's selector, in its order for layers with "
    )
    assert "selected" in before
    assert between.startswith(f"{first}:\nFLASH_ATTN  refused: sliding window not supported")
    assert f"{second}:\nFLASH_ATTN  selected" == after


def test_a_model_that_chooses_itself_is_not_said_to_have_been_selected(tmp_path: Path) -> None:
    assert "selector was not asked" in " ".join(part(told(tmp_path, PACKED), "Backend"))
    asked = replace(LLAMA, id="llama3-FLASHINFER-fp8", backend="FLASHINFER", candidates=())
    assert "selected        FLASHINFER, as asked" in part(told(tmp_path, asked), "Backend")


def test_capacity_is_told_with_its_units(tmp_path: Path) -> None:
    rows = part(told(tmp_path, replace(PACKED, capacity=ROOM), 200), "Capacity")
    assert "blocks          138,384" in rows
    assert "fits            336,591 tokens: 82.18 requests of 4,096 tokens" in rows
    assert "per request     1.26 GiB for a context of 4,096 tokens" in rows
    (weights,) = [row for row in rows if row.startswith("weights")]
    assert "145.79 GiB: too much for this device" in weights


def test_a_model_of_windows_alone_costs_nothing_a_token_and_that_is_said(tmp_path: Path) -> None:
    """Mistral 7B: 0 bytes per token looked like a fault."""
    window = replace(LLAMA.kv[0], kind="SlidingWindowSpec", window=4096, grows=False)
    record = replace(LLAMA, model="mistral", id="mistral-default-fp8", kv=(window,))
    lines = told(tmp_path, replace(record, kv_bytes_per_token=0), 200)
    (row,) = [row for row in part(lines, "Capacity") if row.startswith("per token")]
    assert "0 B for one more token of context: every layer keeps a window" in row
    assert any("SlidingWindowSpec" in line and "keeps 4096 tokens" in line for line in lines)


HOSTILE = "\x1b[2J\x1b]0;owned\x07gone\u202e"


def test_nothing_of_an_error_or_a_log_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = Fault("ValueError", ("ValueError", "Exception"), f"no {HOSTILE}\nmore", f"x{HOSTILE}:y")
    record = replace(
        PACKED, stage="config", error=fault, kv=(), groups=(), log=(f"INFO {HOSTILE}",), tail=""
    )
    assert 1 == main(["explain", CELL, "--from", str(written(tmp_path, record))])
    out = capsys.readouterr().out
    assert {"\n"} == {letter for letter in out if not letter.isprintable()}
    for part_of in ("  no ", "  in x", "  INFO "):
        assert rf"{part_of}\x1b[2J\x1b]0;owned\x07gone\u202e" in out
    assert "ValueError at stage config" in out.splitlines()


def test_a_refusal_by_the_config_is_reproduced_with_the_config_alone(tmp_path: Path) -> None:
    fault = Fault("ValueError", ("ValueError",), "kv_cache_dtype", "vllm/config.py:f")
    record = replace(PACKED, stage="config", error=fault, kv=(), groups=())
    lines = told(tmp_path, record)
    assert "    from vllm import EngineArgs" in lines
    assert "    ).create_engine_config()" in lines


def test_a_host_that_was_not_usable_is_exit_code_75(tmp_path: Path) -> None:
    record = replace(PACKED, stage="import", end="infra", tail="the device is gone", kv=())
    assert 75 == main(["explain", CELL, "--from", str(written(tmp_path, record))])


def test_a_known_failure_is_told_with_its_link_and_reason(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.symlink_to(plan.MODELS)
    # Not the checkout's own: the folder above the models is this test's.
    (tmp_path / "known.yaml").write_text(
        "- name: no-window\n  cells: [dsv4-default-unset]\n  verdict: broken\n"
        "  signature: got auto\n  link: https://github.com/vllm-project/vllm/issues/47174\n"
        "  since: 2026-01-01\n  expires: 2099-01-01\n  reason: nothing resolves auto\n"
    )
    fault = Fault("AssertionError", ("AssertionError",), "only fp8, got auto", "a.py:b")
    record = replace(PACKED, stage="model", error=fault, kv=(), groups=())
    found = explain.read(written(tmp_path, record), CELL, models=models)
    text = "\n".join(part(story.render(found, 200), "Verdict"))
    assert "no-window (fulfilled): broken with" in text
    assert "issues/47174, since 2026-01-01, expires 2099-01-01" in text
    assert "nothing resolves auto" in text
    assert 0 == explain.show(found, as_json=True)


def test_json_holds_what_the_text_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["explain", CELL, "--json", "--from", str(written(tmp_path, LLAMA, PACKED))])
    data = json.loads(capsys.readouterr().out)
    assert (CELL, "ok", "fp8_ds_mla") == (
        data["id"],
        data["verdict"],
        data["resolved"]["kv_cache_dtype"],
    )
    assert len(data["kv"]) == len(data["oracle"])
    assert all(entry["arithmetic"] and not entry["differences"] for entry in data["oracle"])
    assert "kv_cache_dtype" not in data["passed"]
    assert data["reproduce"]["python"].startswith("from vllm import LLM")


def test_what_is_not_in_the_file_is_offered_by_what_is_near(tmp_path: Path) -> None:
    path = written(tmp_path, PACKED)
    with pytest.raises(UsageError, match="did you mean 'dsv4-default-unset'"):
        explain.read(path, "dsv4-defualt-unset")
    with pytest.raises(UsageError, match=r"no record of 'dsv4-default-unset-virtual_b200'$"):
        explain.read(path, "dsv4-default-unset-virtual_b200")


def test_a_cell_of_several_devices_must_be_named_by_one(tmp_path: Path) -> None:
    there = replace(PACKED, device="virtual:h100")
    path = written(tmp_path, PACKED, there)
    with pytest.raises(UsageError, match=r"--device virtual:h200 .* --device virtual:h100"):
        explain.read(path, CELL)
    found = explain.read(path, CELL, devices=["virtual:h100"])
    assert there == found.outcome.record
    assert there == explain.read(path, f"{CELL}-virtual_h100-0.33.0").outcome.record


def test_of_two_runs_in_one_file_the_last_counts(tmp_path: Path) -> None:
    again = replace(PACKED, num_blocks=7)
    assert again == explain.read(written(tmp_path, PACKED, again), CELL).outcome.record


def test_a_record_of_a_real_device_is_read_without_it(tmp_path: Path) -> None:
    record = replace(PACKED, device="GPU-0", device_kind="gpu", depth="warmup", stage="warmup")
    found = explain.read(written(tmp_path, record), CELL)
    assert story.render(found, 100)[0] == f"{CELL} · GPU-0 (SM90, gpu) · vLLM 0.33.0"


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "line 1: not JSON"), ('{"schema": 0}', "schema 0"), ("[]", "JSON object")],
)
def test_a_file_that_holds_no_records_is_exit_code_2(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.jsonl").write_text(text)
    assert 2 == main(["explain", CELL, "--from", str(tmp_path / "records.jsonl")])
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_file_that_is_not_there_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(["explain", CELL, "--from", str(tmp_path / "none")])
    assert "cannot be read" in capsys.readouterr().err


def test_python_by_hand_is_python_with_every_option() -> None:
    options = {"model": "a 'b'", "hf_overrides": {"x": [1]}, "enforce_eager": True}
    for config_only in (True, False):
        tree = ast.parse(python(options, config_only=config_only))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords]
        (call,) = calls
        assert options == {word.arg: ast.literal_eval(word.value) for word in call.keywords}


def test_the_command_by_hand_names_the_cell_and_what_was_passed() -> None:
    case = Case("llama3", "FLASH_ATTN", "fp8", 64, 2)
    line = command(case, "virtual:h200", "/e/bin/python", {"max-model-len": 8192, "other": None})
    assert shlex.split(line) == [
        *("pytest", "cases/test_matrix.py::test_cell[llama3-FLASH_ATTN-fp8-block64-tp2]"),
        *("--device", "virtual:h200", "--engine=/e/bin/python", "--block-size", "64"),
        *("--tensor-parallel-size", "2", "--max-model-len", "8192"),
    ]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", "explain", *arguments],
        cwd=ROOT,
        env={**os.environ, "KVMATRIX_CACHE": str(folder / "cache"), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_cell_is_run_and_its_verdict_is_the_exit_code(tmp_path: Path) -> None:
    engine = f"--engine={plant(tmp_path)}"
    fine = run(tmp_path, "dsv4-default-fine", "--device", "virtual:h200", engine)
    assert 0 == fine.returncode, fine.stderr
    assert "rejected" == part(fine.stdout.splitlines(), "Verdict")[0].split()[0]
    dead = run(tmp_path, "dsv4-default-segfault-virtual_b200", engine)
    assert 1 == dead.returncode, dead.stderr
    assert dead.stdout.startswith("dsv4-default-segfault · virtual:b200 ")
    assert "died by SIGSEGV" in dead.stdout
    lost = run(tmp_path, "dsv4-defualt-fine", "--device", "virtual:h200", engine)
    assert 2 == lost.returncode
    assert "did you mean 'dsv4-default-fine'" in lost.stderr.splitlines()[-1]
