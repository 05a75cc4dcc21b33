"""known.yaml: what can be read, what is refused, and which entry speaks of a cell."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from harness import plan
from harness.errors import UsageError
from harness.known import check, find, load, relevant

ENTRY = """
- name: sm120-auto
  cells: [dsv4-default-unset, "dsv4-*-auto"]
  engines: ">=0.30,<0.34"
  devices: [sm120, "virtual:rtx-*"]
  verdict: unguarded
  signature: kv_cache_dtype not supported
  link: https://github.com/vllm-project/vllm/issues/47228
  since: 2026-11-02
  expires: 2027-03-01
  reason: the validator still refuses auto
"""
SHORT = """
- name: other
  cells: ["*"]
  verdict: broken
  signature: got auto
  link: vllm:unreported
  reproduce: start it with nothing passed
  since: 2026-11-02
  expires: 2026-11-02
  reason: nobody has looked
"""
IDS = ["dsv4-default-unset", "dsv4-default-auto", "dsv4-default-fp8"]


def test_an_entry_is_read() -> None:
    (known,) = load(ENTRY)
    assert "sm120-auto" == known.name
    assert ("dsv4-default-unset", "dsv4-*-auto") == known.cells
    assert ("sm120", "virtual:rtx-*") == known.devices
    assert (date(2026, 11, 2), date(2027, 3, 1)) == (known.since, known.expires)
    assert ("unguarded", "kv_cache_dtype not supported") == (known.verdict, known.signature)
    assert "https://github.com/vllm-project/vllm/issues/47228" == known.link
    assert "the validator still refuses auto" == known.reason


def test_an_unreported_failure_says_how_to_see_it() -> None:
    (known,) = load(SHORT)
    assert "start it with nothing passed" == known.reproduce
    assert known == find([known], "any-default-unset", "0.27.1", "cpu", None)
    assert known == find([known], "any-default-unset", "some branch", "cpu", None)


@pytest.mark.parametrize("text", ["", "# nothing is known to fail\n", "[]"])
def test_no_entries(text: str) -> None:
    assert () == load(text)


@pytest.mark.parametrize(
    ("message", "old", "new"),
    [
        ("unknown key 'signatur'; did you mean 'signature'", "signature:", "signatur:"),
        ("entry 1 .sm120-auto.: since missing", "  since: 2026-11-02\n", ""),
        ("verdict 'ungarded' is not one of broken, unguarded", "unguarded", "ungarded"),
        ("verdict 'ok' is not one of", "verdict: unguarded", "verdict: ok"),
        ("verdict 'infra' is not one of", "verdict: unguarded", "verdict: infra"),
        ("verdict 'skipped' is not one of", "verdict: unguarded", "verdict: skipped"),
        ("engines '0.33' is not like", '">=0.30,<0.34"', "0.33"),
        ("engines .* is not like", '">=0.30,<0.34"', "['>=0.30']"),
        ("a date that is none: month must be", "2026-11-02", "2026-13-02"),
        ("since 20261102 is not a date", "2026-11-02", "20261102"),
        ("since .* is not a date", "2026-11-02", "2026-11-02 10:00:00"),
        ("expires 'soon' is not a date", "2027-03-01", "soon"),
        ("since 2026-11-02 is after expires 2026-11-01", "2027-03-01", "2026-11-01"),
        ("signature missing", "kv_cache_dtype not supported", "''"),
        ("signature missing", "kv_cache_dtype not supported", "' '"),
        ("cells must be a list", '[dsv4-default-unset, "dsv4-*-auto"]', "dsv4-*"),
        ("cells missing", '[dsv4-default-unset, "dsv4-*-auto"]', "[]"),
        ("devices must be a list", '[sm120, "virtual:rtx-*"]', "[{a: b}]"),
        ("is neither a URL nor", "https://github.com", "github.com"),
        ("is neither a URL nor", "https://", "ftp://"),
        ("is neither a URL nor", "https://github.com/vllm-project", "https:///vllm-project"),
        (
            "how to reproduce",
            "https://github.com/vllm-project/vllm/issues/47228",
            "vllm:unreported",
        ),
        ("is not YAML", "cells: [", "cells: [["),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(message: str, old: str, new: str) -> None:
    assert ENTRY.count(old) == 1
    with pytest.raises(UsageError, match=message) as caught:
        load(ENTRY.replace(old, new))
    assert str(caught.value).startswith("cases/known.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("must be a list of entries", "name: x"),
        ("must be a list of entries", "just words"),
        ("entry 1 must be a mapping", "- just words"),
        ("is not YAML", "- {[a]: b}"),
        ("is not YAML", "- a\n---\n- b"),
    ],
)
def test_yaml_that_holds_no_entries(message: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"^other\.yaml.*{message}"):
        load(text, "other.yaml")


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two entries are named 'sm120-auto'"):
        load(ENTRY + ENTRY)


def test_nothing_is_built_from_a_yaml_tag(tmp_path: Path) -> None:
    target = tmp_path / "made"
    text = SHORT.replace("nobody has looked", f"!!python/object/apply:os.mkdir [{target}]")
    with pytest.raises(UsageError, match="is not YAML"):
        load(text)
    assert not target.exists()


def test_entries_that_match_and_hold_are_no_problem() -> None:
    assert [] == check(load(ENTRY), IDS, date(2026, 12, 1))


def test_an_entry_holds_on_its_last_day_and_no_longer() -> None:
    known = load(SHORT)
    assert [] == check(known, IDS, date(2026, 11, 2))
    (problem,) = check(known, IDS, date(2026, 11, 3))
    assert "other expired on 2026-11-02: look at vllm:unreported" in problem


def test_a_pattern_that_matches_no_cell_is_named_with_what_is_near() -> None:
    known = load(ENTRY.replace("dsv4-default-unset", "dsv4-defualt-unset"))
    (problem,) = check(known, IDS, date(2026, 12, 1))
    assert "sm120-auto: no cell 'dsv4-defualt-unset'" in problem
    assert "did you mean dsv4-default-unset?" in problem


@pytest.mark.parametrize(
    ("found", "case_id", "engine", "device", "capability"),
    [
        (True, "dsv4-default-unset", "0.33.0", "virtual:rtx-pro-6000", (12, 0)),
        (True, "dsv4-default-unset", "0.33.0", "GPU-1", (12, 0)),
        (True, "dsv4-FLASHMLA-auto", "0.33.0", "GPU-1", (12, 0)),
        (True, "dsv4-default-unset", "0.33.1.dev5+g123", "GPU-1", (12, 0)),
        (True, "dsv4-default-unset", "0.30.0", "virtual:rtx-pro-6000", None),
        (False, "dsv4-default-unset-more", "0.33.0", "GPU-1", (12, 0)),
        (False, "dsv4-default-fp8", "0.33.0", "GPU-1", (12, 0)),
        (False, "dsv4-default-unset", "0.34.0", "GPU-1", (12, 0)),
        (False, "dsv4-default-unset", "0.34.0.dev7+g123", "GPU-1", (12, 0)),
        (False, "dsv4-default-unset", "0.30.0rc1", "GPU-1", (12, 0)),
        (False, "dsv4-default-unset", "some branch", "GPU-1", (12, 0)),
        (False, "dsv4-default-unset", "0.33.0", "GPU-1", (12, 1)),
        (False, "dsv4-default-unset", "0.33.0", "virtual:h200", (9, 0)),
        (False, "dsv4-default-unset", "0.33.0", "cpu", None),
    ],
)
def test_an_entry_speaks_of_cells_engines_and_devices(
    found: bool, case_id: str, engine: str, device: str, capability: tuple[int, int] | None
) -> None:
    entries = load(ENTRY)
    assert (entries[0] if found else None) == find(entries, case_id, engine, device, capability)


def test_two_entries_that_speak_of_one_cell_are_refused_by_name() -> None:
    entries = load(ENTRY + SHORT)
    assert entries[1] == find(entries, "dsv4-default-unset", "0.33.0", "virtual:h200", (9, 0))
    with pytest.raises(UsageError, match="'sm120-auto' and 'other' both speak of dsv4-default-un"):
        find(entries, "dsv4-default-unset", "0.33.0", "GPU-1", (12, 0))


H200, SM120 = ("virtual:h200", (9, 0)), ("GPU-1", (12, 0))


def test_relevant_entries_speak_of_at_least_one_start_of_the_run() -> None:
    ranged, anywhere = load(ENTRY + SHORT)
    both = (ranged, anywhere)
    assert both == relevant(both, [("0.27.1", *SM120), ("0.33.0", *SM120)])
    assert (anywhere,) == relevant(both, [("0.27.1", *SM120), ("0.33.0", *H200)])


@pytest.mark.parametrize(
    ("speaks", "devices", "start"),
    [
        (True, "sm90", ("0.33.0", "GPU-1", (9, 0))),
        (False, "sm90", ("0.33.0", "cpu", None)),
        (True, "cpu", ("0.33.0", "cpu", None)),
        (False, "cpu", ("0.33.0", *H200)),
        (True, '"virtual:*"', ("0.33.0", *H200)),
    ],
)
def test_an_entry_of_another_device_is_not_relevant(
    speaks: bool, devices: str, start: tuple[str, str, tuple[int, int] | None]
) -> None:
    """A CPU has none of the cells that an entry for Hopper names."""
    entries = load(ENTRY.replace('sm120, "virtual:rtx-*"', devices))
    assert speaks == bool(relevant(entries, [start]))


def test_braces_are_expanded_as_a_shell_does() -> None:
    text = ENTRY.replace('[dsv4-default-unset, "dsv4-*-auto"]', '["dsv4{,-pro}-default-{a,b*}"]')
    (known,) = load(text)
    names = ("dsv4-default-a", "dsv4-default-b*", "dsv4-pro-default-a", "dsv4-pro-default-b*")
    assert names == known.cells
    # Each of them must be there: a family that has gone must not keep its entry.
    assert ["sm120-auto: no cell 'dsv4-pro-default-b*'"] == [
        problem.partition(",")[0]
        for problem in check(
            [known], ["dsv4-default-a", "dsv4-default-bc", "dsv4-pro-default-a"], known.since
        )
    ]


def test_braces_without_bound_are_refused() -> None:
    text = ENTRY.replace('"dsv4-*-auto"', '"dsv4-{1..2000}"')
    with pytest.raises(UsageError, match=r"braces that mean more than 1000 cells"):
        load(text)


OLD_PYTHON = ENTRY.replace("  verdict", '  python: "<3.12"\n  verdict')


@pytest.mark.parametrize(
    ("speaks", "python"),
    [(True, "3.11.7"), (True, "3.10.0"), (True, ""), (False, "3.12.0"), (False, "3.13.1")],
)
def test_an_entry_may_be_for_some_pythons(speaks: bool, python: str) -> None:
    """What FlashInfer 0.6.16 does on Python 3.11 it does not do on 3.12; an old record does not
    say which it was."""
    entries = load(OLD_PYTHON)
    cell = ("dsv4-default-unset", "0.33.0", "GPU-1", (12, 0))
    assert (entries[0] if speaks else None) == find(entries, *cell, python)


def test_a_python_that_is_no_range_is_refused() -> None:
    with pytest.raises(UsageError, match=r"python 'three' is not like '<3\.12'"):
        load(OLD_PYTHON.replace("<3.12", "three"))


def of_cpus(line: str) -> str:
    text = ENTRY.replace("  verdict", f"  {line}\n  verdict")
    return re.sub(r"devices: .*", "devices: [cpu]", text)


@pytest.mark.parametrize(
    ("line", "features", "speaks"),
    [
        ("lacks: [amx_tile]", (), True),
        ("lacks: [amx_tile]", ("avx512_bf16",), True),
        ("lacks: [amx_tile]", ("amx_tile", "avx512_bf16"), False),
        ("lacks: [amx_tile, avx512_bf16]", ("avx512_bf16",), False),
        ("has: [amx_tile]", (), False),
        ("has: [amx_tile]", ("avx512_bf16",), False),
        ("has: [amx_tile]", ("amx_tile", "avx512_bf16"), True),
        ("has: [amx_tile, avx512_bf16]", ("amx_tile",), False),
    ],
)
def test_an_entry_may_be_for_cpus_that_have_or_lack_something(
    line: str, features: tuple[str, ...], speaks: bool
) -> None:
    """vLLM's CPU build has some kernels for AMX alone."""
    entries = load(of_cpus(line))
    cell = ("dsv4-default-unset", "0.33.0", "cpu", None)
    assert (entries[0] if speaks else None) == find(entries, *cell, features=features)


@pytest.mark.parametrize("key", ["has", "lacks"])
def test_only_a_cpu_has_or_lacks_what_is_known(key: str) -> None:
    text = of_cpus(f"{key}: [amx]")
    with pytest.raises(UsageError, match=f"{key} 'amx', known are amx_tile"):
        load(text)
    text = text.replace("[amx]", "[amx_tile]")
    assert load(text)
    with pytest.raises(UsageError, match=r"devices must be \[cpu\]"):
        load(text.replace("devices: [cpu]", "devices: [cpu, sm90]"))


def test_the_shipped_file_can_be_read() -> None:
    """Every entry has a reason, and what nobody reported a reproduction."""
    entries = load((plan.MODELS.parent / "known.yaml").read_text(encoding="utf-8"))
    assert len(entries) == len({entry.name for entry in entries})
    assert all(entry.reason for entry in entries)
