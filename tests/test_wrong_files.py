"""A matrix.json with anything wrong in it: a line and an exit code, no traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import history, night, nights
from harness.cli import main
from tests.results import cell, matrix

ODD: tuple[Any, ...] = (None, True, -1, "\x1b[31m<script>", [[]], {"a": [1]})
"""In place of any value; each is of another kind."""


def whole() -> dict[str, Any]:
    """A matrix.json with everything that a run may leave in one."""
    extra = {
        "remarks": ["coerced"], "vouched": ["oracle"], "seconds": {"total": 1.5}, "end": "finished",
        "declared": [{"backend": "FLASH_ATTN", "reasons": ["no"], "kv_cache_dtypes": ["auto"]}],
        "candidates": [{"backend": "A", "reasons": [], "selected": True, "asked": ""}],
        "groups": [{"kind": "FullAttentionSpec", "layers": 1}], "tail": "the end", "settings": {},
        "memory": {"total_bytes": 1, "weights_bytes": 1, "available_bytes": 1, "weights_fit": True},
    }  # fmt: skip
    broken = cell("broken", "fp8", error={"type": "E", "message": "m", "where": "w"}, **extra)
    data = matrix(cell(**extra), broken, cell("rejected", known="https://a/b", dtype="nvfp4"))
    data["run"] |= {"seconds": 1.0, "counts": {"ok": 1}, "vouched": {}, "depth": {}, "shard": None}
    return data


def remembered() -> dict[str, Any]:
    """One that also has what earlier runs told of it."""
    data = matrix(cell(), engines=("0.33.0",))
    before = matrix(cell("broken", engine="0.32.0"), cell(dtype="gone", engine="0.32.0"))
    before["engines"] = [{"version": "0.32.0", "platform": "cuda", "commit": "abc"}]
    before["run"] = {"started": "2025-12-31T00:00:00Z", "unselected": 1}
    night_, _ = night.parse("0", night.lines(before))
    return {**data, "history": history.history(data, [night_]).to_json()}


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, outermost first."""
    if path:
        yield path
    items: Any = data.items() if isinstance(data, dict) else ()
    for name, value in enumerate(data) if isinstance(data, list) else items:
        yield from places(value, (*path, name))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(data)
    inner = made
    for name in path[:-1]:
        inner = inner[name]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


COMMANDS = {
    "report": ["report", "{bad}", "--out", "{out}"],
    "diff": ["diff", "{bad}", "{good}"],
    "diff-new": ["diff", "{good}", "{bad}", "--markdown"],
    "agree": ["agree", "{good}", "{bad}"],
    "support": ["support", "{bad}", "{good}"],
}


@pytest.mark.parametrize(
    ("command", "data"),
    [*((name, whole()) for name in COMMANDS), ("report", {"history": remembered()["history"]})],
)
def test_any_wrong_value_is_a_line_and_an_exit_code(
    command: str, data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = {} if "cells" in data else remembered()
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
        (folder / "records.jsonl").touch()
    (good / "matrix.json").write_text(json.dumps(whole()))
    named = {"good": str(good), "bad": str(bad), "out": str(tmp_path / "out")}
    arguments = [part.format(**named) for part in COMMANDS[command]]
    wrong = []
    for path in places(data):
        for value in (*ODD, KeyError):
            text = json.dumps({**rest, **changed(data, path, value)})
            (bad / "matrix.json").write_text(text)
            try:
                code = main(arguments)
            except Exception as error:
                wrong.append(f"{path} = {value!r}: {type(error).__name__}: {error}")
                continue
            err = capsys.readouterr().err
            if code not in (0, 1, 2) or len(err.splitlines()) > 4 or "\x1b" in err:
                wrong.append(f"{path} = {value!r}: exit {code}: {err[:300]}")
    assert [] == wrong[:99]


def test_any_wrong_value_of_a_history_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = nights.append(tmp_path, whole())
    lines = file.read_text().splitlines()
    wrong = []
    for number, line in enumerate(lines):
        for path in places(json.loads(line)):
            for value in (*ODD, KeyError):
                bad = json.dumps(changed(json.loads(line), path, value))
                file.write_text("\n".join([*lines[:number], bad, *lines[number + 1 :]]) + "\n")
                try:
                    code = main(["history", str(tmp_path)])
                except Exception as error:
                    wrong.append(f"{number} {path} = {value!r}: {type(error).__name__}: {error}")
                    continue
                err = capsys.readouterr().err
                if code not in (0, 1, 2) or len(err.splitlines()) > 3 or "\x1b" in err:
                    wrong.append(f"{number} {path} = {value!r}: exit {code}: {err[:300]}")
    assert [] == wrong[:99]
