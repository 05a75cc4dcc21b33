from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ci import pipeline, settings, testarea
from harness import nvml, safe
from harness.cli import main
from harness.errors import UsageError
from tests.fake_nvml import Card, FakeNvml, Slice
from tests.test_ci_settings import LEAST, load, merge, premerge, step

DOCS = Path(__file__).resolve().parent.parent / "docs"

AREA_KEYS = {
    *("label", "key", "device", "depends_on", "commands", "source_file_dependencies", "env"),
    *("parallelism", "timeout_in_minutes", "mount_buildkite_agent", "retry", "optional"),
    "working_dir",
}
"""Of those that the generator of vLLM's CI knows (its `Step`), the ones that we use."""


def schema(name: str) -> Any:
    """The published schema that check-jsonschema carries."""
    folder = resources.files("check_jsonschema.builtin_schemas") / "vendor"
    return jsonschema.Draft7Validator(json.loads((folder / f"{name}.json").read_text("utf-8")))


BUILDKITE = schema("buildkite")


def uploaded(data: Any) -> Any:
    """What `pipeline upload` makes of it: `$$` is a `$`; one that is alone would be replaced by a
    variable of the uploader."""
    if isinstance(data, str):
        assert not re.search(r"\$", data.replace("$$", "")), data
        assert r"\$" not in data
        return data.replace("$$", "$")
    if isinstance(data, dict):
        return {uploaded(key): uploaded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [uploaded(each) for each in data]
    return data


TEXT = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=30
).filter(
    lambda t: t.strip() and t.isprintable() and r"\$" not in t and safe.mask(t, {}) == t
) | st.sampled_from(["$HOME", "a $${b}", "it's", '"q"', "1", "yes", "- a", "a: b", "%N"])
KEY = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}", fullmatch=True).filter(
    lambda k: safe.mask(k, {}) == k
)
ENV = st.dictionaries(st.sampled_from(["A", "VLLM_USE_X", "_b"]), TEXT, max_size=3)
PYTEST = st.sampled_from(
    [
        "-k 'dsv4 and not (unset or auto)'",
        '-k "default" --model-runner v1',
        "-n auto --block-size=64",
        "--gpu-memory-utilization 0.5",
        "",
    ]
)


def maybe(**given: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=given)


@st.composite
def steps(draw: st.DrawFn, key: str, devices: st.SearchStrategy[list[str]]) -> dict[str, Any]:
    return {
        "key": key,
        "queue": draw(TEXT),
        "timeout_in_minutes": draw(st.integers(1, 1440)),
        "devices": draw(devices),
        "vllm_device": "h200_35gb",
        **draw(
            maybe(
                label=TEXT,
                engine=st.sampled_from(["current", "0.33.0", "/opt/a b/bin/python"]),
                parallelism=st.integers(1, 40),
                env=ENV,
                concurrency=st.integers(1, 9),
                plugins=st.just([]) | TEXT.map(lambda t: [{"docker#v5.2.0": {"image": t}}]),
            )
        ),
        **draw(maybe(pytest=PYTEST.filter(bool))),
    }


SOME = hypothesis.settings(max_examples=40)
"""A document is large: each example makes and checks several steps."""

REAL = st.sampled_from([["auto"], ["cuda:0"], ["virtual:h200", "MIG-0a"], ["cpu", "GPU-1"]])
VIRTUAL = st.sampled_from([["virtual:h200"], ["virtual:b200", "virtual:h200/1g.35gb"]])


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.lists(KEY, min_size=3, max_size=6, unique=True))
    ours = {f"{keys[0]}-merge"}
    night = [draw(steps(key, REAL | VIRTUAL)) for key in keys[2:] if key not in ours]
    found: dict[str, Any] = {
        "merge": {
            "key": keys[1],
            "queue": draw(TEXT),
            "vllm_device": "cpu-small",
            **draw(
                maybe(
                    label=TEXT,
                    context=TEXT,
                    owners=st.lists(TEXT, min_size=1, max_size=3),
                    slack=st.just(["#vllm-ci", "@someone"]),
                    history=st.sampled_from(["/mnt/history", "a b"]),
                    baseline=st.just("main/matrix.json"),
                    env=ENV,
                )
            ),
        },
        **draw(
            maybe(
                setup=st.just(["pip install -e . && echo $HOME", "true"]),
                folder=st.sampled_from([".", "kvmatrix", "tests/kvmatrix"]),
                python=st.sampled_from(["python3", "uv run python"]),
                infra_fails=st.booleans(),
            )
        ),
    }
    if night and keys[1] not in ours:
        found["nightly"] = {"steps": night}
    if "nightly" not in found or draw(st.booleans()):
        more = {"changes": ["vllm/models/**", "setup.py"]}
        found["premerge"] = {**draw(steps(keys[0], VIRTUAL)), **more}
    if keys[1] in ours:
        found["merge"]["key"] = "another"
    return found


@SOME
@given(documents())
def test_each_pipeline_is_valid_and_within_the_limits(document: dict[str, Any]) -> None:
    text = pipeline.render(pipeline.pipeline(load(document)))
    data = json.loads(text)
    BUILDKITE.validate(data)
    keys = [each["key"] for each in data["steps"]]
    assert len(set(keys)) == len(keys)
    assert all(len(key) <= 100 for key in keys)
    assert sum(each.get("parallelism", 1) for each in data["steps"]) <= 500
    assert len(text.encode()) <= 1 << 20
    assert all("matrix" not in each for each in data["steps"])
    assert all(each.get("parallelism", 2) > 1 for each in data["steps"])
    for each in data["steps"]:
        assert len(each.get("env", {}).get("KVMATRIX_ANNOTATION_CONTEXT", "")) <= 100


@SOME
@given(documents())
def test_nothing_but_infrastructure_is_tried_again_or_passed_over(document: dict[str, Any]) -> None:
    for each in pipeline.pipeline(load(document))["steps"]:
        assert [75, -1, 255] == [rule["exit_status"] for rule in each["retry"]["automatic"]]
        assert each["retry"]["manual"]["allowed"] is True
        soft = [] if document.get("infra_fails") else [{"exit_status": 75}]
        assert soft == each.get("soft_fail", [])


@SOME
@given(documents())
def test_the_merge_waits_for_each_shard_and_for_no_success(document: dict[str, Any]) -> None:
    found = pipeline.pipeline(load(document))["steps"]
    if "nightly" not in document:
        return
    last = found[-1]
    keys = [each["key"] for each in document["nightly"]["steps"]]
    assert [{"step": key, "allow_failure": True} for key in keys] == last["depends_on"]
    command = shlex.split(uploaded(last["commands"][-1]))
    at = command.index("--steps") + 1
    assert keys == command[at : at + len(keys)]


@SOME
@given(documents())
def test_what_is_set_reaches_the_job_as_it_was_written(document: dict[str, Any]) -> None:
    found = {each["key"]: uploaded(each) for each in pipeline.pipeline(load(document))["steps"]}
    asked = [*document.get("nightly", {"steps": []})["steps"]]
    asked += [document["premerge"]] if "premerge" in document else []
    for wanted in asked:
        made = found[wanted["key"]]
        assert wanted["queue"] == made["agents"]["queue"]
        assert wanted.get("env", {}) == made.get("env", {})
        assert wanted.get("plugins", []) == made.get("plugins", [])
        assert wanted.get("concurrency") == made.get("concurrency")
        assert ("concurrency" in made) == ("concurrency_group" in made)
        words = shlex.split(made["commands"][-1])
        expected = [f"--device={each}" for each in wanted["devices"]]
        if wanted.get("engine", "current") != "current":
            expected.append(f"--engine={wanted['engine']}")
        expected += shlex.split(wanted.get("pytest", ""))
        assert expected == words[words.index("--") + 1 :]
        assert wanted["key"] == words[words.index("--step") + 1]


@SOME
@given(documents())
def test_vllms_dialect_has_no_single_quotes_and_no_key_that_it_drops(
    document: dict[str, Any],
) -> None:
    text = testarea.render(testarea.area(load(document)))
    data = yaml.safe_load(text)
    assert {"group", "depends_on", "steps"} == {*data}
    for each in data["steps"]:
        assert AREA_KEYS >= {*each}
        assert not any("'" in command for command in each["commands"])
        assert True is each["mount_buildkite_agent"]
        assert [75, -1, 255] == [rule["exit_status"] for rule in each["retry"]["automatic"]]
        wanted = {**document, **{s["key"]: s for s in document.get("nightly", {}).get("steps", [])}}
        if each["key"] in wanted:
            assert True is each["optional"]
            assert wanted[each["key"]].get("env", {}) == uploaded(each.get("env", {}))
        if "premerge" in document and each["key"] == document["premerge"]["key"]:
            assert ["vllm/models/", "setup.py"] == each["source_file_dependencies"]


def test_the_schema_refuses_what_is_wrong() -> None:
    """So that the tests above can fail."""
    data = pipeline.pipeline(load(LEAST))
    data["steps"][0]["timeout_in_minutes"] = 0
    assert not BUILDKITE.is_valid(data)
    data = pipeline.pipeline(load(LEAST))
    data["steps"][0]["retires"] = {}
    assert not BUILDKITE.is_valid(data)


def test_both_parts_have_conditions_and_one_alone_has_none() -> None:
    found = load(premerge())
    both = {each["key"]: each for each in pipeline.pipeline(found)["steps"]}
    assert ["pre", "gpu", "merge"] == [*both]
    assert "build.pull_request.id != null" == both["pre"]["if"]
    assert 'build.source == "schedule"' == both["gpu"]["if"] == both["merge"]["if"]
    for part, keys in (("premerge", ["pre"]), ("nightly", ["gpu", "merge"])):
        alone = pipeline.pipeline(found, part)["steps"]
        assert keys == [each["key"] for each in alone]
        assert not any("if" in each for each in alone)


def test_changes_become_one_pattern_that_older_agents_read_too() -> None:
    two = pipeline.pipeline(load(premerge(changes=["vllm/v1/**", "vllm/config/**"])))
    assert "{vllm/v1/**,vllm/config/**}" == two["steps"][0]["if_changed"]
    one = pipeline.pipeline(load(premerge()))
    assert "vllm/v1/**" == one["steps"][0]["if_changed"]


def test_shards_before_merging_are_merged_for_the_same_changes() -> None:
    pre, merged, *_ = pipeline.pipeline(load(premerge(parallelism=3)))["steps"]
    assert "pre-merge" == merged["key"]
    assert pre["if_changed"] == merged["if_changed"]
    assert pre["if"] == merged["if"]
    assert [{"step": "pre", "allow_failure": True}] == merged["depends_on"]


def test_more_jobs_than_an_upload_takes_are_refused() -> None:
    half = {**LEAST["nightly"]["steps"][0], "parallelism": 250}
    two = {"steps": [half, {**half, "key": "other", "parallelism": 249}]}
    assert 3 == len(pipeline.pipeline(load({**LEAST, "nightly": two}))["steps"])
    two["steps"][1]["parallelism"] = 250
    with pytest.raises(UsageError, match="501 jobs, and one upload may have 500"):
        pipeline.pipeline(load({**LEAST, "nightly": two}))


def test_a_pipeline_that_is_too_large_is_refused() -> None:
    with pytest.raises(UsageError, match="1048576 are the most"):
        pipeline.render(pipeline.pipeline(load(step(label="x" * (1 << 20)))))


def test_a_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no premerge part"):
        pipeline.pipeline(load(LEAST), "premerge")
    with pytest.raises(UsageError, match="vllm_device: h200_35gb"):
        testarea.area(load(LEAST))


def test_artifacts_lie_where_the_agent_looks_for_them() -> None:
    for folder, out in ((".", "shards"), ("tests/kvmatrix", "../../shards")):
        made = pipeline.pipeline(load({**LEAST, "folder": folder}))["steps"][0]
        assert ["shards/**/*"] == made["artifact_paths"]
        assert f"--out {out} " in made["commands"][-1]


def test_owners_channels_and_the_run_to_compare_with_reach_the_merge() -> None:
    found = load(merge(owners=["@a", "@b"], slack=["#c"], history="/h", baseline="b"))
    last = pipeline.pipeline(found)["steps"][-1]
    assert "@a @b" == last["env"]["KVMATRIX_OWNERS"]
    assert "python3 -m ci.merge --steps gpu --history /h --baseline b" == last["commands"][-1]
    assert [{"slack": {"channels": ["#c"]}, "if": 'step.outcome == "hard_failed"'}] == (
        last["notify"]
    )


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (step(vllm_device="h200_35gb"), "merge: name its device"),
        (premerge(vllm_device="cpu", changes=["vllm/*/x.py"]), "not 'vllm/*/x.py'"),
        (
            {
                **step(vllm_device="h200_35gb"),
                "merge": {**LEAST["merge"], "vllm_device": "cpu-small"},
                "vllm": {"setup": ["echo 'a'"]},
            },
            "leave them out",
        ),
    ],
)
def test_what_vllms_dialect_cannot_say_is_refused(document: Any, told: str) -> None:
    with pytest.raises(UsageError) as raised:
        testarea.area(load(document))
    assert told in str(raised.value)


STUB = """#!/bin/sh
case "$*" in
  "-m harness.cli devices") cat "$DEVICES" ;;
  "-m ci.shard "*) exit "$SHARD" ;;
  *) exit "$OTHER" ;;
esac
"""


def job(tmp_path: Path, commands: list[str], devices: str, shard: int, other: int = 0) -> int:
    """The exit code of a job, as the agent's shell gives it."""
    for name in ("python3", "uv"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "devices").write_text(devices)
    (tmp_path / "kvmatrix").mkdir(exist_ok=True)
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "DEVICES": str(tmp_path / "devices"),
        "SHARD": str(shard),
        "OTHER": str(other),
    }
    script = "\n".join(uploaded(commands))
    return subprocess.run(["sh", "-e", "-c", script], env=environ, cwd=tmp_path).returncode


def listed(monkeypatch: pytest.MonkeyPatch, capsys: Any, *cards: Card) -> str:
    """What `kvmatrix devices` prints on a machine with these."""
    discover = nvml.discover
    with monkeypatch.context() as patched:
        patched.setattr(nvml, "discover", lambda: discover(FakeNvml(cards), {}))
        assert 0 == main(["devices"])
    return str(capsys.readouterr().out)


@pytest.mark.parametrize("code", [0, 1, 2, 75, 137])
def test_a_job_ends_as_its_shard_does(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    devices = listed(monkeypatch, capsys, Card("GPU-0a"))
    found = settings.read(settings.DEFAULT)
    by_key = {each["key"]: each["commands"] for each in pipeline.pipeline(found)["steps"]}
    assert code == job(tmp_path, by_key["kvmatrix-h200-35gb"], devices, code)
    area = {each["key"]: each["commands"] for each in testarea.area(found)["steps"]}
    # There a failed shard would keep the merge, which fails for it, from running.
    assert (0 if code == 1 else code) == job(tmp_path, area["kvmatrix-h200-35gb"], devices, code)
    # Nothing merges this one.
    assert code == job(tmp_path, area["kvmatrix-premerge"], devices, code)


def test_a_job_whose_set_up_fails_is_infrastructure(tmp_path: Path) -> None:
    for each in pipeline.pipeline(settings.read(settings.DEFAULT))["steps"]:
        assert 75 == job(tmp_path, each["commands"], "", 0, other=1)


def test_a_gpu_job_without_a_gpu_is_infrastructure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    commands = pipeline.pipeline(load(LEAST))["steps"][0]["commands"]
    slices = {0: Slice("MIG-1b", "NVIDIA H200 MIG 1g.35gb", 33_000, 26)}
    for cards, code in (
        ((), 75),
        ((Card("GPU-0a", slices={}),), 75),  # MIG mode, and no slice of it
        ((Card("GPU-0a"),), 0),
        ((Card("GPU-0a", slices=slices),), 0),
    ):
        assert code == job(tmp_path, commands, listed(monkeypatch, capsys, *cards), 0)
    virtual = pipeline.pipeline(load(step(devices=["virtual:h200", "cpu"])))["steps"][0]
    assert 0 == job(tmp_path, virtual["commands"], "", 0)


def test_the_command_prints_what_check_jsonschema_takes(tmp_path: Path, capsys: Any) -> None:
    assert 0 == main(["pipeline"])
    out = capsys.readouterr().out
    (tmp_path / "pipeline.json").write_text(out)
    tool = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.buildkite"]
    subprocess.run([*tool, str(tmp_path / "pipeline.json")], check=True, capture_output=True)


def test_the_command_prints_vllms_dialect(capsys: Any) -> None:
    assert 0 == main(["pipeline", "--format", "vllm", "--only", "nightly"])
    gpu, last = yaml.safe_load(capsys.readouterr().out)["steps"]
    assert ("h200_35gb", 14, True) == (gpu["device"], gpu["parallelism"], gpu["optional"])
    assert gpu["label"].endswith(" Shard %N")
    assert ["image-build-cpu", gpu["key"]] == last["depends_on"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "nigthly"], "did you mean 'nightly'"),
        (["--format", "vlm"], "did you mean 'vllm'"),
        (["--config", "none.yaml"], "cannot read none.yaml"),
    ],
)
def test_arguments_that_are_wrong_are_exit_code_2(
    arguments: list[str], told: str, capsys: Any
) -> None:
    assert 2 == main(["pipeline", *arguments])
    out, err = capsys.readouterr()
    assert "" == out
    assert told in err


def test_the_value_of_a_secret_variable_is_never_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("MY_TOKEN", "swordfish-77")
    for name, document in enumerate((step(env={"A": "swordfish-77"}), step(label="swordfish-77"))):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        assert 2 == main(["pipeline", "--config", str(path)])
        out, err = capsys.readouterr()
        assert "secret" in err
        assert "swordfish-77" not in out + err


def test_the_vllm_dialect_does_not_split_words_of_a_step_over_lines() -> None:
    text = testarea.render(testarea.area(settings.read(settings.DEFAULT)))
    lines = [line for line in text.splitlines() if "ci.shard" in line]
    assert all(line.startswith("  - python3 -m ci.shard --step ") for line in lines)
    assert 2 == len(lines)


def test_the_workflow_for_github_is_valid_and_its_shards_are_all_there_is() -> None:
    workflow = yaml.safe_load((DOCS / "github-actions.yml").read_text("utf-8"))
    workflow["on"] = workflow.pop(True)  # YAML 1.1 reads `on` as true, as GitHub does not
    schema("github-workflows").validate(workflow)
    shard, report = workflow["jobs"]["shard"], workflow["jobs"]["report"]
    numbers = shard["strategy"]["matrix"]["shard"]
    assert [*range(1, len(numbers) + 1)] == numbers
    ran = [each.get("run", "") for each in shard["steps"]]
    assert 1 == sum(f"--shard ${{{{ matrix.shard }}}}/{len(numbers)} " in line for line in ran)
    assert "always()" == report["if"]
    assert {*workflow["on"]["pull_request"]["paths"]} == {
        *settings.read(settings.DEFAULT).premerge.changes  # type: ignore[union-attr]
    }


def test_the_guide_names_what_there_is() -> None:
    guide = (DOCS / "ci.md").read_text("utf-8")
    entry = yaml.safe_load(guide.split("```yaml\n")[1].split("```")[0].replace("[...]", "[]"))
    found = load({**LEAST, "nightly": {"steps": entry}})
    BUILDKITE.validate(pipeline.pipeline(found))
    uploads = yaml.safe_load(guide.split("```yaml\n")[2].split("```")[0])
    BUILDKITE.validate(uploads)
    for key in yaml.safe_load(settings.DEFAULT.read_text("utf-8")):
        if key != "python":
            assert f"`{key}" in guide
