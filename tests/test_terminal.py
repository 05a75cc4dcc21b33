from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import device, terminal, versus
from harness.case import Case
from harness.safe import columns
from harness.terminal import render
from harness.verdict import PASSING, VERDICTS
from harness.view import GLYPHS, MIN_WIDTH, CellView

BUG = "https://github.com/vllm-project/vllm/issues/42587"


def cell(backend: str = "default", dtype: str = "fp8", **facts: Any) -> CellView:
    model = facts.setdefault("model", "dsv4")
    plain: dict[str, Any] = {
        "id": f"{model}-{backend}-{dtype}",
        "device": "virtual:h200",
        "engine": "0.33.0",
        "verdict": "ok",
        "known": None,
        "reason": "",
        "remarks": (),
        "stale": None,
        "stage": "allocate",
        "page": None,
        "resolved": None,
        "where": None,
    }
    return CellView(backend=backend, kv_cache_dtype=dtype, **{**plain, **facts})


def shown(*cells: CellView, width: int = 100, unicode: bool = True) -> str:
    return render(cells, width=width, color=False, unicode=unicode)


def test_a_block_is_titled_with_model_device_and_engine() -> None:
    text = render(
        [cell()],
        width=80,
        color=False,
        titles={("0.33.0", "virtual:h200"): "SM90, virtual"},
    )
    assert "dsv4 · virtual:h200 (SM90, virtual) · vLLM 0.33.0" == text.splitlines()[0]


def test_rows_are_backends_and_columns_are_dtypes_as_first_seen() -> None:
    text = shown(
        cell("default", "unset", page=37440),
        cell("default", "auto", verdict="broken"),
        cell("FLASHMLA", "auto", verdict="rejected"),
        cell("FLASHMLA", "unset", page=576),
    )
    assert [
        "          unset    auto",
        "default   ✓ 37440  ✗",
        "FLASHMLA  ✓   576  ·",
    ] == text.splitlines()[2:5]


def test_a_known_failure_carries_k_and_a_stale_entry_s() -> None:
    text = shown(
        cell(dtype="bfloat16", verdict="unguarded", known=BUG, page=65536),
        cell(dtype="fp8", stale="no longer fails", page=37440),
    )
    assert "default  !k 65536  ✓s 37440" in text.splitlines()


def test_a_cell_that_was_not_planned_is_blank() -> None:
    text = shown(cell("a", "x"), cell("b", "y"))
    assert ["a  ✓", "b     ✓"] == text.splitlines()[3:5]


def test_rows_name_the_model_where_there_are_several() -> None:
    text = shown(cell(model="dsv4"), cell(model="kimi-k2"))
    assert "2 models · virtual:h200 · vLLM 0.33.0" in text
    assert ["dsv4    default  ✓", "kimi-k2 default  ✓"] == text.splitlines()[3:5]


def test_each_engine_and_device_has_its_own_block() -> None:
    text = shown(cell(), cell(engine="0.27.1"), cell(device="cpu"))
    assert 3 == len(re.findall("^dsv4 · ", text, re.MULTILINE))


@pytest.mark.parametrize("failure_first", [True, False])
def test_a_failure_is_not_covered_by_another_cell_in_its_place(failure_first: bool) -> None:
    cells = [cell(verdict="crashed", reason="SIGSEGV"), cell()]
    assert "default  ☠" in shown(*cells[:: 1 if failure_first else -1]).splitlines()


def test_dtypes_that_do_not_fit_go_to_further_bands_with_their_labels() -> None:
    dtypes = [f"dtype{n:02}" for n in range(12)]
    rows = shown(*[cell("FLASHMLA", d, page=37440) for d in dtypes], width=40).splitlines()
    heads = [row.split() for row in rows if "dtype" in row]
    assert dtypes == [name for head in heads[:4] for name in head]
    assert 4 == sum(row.startswith("FLASHMLA  ✓ 37440") for row in rows)
    assert [3, 3, 3, 3] == [len(head) for head in heads[:4]]


def test_a_long_header_is_folded_behind_underscores() -> None:
    dtypes = [f"turboquant_k{n}v4_nc" for n in range(6)]
    text = shown(*[cell(dtype=d) for d in dtypes], width=90)
    assert "         " + "  ".join(["turboquant_"] * 6) in text.splitlines()
    assert "         " + "".join(f"k{n}v4_nc      " for n in range(6)).rstrip() in text


def test_bands_are_filled_evenly() -> None:
    dtypes = ["dtype_a", "dtype_b", "dtype_c", "dtype_d"]
    # 40 columns hold a label of 7 and three columns of 2 + 7, yet two bands are needed anyway.
    rows = shown(*[cell(dtype=d, page=37440) for d in dtypes], width=40).splitlines()
    assert [dtypes[:2], dtypes[2:]] == [row.split() for row in rows if "dtype_" in row][:2]


def test_a_band_leaves_out_rows_that_have_nothing_in_it() -> None:
    cells = [cell("x", "a" * 20), cell("y", "b" * 20)]
    rows = shown(*cells, width=40).splitlines()
    assert ["x  ✓", "y  ✓"] == [row for row in rows if row[:1] in ("x", "y")]


def test_a_header_grows_wider_before_it_takes_a_fourth_line() -> None:
    cells = [cell(dtype=f"int{n}_per_token_head") for n in range(4)]
    # With four lines of 6 columns a header, 7 + 4 * (2 + 6) = 39 columns would hold them all.
    rows = shown(*cells, width=39).splitlines()
    assert [2, 2] == [row.count("✓") for row in rows if row.startswith("default")]


def test_a_folded_header_stands_on_its_column() -> None:
    dtypes = [f"int{n}_per_token_head" for n in range(3)]
    rows = shown(*[cell(dtype=d) for d in ["fp8", *dtypes]], width=45).splitlines()
    assert [
        "              int0_per_  int1_per_  int2_per_",
        "              token_     token_     token_",
        "         fp8  head       head       head",
        "default  ✓    ✓          ✓          ✓",
    ] == rows[2:6]


def test_a_header_is_not_folded_where_there_is_room() -> None:
    rows = shown(cell(dtype="fp8_e4m3"), cell(dtype="octave_k3v3_compact")).splitlines()
    assert "         fp8_e4m3  octave_k3v3_compact" == rows[2]


def test_the_legend_counts_the_glyphs_that_occur_and_no_others() -> None:
    text = shown(
        cell(dtype="a", page=1),
        cell(dtype="b"),
        cell(dtype="c", verdict="unclean", reason="KeyError"),
    )
    assert re.search("^✓  2 ok  +initialised", text, re.MULTILINE)
    assert re.search("^~  1 unclean  +refused", text, re.MULTILINE)
    assert "timeout" not in text
    assert "page_size_bytes" in text


def test_totals_name_every_verdict_and_how_many_are_known() -> None:
    text = shown(
        cell(dtype="a"),
        cell(dtype="b", verdict="unguarded", known=BUG),
        cell(dtype="c", verdict="unguarded"),
        cell(dtype="d", verdict="notrun"),
    )
    assert "4 cells: 1 ok, 2 unguarded (1 known), 1 notrun" in text.splitlines()


def test_what_auto_became_is_shown() -> None:
    """vLLM issue 33021: `auto` was never resolved nor logged."""
    facts = {"resolved": "fp8_ds_mla", "stored": "uint8"}
    text = shown(
        cell(dtype="auto", **facts),
        cell(dtype="unset", **facts),
        cell("FLASHMLA", "unset", **facts),
        cell(dtype="fp8_ds_mla", **facts),
    )
    assert "  auto (1), unset (2) -> fp8_ds_mla, stored as uint8" in text.splitlines()


def test_what_auto_became_is_shown_where_it_stayed_auto() -> None:
    text = shown(
        cell(dtype="unset", resolved="auto", stored="bfloat16", model="llama3"),
        cell(dtype="bfloat16", resolved="bfloat16", stored="bfloat16"),
        cell(dtype="unset", verdict="broken", device="cpu"),
    )
    assert [
        "  unset (1) -> auto, stored as bfloat16",
        "    llama3 on virtual:h200",
    ] == text[text.index("What kv_cache_dtype became") :].splitlines()[1:3]


def test_totals_say_who_vouches_for_how_many() -> None:
    text = shown(
        cell(dtype="a", vouched=("oracle", "contract")),
        cell(dtype="b", vouched=("oracle", "contract")),
        cell(dtype="c", vouched=("explicit",)),
        cell(dtype="d", verdict="rejected"),
    )
    assert "ok vouched for by: oracle + contract 2, explicit 1" in text.splitlines()
    assert "Nobody" not in text


def test_what_nobody_vouches_for_is_said_plainly() -> None:
    text = shown(
        cell(dtype="a", vouched=(), page=16),
        cell(dtype="b", vouched=("contract",), page=16),
        cell(dtype="c", vouched=("contract",)),
    )
    assert "ok vouched for by: contract 2, nobody 1" in text.splitlines()
    assert "Nobody vouches for 1 cell of verdict ok\n  dsv4-default-a\n" in text
    assert "Nobody confirms the page of 1 cell of verdict ok\n  dsv4-default-b\n" in text


def test_remarks_are_summed_up_with_the_first_cells() -> None:
    cells = [
        cell(f"b{n}", f"d{n}", remarks=("overdeclared",), verdict="rejected") for n in range(6)
    ]
    text = shown(*cells)
    assert "  overdeclared, 6 cells: the backend declares it" in text
    assert "    dsv4-b0-d0 dsv4-b1-d1 dsv4-b2-d2 dsv4-b3-d3 and 2 more" in text


def test_identical_failures_take_one_paragraph() -> None:
    facts = {"verdict": "broken", "reason": "got auto", "stage": "model", "where": "a.py:f"}
    text = shown(
        cell("x", "auto", **facts),
        cell("x", "unset", **facts),
        cell("y", "auto", **facts),
        cell("y", "fp8", **{**facts, "reason": "another"}),
    )
    assert [
        "FAILED: 4 cells, 2 causes",
        "",
        "✗ broken, 3 cells, stage model",
        "  got auto",
        "  in a.py:f",
        "  dsv4-x-{auto,unset} dsv4-y-auto",
    ] == text[text.index("FAILED") :].splitlines()[:6]


@pytest.mark.parametrize("verdict", sorted({*VERDICTS} - PASSING - {"skipped"}))
def test_every_failing_verdict_is_explained(verdict: str) -> None:
    assert "FAILED: 1 cell, 1 cause\n" in shown(cell(verdict=verdict, reason="why"))


@pytest.mark.parametrize("verdict", [*sorted(PASSING), "skipped"])
def test_other_verdicts_are_no_failure(verdict: str) -> None:
    assert "FAILED" not in shown(cell(verdict=verdict, reason="why"))


def test_unknown_failures_come_before_known_ones() -> None:
    text = shown(
        cell(dtype="a", verdict="unguarded", known=BUG, reason="silence"),
        cell(dtype="b", verdict="mismatch", reason="37376 is not 37440"),
    )
    assert text.index("37376 is not 37440") < text.index(
        f"  {BUG}: 1 unguarded\n    dsv4-default-a"
    )
    assert "FAILED: 1 cell, 1 cause\n" in text


def test_a_stale_known_entry_is_a_failure() -> None:
    text = shown(cell(known=BUG, verdict="unguarded", stale="expired on 2026-01-01"))
    assert "FAILED: 1 cell, 1 cause\n" in text
    assert "  expired on 2026-01-01\n  dsv4-default-fp8" in text
    assert "Known failures" not in text


def test_a_skipped_cell_says_why() -> None:
    assert "Skipped, 1 cell: needs 40 GiB\n" in shown(
        cell(verdict="skipped", reason="needs 40 GiB")
    )


def test_ids_keep_their_device_behind_the_braces() -> None:
    text = shown(
        cell(dtype="a", id="dsv4-default-a-cpu", verdict="oom"),
        cell(dtype="b", id="dsv4-default-b-cpu", verdict="oom"),
    )
    assert "  dsv4-default-{a,b}-cpu" in text.splitlines()


def test_names_are_braced_by_what_the_cell_is_not_by_dashes() -> None:
    facts = {"verdict": "broken", "reason": "why"}
    text = shown(
        *(cell(b, d, model="dsv4-pro", **facts) for b in ("X", "Y") for d in ("a", "b")),
        cell("X", "a", model="llama3-fp8kv-ct", **facts),
    )
    assert "  dsv4-pro-{X,Y}-{a,b} llama3-fp8kv-ct-X-a" in text.splitlines()


def test_refusals_that_differ_in_the_dtype_alone_are_one_cause() -> None:
    text = shown(
        *(cell(dtype=d, verdict="unclean", reason=f"got {d}") for d in ("fp8", "nvfp4")),
        cell(dtype="fp8_ds_mla", verdict="broken", reason="got fp8"),
    )
    assert "FAILED: 3 cells, 2 causes" in text
    assert "  got <kv_cache_dtype>\n  dsv4-default-{fp8,nvfp4}\n" in text
    assert "  got fp8\n  dsv4-default-fp8_ds_mla\n" in text


def large(*more: CellView) -> list[CellView]:
    many = [
        cell(f"B{b}", f"d{d}", model=m, verdict="rejected")
        for m in ("dsv4-pro", "llama3")
        for b in range(20)
        for d in range(11)
    ]
    plain = cell("default", "unset", model="dsv4-pro", page=37440, resolved="fp8_ds_mla")
    return [replace(plain, stored="uint8"), *many, *more]


def test_a_large_run_has_one_row_for_each_model() -> None:
    text = shown(*large(cell("B1", "x", model="llama3", verdict="skipped")))
    assert [
        "          ✓    ·  -  default-unset",
        "dsv4-pro  1  220     ✓  37440 fp8_ds_mla as uint8",
        "llama3       220  1",
        "",
    ] == text.splitlines()[2:6]
    assert "41 rows of model and backend, none with a failure: matrix.json has each cell" in text
    assert "B7" not in text


def test_a_large_run_shows_rows_with_failures_in_full() -> None:
    bad = cell("B7", "d3", model="llama3", verdict="broken", id="llama3-B7-d3-tp2", reason="why")
    text = shown(*large(bad))
    assert "llama3 B7  ·   ·   ·   ✗   ·   ·   ·   ·   ·   ·   ·" in text.splitlines()
    assert "B8" not in text
    assert "FAILED: 1 cell, 1 cause" in text


def test_many_causes_of_a_large_run_are_cut_with_their_number() -> None:
    bad = [cell("B0", f"e{n}", verdict="broken", reason=f"cause {n}") for n in range(20)]
    text = shown(*large(*bad))
    assert "FAILED: 20 cells, 20 causes" in text
    assert "8 more causes, 8 cells: matrix.json" in text
    assert 12 == len(re.findall("^  cause ", text, re.MULTILINE))


def test_a_run_of_a_few_hundred_cells_is_shown_in_full() -> None:
    text = shown(*large()[: terminal.LARGE])
    assert "B7" in text
    assert "matrix.json" not in text


def difference(dtype: str, what: str, old: versus.Value, new: versus.Value, **more: Any) -> Any:
    place = device.parse(more.pop("place", "virtual:h200"))
    case = Case("dsv4", "default", dtype)
    return versus.Difference(case, place, "0.27.1", "0.33.0", what, old, new, **more)


def test_differences_that_are_alike_take_one_line() -> None:
    found = [
        difference("unset", "verdict", "broken", "ok"),
        difference("auto", "verdict", "broken", "ok"),
        difference("fp8", "page_size_bytes", (16, 37376), (16, 37440)),
        difference("nvfp4", "runs", None, "ok", reason="vLLM 0.27.1 has no such kv_cache_dtype"),
    ]
    text = render([cell()], width=100, color=False, differences=found)
    assert [
        "Differences between vLLM 0.27.1 and 0.33.0: 4, in 4 cells",
        "  broken -> ok, 2 cells: dsv4-default-{unset,auto}",
        "  page_size_bytes 16, 37376 -> 16, 37440: dsv4-default-fp8",
        "  only 0.33.0 has it (vLLM 0.27.1 has no such kv_cache_dtype): dsv4-default-nvfp4",
    ] == text.splitlines()[-4:]


def test_what_one_engine_lacks_takes_one_line_whatever_became_of_it_in_the_other() -> None:
    lacking = {"reason": "vLLM 0.27.1 has no DeepseekV41ForCausalLM"}
    found = [
        difference(dtype, "runs", None, verdict, **lacking)
        for dtype, verdict in (("unset", "ok"), ("fp8", "rejected"))
    ]
    assert 1 == len({d.rank for d in found})
    text = render([cell()], width=100, color=False, differences=found)
    assert 1 == text.count("has no DeepseekV41ForCausalLM")
    assert "dsv4-default-{unset,fp8}" in text


def test_differences_name_the_device_where_there_are_several() -> None:
    places = ("virtual:h200", "virtual:b200")
    found = [difference("auto", "verdict", "ok", "broken", place=place) for place in places]
    text = render([cell()], width=100, color=True, differences=found)
    assert "\x1b[1;31m  ok -> broken, 2 cells: " in text
    assert "dsv4-default-auto{-virtual_h200,-virtual_b200}" in text


def test_a_run_with_one_engine_has_no_differences() -> None:
    assert "Differences" not in shown(cell())


def test_a_reason_can_neither_act_on_the_terminal_nor_flood_it() -> None:
    text = shown(cell(verdict="broken", reason="\x1b[2J\u202e\nboom " + "x" * 5000))
    assert r"\x1b[2J\u202e boom" in text
    assert "characters left out" in text
    assert 2000 > len(text)


def test_color_adds_nothing_but_color() -> None:
    cells = [cell(dtype=v, verdict=v, reason="why") for v in VERDICTS]
    colored = render(cells, width=60, color=True)
    assert "\x1b[32m✓\x1b[0m" in colored
    assert shown(*cells, width=60) == re.sub(r"\x1b\[[0-9;]*m", "", colored)


def test_a_known_failure_is_yellow_and_an_unknown_one_red() -> None:
    cells = [cell(dtype="a", verdict="oom", known=BUG), cell(dtype="b", verdict="oom")]
    text = render(cells, width=60, color=True)
    assert "\x1b[33mOk\x1b[0m" in text
    assert "\x1b[1;31mO\x1b[0m" in text


def test_totals_are_red_where_anything_failed() -> None:
    known = cell(dtype="a", verdict="oom", known=BUG)
    good = render([known], width=60, color=True)
    assert "\x1b[32m1 cell: 1 oom (1 known)\x1b[0m" in good
    bad = render([known, cell(dtype="b", verdict="oom")], width=60, color=True)
    assert "\x1b[1;31m2 cells: 2 oom (1 known)\x1b[0m" in bad


@pytest.mark.parametrize("alphabet", [0, 1])
def test_glyphs_differ_without_color(alphabet: int) -> None:
    assert list(VERDICTS) == list(GLYPHS)
    assert len(VERDICTS) == len({glyphs[alphabet] for glyphs in GLYPHS.values()})


def test_the_fallback_is_ascii_whatever_the_texts_hold() -> None:
    cells = [cell(dtype=v, verdict=v, reason="段错误", where="é.py:f") for v in VERDICTS]
    assert shown(*cells, unicode=False).isascii()


def test_nothing_to_show_is_said() -> None:
    assert "0 cells\n" == shown()


names = st.text("abF_4", min_size=1, max_size=40)
texts = st.text(max_size=80)


@given(
    st.lists(
        st.builds(
            cell,
            names,
            names,
            model=st.sampled_from(["dsv4", "kimi-k2-with-a-long-name"]),
            verdict=st.sampled_from(VERDICTS),
            known=st.none() | st.just(BUG),
            stale=st.none() | texts,
            reason=texts,
            remarks=st.just(("coerced",)) | st.tuples(texts),
            page=st.none() | st.integers(0, 10**9),
            resolved=st.none() | texts,
            stored=st.none() | texts,
            vouched=st.just(()) | st.just(("oracle", "contract")),
            where=st.none() | texts,
        ),
        max_size=12,
    ),
    st.integers(MIN_WIDTH, 200),
    st.sampled_from([0, terminal.LARGE]),
)
def test_no_line_is_wider_than_the_terminal(cells: list[CellView], width: int, large: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "LARGE", large)
        text = shown(*cells, width=width)
    for line in text.split("\n"):
        assert width >= columns(line)
        assert line.isprintable()
