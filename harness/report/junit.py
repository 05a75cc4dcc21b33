"""junit.xml: a test case for each cell, for the tools of CI systems. Pure.

Elements and attributes are those of the common JUnit format, `properties` of a test case as pytest
writes them (`record_property`). Verdicts that fail are a `failure`,
a host that was not usable an `error`, known failures are `skipped` with their link: they ran, and
failed as they are known to.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from typing import Any

from harness.change import case_of, facts, shown, state
from harness.report import strips
from harness.report.command import command
from harness.safe import clip, printable
from harness.view import grouped

Data = Mapping[str, Any]

MAX_MESSAGE = 1_000
MAX_BODY = 10_000
"""Characters. Readers of JUnit files hold all of them in memory."""

_ASKED = ("model", "backend", "kv_cache_dtype", "device", "engine", "verdict", "expected", "stage")
_FOUND = ("num_blocks", "kv_bytes_per_token")


def render(data: Data) -> str:
    """The text of junit.xml for a matrix.json."""
    root = ET.Element("testsuites", name="kvmatrix")
    engines = {engine["version"]: engine for engine in data["engines"]}
    kinds = {device["spec"]: device["kind"] for device in data["devices"]}
    histories = strips.told(data)
    totals = (0, 0, 0)
    seconds = 0.0
    for (engine, device), cells in grouped(
        data["cells"], lambda cell: (cell["engine"], cell["device"])
    ).items():
        states = [state(cell) for cell in cells]
        numbers = (len(cells), states.count("failing"), states.count("lost"))
        spent = sum(map(_seconds, cells))
        suite = ET.SubElement(
            root,
            "testsuite",
            {**_numbers(numbers, spent), "name": _line(f"vLLM {engine} on {device}")},
            skipped=str(states.count("known") + states.count("skipped")),
        )
        if started := data["run"].get("started"):
            suite.set("timestamp", _line(str(started)))
        kind = kinds[device]
        _properties(suite, {"device_kind": kind, "measured": "no" if kind == "virtual" else "yes"})
        for cell in cells:
            _case(suite, cell, engines[engine], histories.get((case_of(cell).id, device, engine)))
        totals = (totals[0] + numbers[0], totals[1] + numbers[1], totals[2] + numbers[2])
        seconds += spent
    for name, value in _numbers(totals, seconds).items():
        root.set(name, value)
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _numbers(counts: tuple[int, int, int], seconds: float) -> dict[str, str]:
    tests, failures, errors = counts
    return {
        "tests": str(tests),
        "failures": str(failures),
        "errors": str(errors),
        "time": f"{seconds:.3f}",
    }


def _seconds(cell: Data) -> float:
    value = (cell.get("seconds") or {}).get("total")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _case(suite: ET.Element, cell: Data, engine: Data, history: Data | None) -> None:
    case = ET.SubElement(
        suite,
        "testcase",
        # What tells a cell from those of the same name on other devices.
        classname=_line(f"{cell['device']}.{cell['engine']}.{cell['model']}"),
        name=_line(cell["id"]),
        time=f"{_seconds(cell):.3f}",
    )
    before = {} if history is None else {"flaky": "yes" if history["flaky"] else "no"}
    before |= {"since": history["since"]} if history and history["since"] else {}
    _properties(case, {**_resolved(cell), **before})
    why, reason = state(cell), str(cell.get("reason") or "")
    if why == "known":
        message = f"known failure {cell['known']}: {cell['verdict']}: {reason}"
        ET.SubElement(case, "skipped", type="known", message=_line(message))
    elif why == "skipped":
        ET.SubElement(case, "skipped", type="skipped", message=_line(reason))
    elif why != "passing":
        stale = cell.get("stale")
        kind = "stale" if stale else cell["verdict"]
        element = ET.SubElement(
            case,
            "error" if why == "lost" else "failure",
            type=kind,
            message=_line(f"{kind}: {stale or reason}"),
        )
        element.text = _text("\n".join(_body(cell, engine)))


def _body(cell: Data, engine: Data) -> Iterable[str]:
    yield str(cell.get("reason") or "no reason given")
    error = cell.get("error") or {}
    if error:
        yield f"{error.get('type')}: {clip(str(error.get('message')), MAX_BODY // 3)}"
        yield f"in {error.get('where')}"
    yield f"again: {command(cell, engine)}"
    if cell.get("tail"):
        yield f"the last that it said:\n{clip(str(cell['tail']), MAX_BODY // 3)}"


def _resolved(cell: Data) -> dict[str, str]:
    """What the cell asked for and became; what is not known is left out."""
    found = {name: cell.get(name) for name in (*_ASKED, *_FOUND)}
    found["tokens"] = (cell.get("capacity") or {}).get("tokens")
    found["vouched"] = "+".join(cell.get("vouched") or ())
    found["remarks"] = ", ".join(cell.get("remarks") or ())
    plain = {name: str(value) for name, value in found.items() if value not in (None, "")}
    for (part, what), value in facts(cell).items():
        if not part or what in ("page_size_bytes", "shape"):
            told = shown(value)
            if told != "none":
                plain[f"{part}.{what}" if part else f"resolved.{what}"] = told
    return plain


def _properties(parent: ET.Element, values: Mapping[str, str]) -> None:
    element = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(element, "property", name=_line(name), value=_line(value))


def _line(text: str) -> str:
    return clip(printable(text), MAX_MESSAGE)


def _text(text: str) -> str:
    # Escaped first: XML has no way to write most control characters, nor half a surrogate pair.
    return clip(printable(text, lines=True), MAX_BODY)
