from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.result import load
from tests.results import cell, matrix, write


def test_a_folder_and_its_file_are_the_same_run(tmp_path: Path) -> None:
    data = matrix(cell())
    write(tmp_path, data)
    assert data == load(tmp_path) == load(tmp_path / "matrix.json")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not JSON"),
        (b'{"schema": 1, "cells": [', "not JSON"),
        (b"\x00\x00\x00", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[]", "an object expected, got a list"),
        (b'{"cells": []}', "no schema"),
        (b'{"schema": 2}', "schema 2 is not 1"),
        (b'{"schema": 1}', "run: an object expected, got nothing"),
    ],
)
def test_what_is_no_matrix_is_named_in_one_line(tmp_path: Path, content: bytes, word: str) -> None:
    file = tmp_path / "matrix.json"
    file.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        load(tmp_path)
    assert str(file) in str(raised.value)
    assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UsageError, match=r"cannot read .*No such file"):
            load(path)


Spoil = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda d: d["cells"].append("x"), "cells[1]: an object expected, got a text"),
        (lambda d: d["cells"][0].pop("model"), "cells[0].model: a text expected, got nothing"),
        (lambda d: d["cells"][0].update(verdict="fine"), "unknown verdict 'fine'"),
        (lambda d: d["cells"][0].update(num_blocks="9"), "num_blocks: a whole number expected"),
        (lambda d: d["cells"][0].update(resolved=[]), "resolved: an object expected"),
        (lambda d: d["cells"][0]["kv"].append(None), "kv[1]: an object expected, got nothing"),
        (lambda d: d["cells"][0]["kv"][0].update(page_size_bytes=True), "got true or false"),
        (lambda d: d["cells"].append(cell()), "cells[1]: 'llama3-default-auto' is there twice"),
        (lambda d: d["devices"].clear(), "is not among those of the run"),
        (lambda d: d["engines"][0].pop("version"), "engines[0].version"),
    ],
)
def test_a_part_that_is_wrong_is_named(tmp_path: Path, spoil: Spoil, word: str) -> None:
    data = matrix(cell())
    assert data == load(write(tmp_path / "good", data))
    spoil(data)
    with pytest.raises(UsageError) as raised:
        load(write(tmp_path / "bad", data))
    assert word in str(raised.value)


def test_what_a_later_version_adds_is_no_fault(tmp_path: Path) -> None:
    data = matrix({**cell(), "fresh": 1})
    data["more"] = {}
    assert json.loads(json.dumps(data)) == load(write(tmp_path, data))
