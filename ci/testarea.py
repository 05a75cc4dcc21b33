"""The steps in the dialect of vLLM's own pipeline, a file of `.buildkite/test_areas`. Pure.

What that dialect has was read in the generator of vLLM's CI (vllm-project/ci-infra,
buildkite/pipeline_generator: step.py, buildkite_step.py, plugin/docker_plugin.py) and in
vllm-project/vllm, .buildkite/test_areas/models_basic.yaml:

- keys of a step that it does not know are dropped without a word, `artifact_paths` among them;
- `soft_fail` is true or false, so that 75 cannot be told from 1: it is left out;
- `depends_on` is a list of keys, without `allow_failure`: a step that failed keeps the merge from
  running, so a shard leaves a product failure to the merge;
- single quotes in commands become double ones;
- `source_file_dependencies` are files, or folders as a prefix, not patterns;
- `optional` steps run in a nightly build (NIGHTLY=1), on demand, or by VLLM_CI_ONLY_STEP_KEYS;
- `mount_buildkite_agent` puts the agent's binary into the container.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from ci import pipeline
from ci.settings import Area, Premerge, Settings, Step, premerge_merge_key
from harness.errors import UsageError

_HEAD = """\
# Written by `kvmatrix pipeline --format vllm`: change ci/nightly.yaml there and write anew.
# Exit codes: 1 product failure, 2 usage, 75 infrastructure only, which alone is tried again.
# A shard that finds a product failure passes: the merge, which needs all shards, fails for it.
# Now, without waiting for the night: VLLM_CI_ONLY_STEP_KEYS={keys}
"""


def area(settings: Settings, only: str | None = None) -> dict[str, Any]:
    """The test area of the steps that name a device of vLLM's. UsageError where there is none, or
    where the dialect cannot say what the settings ask for."""
    settings = replace(settings, setup=settings.vllm.setup, folder=settings.vllm.folder)
    steps: list[dict[str, Any]] = []
    if settings.premerge is not None and only in (None, "premerge"):
        steps += _premerge(settings, settings.premerge)
    if settings.nightly is not None and only in (None, "nightly"):
        night = [step for step in settings.nightly.steps if step.vllm_device is not None]
        steps += [{**_shard(settings, step), "optional": True} for step in night]
        if night:
            steps.append({**_merge(settings, settings.merge.key, night), "optional": True})
    if not steps:
        raise UsageError(
            f"no {only or 'step'} with a device of vLLM's: give it one, `vllm_device: h200_35gb`"
        )
    for step in steps:
        for command in step["commands"]:
            if "'" in command:
                raise UsageError(
                    f"{step['key']}: vLLM's CI makes the single quotes of {command!r} double: "
                    "leave them out"
                )
    found = {
        "group": settings.vllm.group,
        "depends_on": list(settings.vllm.depends_on),
        "steps": steps,
    }
    pipeline.check(found)
    return found


def render(data: Mapping[str, Any]) -> str:
    """The test area as YAML, with no single quote of YAML's own."""
    head = _HEAD.format(keys=",".join(step["key"] for step in data["steps"] if "optional" in step))
    if not any("optional" in step for step in data["steps"]):
        head = "".join(head.splitlines(keepends=True)[:-1])
    return head + yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, width=1 << 20, allow_unicode=True
    )


class _Dumper(yaml.SafeDumper):
    """Writes as vLLM's files are written: double quotes, and no anchors."""

    def choose_scalar_style(self) -> str:
        style = super().choose_scalar_style()
        return '"' if style == "'" else str(style or "")

    def ignore_aliases(self, _: Any) -> bool:
        return True


def _premerge(settings: Settings, premerge: Premerge) -> list[dict[str, Any]]:
    step = premerge.step
    if step.vllm_device is None:
        return []
    about = {"source_file_dependencies": [_dependency(each) for each in premerge.changes]}
    steps = [{**_shard(settings, step), **about}]
    if step.parallelism > 1:
        steps.append({**_merge(settings, premerge_merge_key(premerge), [step]), **about})
    return steps


def _dependency(pattern: str) -> str:
    """A pattern as a file or the folder that begins so."""
    found = pattern.removesuffix("**") if pattern.endswith("/**") else pattern
    if any(character in found for character in "*?["):
        raise UsageError(
            f"changes: vLLM's CI takes files and whole folders, such as vllm/v1/**, not {pattern!r}"
        )
    return found


def _shard(settings: Settings, step: Step) -> dict[str, Any]:
    # No `artifact_paths` here: ci.shard uploads what it has written, from where it runs.
    *before, last = pipeline.commands(settings, step, pipeline.SHARDS)
    if _is_merged(settings, step):
        last += " || { code=$?; [ $code -eq 1 ] || exit $code; }"
    found: dict[str, Any] = {
        "label": pipeline.label(step),
        "key": step.key,
        "device": step.vllm_device,
        "timeout_in_minutes": step.timeout_in_minutes,
        **_common(settings.vllm),
        "commands": [pipeline.escaped(line) for line in (*before, last)],
    }
    if step.parallelism > 1:
        found["parallelism"] = step.parallelism
    if step.env:
        found["env"] = {name: pipeline.escaped(value) for name, value in step.env.items()}
    return found


def _is_merged(settings: Settings, step: Step) -> bool:
    premerge = settings.premerge
    return premerge is None or step is not premerge.step or step.parallelism > 1


def _merge(settings: Settings, key: str, steps: Sequence[Step]) -> dict[str, Any]:
    merge = settings.merge
    if merge.vllm_device is None:
        raise UsageError("merge: name its device in vLLM's CI, such as `vllm_device: cpu-small`")
    return {
        "label": merge.label or "KV cache: merge",
        "key": key,
        "device": merge.vllm_device,
        "depends_on": [*settings.vllm.merge_depends_on, *(step.key for step in steps)],
        "timeout_in_minutes": merge.timeout_in_minutes,
        **_common(settings.vllm),
        "commands": [pipeline.escaped(each) for each in pipeline.merge_commands(settings, steps)],
        "env": {name: pipeline.escaped(text) for name, text in pipeline.merge_env(merge).items()},
    }


def _common(area: Area) -> dict[str, Any]:
    return {
        "mount_buildkite_agent": True,
        "working_dir": area.working_dir,
        "retry": {"automatic": pipeline.retry()["automatic"]},
    }
