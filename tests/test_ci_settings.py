from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ci import settings
from harness.errors import UsageError

STEP = {"key": "gpu", "queue": "gpus", "timeout_in_minutes": 30}
LEAST: dict[str, Any] = {
    "nightly": {"steps": [STEP]},
    "merge": {"key": "merge", "queue": "small"},
}


def changed(**more: Any) -> dict[str, Any]:
    """`LEAST` with other parts."""
    return {**LEAST, **more}


def step(**more: Any) -> dict[str, Any]:
    """`LEAST` with a step that has these keys."""
    return changed(nightly={"steps": [{**STEP, **more}]})


def merge(**more: Any) -> dict[str, Any]:
    return changed(merge={**LEAST["merge"], **more})


def premerge(**more: Any) -> dict[str, Any]:
    own = {**STEP, "key": "pre", "devices": ["virtual:h200"], "changes": ["vllm/v1/**"]}
    return changed(premerge={**own, **more})


def load(data: Any) -> settings.Settings:
    return settings.load(yaml.safe_dump(data), "x.yaml")


def complaint(data: Any) -> str:
    with pytest.raises(UsageError) as raised:
        load(data)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_the_least_has_defaults() -> None:
    found = load(LEAST)
    assert found.nightly is not None
    assert (
        settings.Step("gpu", "gpus", 30, devices=("auto",), parallelism=1)
        == (found.nightly.steps[0])
    )
    assert None is found.premerge
    assert "kvmatrix" == found.merge.context


def test_the_file_of_the_checkout_is_right_and_covers_what_the_old_shard_missed() -> None:
    found = settings.read(settings.DEFAULT)
    assert found.premerge is not None
    missed = {"vllm/models/**", "vllm/v1/**", "vllm/config/**", "vllm/platforms/**"}
    assert missed < {*found.premerge.changes}
    assert not found.premerge.step.real


@pytest.mark.parametrize(
    ("data", "key", "near"),
    [
        (changed(nigthly={}), "nigthly", "nightly"),
        (step(paralellism=3), "paralellism", "parallelism"),
        (step(timeout=3), "timeout", "timeout_in_minutes"),
        (merge(histroy="x"), "histroy", "history"),
        (premerge(change=[]), "change", "changes"),
        (changed(nightly={"steps": [STEP], "wen": "x"}), "wen", "when"),
        (changed(vllm={"grup": "x"}), "grup", "group"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_what_is_near(data: Any, key: str, near: str) -> None:
    text = complaint(data)
    assert f"unknown key {key!r}" in text
    assert f"did you mean {near!r}" in text or f"or {near!r}" in text


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "must be a mapping"),
        ({"merge": LEAST["merge"]}, "nothing to run"),
        ({"nightly": LEAST["nightly"]}, "merge is missing"),
        (changed(nightly={"steps": []}), "nightly.steps must be a list of at least one"),
        (changed(nightly={"steps": [1]}), "nightly.steps[1] must be a mapping"),
        (changed(nightly=[]), "nightly must be a mapping"),
        (changed(merge={"key": "merge"}), "queue is missing"),
        (step(queue=""), "nightly.steps[1] (gpu).queue must be text"),
        (step(queue=7), "must be text"),
        (step(parallelism=0), "parallelism must be a whole number from 1 to 500"),
        (step(parallelism=-1), "parallelism must be a whole number"),
        (step(parallelism=501), "parallelism must be a whole number"),
        (step(parallelism=True), "parallelism must be a whole number"),
        (step(parallelism="3"), "parallelism must be a whole number"),
        (step(timeout_in_minutes=1.5), "timeout_in_minutes must be a whole number"),
        (step(key="a b"), "is no step key"),
        (step(key="-a"), "is no step key"),
        (step(key="a" * 81), "at most 80"),
        (step(key="01234567-89ab-cdef-0123-456789abcdef"), "not like a UUID"),
        (step(key="$HOME"), "is no step key"),
        (step(devices=[]), "devices must be a list"),
        (step(devices=["virtual:h2oo"]), "'virtual:h200'"),
        (step(devices=["cuda"]), "'cuda:0'"),
        (step(engine="0.12.0"), "vLLM 0.12.0 is not supported"),
        (step(engine="curent"), "did you mean 'current'"),
        (step(pytest="--modl-runner v2"), "did you mean '--model-runner'"),
        (step(pytest="--model-runner v3"), "unknown model runner 'v3'"),
        (step(pytest="--shard 1/2"), "`parallelism` makes the shards"),
        (step(pytest="--matrix-out=x"), "--matrix-out does not belong here"),
        (step(pytest="--device cpu"), "it is `devices` of the step"),
        (step(pytest="-k 'dsv4 and'"), "-k 'dsv4 and'"),
        (step(pytest="-k"), "expected one argument"),
        (step(pytest="-k 'unclosed"), "No closing quotation"),
        (step(pytest='-k "it\'s"'), "a shell would read"),
        (step(pytest="-k $SELECT"), "a shell would read"),
        (step(pytest="cases/test_matrix.py"), "cells are chosen with -k"),
        (step(pytest="-x"), "unknown option '-x'"),
        (step(pytest="-n many"), "neither auto nor a number"),
        (step(pytest="--depth allocate"), "unknown depth 'allocate'"),
        (step(devices=["virtual:h200"], pytest="--depth warmup"), "not for a virtual device"),
        (step(pytest="--tensor-parallel-size 8"), "is for virtual devices"),
        (step(pytest="--case-timeout soon"), "--case-timeout 'soon'"),
        (step(pytest="--gpu-memory-utilization 7"), "is not a share"),
        (step(env={"A-B": 1}), "is no variable"),
        (step(env={"BUILDKITE_BRANCH": "x"}), "is no variable that a step can set"),
        (step(env={"A": True}), "quote it"),
        (step(env={"A": [1]}), "must be text or a number"),
        (step(env=["A=1"]), "must be a mapping"),
        (step(plugins={"docker#v5.2.0": {}}), "must be a list"),
        (step(plugins=[{"a": 1, "b": 2}]), "must be a list"),
        (step(label="two\nlines"), "not printable"),
        (step(label="\x1b[31m"), "not printable"),
        (step(label="a \\$b"), "a \\ before a $"),
        (merge(context="c" * 101), "at most 100 characters, this has 101"),
        (merge(slack=["# a"]), "is no channel"),
        (merge(history='a"b'), "leave quotes"),
        (merge(key="gpu"), "2 steps have the key 'gpu'"),
        (premerge(key="gpu"), "2 steps have the key 'gpu'"),
        (premerge(devices=["auto"]), "virtual devices alone"),
        (premerge(devices=["virtual:h200", "cuda:0"]), "virtual devices alone"),
        (premerge(changes=None), "changes is missing"),
        (premerge(changes=["{a,b}"]), "no braces"),
        (premerge(changes=["/vllm"]), "from the root"),
        (changed(setup=["pip install x &"]), "not one whole command"),
        (changed(setup=["pip install x # y"]), "not one whole command"),
        (changed(setup=["echo 'x"]), "No closing quotation"),
        (changed(folder="../x"), "no folder within"),
        (changed(folder="/x"), "no folder within"),
        (changed(python="python3; rm"), "does not start a Python"),
        (changed(infra_fails="no"), "must be true or false"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(data: Any, told: str) -> None:
    text = complaint(data)
    assert text.startswith("x.yaml")
    assert told in text


@pytest.mark.parametrize(
    "data",
    [
        step(env={"HF_TOKEN": "value-of-it"}),
        step(env={"PLAIN": "hf_abcdefghijklmnopqrstuvwxyz"}),
        changed(setup=["curl https://user:value-of-it@host/x"]),
        step(plugins=[{"docker#v5.2.0": {"environment": ["A=bkua_abcdefghijkl"]}}]),
        step(label="ghp_abcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_a_secret_is_refused_and_not_shown(data: Any) -> None:
    text = complaint(data)
    assert "secret" in text
    for value in ("value-of-it", "hf_abcdef", "bkua_", "ghp_"):
        assert value not in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "x.yaml line 1"),
        ("merge: {}\nmerge: {}", "line 2: the key 'merge' stands twice"),
        ("a: &a [*a]", "an anchor is part of itself"),
        ("a: 2026-01-01", "neither text nor a number"),
        ("a: .nan", "neither text nor a number"),
        ("1: a", "which is no text"),
        ("[a]: b", "x.yaml"),
        ("a: !!python/object:os.system {}", "x.yaml line 1"),
        ("", "must be a mapping"),
        ("a: \x00", "x.yaml"),
    ],
)
def test_a_text_that_is_no_plain_yaml_is_one_line(text: str, told: str) -> None:
    with pytest.raises(UsageError) as raised:
        settings.load(text, "x.yaml")
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_anchor_may_be_shared() -> None:
    text = """
nightly:
  steps:
    - {key: a, queue: q, timeout_in_minutes: 1, plugins: &box [{"docker#v5.2.0": {image: x}}]}
    - {key: b, queue: q, timeout_in_minutes: 1, plugins: *box}
merge: {key: m, queue: q}
"""
    found = settings.load(text)
    assert found.nightly is not None
    assert [({"docker#v5.2.0": {"image": "x"}},)] * 2 == [s.plugins for s in found.nightly.steps]


def test_a_file_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match="--config FILE") as raised:
            settings.read(path)
        assert str(path) in str(raised.value)
    (tmp_path / "x.yaml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8"):
        settings.read(tmp_path / "x.yaml")


def test_numbers_of_an_environment_become_text() -> None:
    found = load(step(env={"A": 1, "B": "x y", "C": 0.5}))
    assert found.nightly is not None
    assert {"A": "1", "B": "x y", "C": "0.5"} == found.nightly.steps[0].env


@pytest.mark.parametrize(
    "line",
    [
        "-k 'dsv4 and not unset' -m engine -n auto -v",
        "--model-runner v1 --model-runner v2 --block-size 64 --depth generate",
        "--max-model-len 8192 --gpu-memory-utilization 0.8 --case-timeout=60 --isolation spawn",
    ],
)
def test_arguments_that_pytest_would_take_are_taken(line: str) -> None:
    load(step(pytest=line))
