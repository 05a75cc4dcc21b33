from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.progress import Progress, duration, line
from harness.safe import columns
from harness.verdict import VERDICTS


def run(total: int, *verdicts: str, seconds: float = 0.5, latest: str = "") -> Progress:
    progress = Progress.start(total, 100.0)
    for verdict in verdicts:
        progress = progress.after(verdict, seconds, latest)
    return progress


@pytest.mark.parametrize(
    ("shown", "seconds"),
    [
        ("0 s", 0.2),
        ("0 s", -3.0),
        ("21 s", 21.4),
        ("1 min 00 s", 59.6),
        ("2 min 05 s", 2 * 60 + 5),
        ("1 h 00 min", 3599.7),
        ("1 h 02 min", 3600 + 2 * 60 + 10),
        ("2 h 00 min", 3600 + 59 * 60 + 50),
    ],
)
def test_a_duration_carries_its_unit(shown: str, seconds: float) -> None:
    assert shown == duration(seconds)


def test_the_line_counts_by_verdict() -> None:
    progress = run(138, "ok", "ok", "rejected", "known", "broken", "timeout")
    # 6 cells in 12 s of wall time leave 132 cells of 2 s each.
    assert (
        "[  6/138] 2 ok · 1 rejected · 1 known · 2 failed · 0.50 s/cell · 4 min 24 s left"
        == line(progress, 112.0, 120)
    )


def test_cells_side_by_side_shorten_the_time_left_but_not_the_time_per_cell() -> None:
    shown = line(run(20, *["ok"] * 10, seconds=8.0), 110.0, 120)
    assert "8.00 s/cell · 10 s left" in shown


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_verdict_counts_as_one_cell(verdict: str) -> None:
    assert 1 == run(3, verdict).done


def test_skipped_cells_are_counted_apart() -> None:
    assert "0 failed · 1 skipped" in line(run(3, "skipped"), 101.0, 120)


def test_before_the_first_cell_only_the_time_passed_is_known() -> None:
    assert "[0/9] 0 ok · 0 rejected · 0 known · 0 failed · 7 s" == line(run(9), 107.0, 120)


def test_at_the_end_the_time_passed_stands_in_place_of_the_time_left() -> None:
    assert line(run(2, "ok", "ok"), 107.0, 120).endswith("0.50 s/cell · 7 s")


def test_more_reports_than_planned_leave_no_time() -> None:
    assert "left" not in line(run(1, "ok", "ok"), 107.0, 120)


def test_the_latest_id_stands_last_and_is_cut_to_the_room() -> None:
    progress = run(2, "ok", latest="dsv4-FLASHINFER_MLA_SPARSE-fp8")
    assert line(progress, 101.0, 120).endswith(" left  dsv4-FLASHINFER_MLA_SPARSE-fp8")
    # 69 columns of numbers and 2 of space leave 13 of 84 for the id.
    assert line(progress, 101.0, 84).endswith(" left  dsv4-FLASHIN…")
    assert line(progress, 101.0, 82).endswith(" left")


def test_failures_are_what_a_narrow_line_keeps() -> None:
    assert "[1/2] 1 failed · 1 s left" == line(run(2, "broken"), 101.0, 30)
    assert "[1/2] 1 failed" == line(run(2, "broken"), 101.0, 16)


def test_the_line_can_be_ascii() -> None:
    assert line(run(9, "ok", latest="x" * 90), 101.0, 100, unicode=False).isascii()


@given(
    st.lists(st.sampled_from([*VERDICTS, "known"]), max_size=30),
    st.text(max_size=60),
    st.integers(0, 150),
)
def test_the_line_is_never_wider_than_the_terminal(
    verdicts: list[str], latest: str, width: int
) -> None:
    shown = line(run(30, *verdicts, latest=latest), 130.0, width)
    assert width >= columns(shown)
    assert shown.isprintable()
