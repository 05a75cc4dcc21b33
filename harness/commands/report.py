"""`kvmatrix report DIR...`: every format again, from what runs have left; shards made one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import merge, nights, output, part, safe
from harness.errors import UsageError
from harness.matrix import cell_json
from harness.merge import Merged
from harness.record import Record, dumps, to_json
from harness.report import files, markdown

_NAMED = 12
"""Conflicts, duplicates and faults that are printed; matrix.json and matrix.md have all."""


def add(commands: Any) -> None:
    """Its parser."""
    command = commands.add_parser(
        "report",
        help="write every format again from records, and merge shards",
        description="Read matrix.json and records.jsonl of one or more folders, make them one, and "
        "write matrix.json, records.jsonl, matrix.html, matrix.md and junit.xml. A cell that "
        "several folders have is named, and where they disagree the worst is kept. Records without "
        "a verdict, as those of a run that was cut off, are judged as of now.",
        epilog="example: kvmatrix report shard-1 shard-2 shard-3 --out matrix; exit code: 0 "
        "written, 1 written, but shards are missing or contradict each other, or something could "
        "not be read, 2 usage, 75 the disk did not take it. Whether cells fail is in the files.",
    )
    command.add_argument("folders", nargs="+", metavar="DIR", help="--matrix-out of a run or shard")
    command.add_argument(
        "--out", metavar="DIR", help="where the files go (the folder itself, where it is one)"
    )
    command.add_argument(
        "--budget",
        type=int,
        default=markdown.LIMIT,
        metavar="BYTES",
        help=f"the most that matrix.md may have ({markdown.LIMIT}, which a Buildkite annotation "
        f"holds; {markdown.COMMENT} for a comment on GitHub)",
    )
    command.add_argument(
        "--history",
        metavar="DIR",
        help="history folder: add the run, and tell what earlier ones say",
    )
    command.add_argument("--json", action="store_true", help="print what was found as JSON")
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Write the files and tell what was found. The exit code of the epilog."""
    folders = _folders(options.folders)
    if options.out is None and len(folders) > 1:
        raise UsageError("several folders are merged into another one: name it with --out DIR")
    if options.budget < markdown.LEAST:
        raise UsageError(f"--budget {options.budget}: at least {markdown.LEAST} bytes are needed")
    out = Path(options.out) if options.out is not None else folders[0]
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is not a folder")
    parts = [part.read(folder) for folder in folders]
    found = merge.merge(parts, judge())
    if options.out is not None:
        # A shard that is reported on where it lies is all that was meant.
        merged = found.data["run"]["merged"]
        merged["faults"] = sorted({*merged["faults"], *merge.lacking(parts)})
    unread = _past(found.data, options.history) if options.history is not None else []
    write(out, found, options.budget)
    about = found.data["run"]
    if options.json:
        told = {"out": str(out), "cells": len(found.data["cells"]), "counts": about["counts"]}
        print(json.dumps({**told, **about["merged"]}, indent=1))
    else:
        for line in tell(found, out):
            print(safe.printable(line), file=sys.stdout if line.startswith("wrote") else sys.stderr)
    if options.history is not None:
        # Last: a disk that does not take it must cost nothing else.
        nights.append(Path(options.history), found.data)
    return 0 if found.clean and not unread else 1


def _past(data: dict[str, Any], name: str) -> list[str]:
    """Put what earlier runs tell into `data`; what of it cannot be read."""
    told, faults = nights.tell(Path(name), data)
    for fault in faults:
        print(f"kvmatrix: {safe.printable(fault)}", file=sys.stderr)
    data["history"] = told.to_json()
    return faults


def _folders(names: Sequence[str]) -> list[Path]:
    """Each folder once, under the name that it was first given."""
    return [*{Path(name).resolve(): Path(name) for name in reversed(names)}.values()][::-1]


def write(out: Path, found: Merged, budget: int) -> None:
    """Every format. InfraError names a file that the disk does not take."""
    lines = "".join(dumps(record) + "\n" for record in found.records)
    output.write_whole(out / "records.jsonl", lines)
    output.write_whole(out / "matrix.json", json.dumps(found.data, indent=1) + "\n")
    files.write(out, found.data, [to_json(record) for record in found.records], budget)


def tell(found: Merged, out: Path) -> list[str]:
    """What was found, a line each."""
    about = found.data["run"]
    lines = []
    for each in about["merged"]["faults"][:_NAMED]:
        lines.append(f"kvmatrix: {each}")
    for kind in ("conflicts", "duplicates"):
        for each in about["merged"][kind][:_NAMED]:
            told = ", ".join(f"{verdict} in {name}" for name, verdict in each["parts"])
            what = f" differ in {each['what']}, the worst is kept" if "what" in each else ""
            where = f"{each['id']} on {each['device']} with vLLM {each['engine']}"
            lines.append(f"kvmatrix: {kind[:-1]}: {where}: {told}{what}")
    for kind in ("faults", "conflicts", "duplicates"):
        if (more := len(about["merged"][kind]) - _NAMED) > 0:
            lines.append(f"kvmatrix: {more} more {kind}: matrix.json has them")
    counts = ", ".join(f"{number} {name}" for name, number in about["counts"].items())
    cells = len(found.data["cells"])
    return [*lines, f"wrote {out}: {cells} cell{'' if cells == 1 else 's'}: {counts or 'nothing'}"]


def judge() -> merge.Judge:
    """What judges a record; what is expected is read only where there is need."""
    found: list[Callable[[Record], Any]] = []

    def judge(record: Record) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if not found:
            # Here, since what is expected loads pytest.
            from harness.rejudge import Rejudge

            found.append(Rejudge().outcome)
        try:
            outcome = found[0](record)
        except UsageError as error:
            raise ValueError(str(error)) from None
        cell = outcome.cell
        return cell_json(outcome), cell.engine.to_json(), cell.device.to_json()

    return judge
