"""The pipeline: settings become what `buildkite-agent pipeline upload` takes. Pure.

Exit codes decide what Buildkite does with a job: 75, which is infrastructure only, may be tried
again and need not fail the build; 1, a product failure, never.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ci.arguments import quote
from ci.settings import Merge, Premerge, Settings, Step, premerge_merge_key
from harness.errors import EXIT_INFRA, UsageError

AGENT_LOST, AGENT_STOPPED = -1, 255
"""What Buildkite gives a job whose agent was lost, and one whose agent was told to stop."""

RETRIES = 2
"""Of a job, for each reason that is not the product's."""

MAX_JOBS = 500
"""Of one upload; a step has as many as its `parallelism` (facts/buildkite.md)."""

MAX_BYTES = 1 << 20
"""Of the JSON. Our own bound: a thousandth of it is usual, so that more is a mistake."""

SHARDS = "shards"
"""Folder of the shards' own folders, where a job starts; the merge looks for it there."""

PARTS = ("premerge", "nightly")

CHANGES_NEED = "3.99 (with --apply-if-changed; from 3.103 without)"
"""The agents that apply `if_changed`; others ignore it, and run the step for each change."""


def pipeline(settings: Settings, only: str | None = None) -> dict[str, Any]:
    """The pipeline of both parts, each with its condition, or of one alone, without.

    UsageError where there is no such part, or Buildkite would not take the pipeline.
    """
    steps: list[dict[str, Any]] = []
    if settings.premerge is not None and only in (None, "premerge"):
        steps += _premerge(settings, settings.premerge, conditional=only is None)
    if settings.nightly is not None and only in (None, "nightly"):
        nightly = settings.nightly
        when = {} if only else {"if": nightly.when}
        steps += [{**_shards(settings, step), **when} for step in nightly.steps]
        steps.append({**_merge(settings, settings.merge.key, nightly.steps), **when})
    if not steps:
        raise UsageError(f"the settings have no {only} part")
    whole: dict[str, Any] = _escaped({"steps": steps})
    check(whole)
    return whole


def render(data: Mapping[str, Any]) -> str:
    """The pipeline as JSON. UsageError where it is larger than any should be."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if (size := len(text.encode())) > MAX_BYTES:
        raise UsageError(f"the pipeline has {size} bytes, and {MAX_BYTES} are the most: shorten it")
    return text


def check(data: Mapping[str, Any]) -> None:
    """UsageError where the pipeline is beyond a limit of Buildkite's."""
    jobs = sum(step.get("parallelism", 1) for step in data["steps"])
    if jobs > MAX_JOBS:
        raise UsageError(
            f"{jobs} jobs, and one upload may have {MAX_JOBS}: lower `parallelism`, or upload "
            "--only premerge and --only nightly"
        )


def retry() -> dict[str, Any]:
    """Again by itself where infrastructure failed; by hand always."""
    return {
        "automatic": [
            {"exit_status": code, "limit": RETRIES}
            for code in (EXIT_INFRA, AGENT_LOST, AGENT_STOPPED)
        ],
        "manual": {"allowed": True, "permit_on_passed": True},
    }


def commands(settings: Settings, step: Step, out: str) -> list[str]:
    """What a job of `step` runs; `out` is where its shard goes, from kvmatrix's folder."""
    lines = [*_begin(settings)]
    if step.real:
        # `--device auto` goes on with a virtual device where there is no GPU: here it must not.
        lines.append(
            f"{settings.python} -m harness.cli devices "
            f'| grep -E "^(GPU|MIG)-[^ ]+ +(gpu|mig) +[0-9]" || exit {EXIT_INFRA}'
        )
    asked = ["--device=" + spec for spec in step.devices]
    if step.engine != "current":
        asked.append("--engine=" + step.engine)
    words = ["--step", step.key, "--out", out]
    lines.append(_python(settings, "ci.shard", [*words, "--", *asked, *step.pytest]))
    return lines


def merge_commands(settings: Settings, steps: Sequence[Step]) -> list[str]:
    """What the job that merges the shards of `steps` runs."""
    words = ["--steps", *(step.key for step in steps)]
    for option, path in (
        ("--history", settings.merge.history),
        ("--baseline", settings.merge.baseline),
    ):
        words += [option, path] if path is not None else []
    return [*_begin(settings), _python(settings, "ci.merge", words)]


def merge_env(merge: Merge) -> dict[str, str]:
    """What ci.merge reads of its environment."""
    found = {"KVMATRIX_ANNOTATION_CONTEXT": merge.context}
    if merge.owners:
        found["KVMATRIX_OWNERS"] = " ".join(merge.owners)
    return {**found, **merge.env}


def label(step: Step) -> str:
    """What people see of a step; Buildkite puts a job's number for `%N`."""
    shown = step.label or f"KV cache: {step.key}"
    return f"{shown} Shard %N" if step.parallelism > 1 and "%" not in shown else shown


def _begin(settings: Settings) -> Iterator[str]:
    for line in settings.setup:
        # A package index that cannot be reached is no failure of the product.
        yield f"{line} || exit {EXIT_INFRA}"
    if settings.folder != ".":
        yield f"cd {settings.folder}"


def _python(settings: Settings, module: str, words: Sequence[str]) -> str:
    return " ".join([*shlex.split(settings.python), "-m", module, *map(quote, words)])


def _premerge(
    settings: Settings, premerge: Premerge, *, conditional: bool
) -> Iterator[dict[str, Any]]:
    about: dict[str, Any] = {"if_changed": "{" + ",".join(premerge.changes) + "}"}
    if conditional:
        about["if"] = premerge.when
    if len(premerge.changes) == 1:
        about["if_changed"] = premerge.changes[0]
    yield {**_shards(settings, premerge.step), **about}
    if premerge.step.parallelism > 1:
        yield {**_merge(settings, premerge_merge_key(premerge), [premerge.step]), **about}


def _shards(settings: Settings, step: Step) -> dict[str, Any]:
    # The agent looks for artifacts in the folder that a job starts in.
    out = posixpath.relpath(SHARDS, settings.folder)
    found: dict[str, Any] = {
        "label": label(step),
        "key": step.key,
        "agents": {"queue": step.queue},
        "commands": commands(settings, step, out),
        "timeout_in_minutes": step.timeout_in_minutes,
        "retry": retry(),
        # The agent uploads them whatever becomes of the job.
        "artifact_paths": [f"{SHARDS}/**/*"],
    }
    if step.parallelism > 1:
        found["parallelism"] = step.parallelism
    if step.concurrency is not None:
        found["concurrency"] = step.concurrency
        found["concurrency_group"] = f"kvmatrix/{step.key}"
    if step.env:
        found["env"] = dict(step.env)
    return {**found, **_common(settings, step.plugins)}


def _merge(settings: Settings, key: str, steps: Sequence[Step]) -> dict[str, Any]:
    merge = settings.merge
    found: dict[str, Any] = {
        "label": merge.label or "KV cache: merge",
        "key": key,
        "agents": {"queue": merge.queue},
        # Whatever the shards came to: what is missing is told by the merge.
        "depends_on": [{"step": step.key, "allow_failure": True} for step in steps],
        "commands": merge_commands(settings, steps),
        "timeout_in_minutes": merge.timeout_in_minutes,
        "retry": retry(),
        "env": merge_env(merge),
    }
    if merge.slack:
        found["notify"] = [
            {
                "slack": {"channels": list(merge.slack)},
                "if": 'step.outcome == "hard_failed"',
            }
        ]
    return {**found, **_common(settings, merge.plugins)}


def _common(settings: Settings, plugins: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not settings.infra_fails:
        found["soft_fail"] = [{"exit_status": EXIT_INFRA}]
    if plugins:
        found["plugins"] = list(plugins)
    return found


def _escaped(data: Any) -> Any:
    """`data` so that `pipeline upload`, which puts the uploader's variables for `$NAME`, leaves
    each `$` to the shell of the job."""
    if isinstance(data, str):
        return escaped(data)
    if isinstance(data, Mapping):
        return {escaped(key): _escaped(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_escaped(each) for each in data]
    return data


def escaped(text: str) -> str:
    """`text` with each `$` doubled."""
    return text.replace("$", "$$")
