"""The annotation of a build: what leads, what colours it, what it exits with, and its size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci import annotation
from ci.annotation import About
from harness import diff, history, night
from harness.errors import EXIT_INFRA
from tests.results import cell, matrix

OLD = matrix(cell(), cell(dtype="fp8"))
ABOUT = About(owners=("@vllm-project/kv-cache", "@x"), links={"the matrix": "matrix/matrix.html"})


def made(
    new: dict[str, Any], old: dict[str, Any] | None = OLD, about: About = ABOUT, **limits: int
) -> tuple[int, str, str]:
    news = None if old is None else diff.diff(old, new)
    return (
        annotation.exit_code(new, news, about),
        annotation.style(new, news, about),
        annotation.render(new, news, old, about, **limits),
    )


@pytest.mark.parametrize(
    ("new", "old", "missing", "code", "style"),
    [
        ("ok", "ok", (), 0, "success"),
        ("broken", "ok", (), 1, "error"),
        ("broken", "broken", (), 0, "warning"),
        ("broken", None, (), 1, "error"),
        ("ok", None, (), 0, "success"),
        ("ok", "broken", (), 0, "success"),
        # That a cell never reported, or its host was not usable, is no news of vLLM's.
        ("notrun", "ok", (), EXIT_INFRA, "warning"),
        ("notrun", None, (), EXIT_INFRA, "warning"),
        ("infra", "ok", (), EXIT_INFRA, "warning"),
        ("ok", "ok", ("shard 2 left nothing",), EXIT_INFRA, "warning"),
        ("broken", "ok", ("shard 2 left nothing",), 1, "error"),
        ("skipped", "ok", (), 0, "success"),
    ],
)
def test_a_build_is_red_for_real_news_alone(
    new: str, old: str | None, missing: tuple[str, ...], code: int, style: str
) -> None:
    before = None if old is None else matrix(cell(old))
    assert (code, style) == made(matrix(cell(new)), before, About(missing=missing))[:2]


def test_no_cells_are_no_success() -> None:
    assert EXIT_INFRA == made(matrix())[0]


def test_what_is_new_leads_with_reason_owner_commits_and_command() -> None:
    old, new = matrix(cell(), cell("broken", "fp8")), matrix(cell("broken"), cell("broken", "fp8"))
    # As vLLM's own version has it.
    old["engines"][0]["commit"], new["engines"][0]["commit"] = "g4ba787ec9", "gced6857af"
    new["run"]["started"] = "2026-01-02T03:00:00Z"
    text = made(new, old)[2]
    head = text.partition("<details>")[0]
    order = [
        "### KV cache: 1 NEW FAILURE, 1 still failing",
        "compare/4ba787ec9...ced6857af",
        "[the matrix](artifact://matrix/matrix.html)",
        "#### New failures: @vllm-project/kv-cache @x, please look",
        "why it is broken",
        "llama3-default-auto",
        "first seen `2026-01-02T03:00:00Z`; before (`2026-01-01T00:00:00Z`): `ok`",
        "pytest 'cases/test_matrix.py::test_cell[llama3-default-auto]'",
    ]
    places = [head.find(part) for part in order]
    assert -1 not in places, order[places.index(-1)]
    assert sorted(places) == places
    assert "llama3-default-fp8" not in head


def test_a_page_that_changed_though_green_is_told() -> None:
    old = matrix(cell())
    new = matrix(cell())
    new["cells"][0]["kv"][0]["page_size_bytes"] = 999
    code, style, text = made(new, old)
    assert (0, "success") == (code, style)
    assert "no new failure, 1 changed" in text
    assert "65536 -> 999" in text


def test_what_vanished_is_no_success() -> None:
    assert (0, "warning") == made(matrix(cell()))[:2]


def test_since_when_it_fails_is_what_the_history_knows() -> None:
    new = matrix(cell("broken"))
    runs = [matrix(cell("broken"))]
    runs[0]["run"]["started"] = "2025-12-30T00:00:00Z"
    past = [night.parse("x", night.lines(each))[0] for each in runs]
    new["history"] = history.history(new, past).to_json()
    text = made(new, matrix(cell()))[2]
    assert "failing `at least since 2025-12-30T00:00:00Z" in text


HOSTILE = "<script>`x`@all\x1b[31m\0|</details>\n### x"


def test_text_from_a_run_acts_on_nothing() -> None:
    bad = cell("broken", reason=HOSTILE, error={"type": "E", "message": HOSTILE, "where": HOSTILE})
    text = made(matrix(bad), OLD, About(missing=(HOSTILE,), owners=("@a b", "<b>")))[2]
    assert "\x1b" not in text and "\0" not in text
    assert "\n### x" not in text
    # Outside of code spans nothing of it is left: each `<` of it stands behind a backtick.
    for line in text.splitlines():
        if "<script>" in line:
            assert line.index("`") < line.index("<script>")
    assert "<b>" not in text.partition("####")[0]


@settings(max_examples=25)
@given(st.integers(32_768, 200_000), st.integers(0, 300))
def test_it_is_never_larger_than_it_may_be(limit: int, count: int) -> None:
    cells = [
        cell("broken", f"t{at}", reason=f"{at} " + "ü" * 500, model=f"m{at % 50}")
        for at in range(count)
    ]
    text = made(matrix(*cells), matrix(cell()), limit=limit)[2]
    assert len(text.encode()) <= limit
    assert text.count("<details>") == text.count("</details>")


def test_the_usual_limit_is_within_buildkites() -> None:
    assert annotation.LIMIT <= 1 << 20
