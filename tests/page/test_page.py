"""The page in headless Chromium. `show` also fails a test by which the console said anything, a
script ran that is not the page's own, or a request left the page."""

from __future__ import annotations

import pytest

from harness.report import page
from harness.verdict import VERDICTS
from tests.page.conftest import cell, whole

CELLS = [
    cell("llama3", "unset"),
    cell("llama3", "fp8", "rejected"),
    cell("dsv4", "unset", "broken", reason="fp8_ds_mla layout only supports fp8"),
    cell("dsv4", "fp8"),
]

AMONG = [*CELLS, cell("llama3", "fp8", backend="TRITON_ATTN")]
"""With a model that has two rows, so that models have rows of their own."""


def names(tab):
    return [b.get_attribute("aria-label").split(",")[0] for b in tab.query_selector_all(".c")]


def test_a_table_with_headers_for_rows_and_columns(show):
    tab = show(AMONG).at()
    heads = tab.eval_on_selector_all("thead th[scope=col]", "all => all.map(e => e.textContent)")
    assert ["backend", "unset", "fp8"] == heads
    groups = tab.eval_on_selector_all("th[scope=rowgroup]", "all => all.map(e => e.textContent)")
    assert ["llama3", "dsv4"] == groups
    rows = tab.eval_on_selector_all("th[scope=row]", "all => all.map(e => e.textContent)")
    assert ["default", "TRITON_ATTN", "default"] == rows
    assert ["ok", "rejected", "ok", "broken", "ok"] == names(tab)
    assert "5 of 5 cells" == tab.inner_text("#shown")


def test_models_of_one_row_each_have_no_rows_of_their_own(show):
    tab = show(CELLS).at()
    assert 0 == tab.locator("th[scope=rowgroup]").count()
    rows = tab.eval_on_selector_all("th[scope=row]", "all => all.map(e => e.textContent)")
    assert ["llama3 default", "dsv4 default"] == rows


def test_a_cell_shows_glyph_page_and_dtype(show):
    tab = show(CELLS).at()
    assert ["✓", "65,536", "auto"] == tab.inner_text(".c >> nth=0").split()


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_verdict_is_on_the_screen(show, verdict):
    """Cells, and the button that chooses them: a style that hides one of them was a fault."""
    tab = show([cell("llama3", "unset", verdict)]).at()
    for where in (".c", f"[data-verdict={verdict}]"):
        box = tab.locator(where).bounding_box()
        assert box["x"] >= 0 and box["y"] >= 0 and box["width"] > 8 and box["height"] > 8
        middle = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
        seen = (
            "([x, y]) => document.elementFromPoint(x, y).closest('.c, [data-verdict]')?.className"
        )
        assert tab.evaluate(seen, middle) == tab.locator(where).get_attribute("class")


def test_a_stale_known_entry_is_no_ok(show):
    """It fails the run, so it is counted and found as what it is."""
    stale = cell("dsv4", "unset", known="https://a/b", stale="it no longer fails")
    tab = show([cell("llama3", "unset"), stale]).at()
    assert "1" == tab.inner_text("[data-verdict=ok] b")
    assert "1" == tab.inner_text("[data-verdict=stale] b")
    tab.click("[data-verdict=stale]")
    assert 1 == len(names(tab))


def test_a_filter_is_held_in_the_url_and_read_from_it(show):
    opened = show(CELLS)
    tab = opened.at()
    tab.click("[data-verdict=broken]")
    assert ["broken"] == names(tab)
    assert "verdict=broken" in tab.url
    tab = opened.at("model=dsv4&kv_cache_dtype=fp8")
    assert ["ok"] == names(tab)
    tab.click("#clear")
    assert 4 == len(names(tab))
    assert "model" not in tab.url


@pytest.mark.parametrize(
    ("fragment", "left"),
    [
        ("device=virtual:b200", 1),
        ("engine=0.33.0", 3),
        ("backend=FLASHINFER", 1),
        ("search=only%20FP8", 1),
        ("differences=1", 2),
        ("nonsense=1", 4),
        ("model=nobody", 0),
    ],
)
def test_filters(show, fragment, left):
    reason = "only supports fp8"
    cells = [
        cell(dtype="auto"),
        cell(dtype="auto", verdict="broken", device="virtual:b200", reason=reason),
        cell(dtype="fp8", backend="FLASHINFER", verdict="rejected"),
        cell(dtype="bfloat16", engine="0.27.1"),
    ]
    assert f"{left} of 4 cells" == show(cells).at(fragment).inner_text("#shown")


def test_a_link_opens_a_cell_and_escape_closes_it(show):
    tab = show(CELLS).at("cell=dsv4-default-unset")
    assert tab.is_visible("#detail")
    assert "dsv4-default-unset" == tab.inner_text("#detail-title")
    assert "fp8_ds_mla layout only supports fp8" in tab.inner_text("#detail")
    tab.keyboard.press("Escape")
    assert not tab.is_visible("#detail")
    tab.wait_for_url(lambda url: "cell=" not in url)


def test_keys_move_open_close_and_search(show):
    tab = show(CELLS).at()
    tab.focus(".c[tabindex='0']")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    assert "dsv4-default-fp8" == tab.inner_text("#detail-title")
    assert "cell=dsv4-default-fp8" in tab.url
    tab.keyboard.press("Escape")
    assert "true" == tab.evaluate("String(document.activeElement.matches('.c'))")
    tab.keyboard.press("/")
    tab.keyboard.type("layout only")
    tab.locator("#shown", has_text="1 of 4 cells").wait_for()
    assert ["broken"] == names(tab)


def test_back_closes_a_cell(show):
    tab = show(CELLS).at()
    tab.click(".c >> nth=0")
    assert tab.is_visible("#detail")
    tab.go_back()
    tab.wait_for_selector("#detail", state="hidden")


def test_hover_tells_the_story(show):
    tab = show(CELLS).at()
    tab.hover(".c >> nth=2")
    assert "fp8_ds_mla layout only supports fp8" in tab.inner_text("#story")


def test_a_first_tap_tells_the_story_and_a_second_opens(show):
    tab = show(CELLS, has_touch=True, is_mobile=True, viewport={"width": 390, "height": 844}).at()
    tab.tap(".c >> nth=0")
    assert "confirmed by oracle" in tab.inner_text("#story")
    assert not tab.is_visible("#detail")
    tab.tap(".c >> nth=0")
    assert tab.is_visible("#detail")


def test_the_detail_has_pages_with_their_arithmetic(show):
    text = show(CELLS).at("cell=llama3-default-unset").inner_text("#detail")
    assert "8 \u00d7 16 \u00d7 256 \u00d7 2 B = 65,536" in text
    assert "32 \u00d7 65,536 / 16 = 131,072 B" in text


def test_the_detail_has_the_choice_the_log_and_how_to_reproduce(show):
    error = {"type": "ValueError", "message": "no such dtype", "where": "vllm/config.py:check"}
    one = cell("dsv4", "fp8", "broken", error=error, tail="last words")
    records = [{**one, "log": ["Using FLASH_ATTN attention backend"]}]
    text = show([one], records).at("cell=dsv4-default-fp8").inner_text("#detail")
    for part in (
        "too slow for this",
        "no such dtype",
        "vllm/config.py:check",
        "last words",
        "Using FLASH_ATTN attention backend",
        "pytest 'cases/test_matrix.py::test_cell[dsv4-default-fp8]' --device virtual:h200",
    ):
        assert part in text


def test_virtual_and_measured_are_told_apart(show):
    tab = show([cell(), cell(device="cuda:0", id="llama3-default-unset-cuda_0")]).at()
    assert ["virtual", "measured (gpu)"] == tab.eval_on_selector_all(
        "section .kind", "all => all.map(e => e.textContent)"
    )
    assert 2 == tab.locator("#matrix section").count()


HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert()>\x1b[31m\x00\u202e&amp;"


def test_hostile_text_is_shown_as_text(show):
    error = {"type": HOSTILE, "message": HOSTILE, "where": HOSTILE}
    known = "javascript:alert(3)"
    one = cell(HOSTILE, "fp8", "broken", reason=HOSTILE, error=error, tail=HOSTILE, known=known)
    one["id"], one["resolved"]["kv_cache_dtype"] = "hostile", HOSTILE
    tab = show([one, cell()]).at("cell=hostile")
    shown = HOSTILE.replace("\x1b", r"\x1b").replace("\x00", r"\x00").replace("\u202e", r"\u202e")
    assert shown == tab.text_content("#message")
    assert shown == tab.text_content("#tail")
    assert 0 == tab.locator("img").count()
    assert 0 == tab.locator("#detail a").count()
    tab.keyboard.press("Escape")
    assert f"{shown} default" == tab.text_content("th[scope=row]")
    tab.focus(".c")
    assert shown in tab.text_content("#story")


def test_a_message_of_200_kb_is_shown_whole(show):
    message = "x" * 200_000 + " end"
    error = {"type": "E", "message": message, "where": None}
    tab = show([cell("dsv4", "fp8", "broken", error=error)]).at("cell=dsv4-default-fp8")
    assert message == tab.text_content("#message")


def test_charts_draw_bytes_per_token_and_tokens_that_fit(show):
    tab = show(CELLS).at("view=charts")
    first, second = tab.locator("#charts svg").all()
    assert "131,072 B  unset" in first.text_content()
    assert "1,600  virtual:h200" in second.text_content()
    assert "bytes per token" in first.text_content()
    assert not tab.is_visible("#matrix")


def test_the_colours_can_be_chosen(show):
    tab = show(CELLS, color_scheme="light").at()
    light = "getComputedStyle(document.body).backgroundColor"
    before = tab.evaluate(light)
    tab.click("#theme")
    assert before == tab.evaluate(light)
    tab.click("#theme")
    assert before != tab.evaluate(light)


def many(facets=1):
    """2,000 cells a facet: 100 models, 20 dtypes."""
    return [
        cell(f"model{n}", f"dtype{m}", device=f"virtual:gpu{k}", id=f"cell-{k}-{n}-{m}")
        for k in range(facets)
        for n in range(100)
        for m in range(20)
    ]


@pytest.mark.parametrize("facets", [1, 5])
def test_cells_out_of_sight_are_not_drawn_yet(show, facets):
    tab = show(many(facets)).at()
    tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    assert 600 <= tab.locator(".c").count() <= 1200
    # The names of all rows of the first table, and four nodes for each cell that is drawn.
    assert tab.evaluate("document.querySelectorAll('*').length") < 100 * 8 + 1200 * 4 + 1000
    assert f"{2000 * facets:,} of {2000 * facets:,} cells" == tab.inner_text("#shown")
    assert 2000 * facets == tab.evaluate("JSON.parse(data.textContent).cells.length")


def test_cells_are_drawn_when_they_come_into_sight(show):
    tab = show(many()).at()
    assert 0 == tab.locator("[data-i='1999']").count()
    height = tab.evaluate("main.scrollHeight")
    tab.evaluate("main.scrollTop = main.scrollHeight")
    tab.wait_for_selector("[data-i='1999']")
    assert height == tab.evaluate("main.scrollHeight")


def test_keys_reach_cells_that_are_not_drawn_yet(show):
    tab = show(many(2)).at()
    tab.focus(".c[tabindex='0']")
    for _ in range(5):
        tab.keyboard.press("PageDown")
    row = "document.activeElement.closest('tr').querySelector('th').textContent"
    assert "model50 default" == tab.evaluate(row)
    tab = show(many(2)).at("cell=cell-1-99-19")
    tab.keyboard.press("Escape")
    assert "model99 default" == tab.evaluate(row)
    for _ in range(10):
        tab.keyboard.press("PageUp")
    assert "cell-1-0-19" == opened_by_enter(tab)


def opened_by_enter(tab):
    tab.keyboard.press("Enter")
    return tab.inner_text("#detail-title")


def test_print_has_all_cells(show):
    tab = show(many(2)).at()
    tab.pdf()
    assert 4000 == tab.locator(".c").count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_print_is_black_on_white(show, scheme):
    tab = show(many()[:40], color_scheme=scheme).at()
    tab.click("#theme")
    tab.click("#theme")
    assert "dark" == tab.evaluate("document.documentElement.dataset.theme")
    tab.emulate_media(media="print", color_scheme=scheme)
    of = "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).color]"
    for what in ("body", "thead th", "tr.d th", ".n"):
        back, text = tab.eval_on_selector(what, of)
        assert back in ("rgb(255, 255, 255)", "rgb(246, 247, 249)", "rgba(0, 0, 0, 0)")
        assert max(map(int, text.removeprefix("rgb(").removesuffix(")").split(", "))) < 140


def test_a_run_without_cells(show):
    assert "This run has no cells." == show([]).at().inner_text("#empty")


def test_the_page_names_no_address_but_known_links():
    text = page.render(whole(CELLS))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace(
        'http-equiv="Content-Security-Policy"', ""
    ).replace("/^https:", "")


def test_tuples_in_place_of_lists_give_the_same_page():
    one, other = cell(), cell()
    other["kv"] = tuple(other["kv"])
    assert page.render(whole([one])) == page.render(whole([other]))
