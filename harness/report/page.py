"""matrix.html: the matrix as one page that needs nothing but itself. Pure.

The page's own code is in the folder `assets`: a template, a style sheet and scripts, which are put
together here. The data stands in the page as JSON; the scripts show all of it as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from harness import reproduce, safe, support
from harness.case import RUNNERS, Case
from harness.matrix import largest
from harness.report import support_sheet
from harness.sections import REMARKS
from harness.verdict import PASSING, VERDICTS
from harness.view import GLYPHS

SCRIPTS = ("data.js", "state.js", "grid.js", "story.js", "detail.js", "charts.js", "start.js")
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
    depths = matrix["run"].get("depth") or {}
    engines = {engine["version"]: engine for engine in matrix["engines"]}
    differing = _differing(matrix["cells"])
    changes = defaultdict(list)
    for change in matrix.get("differences") or ():
        changes[change["id"], change["device"], change["to"]].append(change)
    cells = []
    for cell in matrix["cells"]:
        case = _case(cell)
        cells.append(
            {
                **cell,
                "row": "-".join([*case.id.removeprefix(case.base).split("-")[1:]]),
                "page": _page(cell),
                "passes": cell["verdict"] in PASSING | {"skipped"} or bool(cell.get("known")),
                "differs": case.id in differing or bool(changes.get(_change_key(cell, case))),
                "changes": changes.get(_change_key(cell, case), []),
                "log": logs.get(_place(cell), []),
                "reproduce": _command(cell, case, depths, engines.get(cell["engine"]) or {}),
            }
        )
    fields = list(dict.fromkeys(name for cell in cells for name in cell))
    pool = _Pool()
    return {
        "run": _clean(matrix["run"]),
        "engines": [
            _clean({name: engine.get(name) for name in _ENGINE}) for engine in matrix["engines"]
        ],
        "devices": _clean(list(matrix["devices"])),
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


def _change_key(cell: Mapping[str, Any], case: Case) -> tuple[Any, ...]:
    return case.id, cell["device"], cell["engine"]


def _case(cell: Mapping[str, Any]) -> Case:
    """The case of a cell; its model runner is in the id alone."""
    names = cell["model"], cell["backend"], cell["kv_cache_dtype"]
    size, ranks = cell.get("block_size") or 0, cell.get("tensor_parallel_size") or 1
    axes = cell["id"].removeprefix(Case(*names).base).split("-")
    runner = next((name for name in RUNNERS if name in axes), "")
    return Case(*names, size, ranks, runner)


def _page(cell: Mapping[str, Any]) -> int | None:
    """As `harness.matrix.main_page`."""
    return largest((kv["kind"], kv["page_size_bytes"]) for kv in cell.get("kv") or ())


def _differing(cells: Iterable[Mapping[str, Any]]) -> set[str]:
    """Ids of the cases that did not become the same on every device with every engine."""
    became = defaultdict(set)
    for cell in cells:
        resolved = cell.get("resolved") or {}
        selected, dtype = resolved.get("selected"), resolved.get("kv_cache_dtype")
        became[_case(cell).id].add((cell["verdict"], _page(cell), dtype, selected))
    return {name for name, found in became.items() if len(found) > 1}


def _command(
    cell: Mapping[str, Any], case: Case, depths: Mapping[str, str], engine: Mapping[str, Any]
) -> str:
    """What to type to see this cell alone."""
    prefix = "cpu:" if engine.get("platform") == "cpu" else ""
    version = prefix + cell["engine"]
    return reproduce.pytest(case, cell["device"], version, {"depth": depths.get(cell["device"])})
