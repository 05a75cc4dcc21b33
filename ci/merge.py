"""`python -m ci.merge`: all shards of a build made one, compared, annotated, judged."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci import annotation, baseline
from ci.agent import Agent, Told
from ci.annotation import About
from ci.shard import DURATIONS, RECORDED
from harness import diff, durations, merge, nights, output, part, result, safe
from harness.commands import report
from harness.diff import Diff
from harness.errors import EXIT_INFRA, EXIT_USAGE, InfraError, UsageError
from harness.interpreter import say
from harness.part import Part
from harness.report import markdown

CONTEXT = "kvmatrix"
"""Of the annotation, where KVMATRIX_ANNOTATION_CONTEXT names none."""

LINKS = {"the matrix": "matrix.html", "matrix.json": "matrix.json", "junit.xml": "junit.xml"}


def main(argv: Sequence[str] | None = None) -> int:
    """Merge, tell, and give the build its exit code."""
    options = _parser().parse_args(argv)
    try:
        return run(options, Agent.here())
    except (UsageError, InfraError) as error:
        # Not through `say`: a broken log must not hide why there is no report.
        print(f"kvmatrix: {safe.printable(safe.mask(str(error), os.environ))}", file=sys.stderr)
        return EXIT_INFRA if isinstance(error, InfraError) else EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ci.merge",
        description="Download the shards of a build's steps, make them one, compare with the run "
        "before, write every format, annotate the build, and exit by what is new. Without "
        "buildkite-agent it does the same with the shards that are there.",
        epilog="example: python -m ci.merge --steps kvmatrix-h200-35gb --history /mnt/ci/kvmatrix; "
        "exit code: 0 nothing new, 1 new failures (any failure where there is no run to compare "
        "with), 2 usage, 75 shards or results are missing and nothing else is wrong",
    )
    parser.add_argument("--steps", nargs="+", required=True, metavar="KEY", help="of the shards")
    parser.add_argument("--shards", default="shards", metavar="DIR", help="where they go (shards)")
    parser.add_argument("--out", default="matrix", metavar="DIR", help="the whole (matrix)")
    parser.add_argument(
        "--history",
        metavar="DIR",
        help="folder that outlives builds; the run is added to it, and "
        "compared with the last one of its branch there",
    )
    parser.add_argument(
        "--baseline", metavar="PATH", help="compare with this matrix.json, or the one in a folder"
    )
    parser.add_argument(
        "--baseline-build", metavar="ID", help="compare with the artifact of this earlier build"
    )
    return parser


def run(options: argparse.Namespace, agent: Agent) -> int:
    """The exit code of the epilog. UsageError and InfraError where there can be no report."""
    out = Path(options.out)
    parts, missing = read(_shards(options, agent), options.steps)
    if not parts:
        _nothing(options, agent, missing)
        raise InfraError(f"no shard of {', '.join(options.steps)} left anything")
    found = merge.merge(parts, report.judge())
    data = found.data
    merged = data["run"]["merged"]
    merged["faults"] = sorted({*merged["faults"], *missing})
    history = None
    if options.history is not None:
        nights.check(Path(options.history))
        history = baseline.home(Path(options.history), agent.environ.get("BUILDKITE_BRANCH", ""))
    old = _baseline(options, history, agent, str(data["run"].get("started") or ""))
    news = None
    if old is not None:
        news = diff.diff(old, data)
        data["baseline"] = news.to_json()
    if history is not None:
        past, faults = nights.tell(history, data)
        data["history"] = past.to_json()
        for fault in faults:
            say(fault)
    report.write(out, found, markdown.LIMIT)
    before = durations.recorded(RECORDED).durations.seconds
    seconds = durations.merged(before, durations.of_matrix(data))
    output.write_whole(out / DURATIONS, durations.dumps(seconds))
    about = About(
        (*missing, *_conflicts(merged)),
        tuple(agent.environ.get("KVMATRIX_OWNERS", "").split()),
        {name: f"{options.out}/{file}" for name, file in LINKS.items()},
    )
    code = annotation.exit_code(data, news, about)
    _tell(options, data, news, old, about, agent)
    if history is not None:
        whole = not missing and all(c["verdict"] not in baseline.NO_RESULT for c in data["cells"])
        _remember(history, agent, data, data if whole else baseline.carried(data, old))
    return code


# ---- Shards --------------------------------------------------------------------------------------


def _shards(options: argparse.Namespace, agent: Agent) -> Path:
    """Where the build's shards are: as downloaded, into a folder that has none of another build;
    or, where they cannot be, those that lie here."""
    fresh = Path(options.out) / "downloaded"
    shutil.rmtree(fresh, ignore_errors=True)
    for step in options.steps:
        told = agent.download(f"{options.shards}/{step}-*/*", fresh, step=step)
        if not told.ok:
            say(told.why)
    if (fresh / options.shards).is_dir():
        return fresh / str(options.shards)
    say(f"no shard was downloaded; those that are in {options.shards} are merged")
    return Path(options.shards)


def read(folder: Path, steps: Sequence[str]) -> tuple[list[Part], list[str]]:
    """The shards of these steps, and a line about each that is missing or cannot be read."""
    parts: list[Part] = []
    missing: list[str] = []
    for step in steps:
        seen: dict[int, Part] = {}
        for index, path in _folders(folder, step):
            try:
                seen[index] = part.read(path)
            except UsageError as error:
                missing.append(f"{step}: shard {index} cannot be read: {error}")
        parts += seen.values()
        missing += _lacking(step, seen)
    return parts, missing


def _folders(folder: Path, step: str) -> Iterator[tuple[int, Path]]:
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        found = re.fullmatch(rf"{re.escape(step)}-(\d+)", path.name)
        if found is not None and path.is_dir():
            yield int(found[1]), path


def _lacking(step: str, seen: Mapping[int, Part]) -> Iterator[str]:
    """What a step's shards say of each other: how many there are, and what they were split by."""
    abouts = {
        index: each.matrix["run"].get("shard") or {}
        for index, each in seen.items()
        if each.matrix is not None
    }
    counts = {int(about["count"]) for about in abouts.values() if about.get("count")}
    if not seen:
        yield f"{step}: no shard left anything"
        return
    for count in sorted(counts):
        lost = [index for index in range(1, count + 1) if index not in seen]
        if lost:
            names = ", ".join(map(str, lost))
            yield f"{step}: shard {names} of {count} left nothing"
    if len(counts) > 1:
        yield f"{step}: its shards are of {' and '.join(map(str, sorted(counts)))} parts"
    if len({about.get("durations") for about in abouts.values()}) > 1:
        yield f"{step}: its shards were split by different durations, so cells may be missing"
    for index, each in seen.items():
        cut = each.matrix is None or any(c["verdict"] == "notrun" for c in each.matrix["cells"])
        if cut:
            yield f"{step}: shard {index} was cut off before its end"


def _conflicts(merged: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("conflicts", "duplicates"):
        for each in merged[kind]:
            told = ", ".join(f"{verdict} in {name}" for name, verdict in each["parts"])
            yield f"{each['id']} on {each['device']} is in several shards: {told}"


# ---- What it is compared with --------------------------------------------------------------------


def _baseline(
    options: argparse.Namespace, history: Path | None, agent: Agent, started: str
) -> dict[str, Any] | None:
    """The run to compare with; None where there is none yet, or it cannot be had."""
    if options.baseline is not None:
        return result.load(Path(options.baseline))
    if options.baseline_build is not None:
        with tempfile.TemporaryDirectory() as scratch:
            name = f"{options.out}/matrix.json"
            told = agent.download(name, Path(scratch), build=options.baseline_build)
            with contextlib.suppress(UsageError):
                return result.load(Path(scratch) / name)
            say(f"build {options.baseline_build} has no {name} to compare with: {told.why}")
    if history is None:
        return None
    return baseline.load(history, agent.environ.get("BUILDKITE_BUILD_ID", ""), started)


def _remember(
    history: Path, agent: Agent, data: Mapping[str, Any], kept: Mapping[str, Any]
) -> None:
    """Add the run to the history, and keep what the next one is compared with."""
    try:
        nights.append(history, data)
        baseline.keep(history, agent.environ.get("BUILDKITE_BUILD_ID", ""), kept)
    except InfraError as error:
        say(f"{error}; this run is not part of the history")


# ---- What is told --------------------------------------------------------------------------------


def _tell(
    options: argparse.Namespace,
    data: Mapping[str, Any],
    news: Diff | None,
    old: Mapping[str, Any] | None,
    about: About,
    agent: Agent,
) -> None:
    """The annotation, as a file and on the build; artifacts; meta-data."""
    body = safe.mask(annotation.render(data, news, old, about), agent.environ)
    output.write_whole(Path(options.out) / "annotation.md", body)
    fresh = str(len(annotation.failures(news))) if news is not None else "unknown"
    _say_all(
        agent.upload(f"{options.out}/*"),
        _annotate(agent, body, annotation.style(data, news, about)),
        agent.set("kvmatrix-counts", json.dumps(data["run"]["counts"])),
        agent.set("kvmatrix-new-failures", fresh),
    )
    # What a log is read for; the rest is in the files.
    print(body.partition("\n<details>")[0], flush=True)


def _nothing(options: argparse.Namespace, agent: Agent, missing: Sequence[str]) -> None:
    """Say that there is no result at all: it is the exit code of infrastructure, and must not pass
    for a quiet night."""
    body = safe.mask(annotation.nothing(missing), agent.environ)
    with contextlib.suppress(InfraError):
        output.write_whole(Path(options.out) / "annotation.md", body)
    _say_all(_annotate(agent, body, "error"), agent.set("kvmatrix-new-failures", "unknown"))
    print(body, flush=True)


def _annotate(agent: Agent, body: str, style: str) -> Told:
    return agent.annotate(body, agent.environ.get("KVMATRIX_ANNOTATION_CONTEXT") or CONTEXT, style)


def _say_all(*tolds: Told) -> None:
    for told in tolds:
        if not told.ok:
            say(told.why)


if __name__ == "__main__":
    sys.exit(main())
