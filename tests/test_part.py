from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.part import read
from harness.record import dumps
from tests.results import cell, matrix, write
from tests.test_merge import record


def lines(folder: Path, *content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_bytes(b"\n".join(content) + b"\n")
    return folder


GOOD = dumps(record("auto")).encode()


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (GOOD[: len(GOOD) // 2], "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"\x00", "not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[]", "a record is a JSON object"),
        (b'{"schema": 99}', "schema 99"),
    ],
)
def test_a_corrupt_line_is_named_and_the_rest_kept(tmp_path: Path, bad: bytes, word: str) -> None:
    write(tmp_path, matrix(cell()))
    found = read(lines(tmp_path, GOOD, b"", bad, dumps(record("fp8")).encode()))
    assert (record("auto"), record("fp8")) == found.records
    (fault,) = found.faults
    assert fault.startswith(f"{tmp_path / 'records.jsonl'} line 3: ")
    assert word in fault


def test_a_run_that_was_cut_off_is_read_and_named(tmp_path: Path) -> None:
    found = read(lines(tmp_path, GOOD))
    assert found.matrix is None
    assert (record("auto"),) == found.records
    assert [f"{tmp_path / 'matrix.json'}: missing, the run was cut off"] == [*found.faults]


def test_matrix_json_is_enough_and_what_is_missing_named(tmp_path: Path) -> None:
    found = read(write(tmp_path, matrix(cell())) / "matrix.json")
    assert matrix(cell()) == found.matrix
    assert [f"{tmp_path / 'records.jsonl'}: missing"] == [*found.faults]


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither matrix\.json nor records\.jsonl"):
        read(tmp_path)
