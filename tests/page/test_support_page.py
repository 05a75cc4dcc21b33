"""The page of what is supported since when, and its table within matrix.html, in Chromium."""

from __future__ import annotations

from typing import Any

import pytest

from harness.report import page, support_page
from harness.support import support
from tests.page.conftest import Opened, cell, whole

CELLS = [
    cell("dsv4", "unset", "broken", engine="0.27.1", reason="only supports fp8"),
    cell("dsv4", "unset"),
    cell("dsv4", "fp8", engine="0.27.1"),
    cell("dsv4", "fp8"),
    cell("llama3", "nvfp4", "notrun"),
    cell("llama3", "fp8", device="GPU-0"),
]


@pytest.fixture
def alone(chromium: Any, tmp_path: Any) -> Any:
    """A page of its own, opened; fails the test that made it say or ask for anything."""
    contexts, opened = [], []

    def open_page(cells: list[dict[str, Any]], **how: Any) -> Any:
        path = tmp_path / "support.html"
        path.write_text(support_page.render(support([whole(cells)])), encoding="utf-8")
        contexts.append(chromium.new_context(**how))
        opened.append(Opened(contexts[-1].new_page(), path))
        opened[-1].tab.goto(path.as_uri())
        return opened[-1].tab

    yield open_page
    for context in contexts:
        context.close()
    for one in opened:
        assert [] == one.trouble
        assert [] == [url for url in one.asked if not url.startswith(("file:", "data:"))]


def texts(tab: Any, what: str) -> list[str]:
    return tab.eval_on_selector_all(what, "all => all.map(e => e.textContent)")


def test_a_page_of_its_own(alone: Any) -> None:
    tab = alone(CELLS)
    assert "kvmatrix: supported since, vLLM 0.27.1, 0.33.0" == tab.title()
    assert ["kv_cache_dtype", "SM90GPU-0, virtual:h200"] == texts(tab, "thead th")
    assert ["dsv4", "llama3"] == texts(tab, "th[scope=rowgroup]")
    assert ["unset", "fp8", "fp8", "nvfp4"] == texts(tab, "th[scope=row]")
    assert [
        "✓ 0.33.0✗✓",
        "✓ 0.27.1 or before",
        "✓ 0.33.0 or before m?✓",
        "? not examined",
    ] == texts(tab, "td")
    assert "0.27.1: broken\n0.33.0: supported, with FLASH_ATTN" == tab.get_attribute("td", "title")


def test_what_is_said_of_a_failure_ends_with_its_reason(alone: Any) -> None:
    tab = alone([cell("dsv4", "unset", "broken", reason="only supports fp8")])
    assert "0.33.0: broken: only supports fp8" == tab.get_attribute("td", "title")


@pytest.mark.parametrize("width", [390, 1280])
def test_every_cell_can_be_seen_and_heads_stay(alone: Any, width: int) -> None:
    many = [cell(f"model{n}", "fp8", ["ok", "notrun", "rejected"][n % 3]) for n in range(90)]
    tab = alone(many, viewport={"width": width, "height": 600})
    boxes = [each.bounding_box() for each in tab.query_selector_all("td")]
    assert 90 == len(boxes)
    assert all(box["x"] >= 0 and box["width"] > 40 for box in boxes)
    tops = [box["y"] for box in boxes]
    assert tops == sorted(tops) and len({*tops}) == 90
    tab.evaluate("document.querySelector('main').scrollTop = 1000")
    head, bar = (tab.locator(what).bounding_box() for what in ("thead th >> nth=1", "header"))
    assert bar["y"] + bar["height"] == pytest.approx(head["y"], abs=1)


HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\x00\u202e&amp;\"'"


def test_hostile_names_are_shown_as_text(alone: Any) -> None:
    cells = [cell(HOSTILE, HOSTILE, "broken", reason=HOSTILE, backend=HOSTILE, engine=HOSTILE)]
    tab = alone([*cells, cell(HOSTILE, HOSTILE, backend=HOSTILE)])
    shown = HOSTILE.replace("\x1b", r"\x1b").replace("\x00", r"\x00").replace("\u202e", r"\u202e")
    assert [shown] == texts(tab, "th[scope=rowgroup]")
    assert [shown] == texts(tab, "th[scope=row]")
    assert shown in tab.get_attribute("td", "title")
    assert 0 == tab.locator("img, script").count()


def test_the_matrix_has_the_table_folded_away(show: Any) -> None:
    tab = show(CELLS).at()
    assert not tab.is_visible("#support table")
    tab.click("#support summary")
    # `toggle` comes behind the click.
    tab.wait_for_selector("#support table", state="visible")
    assert "✓ 0.33.0✗✓" == tab.text_content("#support td")
    # The matrix's own keys and tables are as they were.
    assert 6 == tab.locator("#matrix .c").count()


def test_hostile_names_within_the_matrix(show: Any) -> None:
    tab = show([cell(HOSTILE, HOSTILE, engine="0.27.1"), cell(HOSTILE, HOSTILE)]).at()
    tab.click("#support summary")
    assert 0 == tab.locator("img").count()
    assert r"\x1b[31m" in tab.text_content("#support th[scope=row]")


def test_one_release_has_nothing_to_compare() -> None:
    one = [cell("dsv4", "unset"), cell("dsv4", "fp8")]
    assert 'id="support"' not in page.render(whole(one))
    assert 'id="support"' in page.render(whole([*one, cell("dsv4", "fp8", engine="0.27.1")]))
    unrun = [cell("a", "fp8", "notrun"), cell("a", "fp8", "notrun", engine="0.27.1")]
    assert 'id="support"' not in page.render(whole(unrun))
