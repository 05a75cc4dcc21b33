"""Who can use the page: by phone, by keyboard, by screen reader, on paper, in headless Chromium."""

from __future__ import annotations

import pytest

from harness.report import command, page
from tests.page.conftest import absent, cell, whole

LONG = "a_model_of_a_name_that_is_long_enough_for_two_lines"
CELLS = [
    cell(LONG, f"turboquant_k{n}v4_nc", device=device, engine=engine, id=f"{n}-{device}-{engine}")
    for n in range(20)
    for device in ("virtual:h200", "virtual:rtx-pro-6000")
    for engine in ("0.33.0", "0.27.1")
]
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.mark.parametrize("fragment", ["", "view=charts", f"cell={CELLS[0]['id']}"])
def test_a_phone_scrolls_sideways_in_the_grid_alone(show, fragment):
    tab = show(CELLS, **PHONE).at(fragment)
    assert 390 == tab.evaluate("document.documentElement.scrollWidth")
    assert 390 == tab.evaluate("visualViewport.width")
    wide = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.className)"
    assert [] == tab.eval_on_selector_all("#detail .content, header, .top, .find", wide)
    if fragment == "view=charts":
        assert tab.evaluate("main.scrollWidth <= main.clientWidth")


def test_a_phone_filters(show):
    tab = show(CELLS, **PHONE).at()
    assert not tab.is_visible("#filters")
    tab.tap("#more")
    tab.tap("#filters summary >> nth=0")
    tab.tap("#filters label >> nth=0")
    assert "4 of 80 cells" == tab.inner_text("#shown")
    assert "(1)" in tab.inner_text("#more")


def test_the_first_tab_skips_to_the_cells(show):
    tab = show(CELLS).at()
    tab.keyboard.press("Tab")
    assert "Skip to the matrix" == tab.evaluate("document.activeElement.textContent")
    tab.keyboard.press("Enter")
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate("document.activeElement.matches('.c')")


def test_the_cells_are_one_stop_of_tab(show):
    tab = show(CELLS).at()
    assert 1 == tab.locator(".c[tabindex='0']").count()
    tab.focus(".c[tabindex='0']")
    tab.keyboard.press("ArrowRight")
    assert 1 == tab.locator(".c[tabindex='0']").count()
    assert tab.evaluate("document.activeElement.tabIndex === 0")


def test_what_a_screen_reader_is_told(show):
    known = cell("dsv4", "fp8", "broken", known="https://github.com/vllm-project/vllm/issues/1")
    tab = show([cell(), cell("dsv4", "fp8_e5m2", "rejected"), known]).at()
    assert "virtual:h200, vLLM 0.33.0" in tab.text_content("section caption")
    for name in ("ok, page 65,536 bytes, resolved auto", "rejected", "broken, known failure"):
        assert 1 == tab.get_by_role("button", name=name, exact=True).count()
    assert (
        3
        == tab.get_by_role("table", name="what the KV cache became")
        .get_by_role("columnheader")
        .count()
        - 1
    )
    assert "3" == tab.get_attribute("section table", "aria-rowcount")
    assert ["1", "2", "3"] == tab.eval_on_selector_all(
        "section tr", "all => all.map(e => e.getAttribute('aria-rowindex'))"
    )
    # Every control has a name.
    unnamed = (
        "all => all.filter(e => !e.textContent.trim() && !e.getAttribute('aria-label')"
        " && !(e.labels && e.labels.length)).length"
    )
    assert 0 == tab.eval_on_selector_all("button, input, select, summary", unnamed)


def test_an_open_cell_is_a_dialog_with_a_title_and_keeps_the_focus_within(show):
    tab = show(CELLS).at(f"cell={CELLS[0]['id']}")
    dialog = tab.get_by_role("dialog", name=CELLS[0]["id"])
    assert 1 == dialog.count()
    for _ in range(12):
        tab.keyboard.press("Tab")
        assert tab.evaluate(
            "document.activeElement === document.body || detail.contains(document.activeElement)"
        )


def test_a_chart_is_a_table_too(show):
    tab = show(CELLS).at("view=charts")
    rows = tab.eval_on_selector_all(
        ".chart >> nth=0 >> tbody tr", "all => all.map(e => e.innerText)"
    )
    assert rows
    table = tab.locator(".chart >> nth=0").locator("table")
    assert "131,072" in table.text_content()
    assert 2 == tab.locator("svg[role=img][aria-label]").count()


def test_charts_of_mig_profiles(show):
    sizes = {
        "virtual:h200": 1_600_000,
        "virtual:h200/3g.71gb": 700_000,
        "virtual:h200/1g.18gb": 900,
    }
    cells = [
        cell(device=spec, id=spec, capacity={**cell()["capacity"], "tokens": tokens})
        for spec, tokens in sizes.items()
    ]
    tab = show(cells).at("view=charts")
    text = tab.locator("#charts svg").nth(1).text_content()
    for spec, tokens in sizes.items():
        assert f"{tokens:,}  {spec}" in text
    # From 900 to 1,600,000: on a linear scale the slice would not be seen.
    assert "tokens, logarithmic scale" in text
    tab.focus("#chart-scale")
    tab.select_option("#chart-scale", "linear")
    assert "logarithmic" not in tab.locator("#charts svg").nth(1).text_content()
    assert "scale=linear" in tab.url
    assert "chart-scale" == tab.evaluate("document.activeElement.id")


def test_the_chart_of_one_dtype_has_a_bar_for_each_model(show):
    cells = [cell(model, dtype) for model in ("llama3", "dsv4") for dtype in ("unset", "fp8")]
    tab = show(cells).at("view=charts&dtype=fp8")
    first = tab.locator("#charts svg").nth(0)
    assert 2 == first.locator("rect.bar").count()
    assert "unset" not in first.text_content()


def test_the_command_is_the_one_of_the_other_reports(show):
    one = cell("dsv4", "fp8", engine="0.27.1")
    tab = show([one]).at("cell=dsv4-default-fp8")
    assert command.command(one, {}) == tab.inner_text("#command")


ODD = "a\u2028b\u2029c \ud800 \u202e]]> <!-- {{ 7 * 7 }} ${x} `y` \\u003c \r\n\x85"


def test_odd_characters_are_shown_and_break_nothing(show):
    error = {"type": "E", "message": ODD, "where": None}
    one = cell("dsv4", "fp8", "broken", error=error, reason=ODD)
    one["id"] = ODD
    tab = show([one]).at()
    tab.click(".c")
    shown = tab.text_content("#message")
    for part in (
        r"a\u2028b\u2029c",
        r"\ud800",
        r"\u202e",
        "]]> <!-- {{ 7 * 7 }} ${x} `y`",
        r"\x85",
    ):
        assert part in shown
    tab.reload()
    tab.wait_for_selector("#detail[open]")


def test_a_page_of_odd_names_can_be_written(tmp_path):
    path = tmp_path / "matrix.html"
    path.write_text(page.render(whole([cell(ODD, ODD, device=ODD, engine=ODD)])), encoding="utf-8")
    assert r"\ud800" in path.read_text(encoding="utf-8")


def test_without_a_browser_a_developer_skips_and_ci_fails(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Chromium"):
        absent("no Chromium")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no Chromium, and CI is set"):
        absent("no Chromium")
