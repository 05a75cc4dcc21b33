"""matrix.html: the matrix as one page that needs nothing but itself. Pure.

The page's own code is in the folder `assets`: a template, a style sheet and scripts, which are put
together here. The data stands in the page as JSON; the scripts show all of it as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from harness import safe, support
from harness.change import case_of
from harness.report import news, strips, support_sheet
from harness.report.command import command
from harness.sections import REMARKS
from harness.verdict import VERDICTS
from harness.view import GLYPHS

SCRIPTS = (
    *("data.js", "state.js", "grid.js", "overview.js", "story.js", "history.js"),
    *("compare.js", "detail.js", "charts.js", "start.js"),
)
"""In the order in which they stand in the page; they share one scope."""

STYLES = ("page.css", "support.css")

MAX_TEXT = 250_000
"""Characters of one text; what is beyond is cut from its middle, and the cut says so."""

_ENGINE = ("version", "commit", "torch", "cuda", "flashinfer", "transformers", "python_version")
"""Facts of an engine that the page shows. Its paths mean nothing elsewhere."""


def render(matrix: Mapping[str, Any], records: Iterable[Mapping[str, Any]] = ()) -> str:
    """The page for the dict of a matrix.json. `records`, as lines of records.jsonl, add the log
    lines, which matrix.json does not have."""
    files = templates()
    css = style(files)
    parts = [_source(files, name) for name in SCRIPTS]
    script = "(() => {\n" + "\n".join(['"use strict";', *parts]) + "})();\n"
    data = _shown(matrix, records)
    run = data["run"]
    return files.get_template("matrix.html.j2").render(
        policy=policy(css, script),
        style=Markup(css),
        script=Markup(script),
        data=Markup(_embedded(data)),
        total=len(data["cells"]),
        counts=run.get("counts") or {},
        started=run.get("started") or "",
        engines=[engine["version"] for engine in data["engines"]],
        devices=[device.get("spec") for device in data["devices"]],
        support=_support(matrix),
    )


def _support(matrix: Mapping[str, Any]) -> support_sheet.Sheet | None:
    """The table of what is supported since when; None where there is nothing to compare."""
    if len(matrix["engines"]) < 2:
        return None
    found = support.support([matrix])
    return support_sheet.sheet(found) if len(found.releases) > 1 and found.examined else None


def templates() -> jinja2.Environment:
    """The page's own files, as templates that escape what they show."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )


def _source(files: jinja2.Environment, name: str) -> str:
    assert files.loader is not None
    return files.loader.get_source(files, name)[0]


def style(files: jinja2.Environment) -> str:
    """The style sheet."""
    return "\n".join(_source(files, name) for name in STYLES)


def policy(style: str, script: str = "") -> str:
    """A content security policy by which nothing runs but the page's own code, and nothing is
    fetched."""
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    return (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'"
    )


def _embedded(data: Any) -> str:
    """JSON that can stand in a <script>: neither `</script>` nor `<!--` can be in it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _shown(matrix: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page's scripts read. Values that many cells share stand once, in `pool`."""
    logs = {_place(record): record.get("log") or [] for record in records}
    engines = {engine["version"]: engine for engine in matrix["engines"]}
    changes, past = news.changes(matrix), strips.told(matrix)
    cases = [case_of(cell) for cell in matrix["cells"]]
    differing = news.differing(cases, matrix["cells"])
    cells = []
    for case, cell in zip(cases, matrix["cells"], strict=True):
        key = case.id, cell["device"], cell["engine"]
        found = changes.get(key, [])
        cells.append(
            {
                **cell,
                "case": case.id,
                "row": "-".join([*case.id.removeprefix(case.base).split("-")[1:]]),
                "page": news.page(cell),
                "news": news.words(differing.get(key, ()), found, past.get(key)),
                "changes": found,
                "history": past.get(key),
                "log": logs.get(_place(cell), []),
                "reproduce": command(cell, engines.get(cell["engine"]) or {}),
            }
        )
    baseline, history = matrix.get("baseline"), matrix.get("history") or {}
    fields = list(dict.fromkeys(name for cell in cells for name in cell))
    pool = _Pool()
    return {
        "run": _clean(matrix["run"]),
        "engines": [
            _clean({name: engine.get(name) for name in _ENGINE}) for engine in matrix["engines"]
        ],
        "devices": _clean(list(matrix["devices"])),
        "baseline": _clean(news.baseline(baseline)) if baseline else None,
        "history": _clean({name: history.get(name) or [] for name in ("runs", "missing")}),
        "news": news.WORDS,
        "verdicts": {name: [GLYPHS[name][0], GLYPHS[name][2]] for name in VERDICTS},
        "remarks": REMARKS,
        "fields": fields,
        "cells": [[pool.index(cell.get(name)) for name in fields] for cell in cells],
        "pool": pool.values,
    }


class _Pool:
    """Values, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._indexes: dict[Any, int] = {}

    def index(self, value: Any) -> int:
        """Where `value` stands, made fit to show."""
        # A matrix that never was a file holds tuples where a file gives lists.
        nested = isinstance(value, (dict, list, tuple))
        key = json.dumps(value) if nested else (type(value), value)
        if key not in self._indexes:
            self._indexes[key] = len(self.values)
            self.values.append(_clean(value))
        return self._indexes[key]


def _clean(value: Any) -> Any:
    """`value` with every text in it made printable, and none without end."""
    if isinstance(value, str):
        return safe.clip(safe.printable(value, lines=True), MAX_TEXT)
    if isinstance(value, Mapping):
        return {_clean(str(key)): _clean(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(part) for part in value]
    return value


def _place(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return cell["id"], cell["device"], cell["engine"]
