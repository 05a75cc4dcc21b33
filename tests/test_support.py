from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli import main
from harness.report import support as shown
from harness.since import ABSENT, FAILS, OK, REFUSED, UNKNOWN, Row, State
from harness.support import CPU, NO_CAPABILITY, capability, release, support
from harness.verdict import VERDICTS
from tests.results import H200, cell, gpu, matrix, write

RELEASES = ("0.27.1", "0.30.0", "0.33.0", "0.100.0")
B200 = {"spec": "virtual:b200", "kind": "virtual", "name": "NVIDIA B200", "capability": [10, 0]}


def run(version: str, *cells: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """A run of one release on a virtual H200 and a real one."""
    cells = tuple({**each, "engine": version} for each in cells)
    data = matrix(*cells, devices=(H200, gpu(0), B200), engines=(version,))
    data["engines"][0].update(facts)
    return data


def row(*runs: dict[str, Any], dtype: str = "auto", place: str = "SM90") -> Row:
    found = [r for r in support(runs).rows if (r.kv_cache_dtype, r.capability) == (dtype, place)]
    assert 1 == len(found)
    return found[0]


def sequence(*verdicts: str | None) -> Row:
    """The row of a case that had these verdicts, release by release; None: there is no cell."""
    runs = []
    for version, verdict in zip(RELEASES, verdicts, strict=False):
        other = [cell("ok", "other")]
        runs.append(run(version, *other, *([cell(verdict)] if verdict else [])))
    return row(*runs)


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        (("ok", "ok"), "0.27.1 or before"),
        (("broken", "ok"), "0.30.0"),
        (("rejected", "rejected", "ok"), "0.33.0"),
        (("ok", "broken", "ok"), "0.27.1 or before, gap in 0.30.0"),
        (("ok", "broken", "rejected", "ok"), "0.27.1 or before, gap in 0.30.0-0.33.0"),
        (("ok", "unclean"), "0.27.1 or before, not since 0.30.0 (unclean)"),
        (("rejected", "ok", "broken", "crashed"), "0.30.0, not since 0.33.0 (crashed)"),
        (("rejected", "rejected"), "no (refused)"),
        (("rejected", "mismatch"), "no (mismatch)"),
        (("mismatch", "rejected"), "no (refused)"),
        (
            ("rejected", "ok", "broken", "ok"),
            "0.30.0, gap in 0.33.0",
        ),
        (
            ("ok", "broken", "ok", "oom"),
            "0.27.1 or before, gap in 0.30.0, not since 0.100.0 (oom)",
        ),
        # What was not run is neither a no nor a yes.
        ((None, "ok"), "0.30.0 or before"),
        (("broken", None, "ok"), "after 0.27.1, by 0.33.0"),
        (("ok", "skipped", "ok"), "0.27.1 or before"),
        (("ok", "notrun"), "0.27.1 or before, 0.30.0 not examined"),
        (("rejected", "infra"), "no in 0.27.1 (refused), 0.30.0 not examined"),
        (("infra", "skipped", "notrun"), "not examined"),
        (
            ("ok", "broken", None),
            "0.27.1 or before, not since 0.30.0 (broken), 0.33.0 not examined",
        ),
        (("ok", "broken", None, "ok"), "0.27.1 or before, gap in 0.30.0"),
    ],
)  # fmt: skip
def test_what_a_sequence_of_releases_comes_to(verdicts: tuple[str, ...], told: str) -> None:
    assert told == shown.entry(sequence(*verdicts)).long


def test_the_parts_of_a_sequence() -> None:
    found = sequence("rejected", "ok", "broken", "ok")
    assert ("0.30.0", False, "0.27.1", (("0.33.0",),), None) == (
        *(found.since, found.or_before, found.after, found.gaps, found.lost),
    )
    assert [REFUSED, OK, FAILS, OK] == [state.support for state in found.states]
    lost = sequence("ok", "skipped", "broken", "rejected")
    assert ("0.27.1", True, None, (), "0.33.0") == (
        *(lost.since, lost.or_before, lost.after, lost.gaps, lost.lost),
    )


def test_releases_are_ordered_as_versions() -> None:
    runs = [run(version, cell("ok")) for version in ("0.100.0", "nightly", "0.33.0rc1", "0.33.0")]
    assert ("0.33.0rc1", "0.33.0", "0.100.0", "nightly") == support(runs).releases


def test_dtypes_stand_as_the_newest_release_has_them() -> None:
    old = run("0.27.1", cell("ok", "b"), cell("ok", "gone"), kv_cache_dtypes=["b", "a", "gone"])
    new = run("0.33.0", cell("ok", "a"), cell("ok", "unset"), kv_cache_dtypes=["a", "new", "b"])
    assert ["unset", "a", "b", "gone"] == [each.kv_cache_dtype for each in support([old, new]).rows]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.33.0", "0.33.0"),
        ("0.33.0+cu130", "0.33.0"),
        ("0.32.0+cpu", "0.32.0"),
        ("0.33.1.dev7+gabc", "0.33.1.dev7+gabc"),
        ("<b>", "<b>"),
    ],
)
def test_a_build_is_of_its_release(version: str, name: str) -> None:
    assert name == release(version)


def test_a_dtype_that_a_release_does_not_have_is_no() -> None:
    """What the engine has says so, not that there is no cell: -k may have left it out."""
    new = run("0.33.0", cell("ok", "nvfp4"))
    silent = run("0.27.1", cell("ok", "fp8"))
    lacks = run("0.27.1", cell("ok", "fp8"), kv_cache_dtypes=["auto", "fp8"])
    has = run("0.27.1", cell("ok", "fp8"), kv_cache_dtypes=["auto", "fp8", "nvfp4"])
    told = [
        [s.support for s in row(old, new, dtype="nvfp4").states] for old in (silent, lacks, has)
    ]
    assert [[UNKNOWN, OK], [ABSENT, OK], [UNKNOWN, OK]] == told
    assert "0.33.0" == shown.entry(row(lacks, new, dtype="nvfp4")).long
    # No engine lists `unset`.
    unset = run("0.27.1", cell("ok", "fp8"), kv_cache_dtypes=["fp8"])
    assert (
        UNKNOWN == row(unset, run("0.33.0", cell("ok", "unset")), dtype="unset").states[0].support
    )


def test_a_model_that_a_release_does_not_have_is_no() -> None:
    reason = "vLLM 0.27.1 has no NewForCausalLM"
    for architectures, want in ((["LlamaForCausalLM"], ABSENT), ([], UNKNOWN)):
        old = run("0.27.1", cell("skipped", reason=reason), architectures=architectures)
        assert want == row(old, run("0.33.0", cell("ok"))).states[0].support
    other = run("0.27.1", cell("skipped", reason="needs more memory"), architectures=["A"])
    assert UNKNOWN == row(other, run("0.33.0", cell("ok"))).states[0].support


def test_any_backend_supports_it_and_all_must_have_been_run_for_a_no() -> None:
    good = run("0.33.0", cell("rejected"), cell("ok", backend="TRITON_ATTN"))
    assert ("TRITON_ATTN",) == row(good).states[0].backends
    assert OK == row(good).states[0].support
    default_alone = run("0.30.0", cell("rejected"))
    assert UNKNOWN == row(default_alone, good).states[0].support
    assert REFUSED == row(default_alone).states[0].support
    both = run("0.30.0", cell("rejected"), cell("broken", backend="TRITON_ATTN"))
    assert FAILS == row(both, good).states[0].support
    partly = run("0.30.0", cell("rejected"), cell("skipped", backend="TRITON_ATTN"))
    assert UNKNOWN == row(partly).states[0].support
    # A release that does not offer the backend has all of its own run.
    old = run("0.30.0", cell("rejected"), kind_backends={"regular": ["FLASH_ATTN"]})
    assert REFUSED == row(old, good).states[0].support


def test_the_default_is_told_by_the_backend_that_it_chose() -> None:
    one = cell("ok", resolved={"selected": None, "backends": ["B", "A"]})
    other = cell("ok", resolved={})
    assert ("FLASH_ATTN",) == row(run("0.33.0", cell("ok"))).states[0].backends
    assert ("A", "B") == row(run("0.33.0", one)).states[0].backends
    assert ("default",) == row(run("0.33.0", other)).states[0].backends


def test_the_reason_of_the_default_stands_for_a_failure() -> None:
    cells = [cell("crashed", backend="A", reason="a"), cell("unclean", reason="default's")]
    cells.append(cell("rejected", backend="B"))
    state = row(run("0.33.0", *cells)).states[0]
    assert (FAILS, "unclean", "default's") == (state.support, state.verdict, state.reason)


def test_a_known_failure_is_one() -> None:
    known = cell("unguarded", known="https://bug/1")
    assert FAILS == row(run("0.33.0", known)).states[0].support


def test_axes_are_left_out() -> None:
    more = [
        cell("ok", block_size=64, id="llama3-default-auto-block64"),
        cell("ok", tensor_parallel_size=8, id="llama3-default-auto-tp8"),
        cell("ok", id="llama3-default-auto-v2"),
    ]
    assert REFUSED == row(run("0.33.0", cell("rejected"), *more)).states[0].support
    assert () == support([run("0.33.0", *more)]).rows


def test_a_measured_result_outweighs_virtual_ones() -> None:
    on_gpu = {"device": "GPU-0", "id": "llama3-default-auto-gpu"}
    both = row(run("0.33.0", cell("ok"), cell("broken", **on_gpu))).states[0]
    assert (FAILS, True) == (both.support, both.measured)
    both = row(run("0.33.0", cell("broken"), cell("ok", **on_gpu))).states[0]
    assert (OK, True) == (both.support, both.measured)
    alone = row(run("0.33.0", cell("ok"))).states[0]
    assert (OK, False) == (alone.support, alone.measured)
    nothing = row(run("0.33.0", cell("ok"), cell("infra", **on_gpu))).states[0]
    assert (OK, False) == (nothing.support, nothing.measured)


def test_capabilities_are_apart_and_devices_of_one_are_together() -> None:
    old = run("0.30.0", cell("rejected"), cell("ok", device="virtual:b200", id="b"))
    assert REFUSED == row(old).states[0].support
    assert OK == row(old, place="SM100").states[0].support
    slice_ = {**gpu(1), "kind": "mig", "mig": "1g.18gb"}
    assert "SM90" == capability(slice_) == capability(H200)
    assert "SM121" == capability({"kind": "gpu", "capability": (12, 1)})
    assert CPU == capability({"kind": "cpu", "capability": None})
    for unknown in (None, "9.0", [9], ["<b>", 0]):
        assert NO_CAPABILITY == capability({"kind": "gpu", "capability": unknown})


def test_the_cpu_has_releases_of_its_own() -> None:
    cpu = {"spec": "cpu", "kind": "cpu", "name": "CPU", "capability": None}
    build = matrix(cell("ok", device="cpu", engine="0.32.0"), devices=(cpu,), engines=("0.32.0",))
    build["engines"][0]["platform"] = "cpu"
    found = row(build, run("0.33.0", cell("ok")), place=CPU)
    assert [State("0.32.0", OK, True, ("FLASH_ATTN",))] == [*found.states]
    assert ("SM90", CPU) == tuple(support([build, run("0.33.0", cell("ok"))]).capabilities)


# ---- Whatever the runs ---------------------------------------------------------------------------

DTYPES = ("auto", "fp8", "nvfp4")
cells = st.builds(
    cell,
    st.sampled_from(VERDICTS),
    st.sampled_from(DTYPES),
    model=st.sampled_from(["a", "b"]),
    backend=st.sampled_from(["default", "X", "Y"]),
    device=st.sampled_from(["virtual:h200", "GPU-0", "virtual:b200"]),
    reason=st.sampled_from(["", "one", "two"]),
)
runs = st.lists(
    st.builds(
        lambda version, found, dtypes: run(version, *found, kv_cache_dtypes=dtypes),
        st.sampled_from(RELEASES),
        st.lists(cells, max_size=8),
        st.sampled_from([[], [*DTYPES], ["auto"]]),
    ),
    max_size=5,
)


@given(runs, st.randoms(use_true_random=False))
def test_the_order_of_runs_and_cells_is_irrelevant(
    found: list[dict[str, Any]], chance: random.Random
) -> None:
    other = copy.deepcopy(found)
    chance.shuffle(other)
    for data in other:
        chance.shuffle(data["cells"])
    assert support(found).to_json() == support(other).to_json()


@given(runs)
def test_what_was_not_examined_is_no_no(found: list[dict[str, Any]]) -> None:
    place = {"virtual:h200": "SM90", "GPU-0": "SM90", "virtual:b200": "SM100"}
    verdicts: dict[tuple[str, ...], set[str]] = {}
    offered: dict[str, set[str]] = {}
    for data in found:
        (engine,) = data["engines"]
        offered.setdefault(engine["version"], set()).update(engine["kv_cache_dtypes"])
        for c in data["cells"]:
            key = (c["engine"], c["model"], c["kv_cache_dtype"], place[c["device"]])
            verdicts.setdefault(key, set()).add(c["verdict"])
    for one in support(found).rows:
        for state in one.states:
            key = (state.release, one.model, one.kv_cache_dtype, one.capability)
            examined = verdicts.get(key, set()) - {"skipped", "infra", "notrun"}
            lacks = bool(offered[state.release]) and key[2] not in offered[state.release]
            if state.support == ABSENT:
                assert lacks and not examined
            elif state.no:
                assert examined and (state.support != REFUSED or "rejected" in examined)
            elif state.support == OK:
                assert "ok" in examined
        assert shown.entry(one).long.startswith("no ") == (
            one.since is None and any(state.no for state in one.states)
        )


# ---- The command ---------------------------------------------------------------------------------

OLD = run("0.27.1", cell("broken", "unset", reason="only fp8"), cell("ok", "fp8"))
NEXT = run("0.33.0", cell("ok", "unset"), cell("ok", "fp8"), cell("rejected", "int8"))


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return [str(write(tmp_path / name, data)) for name, data in (("n", NEXT), ("o", OLD))]


def test_the_terminal_has_a_table_for_each_model(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == main(["support", *folders])
    out = capsys.readouterr().out
    assert out.startswith("Supported since: vLLM 0.27.1, 0.33.0\n")
    assert (
        "llama3\n         SM90\n  unset  ✓ 0.33.0\n  fp8    ✓ ≤0.27.1\n  int8   · refused\n" in out
    )
    assert "none of it measured" in out and "Only the default backend" in out
    # The legend has what stands in the table, and no more.
    assert "≤  in this release or before" in out and "✓  supported" in out
    assert not {"!", "?", "◐", "✗"} & {line[2:3] for line in out.splitlines()}


@pytest.mark.parametrize("columns", [24, 60, 80])
def test_no_line_is_wider_than_the_terminal(
    folders: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert 0 == main(["support", *folders])
    assert columns >= max(map(len, capsys.readouterr().out.splitlines()))


def test_alike_dtypes_share_a_row_and_alike_capabilities_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("virtual:h200", "virtual:b200")
    both = [
        cell("ok", dtype, device=place, id=dtype + place)
        for dtype in ("auto", "fp8")
        for place in places
    ]
    assert 0 == main(["support", str(write(tmp_path / "r", run("0.33.0", *both)))])
    assert "\n             SM90-100\n  auto, fp8  ✓ ≤0.33.0\n" in capsys.readouterr().out


def test_the_cpu_has_a_column_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = {"spec": "cpu", "kind": "cpu", "name": "CPU", "capability": None}
    idle = [cell("notrun", model="idle"), cell("notrun", model="idle", device="cpu", id="c")]
    data = matrix(*idle, cell("ok"), devices=(H200, cpu))
    data["engines"].append({"version": "0.32.0", "platform": "cpu"})
    for each in data["cells"]:
        each["engine"] = "0.32.0" if each["device"] == "cpu" else "0.33.0"
    assert 0 == main(["support", str(write(tmp_path / "r", data))])
    assert "idle\n        SM90  CPU\n  auto  ?     ?\n" in capsys.readouterr().out


def test_markdown_is_one_table(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["support", *folders, "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("| model | kv_cache_dtype | SM90 |")
    assert [
        "|---|---|---|",
        "| `llama3` | `unset` | ✓ `0.33.0` |",
        "| `llama3` | `fp8` | ✓ `≤0.27.1` |",
        "| `llama3` | `int8` | · `refused` |",
    ] == lines[start + 1 : start + 5]


def test_json_has_all_of_it(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["support", *folders, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ["0.27.1", "0.33.0"] == found["releases"]
    assert {
        "model": "llama3",
        "kv_cache_dtype": "unset",
        "capability": "SM90",
        "since": "0.33.0",
        "or_before": False,
        "after": "0.27.1",
        "gaps": [],
        "lost": None,
        "backends": ["FLASH_ATTN"],
        "measured": False,
        "releases": [
            {"release": "0.27.1", "support": "fails", "measured": False, "backends": [],
             "verdict": "broken", "reason": "only fp8"},
            {"release": "0.33.0", "support": "supported", "measured": False,
             "backends": ["FLASH_ATTN"], "verdict": None, "reason": None},
        ],
    } == found["rows"][0]  # fmt: skip


def test_a_choice_of_model_device_and_backend(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--model", "llama3", "--device", "virtual:h200", "--backend", "default"]
    assert 0 == main(["support", *folders, *chosen])
    assert "llama3" in capsys.readouterr().out
    assert 2 == main(["support", *folders, "--model", "lama3"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "unknown model 'lama3': did you mean 'llama3'?" in line


def test_nothing_examined_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write(tmp_path / "r", run("0.33.0", cell("notrun"), cell("skipped", "fp8")))
    assert 0 == main(["support", str(empty)])
    out, err = capsys.readouterr()
    assert "" == out
    assert ["kvmatrix: Nothing was examined: none of 2 cells has a result (skipped, not run, or no "
            "usable host)"] == err.splitlines()  # fmt: skip


def test_bad_runs_are_one_line_and_exit_2(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("{")
    for bad in ("bad.json", "none"):
        assert 2 == main(["support", folders[0], str(tmp_path / bad)])
        (line,) = capsys.readouterr().err.splitlines()
        assert bad in line
    with pytest.raises(SystemExit) as ended:
        main(["support"])
    assert 2 == ended.value.code


def test_a_page_that_cannot_be_written_is_exit_75(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert 75 == main(["support", *folders, "--html", str(tmp_path / "file" / "page.html")])
    (line,) = capsys.readouterr().err.splitlines()
    assert "page.html" in line


HOSTILE = "\x1b[31m<script>alert(1)</script>\x00`` | \\| @all [x](http://e)\n# y"


@pytest.mark.parametrize("option", ["", "--markdown"])
def test_hostile_names_are_shown_as_text(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [cell("ok", HOSTILE, model=HOSTILE), cell("ok", "fp8", model="`a|b")]
    data = [run(HOSTILE, *cells, cell("broken", "x")), run("0.33.0", cell("ok", "x"))]
    paths = [str(write(tmp_path / str(number), one)) for number, one in enumerate(data)]
    assert 0 == main(["support", *paths, *filter(None, [option])])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x00" not in out
    assert not [line for line in out.splitlines() if line.startswith("# y")]
    if option:
        # A bar that is not escaped, or one behind two backslashes, would begin another cell.
        table = [line for line in out.splitlines() if line.startswith("|")]
        assert {4} == {len(re.findall(r"(?<!\\)\|", line)) for line in table}
        assert not any("\\\\|" in line for line in table)
        assert "<script>" not in re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", out)
