"""What a cell was, run after run: lines, strips, flaky and missing cells, and the folder."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import history, nights, result
from harness import night as files
from harness.cli import main
from harness.errors import EXIT_INFRA, InfraError, UsageError
from harness.history import History
from harness.night import HistoryError
from harness.report import junit, markdown, strips
from harness.verdict import PASSING, VERDICTS
from harness.view import Screen
from tests.chaos.planted import plant
from tests.results import cell, gpu, matrix, write
from tests.test_baseline import run

PLAIN = Screen(100, color=False, unicode=True)


def night(day: int, *cells: dict[str, Any], commit: str = "", **more: Any) -> dict[str, Any]:
    """The matrix.json of a day in January."""
    data = matrix(*cells, **more)
    data["run"]["started"] = f"2026-01-{day:02}T03:00:00Z"
    for engine in data["engines"]:
        engine |= {"commit": commit} if commit else {}
    return data


def past(*runs: dict[str, Any]) -> list[files.Night]:
    return [files.parse(files.name(text), text)[0] for text in map(files.lines, runs)]


def told(*runs: dict[str, Any]) -> History:
    """What all but the last tell of it."""
    return history.history(runs[-1], past(*runs[:-1]))


# ---- Strips --------------------------------------------------------------------------------------


def test_a_strip_has_each_run_oldest_first_and_since_when_it_holds() -> None:
    runs = [night(day, cell(v)) for day, v in enumerate(("broken", "broken", "ok", "ok"), 1)]
    found = told(*runs)
    (trace,) = found.traces
    assert (("broken", "broken", "ok", "ok"), 2, 0) == (trace.strip, trace.since, trace.gaps)
    assert not trace.always
    assert "2026-01-03T03:00:00Z" == found.runs[2]["started"]


def test_what_was_never_otherwise_is_at_least_since_the_first_run() -> None:
    data = told(night(1, cell()), night(2, cell())).to_json()
    assert "at least since 2026-01-01T03:00:00Z (vLLM 0.33.0)" == strips.since(
        data, data["cells"][0]
    )


def test_a_run_without_a_result_neither_passes_nor_ends_a_series() -> None:
    runs = [night(1, cell("broken"), commit="a"), night(2, cell()), night(3, cell("infra"))]
    runs += [
        night(4, cell("notrun")),
        night(5, cell(dtype="fp8"), cell("skipped")),
        night(6, cell()),
    ]
    (trace,) = told(*runs).traces
    assert ("broken", "ok", "infra", "notrun", "skipped", "ok") == trace.strip
    assert (1, 3, ()) == (trace.since, trace.gaps, trace.flaky)


def test_a_run_that_had_no_such_cell_shows_as_none() -> None:
    runs = [night(1, cell(), cell(dtype="fp8")), night(2, cell()), night(3, cell(dtype="fp8"))]
    (trace,) = told(*runs, night(4, cell(dtype="fp8"), cell())).traces[:1]
    assert ("ok", None, "ok", "ok") == trace.strip
    assert "✓□✓✓" == strips.strip(PLAIN, trace.strip)
    assert "+_++" == strips.strip(Screen(80, color=False, unicode=False), trace.strip)


@given(st.lists(st.sampled_from([None, *history.NO_RESULT]), min_size=1, max_size=8))
def test_no_result_is_never_shown_as_a_pass(found: list[str | None]) -> None:
    shown = strips.strip(PLAIN, found)
    assert len(found) == len(shown)
    assert not {"✓", "·"} & set(shown)


@pytest.mark.parametrize("lost", history.NO_RESULT)
def test_what_gave_no_result_is_no_known_failure_either(lost: str) -> None:
    runs = [night(day, cell(v, known="bug")) for day, v in enumerate(("broken", lost, "broken"), 1)]
    (trace,) = told(*runs).traces
    assert ("broken (known)", lost, "broken (known)") == trace.strip
    assert (0, 1) == (trace.since, trace.gaps)


def test_what_has_no_result_now_is_nothing_since_no_day() -> None:
    data = told(night(1, cell()), night(2, cell("notrun"))).to_json()
    assert "" == strips.since(data, data["cells"][0])
    assert [] == strips.changed(data)


def test_every_verdict_has_a_sign_and_a_known_failure_its_own() -> None:
    assert len(VERDICTS) == len(strips.strip(PLAIN, VERDICTS))
    assert "k" == strips.strip(PLAIN, ["broken (known)"])
    assert "✓" == strips.strip(PLAIN, ["ok (stale known entry)"])


# ---- Flaky ---------------------------------------------------------------------------------------


def test_flaky_is_what_one_engine_gave_both_ways() -> None:
    runs = [night(day, cell(v)) for day, v in enumerate(("ok", "timeout", "ok"), 1)]
    assert (0, 1, 2) == told(*runs).traces[0].flaky


def test_another_commit_of_the_same_version_may_differ() -> None:
    runs = [night(1, cell(), commit="a" * 40), night(2, cell("broken"), commit="b" * 40)]
    assert () == told(*runs).traces[0].flaky
    assert (0, 2) == told(*runs, night(3, cell("broken"), commit="a" * 40)).traces[0].flaky[:2]


def test_a_known_failure_that_also_passes_is_flaky_and_a_gap_is_not() -> None:
    assert told(night(1, cell("broken", known="bug")), night(2, cell())).traces[0].flaky
    for verdict in history.NO_RESULT:
        assert () == told(night(1, cell(verdict)), night(2, cell())).traces[0].flaky


def test_a_stale_known_entry_makes_a_pass_no_failure() -> None:
    """The cell passes: it is the entry that is wrong."""
    assert () == told(night(1, cell()), night(2, cell(stale="gone"))).traces[0].flaky
    both = told(night(1, cell("broken", known="bug")), night(2, cell(stale="gone")))
    assert (0, 1) == both.traces[0].flaky


@given(st.lists(st.sampled_from(VERDICTS), min_size=1, max_size=10))
def test_only_passes_beside_failures_are_flaky(verdicts: list[str]) -> None:
    runs = [night(day, cell(v)) for day, v in enumerate(verdicts, 1)]
    clear = [v for v in verdicts if v not in history.NO_RESULT]
    both = {v in PASSING for v in clear} == {True, False}
    assert both == bool(told(*runs).traces[0].flaky)


# ---- Devices, engines, runs ----------------------------------------------------------------------


def test_another_gpu_of_the_name_and_the_next_version_are_the_same_cell() -> None:
    old = night(1, cell("broken", device="GPU-1", engine="0.33.1.dev1"), devices=(gpu(1),))
    old["engines"][0]["version"] = "0.33.1.dev1"
    new = night(2, cell(device="GPU-2"), devices=(gpu(2),))
    assert ("broken", "ok") == told(old, new).traces[0].strip
    assert () == told(old, new).traces[0].flaky


@given(st.data())
def test_the_order_of_files_does_not_matter_and_none_counts_twice(data: st.DataObject) -> None:
    verdicts = data.draw(st.lists(st.sampled_from(VERDICTS), min_size=1, max_size=5))
    earlier = past(*(night(day, cell(v)) for day, v in enumerate(verdicts, 1)))
    now = night(20, cell())
    mixed = data.draw(st.permutations([*earlier, *earlier]))
    assert history.history(now, earlier) == history.history(now, mixed)
    assert (*verdicts, "ok") == history.history(now, mixed).traces[0].strip


def test_runs_of_other_cells_take_no_place_and_only_the_last_are_shown() -> None:
    runs = [night(1, cell("broken"))]
    runs += [night(day, cell(dtype="fp8")) for day in range(2, 20)]
    runs += [night(20, cell())]
    assert ("broken", "ok") == told(*runs).traces[0].strip
    many = [night(day, cell()) for day in range(1, 28)]
    assert history.LAST == len(told(*many).traces[0].strip)


def gone(found: History) -> list[tuple[str, str, str]]:
    return [(case.id, device, engine) for case, device, engine in (t.key for t in found.missing)]


def test_cells_that_an_earlier_run_had_are_missing_unless_they_were_not_asked_for() -> None:
    runs = [night(1, cell(), cell(dtype="fp8")), night(2, cell()), night(3, cell())]
    found = told(*runs)
    assert [("llama3-default-fp8", "virtual:h200", "0.33.0")] == gone(found)
    (lost,) = found.missing
    assert (("ok", None, None), None) == (lost.strip, lost.since)
    assert () == history.history(runs[-1], past(*runs[:-1]), unselected=[lost.key]).missing


def test_a_lost_shard_is_missing_every_night_but_not_where_its_device_was_not_asked_for() -> None:
    """Nothing of its device is left in the run: no column that it could be paired with."""
    one, other = cell(device="GPU-1"), cell("broken", device="GPU-2")
    both = {"devices": (gpu(1, "NVIDIA H200"), gpu(2, "NVIDIA B200"))}
    short = [night(day, one, devices=both["devices"][:1]) for day in (2, 3)]
    runs = [night(1, one, other, **both), *short]
    assert [("llama3-default-auto", "GPU-2", "0.33.0")] == gone(told(*runs))
    assert () == history.history(runs[-1], past(*runs[:-1]), unselected=()).missing
    text = "\n".join(strips.terminal(PLAIN, told(*runs).to_json()))
    assert "  Missing: earlier runs had them, which is no pass: 1 cell\n" in text
    assert "    all of GPU-2 with vLLM 0.33.0: 1 cell" in text
    data = {**runs[-1], "history": told(*runs).to_json()}
    assert "- `all of GPU-2 with vLLM 0.33.0`: 1 cell\n" in markdown.render(data)


def test_runs_that_began_later_are_no_past() -> None:
    later, now = night(9, cell("broken")), night(5, cell())
    assert ("ok",) == told(later, now).traces[0].strip


def test_since_names_the_version_that_stood_for_the_engine_then() -> None:
    old = night(1, cell(), cell(engine="0.32.0"), engines=("0.27.1", "0.32.0"))
    old["cells"][0]["engine"] = "0.27.1"
    new = night(2, cell(engine="0.27.1"), cell(), engines=("0.27.1", "0.33.0"))
    data = told(old, new).to_json()
    assert [f"at least since 2026-01-01T03:00:00Z (vLLM {v})" for v in ("0.27.1", "0.32.0")] == [
        strips.since(data, each) for each in data["cells"]
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


# ---- The file and the folder ---------------------------------------------------------------------


def test_the_same_run_is_one_file_and_another_of_the_same_second_is_two(tmp_path: Path) -> None:
    one, other = night(1, cell()), night(1, cell("broken"))
    assert nights.append(tmp_path, one) == nights.append(tmp_path, one)
    nights.append(tmp_path, other)
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert 2 == len(names)
    assert all(name.startswith("20260101T030000Z-") and name.endswith(".jsonl") for name in names)


def test_a_run_that_is_reported_on_again_is_not_its_own_past(tmp_path: Path) -> None:
    data = night(1, cell())
    nights.append(tmp_path, data)
    assert ("ok",) == nights.tell(tmp_path, data)[0].traces[0].strip


def test_a_line_tells_what_was_found(tmp_path: Path) -> None:
    path = nights.append(tmp_path, night(1, cell(reason="x" * 999)))
    line = json.loads(path.read_text().split("\n")[1])
    assert 65536 == line["page_size_bytes"]
    assert {"kv_cache_dtype": "auto", "storage_dtype": "bfloat16", "backends": ["FLASH_ATTN"]} == (
        line["resolved"]
    )
    assert len(line["reason"]) <= files.MAX_REASON


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"schema":2}', "no schema 1"),
        (b'{"schema":1,"run":{},"engines":[{}],"devices":[]}', "does not list its engines"),
        (b'{"schema":1,"run":3,"engines":[],"devices":[]}', "nothing of the run"),
        (b'{"schema":1,"run":{"started":3},"engines":[],"devices":[]}', "nothing of the run"),
        (b'{"schema":1,"run":{"counts":[]},"engines":[],"devices":[]}', "does not count"),
        (b'{"schema":1,"run":{},"engines":[{"version":"1","commit":2}],"devices":[]}', "commit"),
        (b'{"schema":1,"run":{},"engines":[],"devices":[{"spec":"a"},{"spec":"a"}]}', "twice"),
    ],
)
def test_a_file_that_is_none_is_named_and_the_rest_kept(
    content: bytes, words: str, tmp_path: Path
) -> None:
    nights.append(tmp_path, night(1, cell()))
    (tmp_path / "20260102T000000Z-bad.jsonl").write_bytes(content)
    found, faults = nights.read(tmp_path)
    assert 1 == len(found) == len(faults)
    assert "20260102T000000Z-bad.jsonl" in faults[0]
    assert words in faults[0]


LINE: dict[str, Any] = json.loads(files.lines(matrix(cell(dtype="x"))).split("\n")[1])


@pytest.mark.parametrize(
    "bad",
    [
        *("{", "[]", '{"id":"x"}', "[" * 100_000),
        *(json.dumps({**LINE, "block_size": size}) for size in ([1], "1", True)),
        *(json.dumps({**LINE, name: 3}) for name in ("known", "stale", "device", "reason")),
    ],
)
def test_a_corrupt_line_is_named_and_the_rest_kept(bad: str, tmp_path: Path) -> None:
    path = nights.append(tmp_path, night(1, cell(), cell(dtype="fp8")))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], bad, *lines[2:]]) + "\n")
    (found,), (fault,) = nights.read(tmp_path)
    assert 2 == len(found.cells)
    assert f"{path} line 3: " in fault


@given(st.dictionaries(st.sampled_from([*LINE, "known", "stale", "block_size"]), JSON))
def test_no_line_is_a_traceback(changes: dict[str, Any]) -> None:
    head = files.lines(matrix()).split("\n")[0]
    found, faults = files.parse("x", f"{head}\n{json.dumps({**LINE, **changes})}\n")
    assert 1 == len(found.cells) + len(faults)
    strips.terminal(PLAIN, history.history(night(2, cell(dtype="x")), [found]).to_json())


def test_a_file_that_ends_early_is_named_and_a_cell_counts_once() -> None:
    data = night(1, cell(), cell(dtype="fp8"))
    data["run"]["counts"] = {"ok": 2}
    head, *rest = files.lines(data).splitlines()
    assert ["ends early: 1 of 2 cells are there"] == files.parse("x", f"{head}\n{rest[0]}\n")[1]
    found, faults = files.parse("x", "\n".join([head, *rest, rest[0]]))
    assert (2, ["line 4: the cell is there twice"]) == (len(found.cells), faults)


def test_an_unknown_verdict_is_a_corrupt_line() -> None:
    text = files.lines(night(1, cell())).replace('"verdict":"ok"', '"verdict":"good"')
    assert ["line 2: unknown verdict 'good'"] == files.parse("x", text)[1]
    with pytest.raises(HistoryError):
        files.parse("x", "")


def test_a_folder_that_is_a_file_and_a_disk_that_is_full(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="is a file; name a folder"):
        nights.read(file)
    with pytest.raises(InfraError, match="file"):
        nights.append(file / "in", night(1, cell()))
    assert ([], []) == nights.read(tmp_path / "yet to come")


# ---- Shown ---------------------------------------------------------------------------------------

HOSTILE = "<script>\x1b[31m|`x`\0@all"


def hostile() -> dict[str, Any]:
    bad = cell("broken", HOSTILE, model=HOSTILE)
    now = night(3, {**bad, "verdict": "ok"})
    now["history"] = told(night(1, bad), night(2, bad, cell()), now).to_json()
    return now


def test_text_from_a_run_is_text_everywhere() -> None:
    data = hostile()
    assert all(line.isprintable() for line in strips.terminal(PLAIN, data["history"]))
    text = "\n".join(row for _, rows in strips.markdown(data["history"]) for row, _ in rows)
    assert "`` <script>" not in text.replace("`` llama", "")
    assert "\x1b" not in text
    ET.fromstring(junit.render(data))
    assert "Flaky: one engine gave both: 1 cell" in markdown.render(data)


def test_junit_tells_since_when_and_whether_it_is_flaky() -> None:
    data = night(2, cell(), cell(dtype="fp8"))
    data["history"] = told(night(1, cell("broken"), cell(dtype="fp8")), data).to_json()
    root = ET.fromstring(junit.render(data))
    found = [
        {p.get("name"): p.get("value") for p in case.iterfind("properties/property")}
        for case in root.iter("testcase")
    ]
    before = "at least since 2026-01-01T03:00:00Z (vLLM 0.33.0)"
    assert [("yes", "since this run"), ("no", before)] == [
        (each["flaky"], each["since"]) for each in found
    ]


def test_the_terminal_tells_what_is_not_as_it_was() -> None:
    steady = cell(dtype="fp8")
    runs = [night(1, cell("broken"), steady, commit="a"), night(2, cell(), steady, commit="b")]
    text = "\n".join(strips.terminal(PLAIN, told(*runs).to_json()))
    assert "Not what it was in the run before: 1 cell" in text
    assert "✗✓  llama3-default-auto on virtual:h200 with vLLM 0.33.0, since this run" in text
    assert "fp8" not in text
    quiet = "\n".join(strips.terminal(PLAIN, told(night(1, steady), night(2, steady)).to_json()))
    assert "Every cell is what it was in the run before" in quiet


# ---- As users start it ---------------------------------------------------------------------------


def test_pytest_adds_each_run_and_tells_of_those_before(tmp_path: Path) -> None:
    python = plant(tmp_path)
    folder = tmp_path / "history"
    both = ("-k", "dsv4-default-fine or dsv4-default-segfault", f"--history={folder}")
    _, out, data = run(tmp_path, python, *both)
    assert "History: no earlier run has any of these cells" in out
    assert [["rejected"], ["crashed"]] == [c["strip"] for c in data["history"]["cells"]]

    # That the cell passed with this very engine makes it flaky now.
    (path,) = folder.iterdir()
    path.write_text(path.read_text().replace('"crashed"', '"ok"'))
    code, out, data = run(tmp_path, python, *both, "-n1")
    assert 1 == code
    assert "Flaky: one engine gave both: 1 cell\n    ✓☠  dsv4-default-segfault" in out
    assert 2 == len([*folder.iterdir()])

    # What -k leaves out is not missing.
    _, out, data = run(tmp_path, python, "-k", "dsv4-default-fine", f"--history={folder}")
    assert [] == data["history"]["missing"]
    assert "Missing" not in out


NO_DISK = "/proc/kvmatrix"
"""A folder that nobody can make."""


def test_a_disk_that_does_not_take_it_costs_the_history_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = plant(tmp_path)
    code, out, data = run(tmp_path, python, "-k", "dsv4-default-fine", f"--history={NO_DISK}")
    assert (EXIT_INFRA, ["rejected"]) == (code, [c["verdict"] for c in data["cells"]])
    assert f"kvmatrix: cannot write {NO_DISK}" in out
    assert (tmp_path / "out" / "junit.xml").is_file()

    again = tmp_path / "again"
    arguments = ["report", str(tmp_path / "out"), "--out", str(again), "--history", NO_DISK]
    assert EXIT_INFRA == main(arguments)
    assert f"kvmatrix: cannot write {NO_DISK}" in capsys.readouterr().err
    assert data["cells"] == result.load(again)["cells"]


def test_reports_of_merged_shards_are_added_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [write(tmp_path / name, night(2, cell(dtype=name))) for name in ("auto", "fp8")]
    for shard in shards:
        (shard / "records.jsonl").touch()
    folder = tmp_path / "history"
    nights.append(folder, night(1, cell("broken"), cell(dtype="fp8"), cell(dtype="gone")))
    arguments = [
        "report",
        *map(str, shards),
        "--out",
        str(tmp_path / "out"),
        "--history",
        str(folder),
    ]
    assert 0 == main(arguments) == main(arguments)
    data = result.load(tmp_path / "out")["history"]
    assert [["broken", "ok"], ["ok", "ok"]] == [c["strip"] for c in data["cells"]]
    assert ["llama3-default-gone"] == [c["id"] for c in data["missing"]]
    assert 2 == len([*folder.iterdir()])

    # Reported on once more without a history, what it told of the past stays.
    out = str(tmp_path / "out")
    assert 0 == main(["report", out])
    assert data == result.load(tmp_path / "out")["history"]

    (folder / "x.jsonl").write_text("{")
    assert 1 == main(arguments)
    assert "x.jsonl is no history of a run" in capsys.readouterr().err


# ---- kvmatrix history ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    nights.append(tmp_path, night(1, cell("broken"), cell(dtype="fp8")))
    nights.append(tmp_path, night(2, cell(), cell(dtype="fp8")))
    return tmp_path


def test_the_command_shows_strips_flaky_ones_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == main(["history", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✗✓  flaky  llama3-default-auto on virtual:h200")
    assert any(line.startswith("✓✓  llama3-default-fp8") for line in lines)
    assert 0 == main(["history", str(folder), "*-fp8", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert [["ok", "ok"]] == [c["strip"] for c in data["cells"]]


def test_the_command_shows_what_the_newest_run_lacks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nights.append(folder, night(3, cell()))
    assert 0 == main(["history", str(folder), "*-fp8"])
    line = "✓✓□  llama3-default-fp8 on virtual:h200 with vLLM 0.33.0: missing\n"
    assert line == capsys.readouterr().out
    # What was not asked for has not been lost.
    part = night(4, cell())
    part["run"]["unselected"] = 1
    nights.append(folder, part)
    assert 0 == main(["history", str(folder), "*-fp8"])
    assert "✓✓□□" in (out := capsys.readouterr().out)
    assert "missing" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "none is no history folder: `pytest --history=DIR` makes one"),
        ([".", "llama3-default-fp9"], "did you mean 'llama3-default-fp8'"),
        ([".", "--runs", "0"], "--runs 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str],
    words: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert 2 == main(["history", *arguments])
    err = capsys.readouterr().err
    assert words in err
    assert 1 == len(err.splitlines())


def test_an_empty_folder_says_what_fills_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(["history", str(tmp_path)])
    assert "has no run" in capsys.readouterr().err


def test_what_cannot_be_read_is_exit_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "0.jsonl").write_text("no")
    assert 1 == main(["history", str(folder)])
    assert "0.jsonl is no history of a run" in capsys.readouterr().err
