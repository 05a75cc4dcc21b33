"""What is news, and finding one's way among many tables, in headless Chromium."""

from __future__ import annotations

import pytest

from tests.page.conftest import cell

HERE, OLD = "0.33.0", "0.27.1"
H200, T4 = "virtual:h200", "virtual:t4"


def at(device, engine, dtype="unset", verdict="ok", **facts):
    name = f"dsv4-default-{dtype}-{device}-{engine}"
    return cell("dsv4", dtype, verdict, device, engine, id=name, **facts)


CELLS = [
    at(T4, HERE, verdict="rejected"),
    at(H200, OLD, verdict="broken"),
    at(H200, HERE),
    at(H200, OLD, "fp8"),
    at(H200, HERE, "fp8"),
]


def titles(tab):
    return tab.eval_on_selector_all(
        "#matrix section:not([hidden])", "all => all.map(e => e.getAttribute('aria-label'))"
    )


def test_facets_stand_by_device_and_then_by_engine_in_the_order_of_the_run(show):
    tab = show(CELLS).at()
    # T4 is the first device, 0.33.0 the first engine.
    assert [f"{T4}, vLLM {HERE}", f"{H200}, vLLM {HERE}", f"{H200}, vLLM {OLD}"] == titles(tab)


def test_the_overview_counts_and_leads_to_each_table(show):
    opened = show(CELLS)
    tab = opened.at()
    heads = tab.eval_on_selector_all("#overview thead th", "all => all.map(e => e.textContent)")
    assert ["device", f"vLLM {HERE}", f"vLLM {OLD}"] == heads
    jumps = [jump.text_content() for jump in tab.query_selector_all(".lead")]
    assert 3 == len(jumps)
    assert all(jump.bounding_box()["x"] > 0 for jump in tab.query_selector_all(".lead"))
    assert "broken 1, " in jumps[2] and "ok 1, " in jumps[2]
    assert 1 == tab.locator("#overview td.none").count()
    tab.click(".lead >> nth=2")
    assert f"{H200}, vLLM {OLD}" == tab.evaluate("document.activeElement.textContent")
    assert not opened.at("model=nobody").is_visible("#overview")


def test_one_table_has_no_overview(show):
    assert not show([cell()]).at().is_visible("#overview")


def test_brackets_go_from_table_to_table(show):
    many = [
        cell(f"model{n}", device=device, id=f"{n}-{device}")
        for device in (H200, T4)
        for n in range(60)
    ]
    tab = show(many).at()
    tab.keyboard.press("]")
    tab.keyboard.press("]")
    assert f"{T4}, vLLM {HERE}" == tab.evaluate("document.activeElement.textContent")
    tab.keyboard.press("[")
    assert f"{H200}, vLLM {HERE}" == tab.evaluate("document.activeElement.textContent")


def test_a_title_and_the_heads_of_columns_stay_in_sight(show):
    many = [cell(f"model{n}", f"dtype_number_{m}") for n in range(60) for m in range(30)]
    tab = show(many, viewport={"width": 800, "height": 600}).at()
    tab.evaluate("main.scrollTo(1500, 900)")
    title, head = (tab.locator(what).bounding_box() for what in (".head", "thead th >> nth=1"))
    bar = tab.locator("header").bounding_box()
    assert 0 == title["x"]
    assert bar["height"] == pytest.approx(title["y"], abs=1)
    assert title["y"] + title["height"] == pytest.approx(head["y"], abs=1)
    assert 0 == tab.locator("thead th >> nth=0").bounding_box()["x"]


@pytest.mark.parametrize(
    ("fragment", "left"),
    [
        ("news=between%20engines", 2),
        # On the T4 and on the H200 vLLM 0.33.0 gave different verdicts.
        ("news=between%20devices", 2),
        ("news=between%20devices&news=between%20engines", 3),
        ("differences=1", 3),
    ],
)
def test_differences_between_engines_and_devices_are_told_apart(show, fragment, left):
    assert f"{left} of 5 cells" == show(CELLS).at(fragment).inner_text("#shown")


def test_a_cell_that_never_ran_is_no_difference(show):
    cells = [at(H200, OLD, verdict="notrun"), at(H200, HERE)]
    assert "0 of 2 cells" == show(cells).at("differences=1").inner_text("#shown")


def test_the_detail_says_where_the_same_case_came_out_otherwise(show):
    tab = show(CELLS).at(f"cell={CELLS[2]['id']}")
    words = [item.inner_text() for item in tab.query_selector_all("#detail li")]
    assert [
        f"on {T4}: verdict rejected, here ok",
        f"with vLLM {OLD}: verdict broken, here ok",
    ] == words
    tab.click("#detail button.tag >> text=broken")
    assert CELLS[1]["id"] == tab.inner_text("#detail-title")
    tab.keyboard.press("Escape")
    assert "broken" == tab.evaluate("document.activeElement.getAttribute('aria-label')")


def change(kind, **facts):
    return {
        "kind": kind, "id": "dsv4-default-unset", "device": H200, "engine": HERE, "what": "verdict",
        "part": None, "old": "ok", "new": "broken", "reason": "", **facts,
    }  # fmt: skip


BASELINE = {
    "schema": 1, "compared": 4, "renamed": [], "notes": ["<b>a note</b>"],
    "counts": {"new failure": 1, "changed": 1, "still failing": 1, "vanished": 1, "fixed": 0},
    "changes": [
        change("new failure", reason="it <i>broke</i>"),
        change("still failing", engine=OLD, old="broken"),
        change("changed", id="dsv4-default-fp8", what="page_size_bytes", part="attn",
               old=16384, new=[8192, 4096]),
        change("vanished", id="gone", new=None),
    ],
}  # fmt: skip


def test_news_since_the_baseline_are_counted_filtered_and_told(show):
    tab = show(CELLS, baseline=BASELINE).at()
    told = tab.inner_text("#baseline")
    assert "4 cells in both" in told
    assert "new failure 1" in told and "fixed" not in told
    assert "<b>a note</b>" in told
    assert "1 vanished" in told
    assert f"gone on {H200} with vLLM {HERE}: was ok" in tab.text_content("#baseline li")
    tab.click("#baseline >> text=new failure")
    assert "1 of 5 cells" == tab.inner_text("#shown")
    assert "baseline%3A+new+failure" in tab.url
    tab.click(".c")
    detail = tab.inner_text("#detail")
    assert "since the baseline: new failure, verdict ok → broken (it <i>broke</i>)" in detail


def test_what_still_fails_is_no_difference(show):
    alone = show([at(H200, OLD, verdict="broken")], baseline=BASELINE).at("differences=1")
    assert "0 of 1 cells" == alone.inner_text("#shown")


def test_a_change_of_a_page_is_told_in_numbers(show):
    tab = show(CELLS, baseline=BASELINE).at(f"cell={CELLS[4]['id']}")
    text = tab.inner_text("#detail")
    assert "changed, page_size_bytes of attn 16,384 → 8,192, 4,096" in text


def test_changes_since_the_engine_before_are_told(show):
    since = {
        "id": "dsv4-default-unset", "device": H200, "from": OLD, "to": HERE, "what": "selected",
        "old": "FLASH_ATTN", "new": "FLASHMLA", "reason": "",
    }  # fmt: skip
    tab = show(CELLS, differences=[since]).at(f"cell={CELLS[2]['id']}")
    assert f"since vLLM {OLD}, selected FLASH_ATTN → FLASHMLA" in tab.inner_text("#detail")


def run(started):
    return {"started": started, "engines": [{"version": HERE, "commit": None}], "devices": [H200]}


HISTORY = {
    "runs": [run("2026-11-30"), run("2026-12-01"), run("2026-12-02")],
    "cells": [
        {"id": "dsv4-default-unset", "device": H200, "engine": HERE, "always": False, "gaps": 0,
         "strip": ["ok", "broken", "ok"], "since": 2, "flaky": [1, 2]},
    ],
    "missing": [{"id": "gone", "device": H200, "engine": HERE}],
}  # fmt: skip


def test_a_flaky_cell_is_marked_and_its_strip_told(show):
    opened = show([at(H200, HERE), at(H200, HERE, "fp8")], history=HISTORY)
    tab = opened.at("news=flaky")
    assert "1 of 2 cells" == tab.inner_text("#shown")
    assert "flaky" in tab.get_attribute(".c", "aria-label")
    assert "≈" in tab.inner_text(".c")
    assert "1 missing" in tab.inner_text("#baseline")
    tab.click(".c")
    strip = [each.text_content() for each in tab.query_selector_all(".strip li")]
    assert 3 == len(strip)
    assert "2026-12-01: vLLM 0.33.0: broken" in strip[1]
    assert "flaky: one engine gave both" in tab.inner_text("#detail")
