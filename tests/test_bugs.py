"""A test for every public bug that plain data can show: a record with its symptom gets its verdict.

`docs/bugs.md` says where each bug is shown; that it names what exists is tested here too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness import layout
from harness.case import DEFAULT, UNSET, Case
from harness.options import REAL_STAGES, options
from harness.record import Declared, Memory, Record, Resolved, dumps, loads
from harness.reduce import reduce
from harness.verdict import notrun
from tests import geometry, observed
from tests.observed import right as confirmed
from tests.test_mutations_configs import MODELS, known
from tests.test_verdict import (
    GOT_AUTO,
    MIG_ASSERT,
    OK,
    SUPPORTED,
    died,
    failed,
    judged,
    record,
)

ROOT = Path(__file__).resolve().parent.parent

BUGS = {
    *(47174, 45091, 55134, 47228, 54233, 25988, 33021, 14221, 42587, 32732, 47549, 47610, 47618),
    *(55509, 51041, 45207, 42927, 34814, 55046, 55221, 53320, 41848, 50463, 42446, 43030),
    *(57362, 24144, 40597, 41423, 38097, 52334),
}
"""vLLM issues and pull requests."""


def default_of(model: str, device: str = "virtual:h200") -> Record:
    return next(
        one.record
        for one in observed.load(model)
        if (one.record.id, one.record.device) == (f"{model}-default-unset", device)
    )


# ---- What the default becomes -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["unset", "auto"])
def test_bug_47174_45091_55134_an_assertion_on_the_default_is_broken(dtype: str) -> None:
    assert "broken" == judged(failed(dtype, "AssertionError", GOT_AUTO), OK).verdict


def test_bug_47228_54233_a_validator_that_refuses_what_was_resolved_is_unguarded() -> None:
    refuses = (Declared("FLASHMLA_SPARSE_DSV4", ("kv_cache_dtype not supported",)),)
    found = judged(record(declared=refuses), OK)
    assert "unguarded" == found.verdict
    assert "the declaration is wrong" in found.reason


def test_bug_25988_a_default_that_the_model_overrides_must_be_written_back() -> None:
    lost = Resolved("fp8_ds_mla", "uint8", "auto")
    found = judged(record(resolved=lost), OK)
    assert "mismatch" == found.verdict
    assert "written back to the cache config is auto, must be fp8_ds_mla" in found.reason


def test_bug_14221_fp8_that_is_silently_ignored_is_a_mismatch() -> None:
    """It starts, and even calls itself fp8: the real element type tells."""
    ignored = record("fp8", resolved=Resolved("fp8", "bfloat16", "fp8"), declared=(), log=())
    found = judged(ignored)
    assert "mismatch" == found.verdict
    assert "bfloat16 does not hold fp8" in found.reason


def test_bug_14221_a_tensor_in_bfloat16_under_the_name_fp8_is_a_mismatch() -> None:
    seen = next(one for one in confirmed("llama3") if one.resolved.kv_cache_dtype == "fp8")
    (kv,) = seen.kv
    wrong = (replace(kv, tensor_dtype="bfloat16"),)
    lines = layout.compare(MODELS["llama3"], wrong, seen.resolved, seen.capability)
    assert any("element type of the tensor bfloat16, must be uint8" in line for line in lines)


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "fp8_e5m2", "fp8_inc", "bfloat16"])
def test_bug_42587_a_dtype_that_the_command_line_takes_and_init_dies_of(dtype: str) -> None:
    """Unclean by an accident; broken where the backend lists it; a clear ValueError is rejected."""
    accident = failed(dtype, "KeyError", f"'{dtype}'", declared=())
    assert "unclean" == judged(accident).verdict
    assert "broken" == judged(replace(accident, declared=SUPPORTED)).verdict
    clear = failed(dtype, "ValueError", f"kv_cache_dtype {dtype} is not supported", declared=())
    assert "rejected" == judged(clear).verdict


# ---- Backends -----------------------------------------------------------------------------------


def test_bug_32732_no_valid_backend_for_the_default_is_broken() -> None:
    """However clearly it is said: nothing was passed."""
    seen = failed("unset", "ValueError", "No valid attention backend found for cuda", declared=())
    assert "broken" == judged(seen).verdict


def test_bug_47549_fp8_that_a_backend_lists_and_no_longer_takes_is_seen() -> None:
    seen = failed("fp8", "ValueError", "kv_cache_dtype fp8 needs SM80", backend="FLASHINFER")
    lists = (Declared("FLASHINFER", ()),)
    assert ("overdeclared",) == judged(replace(seen, declared=lists)).remarks


def test_bug_47610_rows_of_another_width_are_a_mismatch() -> None:
    seen = next(one for one in confirmed("dsv4") if one.resolved.kv_cache_dtype == "fp8")
    at, main = next((at, kv) for at, kv in enumerate(seen.kv) if kv.role == "attn")
    assert main.shape is not None
    wide = replace(main, shape=(*main.shape[:-1], 584))
    kv = (*seen.kv[:at], wide, *seen.kv[at + 1 :])
    lines = layout.compare(MODELS["dsv4"], kv, seen.resolved, seen.capability)
    assert any("last dimension of the tensor 584, must be 512" in line for line in lines)


def test_bug_47618_a_dtype_that_differs_between_layers_is_a_mismatch() -> None:
    """What a runner does that decides layer by layer, and does not say so."""
    mixed = Resolved("fp8+auto", "uint8+bfloat16")
    found = judged(record("fp8", resolved=mixed, declared=(), log=()))
    assert "mismatch" == found.verdict
    kv = confirmed("llama3")[0].kv
    assert layout.compare(MODELS["llama3"], kv, mixed, (9, 0))


def test_bug_47618_each_runner_has_a_cell_of_its_own() -> None:
    ids = {Case("llama3", DEFAULT, "fp8", model_runner=runner).id for runner in ("v1", "v2")}
    assert {"llama3-default-fp8-v1", "llama3-default-fp8-v2"} == ids


def test_bug_55221_a_dtype_that_a_listed_backend_fails_on_is_broken() -> None:
    backend = "FLASHINFER_MLA_SPARSE_SM90"
    seen = failed(
        *("fp8", "RuntimeError", "kv_data_type torch.uint8 is not supported"),
        stage="warmup",
        backend=backend,
        declared=(Declared(backend, ()),),
    )
    found = judged(seen)
    assert "broken" == found.verdict
    assert "torch.uint8 is not supported" in found.reason


# ---- Capacity -----------------------------------------------------------------------------------

BUDGET = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"


def test_bug_55509_a_kv_budget_that_is_too_small_names_backend_and_bytes() -> None:
    """vLLM's message has neither; the record has both, whatever the message says."""
    seen = failed("unset", "ValueError", BUDGET, stage="plan")
    memory = Memory(16 << 30, 15 << 30, 1 << 20, True)
    seen = replace(seen, resolved=Resolved(selected="FLASHMLA_SPARSE_DSV4"), memory=memory)
    found = judged(seen)
    assert "oom" == found.verdict
    assert BUDGET.partition(".")[0] in found.reason
    written = loads(dumps(seen))
    assert written.memory is not None
    told = (written.resolved.selected, written.memory.available_bytes)
    assert ("FLASHMLA_SPARSE_DSV4", 1 << 20) == told


def test_bug_51041_a_token_of_dsv4_costs_what_its_states_cost() -> None:
    """43 layers in bf16 without compression would be 43 x 1152 B = 49536 B a token, over 12 times
    as much; a page that is not shared or compressed shows in what was seen."""
    seen = default_of("dsv4")
    per_token = sum(
        kv.layers * kv.page_size_bytes / kv.block_size
        for kv in seen.kv
        if not kv.kind.startswith("SlidingWindow")
    )
    # 21 layers of ratio 4, 20 of ratio 128, 21 indexers, at 256 tokens a block.
    assert (21 * 65 * 576 + 20 * 3 * 576 + 21 * 15 * 576) / 256 == per_token == 3915
    uncompressed = tuple(
        replace(kv, compress_ratio=1) if kv.role == "attn" else kv for kv in seen.kv
    )
    assert layout.compare(MODELS["dsv4"], uncompressed, seen.resolved, seen.capability)


@pytest.mark.parametrize("message", ["", "assert page_size_bytes == other"])
def test_bug_45207_42927_a_bare_assertion_is_unclean(message: str) -> None:
    found = judged(failed("fp8", "AssertionError", message, stage="plan", declared=()))
    assert "unclean" == found.verdict
    assert "AssertionError is no ValueError" in found.reason


HYBRIDS = ("falcon-h1", "jamba", "kimi-linear", "nemotron-h", "qwen3-next")


@pytest.mark.parametrize("model", HYBRIDS)
def test_bug_45207_42927_pages_of_a_hybrid_that_differ_are_a_mismatch(model: str) -> None:
    seen = default_of(model)
    assert 1 == len({kv.page_size_bytes for kv in seen.kv}) < len(seen.kv)
    kv = (replace(seen.kv[0], page_size_bytes=seen.kv[0].page_size_bytes + 16), *seen.kv[1:])
    assert layout.compare(MODELS[model], kv, seen.resolved, seen.capability)


@pytest.mark.parametrize("model", sorted(filter(known, MODELS)))
def test_bug_34814_a_reduced_model_keeps_every_size_that_a_page_is_made_of(model: str) -> None:
    """ "2 cannot be divided by 8" came of a reduction that had shrunk the heads too."""
    config = MODELS[model]
    small = reduce(config).config
    for path in geometry.read(config):
        if path in geometry.SIZES[str(config["model_type"])]:
            full, reduced = config, small
            for key in path:
                full, reduced = full[key], reduced[key]
            assert full == reduced, path
    seen = default_of(model)
    kind = layout.layout_of(
        config, seen.resolved.kv_cache_dtype, seen.resolved.storage_dtype, seen.capability
    )

    def pages(config: object) -> set[tuple[str, int, int, int]]:
        assert isinstance(config, dict)
        found = layout.expected_pages(config, kind, seen.capability)
        return {(p.role, p.compress_ratio, p.block_size, p.page_size_bytes) for p in found}

    assert pages(dict(config)) == pages(dict(small))


def test_bug_55046_no_backend_for_an_embedding_model_is_seen() -> None:
    """The default is broken; a dtype that a backend lists, refused, is overdeclared."""
    message = "No valid attention backend found for cuda with kv_cache_dtype=fp8"
    lists = (Declared("FLASH_ATTN", ()),)
    assert "broken" == judged(failed("unset", "ValueError", message, declared=())).verdict
    assert ("overdeclared",) == judged(failed("fp8", "ValueError", message, declared=lists)).remarks


# ---- Devices, children, time --------------------------------------------------------------------


def test_bug_53320_a_crash_in_graph_capture_is_reached_and_told() -> None:
    """A real device initialises completely, so that capture is behind no depth."""
    assert REAL_STAGES[0] == "warmup"
    found = judged(replace(died("signal", "cudaErrorIllegalAddress", -6), stage="warmup"), OK)
    assert "crashed" == found.verdict
    assert "died by SIGABRT at stage warmup" in found.reason


def test_bug_53320_a_virtual_device_does_not_claim_to_have_been_there() -> None:
    (pool,) = options(["virtual:h20"], []).pools
    assert "allocate" == options(["virtual:h20"], []).depth_on(pool.device)


@pytest.mark.parametrize("end", ["signal", "exit"])
def test_bug_42446_43030_out_of_memory_on_a_slice_is_no_crash(end: str) -> None:
    assert "oom" == judged(died(end, f"RuntimeError: {MIG_ASSERT}", -6)).verdict
    assert "oom" == judged(failed("unset", "RuntimeError", MIG_ASSERT)).verdict
    assert "crashed" == judged(died(end, "Segmentation fault", -11)).verdict


def test_bug_57362_24144_40597_memory_that_is_left_is_charged_to_its_cell() -> None:
    leaking = record(leaked_bytes=3 << 30)
    found = judged(leaking, OK, oracle=lambda _: [])
    assert "crashed" == found.verdict
    assert "left 3072 MiB" in found.reason
    assert "ok" == judged(replace(leaking, leaked_bytes=None), OK, oracle=lambda _: []).verdict


def test_bug_41423_38097_a_child_that_never_ran_the_cell_is_no_pass() -> None:
    """It exited with 0, and left nothing."""
    assert "crashed" == judged(died("silent", code=0), OK).verdict
    assert not judged(died("silent", code=0), OK).passes
    assert not notrun().passes


def test_bug_52334_a_start_that_stalls_is_a_timeout_with_its_stage() -> None:
    found = judged(died("timeout", "loading"), OK)
    assert ("timeout", False) == (found.verdict, found.passes)
    assert "stage model after 120 s" in found.reason


# ---- docs/bugs.md -------------------------------------------------------------------------------

DOCUMENT = ROOT / "docs" / "bugs.md"


def rows() -> Iterator[list[str]]:
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and line[2].isdigit():
            yield [part.strip() for part in line.strip("|").split("|")]


def test_every_bug_has_a_row() -> None:
    numbers = [int(n) for row in rows() for n in row[0].split(",")]
    assert BUGS == set(numbers)
    assert len(BUGS) == len(numbers)


def test_every_row_says_where_it_is_shown() -> None:
    for number, symptom, shown in rows():
        assert symptom
        assert re.search(r"`[^`]+`", shown) or "needs a GPU" in shown, number


def test_every_test_that_the_document_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", DOCUMENT.read_text(encoding="utf-8"))
    assert len(named) > 30
    for path, function in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, path


def test_every_cell_that_the_document_names_exists() -> None:
    """Model, backend and dtype; the backends are members of vLLM's AttentionBackendEnum."""
    backends = {
        *(DEFAULT, "FLASHINFER", "FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_SM90"),
    }
    named = {n for row in rows() for n in re.findall(r"`([\w.-]+)`", row[2])}
    assert len(named) > 10
    for name in named:
        model = max((key for key in MODELS if name.startswith(f"{key}-")), key=len, default="")
        assert model, name
        backend, _, dtype = name.removeprefix(f"{model}-").partition("-")
        assert backend in backends, name
        assert dtype.removesuffix("-v1").removesuffix("-v2") in (UNSET, *geometry.NAMES), name


def test_every_bug_has_a_test_that_is_named_after_it() -> None:
    text = "".join((ROOT / path).read_text() for path in ("tests/test_bugs.py", "docs/bugs.md"))
    text += (ROOT / "tests" / "engine" / "test_bugs.py").read_text()
    named = {int(n) for name in re.findall(r"test_bug_([\d_]+)_", text) for n in name.split("_")}
    # Shown where they belong, by tests that docs/bugs.md names.
    elsewhere = {33021, 41848, 50463}
    assert BUGS == named | elsewhere
