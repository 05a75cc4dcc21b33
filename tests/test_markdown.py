from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.report.markdown import LEAST, LIMIT, render
from tests.results import H200, cell, gpu, matrix


def test_failures_come_first_with_their_reason_and_how_to_see_them_again() -> None:
    error = {"type": "ValueError", "message": "m", "where": "vllm/a.py:f"}
    text = render(
        matrix(
            cell("ok"),
            cell("broken", "fp8", known="https://github.com/vllm-project/vllm/issues/1"),
            cell("broken", "unset", reason="only supports fp8, got auto", error=error),
        )
    )
    assert "## KV cache matrix: 1 of 3 cells FAILED, 1 known to fail\n" in text
    assert text.index("### Failures: 1 cell\n") < text.index("### Known failures\n")
    assert "- **broken**, 1 cell, stage `config`: `only supports fp8, got auto`\n" in text
    assert "in `vllm/a.py:f`" in text
    assert (
        "  ```sh\n  pytest 'cases/test_matrix.py::test_cell[llama3-default-unset]' "
        "--device virtual:h200 --engine 0.33.0\n  ```\n"
    ) in text
    assert "- <https://github.com/vllm-project/vllm/issues/1>: 1 broken\n" in text


def test_cells_that_fail_alike_are_one_cause() -> None:
    text = render(
        matrix(*(cell("broken", d, reason=f"no {d} here") for d in ("fp8", "nvfp4", "int8")))
    )
    assert 1 == text.count("- **broken**")
    assert "`no <kv_cache_dtype> here`" in text
    assert "`llama3-default-{fp8,nvfp4,int8}`" in text


def test_a_missing_result_is_no_pass() -> None:
    head = render(matrix(cell("ok"), cell("infra", "fp8"), cell("notrun", "unset"))).splitlines()[0]
    assert head == (
        "## KV cache matrix: 1 of 3 cells FAILED, 1 cell without a result, the host was not usable"
    )


def test_a_virtual_result_is_never_shown_as_a_measured_one() -> None:
    text = render(matrix(cell(), cell(device="GPU-1"), devices=(H200, gpu(1))))
    assert "virtual:h200 (NVIDIA H200, virtual: computed, not measured)" in text
    assert "GPU-1 (NVIDIA H200, gpu, measured)" in text


def test_counts_are_those_of_the_cells() -> None:
    data = matrix(
        *(cell("ok", f"a{n}") for n in range(3)),
        *(cell("rejected", f"b{n}") for n in range(4)),
        *(cell("mismatch", f"c{n}", known="vllm:1") for n in range(5)),
        *(cell("mismatch", f"d{n}") for n in range(6)),
    )
    rows = dict(re.findall(r"^\| \S+ (\w+) \| (.*?) \|", render(data), re.MULTILINE))
    assert {"ok": "3", "rejected": "4", "mismatch": "11"} == rows
    assert "| `llama3` | `virtual:h200` | `0.33.0` | 3 | 4 | 5 | 6 |  |  |" in render(data)


def test_what_merging_found_is_told() -> None:
    data = matrix(cell("broken"))
    parts = [["shard-1", "ok"], ["shard-2", "broken"]]
    found = {"id": "llama3-default-auto", "device": "virtual:h200", "engine": "0.33.0"}
    data["run"]["merged"] = {
        "conflicts": [{**found, "parts": parts, "what": "verdict"}],
        "duplicates": [{**found, "parts": parts}],
        "faults": ["shard-3/records.jsonl line 7: not JSON"],
    }
    text = render(data)
    assert "1 cell came out differently in the parts that were merged" in text
    assert "`ok in shard-1, broken in shard-2`" in text
    assert "`shard-3/records.jsonl line 7: not JSON`" in text


# ---- Hostile texts -------------------------------------------------------------------------------

HOSTILE = [
    *("<script>alert(1)</script>", "</code></details><img src=x>", "@team #1 [a](http://b)"),
    *("`", "```", "`` ` ``", "~~~\n# title", "a | b || c", "x\n\n# injected\n\n"),
    *("\x1b[31mred\x1b[0m", "nul \x00", "half \ud800 pair", "\u202eover", " ", "\r\n", "-->"),
]


def outside(text: str) -> str:
    """The Markdown without its code spans and fenced blocks."""
    text = re.sub(r"^  (`{3,})sh\n.*?\n  \1$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", text)


SAFE = re.compile(r"<br>|<https://[A-Za-z0-9./_#-]+>")


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_of_a_hostile_text_is_outside_of_code(text: str) -> None:
    word = f"{text}evil{text}"
    error = {"type": word, "message": word, "where": word}
    more = {"model": word, "backend": word}
    data = matrix(
        cell("broken", word, reason=word, error=error, stage=word, **more),
        cell("broken", "fp8", known=word, reason=word, **more),
        cell("broken", "int8", stale=word, **more),
        cell("skipped", "x", reason=word, **more),
        cell("infra", "y", reason=word, **more),
    )
    data["devices"][0] = {**H200, "name": word}
    data["run"]["started"] = word
    shown = render(data)
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert {"\n"} >= {c for c in shown if not c.isprintable()}
    plain = outside(shown)
    assert "evil" not in plain
    assert not re.search("[<>@]", SAFE.sub("", plain))


def test_the_hostile_text_is_what_is_looked_for() -> None:
    assert "evil" in outside("- evil") and "evil" not in outside("- `evil` ``a`evil``")


# ---- The budget ----------------------------------------------------------------------------------

LONG = "語" * 200_000
"""Three bytes a letter."""


def failing(number: int) -> list[dict[str, object]]:
    return [cell("broken", f"d{n}", reason=f"reason {n} {LONG}") for n in range(number)]


@pytest.mark.parametrize("limit", [LEAST, 65_536, LIMIT])
def test_the_budget_is_of_bytes_not_of_letters(limit: int) -> None:
    text = render(matrix(*failing(1200)), limit)
    size = len(text.encode("utf-8"))
    assert size <= limit
    assert size > limit * 0.7  # and is made use of
    assert len(text) < size / 2


def test_what_does_not_fit_is_summed_up() -> None:
    text = render(matrix(*failing(100), cell("skipped", "x")), LEAST)
    shown = text.count("- **broken**")
    assert 0 < shown < 100
    left = f'- {100 - shown} of 100 causes in "Failures: 100 cells" ({100 - shown} cells)'
    assert left in text
    assert '- 1 of 1 reasons in "Skipped" (1 cell)' in text


def test_with_room_enough_nothing_is_left_out() -> None:
    assert "Left out" not in render(matrix(*failing(100)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ok", "broken", "skipped", "infra", "notrun"]),
            st.text(max_size=400),
            st.sampled_from([None, "https://bugs/1", "語" * 300]),
        ),
        max_size=40,
    )
)
def test_no_matrix_is_beyond_its_budget(rows: list[tuple[str, str, str | None]]) -> None:
    cells = [
        cell(verdict, f"{number}{text}", model=f"m{number}{text}", reason=text * 9, known=known)
        for number, (verdict, text, known) in enumerate(rows)
    ]
    devices = (H200, *(gpu(number, "語" * 900) for number in range(9)))
    data = matrix(*cells, devices=devices, engines=("0.33.0", *("語" * n for n in range(200, 209))))
    assert len(render(data, LEAST).encode("utf-8")) <= LEAST
