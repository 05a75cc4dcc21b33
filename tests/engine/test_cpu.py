"""Real engines: vLLM's CPU build, installed on demand, nothing of it patched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Matrix

pytestmark = pytest.mark.engine

CPU = ("--device", "cpu", "--engine", "cpu:0.32.0")

AMX = "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
"""Whether this host can compute DeepSeek-V4's fp8 weights."""

SOME = (
    "llama3-default-unset or llama3-default-fp8_e4m3 or dsv4-default-unset "
    "or dsv4-default-bfloat16 or llama3-CPU_ATTN-auto or llama3-default-turboquant_k8v4 "
    "or mamba2-default-unset"
)


def test_real_engines_start_on_a_cpu(matrix: Matrix) -> None:
    done = matrix("-k", SOME, *CPU)
    assert 0 == done.code, done.text
    cells = done.cells
    assert {
        "llama3-default-unset": "ok",
        "llama3-default-fp8_e4m3": "ok",
        "llama3-CPU_ATTN-auto": "ok",
        "dsv4-default-unset": "ok" if AMX else "skipped",
        "dsv4-default-bfloat16": "rejected" if AMX else "skipped",
        "llama3-default-turboquant_k8v4": "unguarded",
        # A worker holds a state as two views, and keeps it in float32 on some CPUs.
        "mamba2-default-unset": "ok",
    } == {name: cell["verdict"] for name, cell in cells.items()}
    llama, packed = cells["llama3-default-unset"], cells["dsv4-default-unset"]
    assert ("generate", True) == (llama["stage"], llama["logits_finite"])
    # 128 tokens x K and V x 8 heads x 128 values x 2 B, and half of it for a byte a value.
    pages = {"llama3-default-unset": 524288, "llama3-default-fp8_e4m3": 262144}
    for name, page in pages.items():
        assert [page] == [kv["page_size_bytes"] for kv in cells[name]["kv"]]
    assert ["explicit", "oracle", "contract"] == llama["vouched"]
    if not AMX:
        assert "AMX" in packed["reason"]
        return
    assert "warmup" == packed["stage"]
    # The format of DeepSeek-V4's cache is the same as on a GPU.
    assert {37440, 1728, 8640, 32832} == {kv["page_size_bytes"] for kv in packed["kv"]}
    assert ["oracle", "contract"] == packed["vouched"]


def test_a_real_record_holds_what_was_measured(matrix: Matrix) -> None:
    done = matrix("-k", "llama3-default-unset", *CPU, "--isolation", "spawn")
    assert 0 == done.code, done.text
    (record,) = done.records
    assert ("cpu", "v1") == (record["device_kind"], record["model_runner"])
    memory = record["memory"]
    assert 0 < memory["used_before_bytes"] < memory["used_after_weights_bytes"]
    assert memory["used_after_weights_bytes"] < memory["used_after_kv_bytes"]
    assert memory["weights_bytes"] > 0
    assert {"config", "model", "warmup", "generate", "total"} <= record["seconds"].keys()
    (kv,) = record["kv"]
    assert len(kv["shape"]) == len(kv["stride"]) >= 4
    assert 1 == kv["stride"][-1]
    assert record["tail"]
    assert "0" == record["settings"]["VLLM_ENABLE_V1_MULTIPROCESSING"]
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in record["settings"]  # vLLM's own doing


def test_secrets_do_not_reach_the_engine(matrix: Matrix, environ: dict[str, str]) -> None:
    secret = "hf_" + "s3cret" * 5
    done = matrix(
        *("-k", "dsv4-default-bfloat16", *CPU, "--isolation", "spawn"),
        environ={**environ, "HF_TOKEN": secret, "VLLM_API_KEY": secret},
    )
    assert 0 == done.code, done.text
    assert secret not in str(done.records)
    assert "VLLM_API_KEY" not in done.records[0]["settings"]


def test_the_model_runner_that_is_asked_for_is_used(matrix: Matrix) -> None:
    """vLLM's newer runner needs a Triton for CPUs, which the build lacks: it says so."""
    done = matrix("-k", "llama3-default-auto", *CPU, "--model-runner", "v2")
    assert 1 == done.code, done.text
    assert "Model Runner V2" in done.cells["llama3-default-auto-v2"]["error"]["message"]


def test_workers_share_the_cells_of_a_cpu(matrix: Matrix) -> None:
    done = matrix("-k", "dsv4-default-float16 or dsv4-default-nvfp4", *CPU, "-n", "auto")
    assert 0 == done.code, done.text
    assert {"nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "float16"} == {
        cell["kv_cache_dtype"] for cell in done.cells.values()
    }
    # Without AMX the layers of the model come to nothing before a backend sees the dtype.
    others = {"rejected"} if AMX else {"rejected", "skipped"}
    assert others == {cell["verdict"] for cell in done.cells.values()}
    assert len(done.cells) == len(done.records) > 2
