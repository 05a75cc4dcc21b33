"""`kvmatrix report` as users start it, in one process."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from harness.cli import main
from harness.record import dumps, loads
from harness.report.markdown import LEAST
from tests.chaos.planted import plant
from tests.results import cell, matrix, write
from tests.test_merge import record
from tests.test_part import lines

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(__file__).parent / "resources" / "two-engines.jsonl"
FORMATS = ("junit.xml", "matrix.html", "matrix.json", "matrix.md", "records.jsonl")


def shard(folder: Path, *verdicts: tuple[str, str]) -> Path:
    """A folder with a cell, and its record, of each dtype and verdict."""
    write(folder, matrix(*(cell(verdict, dtype) for dtype, verdict in verdicts)))
    stages = {"ok": "allocate"}
    return lines(
        folder,
        *(dumps(record(dtype, stages.get(v, "config"))).encode() for dtype, v in verdicts),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_format_counts_the_same(tmp_path: Path) -> None:
    one = shard(tmp_path / "a", ("auto", "ok"), ("fp8", "rejected"), ("nvfp4", "broken"))
    two = shard(tmp_path / "b", ("unset", "ok"), ("fp8_inc", "broken"), ("int8", "mismatch"))
    out = tmp_path / "out"
    assert 0 == main(["report", str(one), str(two), "--out", str(out)])
    assert [*FORMATS] == [*contents(out)]
    expected = {"ok": 2, "rejected": 1, "broken": 2, "mismatch": 1}
    data = json.loads((out / "matrix.json").read_text())
    assert expected == data["run"]["counts"] == Counter(c["verdict"] for c in data["cells"])
    table = re.findall(
        r"^\| \S+ (\w+) \| (\d+) \|", (out / "matrix.md").read_text("utf-8"), re.MULTILINE
    )
    assert expected == {name: int(number) for name, number in table}
    page = json.loads(
        re.findall(r">(\{.*\})</script>", (out / "matrix.html").read_text("utf-8"))[0]
    )
    verdict = page["fields"].index("verdict")
    assert expected == Counter(page["pool"][cell[verdict]] for cell in page["cells"])
    root = ET.parse(out / "junit.xml").getroot()
    values = [each.get("value") for each in root.iterfind(".//testcase//property[@name='verdict']")]
    assert expected == Counter(values)
    assert "3" == root.get("failures")
    records = [loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert [c["kv_cache_dtype"] for c in data["cells"]] == [r.kv_cache_dtype for r in records]


def test_a_run_writes_every_format_itself(tmp_path: Path) -> None:
    python = plant(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "junit.xml").write_text("of an earlier run")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", f"--engine={python}", "--device", "virtual:h200"),
            *(f"--matrix-out={out}", "-k", "dsv4-default-fine or dsv4-default-segfault"),
        ],
        cwd=ROOT,
        env={**os.environ, "KVMATRIX_CACHE": f"{tmp_path}/cache", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "matrix.json, matrix.html, matrix.md, junit.xml and records.jsonl are in" in done.stdout
    assert [*FORMATS] == [*contents(out)]
    assert "1 of 2 cells FAILED" in (out / "matrix.md").read_text("utf-8")
    root = ET.parse(out / "junit.xml").getroot()
    assert ("2", "1") == (root.get("tests"), root.get("failures"))

    # A run that was killed leaves the matrix.json that it began with: no cell has reported.
    data = json.loads((out / "matrix.json").read_text())
    blank = [{**each, "verdict": "notrun"} for each in data["cells"]]
    write(out, {**data, "cells": blank})
    main(["report", str(out)])
    again = {c["id"]: c["verdict"] for c in json.loads((out / "matrix.json").read_text())["cells"]}
    assert {c["id"]: c["verdict"] for c in data["cells"]} == again


def test_shuffled_shards_give_the_same_bytes(tmp_path: Path) -> None:
    shards = [
        shard(tmp_path / "a", ("auto", "ok"), ("fp8", "broken")),
        shard(tmp_path / "b", ("fp8", "rejected"), ("unset", "ok")),
        shard(tmp_path / "c", ("nvfp4", "ok"), ("auto", "ok")),
    ]
    made = []
    for number, order in enumerate(itertools.permutations(shards)):
        out = tmp_path / f"out{number}"
        assert 1 == main(["report", *map(str, order), "--out", str(out)])
        made.append(contents(out))
    assert 6 == len(made)
    assert all(each == made[0] for each in made)


def test_a_report_of_a_report_is_the_same(tmp_path: Path) -> None:
    folder = shard(tmp_path / "a", ("auto", "ok"), ("fp8", "broken"))
    assert 0 == main(["report", str(folder)])
    once = contents(folder)
    assert [*FORMATS] == [*once]
    assert 0 == main(["report", str(folder)])
    assert once == contents(folder)


def test_conflicts_are_named_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = shard(tmp_path / "a", ("auto", "ok")), shard(tmp_path / "b", ("auto", "broken"))
    assert 1 == main(["report", str(one), str(two), "--out", str(tmp_path / "out")])
    done = capsys.readouterr()
    told = f"broken in {two} differ in verdict, the worst is kept"
    assert "conflict: llama3-default-auto on virtual:h200 with vLLM 0.33.0: " in done.err
    assert f"ok in {one}, {told}" in done.err
    assert f"wrote {tmp_path / 'out'}: 1 cell: 1 broken\n" == done.out


def test_a_corrupt_line_is_named_and_the_rest_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shard(tmp_path / "a", ("auto", "ok"), ("fp8", "ok"))
    file = folder / "records.jsonl"
    good = file.read_bytes().splitlines()
    file.write_bytes(good[0] + b"\n" + good[1][:40])  # as where a disk was full
    assert 1 == main(["report", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {"ok": 2} == found["counts"]
    (fault,) = found["faults"]
    assert fault.startswith(f"{file} line 2: not JSON")
    assert good[:1] == file.read_bytes().splitlines()


def test_a_shard_that_is_missing_is_named_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = shard(tmp_path / "a", ("auto", "ok"))
    data = json.loads((one / "matrix.json").read_text())
    data["run"]["shard"] = {"index": 1, "count": 2, "durations": None}
    write(one, data)
    out = tmp_path / "out"
    assert 1 == main(["report", str(one), "--out", str(out)])
    assert "shard 2 of 2 is not among the parts" in capsys.readouterr().err
    assert "shard 2 of 2 is not among the parts" in (out / "matrix.md").read_text("utf-8")
    assert 0 == main(["report", str(one)])  # itself alone, where it lies


def test_records_of_a_run_that_was_cut_off_are_judged(tmp_path: Path) -> None:
    """vLLM 47174: DeepSeek-V4 with default options, before its fix and after it."""
    folder = lines(tmp_path / "cut", *KEPT.read_bytes().splitlines())
    out = tmp_path / "out"
    assert 1 == main(["report", str(folder), "--out", str(out)])
    data = json.loads((out / "matrix.json").read_text())
    assert len(KEPT.read_bytes().splitlines()) == len(data["cells"])
    assert ["0.27.1", "0.33.0"] == [engine["version"] for engine in data["engines"]]
    founding = {c["id"]: c["verdict"] for c in data["cells"] if "dsv4-default-unset" in c["id"]}
    assert {"dsv4-default-unset-0.27.1": "broken", "dsv4-default-unset-0.33.0": "ok"} == founding


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["{a}", "{b}"], "--out"),
        (["{a}", "--budget", "100"], str(LEAST)),
        (["{none}"], "neither matrix.json nor records.jsonl"),
        (["{a}", "--out", "{a}/matrix.json"], "not a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    tmp_path: Path, arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        shard(tmp_path / name, ("auto", "ok"))
    (tmp_path / "none").mkdir()
    names = {name: str(tmp_path / name) for name in ("a", "b", "none")}
    assert 2 == main(["report", *(text.format(**names) for text in arguments)])
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line


def test_a_folder_that_is_named_twice_is_one(tmp_path: Path) -> None:
    folder = shard(tmp_path / "a", ("auto", "ok"))
    assert 0 == main(["report", str(folder), f"{folder}/../a", "--out", str(tmp_path / "out")])
    data = json.loads((tmp_path / "out" / "matrix.json").read_text())
    assert [] == data["run"]["merged"]["duplicates"]


def test_hostile_text_goes_through_every_format(tmp_path: Path) -> None:
    text = "<script>\x1b[31m\x00\ud800" + "x" * 200_000
    folder = tmp_path / "a"
    error = {"type": "E", "message": text, "where": text}
    write(folder, matrix(cell("broken", reason=text, error=error, tail=text)))
    lines(folder, dumps(record("auto", "config", tail=text)).encode())
    assert 0 == main(["report", str(folder), "--budget", str(LEAST)])
    assert text == json.loads((folder / "matrix.json").read_text())["cells"][0]["reason"]
    assert text == loads((folder / "records.jsonl").read_text()).tail
    # Nothing of it is a tag: it stands in the page's JSON.
    assert "<script>\x1b" not in (folder / "matrix.html").read_text("utf-8")
    assert 2 == (folder / "matrix.html").read_text("utf-8").count("<script")
    ET.parse(folder / "junit.xml")
    assert (folder / "matrix.md").stat().st_size <= LEAST


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "kvmatrix report shard-1 shard-2" in capsys.readouterr().out
