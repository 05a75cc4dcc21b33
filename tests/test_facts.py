from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from harness.errors import UsageError
from harness.facts import EngineFacts, check_supported, cpu_backends, dumps, loads

FACTS = EngineFacts(
    python="/venv/bin/python",
    version="0.33.0",
    commit="g0123456",
    torch="2.14.0+cu130",
    cuda="13.0",
    flashinfer=None,
    transformers="5.0.0",
    python_version="3.11.7",
    kv_cache_dtypes=("auto", "bfloat16", "fp8"),
    backends=("FLASH_ATTN", "TRITON_ATTN"),
    model_backends={"DeepseekV4ForCausalLM": ("FLASHMLA_SPARSE_DSV4",)},
)


def test_facts_survive_json() -> None:
    assert FACTS == loads(dumps(FACTS))


def test_the_json_form_is_plain_data_with_a_schema() -> None:
    data = json.loads(dumps(FACTS))
    assert 3 == data["schema"]
    assert ["auto", "bfloat16", "fp8"] == data["kv_cache_dtypes"]
    assert {"DeepseekV4ForCausalLM": ["FLASHMLA_SPARSE_DSV4"]} == data["model_backends"]
    assert data["flashinfer"] is None
    assert ("cuda", []) == (data["platform"], data["cpu_backends"])


def test_the_facts_of_a_cpu_build_survive_json() -> None:
    engine = replace(FACTS, cuda=None, platform="cpu", cpu_backends=("CPU_ATTN", "CPU_MLA"))
    assert engine == loads(dumps(engine))


def test_the_cpus_own_backends_are_told_by_their_names() -> None:
    names = ["FLASH_ATTN", "CPU_MLA", "CPU_ATTN", "AMX_MLA", "NO_CPU_", "CPUX"]
    assert ("CPU_MLA", "CPU_ATTN", "AMX_MLA") == cpu_backends(names)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("schema 1 is not 3", {"schema": 1}),
        ("schema None is not 3", {"schema": None}),
        (r"missing or unknown \['gpu'\]", {"gpu": "H200"}),
        ("version is not a string but 33", {"version": 33}),
        ("torch is not a string but None", {"torch": None}),
        ("backends is not a list of strings", {"backends": "FLASH_ATTN"}),
        ("kv_cache_dtypes is not a list of strings", {"kv_cache_dtypes": ["auto", None]}),
        ("cpu_backends is not a list of strings", {"cpu_backends": "CPU_ATTN"}),
        ("platform is not a string but None", {"platform": None}),
        ("platform 'rocm' is none of", {"platform": "rocm"}),
        ("model_backends is not an object", {"model_backends": []}),
        ("model_backends is not a list of strings", {"model_backends": {"A": "B"}}),
        ("kind_backends is not a list of strings", {"kind_backends": {"mla": "B"}}),
        ("architectures is not a list of strings", {"architectures": "LlamaForCausalLM"}),
    ],
)
def test_json_that_holds_no_facts_says_why(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        loads(json.dumps({**FACTS.to_json(), **change}))


def test_a_missing_field_is_named() -> None:
    data = FACTS.to_json()
    del data["cuda"]
    with pytest.raises(ValueError, match=r"missing or unknown \['cuda'\]"):
        loads(json.dumps(data))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("engine facts: not JSON", '{"schema": 1, "python": "/ve'),
        ("engine facts: not JSON", ""),
        ("engine facts are a JSON object, not list", "[]"),
    ],
)
def test_text_that_holds_no_facts_says_why(message: str, text: str) -> None:
    with pytest.raises(ValueError, match=message):
        loads(text)


@pytest.mark.parametrize(
    "version", ["0.27.0", "0.27.1", "0.33.0", "0.33.0rc1", "0.33.1.dev3+gabc1234", "0.33.9+cu129"]
)
def test_releases_and_development_builds_in_the_range_are_supported(version: str) -> None:
    check_supported(version)


@pytest.mark.parametrize("version", ["0.24.0", "0.26.9", "0.34.0", "0.34.0rc1", "1.0", "dev", ""])
def test_others_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_supported(version)
    assert (
        f"vLLM {version} is not supported: kvmatrix reads 0.27 to 0.33; "
        "name one of them, such as --engine 0.33.0"
    ) == str(raised.value)
