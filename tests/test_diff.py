from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness import matrix as written
from harness.case import Case
from harness.change import Value, case_of
from harness.cli import main
from harness.diff import (
    APPEARED,
    CHANGED,
    FIXED,
    KINDS,
    LOST,
    NEW,
    STILL,
    VANISHED,
    Diff,
    diff,
)
from harness.record import KVCache
from harness.report.changes import code
from harness.verdict import PASSING, VERDICTS
from tests import test_versus
from tests.results import H200, cache, cell, gpu, matrix, write


def told(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, Value, Value]]:
    found = diff(matrix(old), matrix(new)).changes
    return [(c.kind, f"{c.part} {c.what}".strip(), c.old, c.new) for c in found]


def kinds(found: Diff) -> list[str]:
    return [each.kind for each in found.changes]


def test_a_run_beside_itself_has_no_news() -> None:
    cells = [cell(verdict, f"d{number}") for number, verdict in enumerate(VERDICTS)]
    found = diff(matrix(*cells), matrix(*reversed(copy.deepcopy(cells))))
    # What fails still fails; the rest is no news.
    bad = {*VERDICTS} - PASSING - {"skipped"}
    assert ({STILL}, len(bad)) == ({*kinds(found)}, len(found.changes))
    assert (len(VERDICTS), 0) == (found.compared, found.exit_code)


def test_what_the_harness_writes_beside_itself_has_no_news() -> None:
    """Round trip: the writer of matrix.json and its reader agree on the names."""
    page = KVCache("MLAAttentionSpec", "attn", 2, 64, 37440, 37376, "uint8", shape=(-1, 64, 584))
    outcome = test_versus.outcome(test_versus.NEW, selected="FLASHMLA", kv=(page,))
    fresh = written.to_json({}, [test_versus.NEW], [outcome.cell.device], [outcome])
    before = json.loads(json.dumps(fresh))
    # A run compares what it has not written yet with a baseline that was read.
    assert before["cells"] == fresh["cells"]
    assert () == diff(before, fresh).changes
    after = copy.deepcopy(before)
    assert () == diff(before, after).changes
    after["cells"][0]["kv"][0].update(page_size_bytes=37376, shape=[-1, 64, 583])
    assert [
        ("page_size_bytes", 37440, 37376),
        ("shape", "(blocks, 64, 584)", "(blocks, 64, 583)"),
    ] == [(c.what, c.old, c.new) for c in diff(before, after).changes]


@pytest.mark.parametrize(
    ("old", "new", "kind", "code"),
    [
        ("ok", "broken", NEW, 1),
        ("rejected", "mismatch", NEW, 1),
        ("skipped", "crashed", NEW, 1),
        ("ok", "notrun", NEW, 1),  # what never reported has not passed
        ("notrun", "broken", NEW, 1),  # and says nothing of what comes after it
        ("infra", "broken", NEW, 1),
        ("notrun", "notrun", STILL, 0),
        ("broken", "notrun", STILL, 0),
        ("broken", "unclean", STILL, 0),
        ("broken", "ok", FIXED, 0),
        ("infra", "ok", FIXED, 0),
        ("ok", "infra", LOST, 75),
        ("broken", "infra", LOST, 75),  # not fixed
        ("broken", "skipped", CHANGED, 0),  # not fixed either
        ("ok", "rejected", CHANGED, 0),
        ("ok", "skipped", CHANGED, 0),
    ],
)
def test_what_became_of_a_verdict(old: str, new: str, kind: str, code: int) -> None:
    found = diff(matrix(cell(old)), matrix(cell(new)))
    assert ([kind], code) == (kinds(found), found.exit_code)


def test_only_a_pass_fixes_and_only_a_failure_is_new() -> None:
    for old, new in product(VERDICTS, VERDICTS):
        found = diff(matrix(cell(old)), matrix(cell(new)))
        if FIXED in kinds(found):
            assert new in PASSING and old not in PASSING
        if NEW in kinds(found):
            assert new not in PASSING | {"skipped", "infra"}
        if old in PASSING and new not in PASSING:
            assert not {FIXED, STILL} & {*kinds(found)}


def test_a_known_failure_is_none() -> None:
    known = cell("broken", known="https://bug/1")
    stale = cell("ok", known="https://bug/1", stale="no longer fails")
    assert [(CHANGED, "verdict", "ok", "broken (known)")] == told(cell(), known)
    assert 0 == diff(matrix(cell()), matrix(known)).exit_code
    assert [] == told(known, known)
    assert [(NEW, "verdict", "broken (known)", "broken")] == told(known, cell("broken"))
    assert [(FIXED, "verdict", "broken (known)", "ok")] == told(known, cell())
    assert [(NEW, "verdict", "broken (known)", "ok (stale known entry)")] == told(known, stale)


def test_a_page_a_backend_and_a_capacity_are_news_though_green() -> None:
    new = cell(
        kv=[cache(32768, dtype="uint8", backend="FLASHINFER", block_size=16)],
        resolved={
            "kv_cache_dtype": "fp8",
            "storage_dtype": "uint8",
            "backends": ["FLASHINFER"],
            "selected": "FLASHINFER",
        },
        num_blocks=2000,
        kv_bytes_per_token=65536,
        capacity={"tokens": 32000, "max_model_len": 4096, "gpu_memory_utilization": 0.92},
    )
    assert {
        (CHANGED, "selected", "FLASH_ATTN", "FLASHINFER"),
        (CHANGED, "backends", ("FLASH_ATTN",), ("FLASHINFER",)),
        (CHANGED, "kv_cache_dtype", "auto", "fp8"),
        (CHANGED, "storage_dtype", "bfloat16", "uint8"),
        (CHANGED, "attn page_size_bytes", 65536, 32768),
        (CHANGED, "attn content_bytes", 65536, 32768),
        (CHANGED, "attn backend", "FLASH_ATTN", "FLASHINFER"),
        (CHANGED, "attn dtype", "bfloat16", "uint8"),
        (CHANGED, "num_blocks", 1000, 2000),
        (CHANGED, "kv_bytes_per_token", 131072, 65536),
        (CHANGED, "tokens", 16000, 32000),
    } == {*told(cell(), new)}
    assert 0 == diff(matrix(cell()), matrix(new)).exit_code


def test_pages_that_change_places_are_news() -> None:
    old, new = (cell(kv=[cache(a, "attn"), cache(b, "indexer")]) for a, b in ((64, 128), (128, 64)))
    assert {("attn page_size_bytes", 64, 128), ("indexer page_size_bytes", 128, 64)} <= {
        change[1:] for change in told(old, new)
    }


def test_caches_of_one_role_are_told_apart_by_their_compression() -> None:
    old = cell(kv=[cache(64, compress_ratio=4), cache(8, compress_ratio=128, layers=20)])
    new = cell(kv=[cache(64, compress_ratio=4), cache(16, compress_ratio=128, layers=20)])
    assert (CHANGED, "attn (1 state in 128 tokens) page_size_bytes", 8, 16) in told(old, new)
    # Two caches that nothing tells apart: both pages are told.
    old, new = (cell(kv=[cache(64), cache(size)]) for size in (8, 16))
    assert (CHANGED, "attn page_size_bytes", ("8", "64"), ("16", "64")) in told(old, new)


def test_a_cache_that_is_gone_is_news() -> None:
    old = cell(kv=[cache(), cache(64, "indexer")])
    assert [(CHANGED, "caches", ("indexer of 64 B",), ())] == told(old, cell())
    assert [(CHANGED, "caches", ("attn of 65536 B",), ())] == told(cell(), cell(kv=[]))


def test_what_a_failed_start_did_not_get_to_is_no_news_beside_it() -> None:
    assert [(NEW, "verdict", "ok", "broken")] == told(cell(), cell("broken"))
    # Nor is what a run was told to leave out.
    shallow = cell(stage="spec", num_blocks=None, capacity=None)
    assert [] == told(cell(), shallow)


def test_a_file_that_does_not_tell_a_fact_gives_no_news() -> None:
    old = cell()
    del old["capacity"], old["kv_bytes_per_token"], old["resolved"]["selected"]
    assert [] == told(old, cell())


def test_capacity_is_compared_where_the_same_was_asked() -> None:
    asked = {"tokens": 99, "max_model_len": 8192, "gpu_memory_utilization": 0.92}
    found = diff(matrix(cell()), matrix(cell(num_blocks=1, capacity=asked)))
    assert () == found.changes
    assert ("capacity is not compared where max_model_len differs (4096, now 8192)",) == found.notes


def test_free_memory_of_a_real_device_varies() -> None:
    def on(device: dict[str, Any], blocks: int) -> dict[str, Any]:
        return matrix(cell(device=device["spec"], num_blocks=blocks), devices=(device,))

    assert [] == kinds(diff(on(gpu(1), 1000), on(gpu(1), 985)))
    assert [CHANGED] == kinds(diff(on(gpu(1), 1000), on(gpu(1), 970)))
    assert [CHANGED] == kinds(diff(on(H200, 1000), on(H200, 999)))


# ---- Cells, devices and engines that one run lacks -----------------------------------------------


def test_cells_appear_and_vanish_and_are_never_passes() -> None:
    found = diff(matrix(cell("broken", "gone"), cell()), matrix(cell(), cell("ok", "fresh")))
    assert [(APPEARED, None, "ok"), (VANISHED, "broken", None)] == [
        (c.kind, c.old, c.new) for c in found.changes
    ]
    assert (1, 0) == (found.compared, found.exit_code)


@pytest.mark.parametrize(("verdict", "kind", "code"), [("broken", NEW, 1), ("infra", LOST, 75)])
def test_a_cell_that_appears_and_fails_is_a_failure(verdict: str, kind: str, code: int) -> None:
    found = diff(matrix(), matrix(cell(verdict)))
    assert ([kind], code) == (kinds(found), found.exit_code)


def test_another_gpu_of_the_same_name_is_the_same_device() -> None:
    old = matrix(cell(device="GPU-1"), devices=(gpu(1),))
    new = matrix(cell("broken", device="GPU-2"), devices=(gpu(2),))
    found = diff(old, new)
    assert ([NEW], (("GPU-1", "GPU-2"),)) == (kinds(found), found.renamed)
    other = diff(old, matrix(cell(device="GPU-2"), devices=(gpu(2, "NVIDIA B200"),)))
    assert [APPEARED, VANISHED] == kinds(other)


def test_devices_that_could_be_either_are_not_guessed() -> None:
    old = matrix(cell(device="GPU-1"), devices=(gpu(1),))
    news = [cell(device=f"GPU-{number}") for number in (2, 3)]
    assert 0 == diff(old, matrix(*news, devices=(gpu(2), gpu(3)))).compared
    # Of two, one is still called alike: the other is the other.
    olds = [cell(device=f"GPU-{number}") for number in (1, 2)]
    both = diff(matrix(*olds, devices=(gpu(1), gpu(2))), matrix(*news, devices=(gpu(2), gpu(3))))
    assert (2, (("GPU-1", "GPU-3"),)) == (both.compared, both.renamed)


def test_the_next_version_of_an_engine_is_compared_with_the_last() -> None:
    old = matrix(cell(engine="0.33.0"), engines=("0.33.0",))
    new = matrix(cell("broken", engine="0.34.0"), engines=("0.34.0",))
    found = diff(old, new)
    assert ([NEW], (("vLLM 0.33.0", "vLLM 0.34.0"),)) == (kinds(found), found.renamed)
    cpu = copy.deepcopy(new)
    cpu["engines"][0]["platform"] = "cpu"
    assert 0 == diff(old, cpu).compared


def test_ids_that_name_the_device_are_of_the_same_case() -> None:
    """A run of several devices has longer ids than a run of one."""
    long = cell() | {"id": "llama3-default-auto-virtual_h200-0.33.0"}
    assert 1 == diff(matrix(cell()), matrix(long)).compared


@pytest.mark.parametrize(
    ("more", "tail", "case"),
    [
        ({}, "", Case("llama3", "default", "auto")),
        ({}, "-v2", Case("llama3", "default", "auto", model_runner="v2")),
        ({}, "-v1-cpu-0.33.0", Case("llama3", "default", "auto", model_runner="v1")),
        ({}, "-v100", Case("llama3", "default", "auto")),
        ({"block_size": 64}, "-block64", Case("llama3", "default", "auto", 64)),
        (
            {"block_size": 64, "tensor_parallel_size": 8},
            "-block64-tp8-v2-virtual_h200",
            Case("llama3", "default", "auto", 64, 8, "v2"),
        ),
    ],
)
def test_the_case_is_read_from_the_cell(more: dict[str, Any], tail: str, case: Case) -> None:
    assert case == case_of(cell() | more | {"id": f"llama3-default-auto{tail}"})


def test_what_was_not_selected_has_not_vanished() -> None:
    old = matrix(cell(), cell(dtype="fp8"), cell(dtype="gone"))
    left = {(Case("llama3", "default", "fp8"), "virtual:h200", "0.33.0")}
    found = diff(old, matrix(cell()), left)
    assert [(VANISHED, "llama3-default-gone")] == [(c.kind, c.case.id) for c in found.changes]
    # Nor have the devices that were not asked for.
    b200 = {**H200, "spec": "virtual:b200", "name": "NVIDIA B200"}
    old = matrix(cell(), cell(device="virtual:b200"), devices=(H200, b200))
    assert () == diff(old, matrix(cell()), set()).changes
    assert [VANISHED] == kinds(diff(old, matrix(cell())))


# ---- The command ---------------------------------------------------------------------------------


def run(tmp_path: Path, old: dict[str, Any], new: dict[str, Any], *options: str) -> int:
    folders = [str(write(tmp_path / name, data)) for name, data in (("o", old), ("n", new))]
    return main(["diff", *folders, *options])


OLD = matrix(cell(), cell("broken", "a"), cell("ok", "b"))
NEXT = matrix(cell(kv=[cache(4096)]), cell("ok", "a"), cell("broken", "b"), cell("ok", "c"))


def test_the_terminal_tells_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == run(tmp_path, OLD, NEXT)
    out = capsys.readouterr().out
    for line in (
        "New failures: 1 cell\n  ok -> broken: llama3-default-b\n    why it is broken\n",
        "Fixed: 1 cell\n  broken -> ok: llama3-default-a\n",
        "page_size_bytes of attn 65536 -> 4096: llama3-default-auto\n",
        "Appeared: 1 cell\n  ok: llama3-default-c\n",
    ):
        assert line in out
    assert 0 == run(tmp_path, OLD, OLD)
    assert 0 == run(tmp_path, matrix(cell()), matrix(cell()))
    assert "No difference in the 1 cell that both runs have" in capsys.readouterr().out


def test_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == run(tmp_path, OLD, NEXT, "--json")
    found = json.loads(capsys.readouterr().out)
    counts = {NEW: 1, FIXED: 1, CHANGED: 1, APPEARED: 1}
    assert {kind: counts.get(kind, 0) for kind in KINDS} == found["counts"]
    assert 3 == found["compared"]
    assert {
        "kind": NEW,
        "id": "llama3-default-b",
        "device": "virtual:h200",
        "engine": "0.33.0",
        "what": "verdict",
        "part": None,
        "old": "ok",
        "new": "broken",
        "reason": "why it is broken",
    } == found["changes"][0]


HOSTILE = "\x1b[31m<script>alert(1)</script>\x00`` @all [x](http://e)\n# y " + "z" * 200_000


@pytest.mark.parametrize("option", ["", "--markdown"])
def test_hostile_text_is_shown_as_text(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = cell("broken", reason=HOSTILE, model="<b>\x1b[1m", backend="`x`\n")
    new = matrix(bad, {**cell(), "kv": [cache(role=HOSTILE)]})
    assert 1 == run(tmp_path, matrix(cell()), new, *filter(None, [option]))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x00" not in out
    assert len(out) < 10_000
    if option:
        # Longer than any run of backticks inside, so that all of it stays code.
        assert "``` \\x1b[31m<script>" in out or "```\\x1b[31m<script>" in out
        assert not [line for line in out.splitlines() if line.startswith("# y")]


@pytest.mark.parametrize(
    ("text", "span"), [("a", "`a`"), ("a`b", "``a`b``"), ("`", "`` ` ``"), ("``a", "``` ``a ```")]
)
def test_nothing_ends_a_code_span(text: str, span: str) -> None:
    assert span == code(text)


def test_many_changes_are_listed_in_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [cell("broken", f"d{number}", reason=f"cause {number}") for number in range(14)]
    assert 1 == run(tmp_path, matrix(), matrix(*cells))
    out = capsys.readouterr().out
    assert "New failures: 14 cells" in out
    assert "2 more, all of them with --json" in out
    assert 1 == run(tmp_path, matrix(), matrix(*cells), "--json")
    assert 14 == len(json.loads(capsys.readouterr().out)["changes"])


def test_a_corrupt_file_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good", OLD)
    (tmp_path / "bad.json").write_text('{"schema": 1,')
    assert 2 == main(["diff", str(good), str(tmp_path / "bad.json")])
    (line,) = capsys.readouterr().err.splitlines()
    assert "bad.json" in line and "not JSON" in line
    assert 2 == main(["diff", str(tmp_path / "none"), str(good)])
