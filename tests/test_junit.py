from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from harness.report.junit import MAX_BODY, MAX_MESSAGE, render
from tests.results import H200, cell, gpu, matrix

# The common format: what an element may hold, in which order, and the attributes that it must and
# may have. `testsuite` and `testcase` as Jenkins and Ant define them, `properties` in a test case
# as pytest writes them.
GRAMMAR = {
    "testsuites": (r"(testsuite )*", {"name", "tests", "failures", "errors", "time"}, set()),
    "testsuite": (
        r"(properties )?(testcase )*",
        {"name", "tests", "failures", "errors"},
        {"skipped", "time", "timestamp"},
    ),
    "testcase": (
        r"(properties )?(skipped |failure |error )?",
        {"name", "classname", "time"},
        set(),
    ),
    "properties": (r"(property )+", set(), set()),
    "property": ("", {"name", "value"}, set()),
    "failure": ("", {"type", "message"}, set()),
    "error": ("", {"type", "message"}, set()),
    "skipped": ("", {"type", "message"}, set()),
}

TIME = re.compile(r"\d+\.\d{3}")


def parse(data: dict[str, Any]) -> ET.Element:
    """junit.xml as readers see it, once it is valid and its counts are those of its parts."""
    root = ET.fromstring(render(data).encode("utf-8"))
    assert "testsuites" == root.tag
    for element in root.iter():
        inside, must, may = GRAMMAR[element.tag]
        assert re.fullmatch(inside, "".join(f"{child.tag} " for child in element)), element.tag
        assert must <= {*element.keys()} <= must | may
        assert TIME.fullmatch(element.get("time", "0.000"))
    for suite in (root, *root.iter("testsuite")):
        for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
            assert str(len([*suite.iter(tag)])) == suite.get(name)
    return root


EVERY = [
    cell("ok", "auto", seconds={"total": 1.25}),
    cell("rejected", "fp8"),
    cell("broken", "unset"),
    cell("broken", "nvfp4", known="https://bugs/1"),
    cell("ok", "fp8_inc", stale="known failure x no longer fails"),
    cell("skipped", "bfloat16"),
    cell("notrun", "float16"),
    cell("infra", "fp8_e4m3"),
]


def test_there_is_a_test_case_for_each_cell_and_each_counts_as_what_it_is() -> None:
    root = parse(matrix(*EVERY))
    found = {
        case.get("name", "").removeprefix("llama3-default-"): [
            (child.tag, child.get("type")) for child in case if child.tag != "properties"
        ]
        for case in root.iter("testcase")
    }
    assert {
        "auto": [],
        "fp8": [],
        "unset": [("failure", "broken")],
        "nvfp4": [("skipped", "known")],
        "fp8_inc": [("failure", "stale")],
        "bfloat16": [("skipped", "skipped")],
        "float16": [("failure", "notrun")],
        "fp8_e4m3": [("error", "infra")],
    } == found
    assert ("8", "3", "1") == (root.get("tests"), root.get("failures"), root.get("errors"))
    assert ["2"] == [suite.get("skipped") for suite in root.iter("testsuite")]
    assert "1.250" == root.get("time")


def test_a_known_failure_says_which_and_why() -> None:
    (skipped,) = parse(matrix(cell("broken", known="https://bugs/1"))).iter("skipped")
    assert "known failure https://bugs/1: broken: why it is broken" == skipped.get("message")


def properties(element: ET.Element) -> dict[str, str]:
    found = element.find("properties")
    assert found is not None
    return {each.get("name", ""): each.get("value", "") for each in found}


def test_properties_tell_what_was_asked_for_and_what_it_became() -> None:
    (case,) = parse(matrix(cell("ok", "fp8"))).iter("testcase")
    found = properties(case)
    assert "fp8" == found["kv_cache_dtype"]
    assert "bfloat16" == found["resolved.storage_dtype"]
    assert "FLASH_ATTN" == found["resolved.backends"]
    assert "65536" == found["attn.page_size_bytes"]
    assert "(blocks, 2, 16, 8, 128)" == found["attn.shape"]
    assert "16000" == found["tokens"]


def test_each_device_and_engine_is_a_suite_that_says_whether_it_measured() -> None:
    data = matrix(cell(), cell(device="GPU-1"), devices=(H200, gpu(1)))
    suites = [*parse(data).iter("testsuite")]
    assert ["vLLM 0.33.0 on virtual:h200", "vLLM 0.33.0 on GPU-1"] == [
        s.get("name") for s in suites
    ]
    assert ["no", "yes"] == [properties(suite)["measured"] for suite in suites]


def test_a_failure_tells_its_error_and_how_to_see_it_again() -> None:
    error = {"type": "KeyError", "message": "no such key", "where": "vllm/a.py:f"}
    (failure,) = parse(matrix(cell("broken", "unset", error=error, tail="last words"))).iter(
        "failure"
    )
    text = failure.text or ""
    for word in ("KeyError: no such key", "in vllm/a.py:f", "last words"):
        assert word in text
    assert "'cases/test_matrix.py::test_cell[llama3-default-unset]' --device virtual:h200" in text


HOSTILE = {
    "<script>alert(1)</script>": "<script>alert(1)</script>",
    "]]>&amp;\"'": "]]>&amp;\"'",
    "a\x00b": "a\\x00b",
    "\x1b[31mred": "\\x1b[31mred",
    "half \ud800 pair": "half \\ud800 pair",
    "\ufffe\uffff": "\\ufffe\\uffff",
    "line\none": "line\\none",
    "\u202eover": "\\u202eover",
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items())
def test_hostile_text_is_shown_as_text(text: str, shown: str) -> None:
    error = {"type": text, "message": text, "where": text}
    bad = cell("broken", dtype=text, reason=text, error=error, tail=text, known=None)
    data = matrix(bad, cell("broken", "fp8", known=text, reason=text), cell("skipped", reason=text))
    root = parse(data)
    (failure,) = root.iter("failure")
    assert f"broken: {shown}" == failure.get("message")
    assert [f"known failure {shown}: broken: {shown}", shown] == [
        each.get("message") for each in root.iter("skipped")
    ]


def test_a_message_of_200_kb_is_cut() -> None:
    long = "x" * 200_000
    error = {"type": "E", "message": long, "where": "w"}
    (failure,) = parse(matrix(cell("broken", reason=long, error=error, tail=long))).iter("failure")
    assert MAX_MESSAGE == len(failure.get("message", ""))
    assert MAX_BODY == len(failure.text or "")


def test_no_cells_are_valid_too() -> None:
    assert "0" == parse(matrix()).get("tests")
