"""The strip of a cell's earlier runs on the page: what it says in words, and what is missing."""

from __future__ import annotations

from harness import history, night
from tests.page.conftest import cell, whole


def run(day, cells, **more):
    data = whole(cells)
    data["run"] |= {"started": f"2026-12-{day:02}T03:00:00Z", **more}
    return data


def told(*runs):
    """The last run's history, as a run puts it into its matrix.json."""
    files = map(night.lines, runs[:-1])
    past = [night.parse(night.name(text), text)[0] for text in files]
    return history.history(runs[-1], past).to_json()


def words(tab):
    boxes = tab.query_selector_all(".strip li")
    # A tooltip for the mouse, the same words for a screen reader.
    assert [box.get_attribute("title") for box in boxes] == [
        box.query_selector(".vh").text_content() for box in boxes
    ]
    return [box.get_attribute("title") for box in boxes]


def test_a_box_tells_when_which_vllm_and_what(show):
    both = [cell(engine="0.27.1"), cell(engine="0.32.0", verdict="broken")]
    now = [cell(engine="0.27.1"), cell(engine="0.33.0", id="new")]
    runs = [run(1, both), run(2, now[:1], unselected=1), run(3, [cell(engine="0.27.1")])]
    tab = show(now, history=told(*runs, run(4, now))).at("cell=new")
    assert [
        "2026-12-01T03:00:00Z: vLLM 0.32.0: broken",
        "2026-12-02T03:00:00Z: not in that run, which had a part of the cells",
        "2026-12-03T03:00:00Z: no such cell in that run",
        "this run: vLLM 0.33.0: ok",
    ] == words(tab)
    assert "since this run" in tab.inner_text("#detail")
    passing = tab.eval_on_selector_all(".strip .good", "all => all.length")
    assert 1 == passing


def test_a_lost_device_is_listed_as_missing(show):
    before = [cell(), cell(device="virtual:b200"), cell(dtype="<b>fp8</b>")]
    now = [cell()]
    tab = show(now, history=told(run(1, before), run(2, now), run(3, now))).at()
    assert "2 missing: earlier runs had them, which is no pass" in tab.inner_text("#baseline")
    listed = tab.eval_on_selector_all("#baseline li", "all => all.map(e => e.textContent)")
    assert {
        "llama3-default-unset on virtual:b200 with vLLM 0.33.0",
        "llama3-default-b_fp8_b on virtual:h200 with vLLM 0.33.0",
    } == {*listed}
