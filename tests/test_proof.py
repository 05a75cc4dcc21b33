"""The proof of a reduction, and the memory that a cell needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness import device, plan
from harness.case import Case
from harness.device import GIB, Device
from harness.errors import UsageError
from harness.facts import EngineFacts
from harness.plan import Cell, Model
from harness.proof import Need, Reductions, need, planning_device, reduced_folder
from harness.record import Capacity, Fault, KVCache, Memory, Record, Resolved
from harness.request import Request
from tests.test_guard import ENGINE, H200

CPU = device.cpu("A CPU", 16 * GIB)

(LLAMA,) = (model for model in plan.models() if model.key == "llama3")

MAIN = KVCache("FullAttentionSpec", "self_attn.attn", 32, 16, 65536, 65536, "bfloat16")


def cell(engine: EngineFacts = ENGINE, on: Device = H200, dtype: str = "unset") -> Cell:
    return Cell("llama3-X", Case("llama3", "X", dtype), LLAMA, on, engine)


def planned(request: Request, kv: tuple[KVCache, ...] = (MAIN,)) -> Record:
    case = request.case
    return Record(
        id=case.id,
        model=case.model,
        backend=case.backend,
        kv_cache_dtype=case.kv_cache_dtype,
        device=request.device.spec,
        device_kind=request.device.kind,
        capability=request.device.capability,
        engine=request.engine.version,
        depth=request.depth,
        stage="allocate",
        resolved=Resolved(kv_cache_dtype="auto"),
        kv=kv,
        capacity=Capacity(4096, 1.0, 4096 * 8192, 4096, 0.92),
        memory=Memory(16 * GIB, 3 * GIB, GIB, True),
    )


class Engine:
    """Plans requests as `reduced_kv` says for the reduced model, and remembers them."""

    def __init__(self, reduced_kv: tuple[KVCache, ...] = (replace(MAIN, layers=1),)) -> None:
        self.asked: list[Request] = []
        self._reduced = reduced_kv

    def __call__(self, request: Request) -> Record:
        self.asked.append(request)
        full = request.model_path == LLAMA.path
        return planned(request, (MAIN,) if full else self._reduced)


def test_full_and_reduced_are_planned_on_a_virtual_device_of_the_same_numbers(
    tmp_path: Path,
) -> None:
    engine = Engine()
    proof = Reductions(tmp_path, engine).proof(cell())
    assert ((), 3 * GIB, 4096 * 8192) == (
        proof.problems,
        proof.weights_bytes,
        proof.request_bytes,
    )
    assert {("virtual", (9, 0), 141 * GIB)} == {
        (r.device.kind, r.device.capability, r.device.memory_bytes) for r in engine.asked
    }
    paths = [r.model_path for r in engine.asked]
    assert [LLAMA.path, reduced_folder(tmp_path, LLAMA)] == paths
    assert {"llama3-default-unset"} == {r.case.id for r in engine.asked}


def test_a_cpu_plans_on_itself() -> None:
    assert CPU == planning_device(CPU)


def test_a_proof_is_made_once_and_kept(tmp_path: Path) -> None:
    first = Reductions(tmp_path, Engine()).proof(cell())
    again = Engine()
    reductions = Reductions(tmp_path, again)
    assert first == reductions.proof(cell())
    assert [] == again.asked
    other = replace(ENGINE, python="/f/bin/python", version="0.32.0")
    reductions.proof(cell(other))
    assert again.asked


def test_each_dtype_has_a_proof_of_its_own(tmp_path: Path) -> None:
    """TurboQuant keeps the first and last two layers in the model's dtype: four are too few."""
    engine = Engine()
    reductions = Reductions(tmp_path, engine)
    cells = [cell(), cell(dtype="turboquant_k8v4"), cell()]
    wanted = reductions.requests(cells)
    assert 4 == len(wanted)
    for one in cells:
        reductions.proof(one)
    assert wanted == engine.asked
    assert [] == Reductions(tmp_path, engine).requests(cells)


def test_a_corrupt_proof_is_made_again(tmp_path: Path) -> None:
    Reductions(tmp_path, Engine()).proof(cell())
    (path,) = (tmp_path / "proofs").glob("*.json")
    path.write_text("{")
    again = Engine()
    Reductions(tmp_path, again).proof(cell())
    assert again.asked


def test_a_deadline_on_a_busy_host_is_no_proof_for_later_runs(tmp_path: Path) -> None:
    def late(request: Request) -> Record:
        return replace(planned(request), end="timeout", stage="model")

    assert Reductions(tmp_path, late).proof(cell()).problems
    assert () == Reductions(tmp_path, Engine()).proof(cell()).problems


@pytest.mark.parametrize(
    "kv",
    [
        (),
        (replace(MAIN, page_size_bytes=32768),),
        (MAIN, replace(MAIN, kind="SlidingWindowSpec")),
        (replace(MAIN, backend="OTHER"),),
    ],
)
def test_a_kind_that_is_lost_or_changed_is_a_problem(
    tmp_path: Path, kv: tuple[KVCache, ...]
) -> None:
    assert Reductions(tmp_path, Engine(kv)).proof(cell()).problems


def test_a_model_that_no_release_starts_has_nothing_to_lose(tmp_path: Path) -> None:
    fault = Fault("ValueError", ("ValueError", "Exception"), "no", "x:y")

    def refuse(request: Request) -> Record:
        return replace(planned(request, ()), stage="config", error=fault, memory=None)

    proof = Reductions(tmp_path, refuse).proof(cell())
    assert ((), 0) == (proof.problems, proof.weights_bytes)


def test_a_model_that_cannot_be_reduced_is_named(tmp_path: Path) -> None:
    strange = Model("strange", tmp_path, {"architectures": ["X"], "model_type": "strange"})
    with pytest.raises(UsageError, match="strange"):
        reduced_folder(tmp_path, strange)


def test_the_reduced_config_is_small_and_whole(tmp_path: Path) -> None:
    config = json.loads((reduced_folder(tmp_path, LLAMA) / "config.json").read_text())
    assert config["num_hidden_layers"] < LLAMA.config["num_hidden_layers"]
    for kept in ("num_key_value_heads", "num_attention_heads", "hidden_size", "model_type"):
        assert LLAMA.config[kept] == config[kept]


def test_a_reduced_config_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    path = reduced_folder(tmp_path, LLAMA) / "config.json"
    whole = path.read_text()
    path.write_text(whole[:50])
    assert whole == (reduced_folder(tmp_path, LLAMA) / "config.json").read_text()


@pytest.mark.parametrize(
    ("fits", "memory"), [(False, 4 * GIB), (True, 16 * GIB), (True, 0), (False, 6 * GIB)]
)
def test_what_does_not_fit_is_told_with_the_numbers(fits: bool, memory: int) -> None:
    wanted = Need(weights=2 * GIB, kv_cache=GIB, overhead=3 * GIB, utilisation=0.9)
    lacking = wanted.lacking(replace(H200, memory_bytes=memory))
    assert fits == (lacking is None)
    if lacking is not None:
        for words in ("needs 6.7 GiB", "weights 2.0 GiB", "KV cache 1.0 GiB", "NVIDIA H200 has"):
            assert words in lacking


@pytest.mark.parametrize(("on", "share"), [(CPU, 1.0), (H200, 0.9)])
def test_a_need_counts_weights_context_and_overhead(
    tmp_path: Path, on: Device, share: float
) -> None:
    proof = Reductions(tmp_path, Engine()).proof(cell(ENGINE, on))
    wanted = need(proof, on)
    assert (3 * GIB, 8192 * 4096, share) == (wanted.weights, wanted.kv_cache, wanted.utilisation)
    assert wanted.total > wanted.weights + wanted.kv_cache


def test_engines_of_the_fixture_serve_gpus(tmp_path: Path) -> None:
    cpu_build = EngineFacts(**{**ENGINE.__dict__, "cuda": None, "platform": "cpu"})
    assert plan.serves(ENGINE, H200)
    assert not plan.serves(ENGINE, CPU)
    assert plan.serves(cpu_build, CPU)
    assert not plan.serves(cpu_build, device.parse("virtual:h200"))
