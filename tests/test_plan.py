from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import device, plan, session
from harness.errors import UsageError
from harness.facts import EngineFacts
from harness.plan import Axes
from harness.profile import PROFILES, SWEEP

FACTS = EngineFacts(
    python="python",
    version="0.33.0",
    commit=None,
    torch="2.14",
    cuda="13.0",
    flashinfer=None,
    transformers=None,
    python_version="3.11.7",
    kv_cache_dtypes=("auto", "fp8"),
    backends=("FLASH_ATTN", "FLASHMLA", "FLASHMLA_SPARSE", "OWN"),
    model_backends={"OwnForCausalLM": ("OWN",)},
    kind_backends={
        "regular": ("FLASH_ATTN",),
        "mla": ("FLASHMLA",),
        "sparse": ("FLASHMLA_SPARSE",),
    },
    architectures=("LlamaForCausalLM", "OwnForCausalLM"),
)


def model(tmp_path: Path, key: str, start: dict[str, Any] | None = None, **config: Any) -> None:
    folder = tmp_path / key
    folder.mkdir()
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    if start is not None:
        (folder / "start.json").write_text(json.dumps(start))


def llama(**more: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **more}


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("FLASH_ATTN", llama()),
        ("FLASH_ATTN", llama(kv_lora_rank=None)),
        ("FLASHMLA", llama(kv_lora_rank=512)),
        ("FLASHMLA_SPARSE", llama(kv_lora_rank=512, index_topk=2048)),
        ("OWN", llama(architectures=["OwnForCausalLM"])),
    ],
)
def test_a_model_gets_the_backends_of_its_kind(
    tmp_path: Path, backend: str, config: dict[str, Any]
) -> None:
    model(tmp_path, "some", **config)
    (found,) = plan.models(tmp_path)
    backends = dict.fromkeys(case.backend for case in plan.cases(found, FACTS))
    assert ["default", backend] == list(backends)


def test_a_model_without_attention_is_left_to_vllm(tmp_path: Path) -> None:
    model(tmp_path, "some", {"attention": False}, **llama())
    (found,) = plan.models(tmp_path)
    assert {"default"} == {case.backend for case in plan.cases(found, FACTS)}


def test_axes_add_cells_with_ids_of_their_own(tmp_path: Path) -> None:
    model(tmp_path, "a-b", **llama())
    (found,) = plan.models(tmp_path)
    ids = [case.id for case in plan.cases(found, FACTS, Axes((0, 64), (1, 2)))]
    assert "a-b-default-unset" == ids[0]
    assert {"a-b-default-fp8-block64-tp2", "a-b-FLASH_ATTN-auto-tp2"} <= set(ids)
    assert len(set(ids)) == len(ids) == 4 * 2 * 3


def test_a_model_may_share_the_config_of_another(tmp_path: Path) -> None:
    model(tmp_path, "one", **llama())
    model(tmp_path, "one-mtp", {"config": "one", "engine_args": {"runner": "draft"}})
    one, pair = plan.models(tmp_path)
    assert one.config == pair.config
    assert (one.path, "one-mtp") == (pair.path, pair.key)
    assert {"runner": "draft"} == pair.start.engine_args


@pytest.mark.parametrize(
    ("message", "start"),
    [
        (
            r"some/start.json: unknown key 'engine_arg'; did you mean 'engine_args'",
            {"engine_arg": 1},
        ),
        (r"some/start.json must be a JSON object", [1]),
        (r"some/start.json: engine_args must be an object", {"engine_args": [1]}),
        (r"some/start.json: capability must be \[major, minor\], not 80", {"capability": 80}),
        (r"some/start.json: why must say what needs the capability", {"capability": [8, 0]}),
        (r"some/start.json: attention must be a bool", {"attention": "no"}),
        (r"model config some/config.json cannot be used", {"config": "nobody"}),
    ],
)
def test_a_wrong_start_is_named(tmp_path: Path, message: str, start: Any) -> None:
    model(tmp_path, "some", start, **llama())
    with pytest.raises(UsageError, match=message):
        plan.models(tmp_path)


def test_a_start_without_any_config_is_named(tmp_path: Path) -> None:
    model(tmp_path, "some", {"why": "x"})
    with pytest.raises(UsageError, match=r"model some has no config.json, and some/start.json"):
        plan.models(tmp_path)


def test_a_family_that_the_engine_lacks_is_told(tmp_path: Path) -> None:
    model(tmp_path, "new", **llama(architectures=["NewForCausalLM"]))
    h200 = device.parse("virtual:h200")
    cells = plan.cells(plan.models(tmp_path), [h200], [FACTS])
    assert {"vLLM 0.33.0 has no NewForCausalLM"} == {cell.lacks for cell in cells}


def test_a_capability_that_the_weights_need_is_told(tmp_path: Path) -> None:
    model(tmp_path, "some", {"capability": [8, 0], "why": "MXFP4"}, **llama())
    devices = [device.parse("virtual:t4"), device.parse("virtual:a100")]
    cells = plan.cells(plan.models(tmp_path), devices, [FACTS])
    told = {cell.device.spec: cell.lacks for cell in cells}
    assert {
        "virtual:t4": "some needs SM80 (MXFP4), virtual:t4 is SM75",
        "virtual:a100": None,
    } == told


def test_facts_without_architectures_say_nothing_of_a_family(tmp_path: Path) -> None:
    model(tmp_path, "some", **llama())
    engine = replace(FACTS, architectures=())
    (cell, *_) = plan.cells(plan.models(tmp_path), [device.parse("virtual:h200")], [engine])
    assert cell.lacks is None


def test_the_sweep_has_each_capability_once() -> None:
    swept = [PROFILES[name].capability for name in SWEEP]
    assert sorted({profile.capability for profile in PROFILES.values()}) == sorted(swept)


def test_the_shipped_models_cover_the_families() -> None:
    keys = {model.key for model in plan.models()}
    wanted = "dsv4 dsv4-pro dsv41 dsv32 glm5 dsv3 kimi-k2 llama3 qwen3 qwen3-moe gpt-oss gemma3"
    wanted += " llama4 mistral qwen3-next kimi-linear nemotron-h jamba falcon-h1 mamba2 minimax-m2"
    assert set(wanted.split()) <= keys


def test_explicit_cases_are_of_shipped_models() -> None:
    keys = {model.key for model in plan.models()}
    for one in session.explicit_cases(plan.MODELS.parent):
        assert any(one.id.startswith(f"{key}-") for key in keys), one.id


def test_a_model_for_virtual_devices_is_skipped_elsewhere(tmp_path: Path) -> None:
    model(tmp_path, "some", {"virtual": "no tokenizer"}, **llama())
    real = replace(device.parse("virtual:h200"), kind="gpu", spec="GPU-1")
    cells = plan.cells(plan.models(tmp_path), [device.parse("virtual:h200"), real], [FACTS])
    told = {cell.device.kind: cell.lacks for cell in cells}
    assert {"virtual": None, "gpu": "some is for virtual devices: no tokenizer"} == told


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+g1"])
def test_two_engines_of_one_version_are_refused_by_their_paths(version: str) -> None:
    """Their cells would have the same ids."""
    one = replace(FACTS, version=version, python="/one/python")
    other = replace(FACTS, version=version.replace("+", "_"), python="/other/python")
    with pytest.raises(UsageError, match=r"/one/python and /other/python are both vLLM 0\.33\.0"):
        plan.check_pairs([device.parse("virtual:h200")], [one, other])


def test_engines_of_two_versions_or_builds_are_told_apart() -> None:
    cpu = replace(FACTS, platform="cpu")
    here = [device.parse("virtual:h200"), device.cpu()]
    plan.check_pairs(here, [FACTS, replace(FACTS, version="0.27.1"), cpu])
    ids = [
        cell.id
        for cell in plan.cells(
            plan.models(), here, [FACTS, replace(FACTS, version="0.27.1"), cpu], Axes()
        )
    ]
    assert len(ids) == len({*ids})
