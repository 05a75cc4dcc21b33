"""Every verdict, from records alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from harness.case import Case
from harness.expect import Expectation, Explicit
from harness.known import Known
from harness.record import Declared, Fault, KVCache, Record, Resolved
from harness.verdict import (
    PASSING,
    Judgement,
    clear_refusal,
    declared_for,
    judge,
    notrun,
    skipped,
)

BACKEND = "FLASHMLA_SPARSE_DSV4"
FAMILY = {
    "ValueError": ("ValueError", "Exception"),
    "ValidationError": ("ValidationError", "ValueError", "Exception"),
    "AssertionError": ("AssertionError", "Exception"),
    "KeyError": ("KeyError", "LookupError", "Exception"),
    "ZeroDivisionError": ("ZeroDivisionError", "ArithmeticError", "Exception"),
    "RuntimeError": ("RuntimeError", "Exception"),
    "NotImplementedError": ("NotImplementedError", "RuntimeError", "Exception"),
    "OutOfMemoryError": ("OutOfMemoryError", "RuntimeError", "Exception"),
}
GOT_AUTO = "DeepseekV4 fp8_ds_mla layout only supports fp8 kv-cache, got auto"
MIG_ASSERT = (
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131'
)
SUPPORTED = (Declared(BACKEND, ()),)
REFUSED = (Declared(BACKEND, ("kv_cache_dtype not supported", "sinks not supported")),)
PACKED = Resolved("fp8_ds_mla", "uint8", "fp8_ds_mla", (BACKEND,), BACKEND)
MAIN = KVCache(
    kind="MLAAttentionSpec",
    role="attn",
    layers=21,
    block_size=256,
    page_size_bytes=37440,
    content_bytes=37376,
    dtype="uint8",
    compress_ratio=4,
    backend=BACKEND,
    shape=(-1, 1, 64, 584),
    tensor_dtype="uint8",
)
LOGGED = ("INFO Using DeepSeek's fp8_ds_mla KV cache format.",)
OK = Explicit(
    id="dsv4-default-unset",
    outcome="ok",
    why="vllm#47174",
    kv_cache_dtype="fp8_ds_mla",
    storage_dtype="uint8",
    written_back=True,
    pages=(("attn", 4, 37440),),
    tail=584,
)
REJECTED = Explicit("dsv4-default-bfloat16", "rejected", "no bf16 form", says=("--kv-cache-dtype",))
KNOWN = Known(
    name="got-auto",
    cells=("dsv4-*",),
    verdict="broken",
    signature="got auto",
    link="https://github.com/vllm-project/vllm/issues/47174",
    since=date(2026, 1, 1),
    expires=date(2026, 12, 31),
    reason="nothing resolves auto",
)


def record(dtype: str = "unset", backend: str = "default", **facts: Any) -> Record:
    """A record that went through, but for `facts`."""
    case = Case("dsv4", backend, dtype)
    base = Record(
        id=case.id,
        model=case.model,
        backend=backend,
        kv_cache_dtype=dtype,
        device="virtual:h200",
        device_kind="virtual",
        capability=(9, 0),
        engine="0.33.0",
        depth="allocate",
        stage="allocate",
        resolved=PACKED,
        kv=(MAIN,),
        declared=SUPPORTED,
        log=LOGGED,
    )
    return replace(base, **facts)


def fault(kind: str, message: str) -> Fault:
    return Fault(kind, FAMILY[kind], message, "vllm/models/deepseek_v4/attention.py:__init__")


def failed(dtype: str, kind: str, message: str, **facts: Any) -> Record:
    """A record that failed while the model was built."""
    facts = {"stage": "model", "resolved": Resolved(), "kv": (), "log": (), **facts}
    return record(dtype, error=fault(kind, message), **facts)


def died(end: str, tail: str = "", code: int | None = None) -> Record:
    return record(end=end, stage="model", tail=tail, exit_code=code, seconds={"total": 120.4})


def judged(
    seen: Record,
    explicit: Explicit | None = None,
    known: Known | None = None,
    oracle: Callable[[Record], list[str] | None] = lambda record: None,
) -> Judgement:
    return judge(seen, Expectation(explicit, known), oracle)


# ---- ok ----


def test_ok_names_everything_that_confirmed_it() -> None:
    found = judged(record(), OK, oracle=lambda record: [])
    assert ("ok", ("explicit", "oracle", "contract")) == (found.verdict, found.vouched)
    assert found.passes
    assert "confirmed by explicit, oracle, contract" == found.reason


def test_ok_that_nothing_confirms_says_so() -> None:
    assert Judgement("ok", "initialised; nothing confirms it") == judged(record(declared=()))


# ---- broken ----


def test_founding_bug_with_nothing_passed_is_broken() -> None:
    found = judged(failed("unset", "AssertionError", GOT_AUTO))
    assert "broken" == found.verdict
    assert not found.passes
    assert "nothing was passed" in found.reason
    assert GOT_AUTO in found.reason


def test_a_block_size_was_passed_too() -> None:
    """A refusal that names it is clear, and one that does not is no failure of the defaults."""
    asked = {"kv": (), "stage": "plan", "block_size": 16}
    named = judged(record(error=fault("ValueError", "reduce --block-size to 64"), **asked))
    assert "rejected" == named.verdict
    unnamed = judged(record(error=fault("ValueError", "does not divide"), **asked))
    assert "nothing was passed" not in unnamed.reason


def test_founding_bug_with_auto_is_broken_through_the_explicit_case() -> None:
    seen = failed("auto", "AssertionError", GOT_AUTO, declared=())
    assert "broken" == judged(seen, OK).verdict
    assert "unclean" == judged(seen).verdict


@pytest.mark.parametrize("explicit", [None, OK])
def test_a_clear_refusal_of_the_default_is_broken(explicit: Explicit | None) -> None:
    found = judged(failed("unset", "ValueError", "kv_cache_dtype", declared=REFUSED), explicit)
    assert "broken" == found.verdict


def test_declared_supported_yet_failing_by_accident_is_broken() -> None:
    found = judged(failed("auto", "KeyError", "'kv_cache_dtype'"))
    assert "broken" == found.verdict
    assert f"{BACKEND} declares it supported" in found.reason


@pytest.mark.parametrize("explicit", [None, REJECTED])
def test_an_engine_that_cannot_be_imported_is_broken(explicit: Explicit | None) -> None:
    message = "--kv-cache-dtype"
    seen = failed("bfloat16", "ValueError", message, stage="import", declared=REFUSED)
    assert "broken" == judged(seen, explicit).verdict


# ---- a host that cannot compute the weights ----

NO_KERNEL = (
    "Failed to find a kernel that can implement the ScaledMM linear layer. Reasons: \n"
    "CPUFp8BlockScaledMMKernel requires AMX tile support (Sapphire Rapids or newer).."
)
ON_CPU = {"device": "cpu", "device_kind": "cpu", "capability": None, "declared": ()}


@pytest.mark.parametrize("explicit", [None, OK, REJECTED])
@pytest.mark.parametrize("known", [None, KNOWN])
@pytest.mark.parametrize("dtype", ["unset", "fp8"])
def test_a_cpu_that_cannot_compute_the_weights_is_skipped(
    dtype: str, explicit: Explicit | None, known: Known | None
) -> None:
    found = judged(failed(dtype, "ValueError", NO_KERNEL, **ON_CPU), explicit, known)
    assert ("skipped", None, None) == (found.verdict, found.known, found.stale)
    assert "this CPU lacks AMX tile support" in found.reason
    assert not found.passes


@pytest.mark.parametrize(
    ("kind", "message", "facts"),
    [
        ("ValueError", NO_KERNEL, {}),
        ("ValueError", NO_KERNEL, {"device": "GPU-0", "device_kind": "gpu"}),
        ("ValueError", NO_KERNEL, {"device": "MIG-0", "device_kind": "mig"}),
        ("ValueError", f"{NO_KERNEL}\nOtherKernel has a bug.", ON_CPU),
        ("ValueError", "FP8 KV cache on CPU requires x86 with AVX-512 or AMX.", ON_CPU),
        ("AssertionError", NO_KERNEL, ON_CPU),
        ("ValueError", NO_KERNEL, {**ON_CPU, "stage": "warmup"}),
    ],
)
def test_no_other_failure_is_the_hosts(kind: str, message: str, facts: dict[str, Any]) -> None:
    assert "broken" == judged(failed("unset", kind, message, **facts)).verdict


# ---- rejected, unclean ----


def test_a_clear_refusal_of_what_is_declared_unsupported_is_rejected() -> None:
    found = judged(failed("nvfp4", "ValueError", "nvfp4 will not do", declared=REFUSED))
    assert Judgement("rejected", "ValueError: nvfp4 will not do") == found


def test_a_clear_refusal_where_nobody_declares_anything_is_rejected() -> None:
    found = judged(failed("nvfp4", "NotImplementedError", "this nvfp4 cache", declared=()))
    assert ("rejected", ()) == (found.verdict, found.remarks)


def test_a_clear_refusal_of_what_is_declared_supported_is_overdeclared() -> None:
    found = judged(failed("bfloat16", "ValueError", "kv_cache_dtype is bfloat16"))
    assert ("rejected", ("overdeclared",)) == (found.verdict, found.remarks)
    assert found.passes


@pytest.mark.parametrize("declared", [(), REFUSED])
@pytest.mark.parametrize("kind", ["AssertionError", "KeyError", "ZeroDivisionError"])
def test_a_refusal_by_accident_is_unclean(kind: str, declared: tuple[Declared, ...]) -> None:
    found = judged(failed("nvfp4", kind, "kv_cache_dtype nvfp4", declared=declared))
    assert "unclean" == found.verdict
    assert f"{kind} is no ValueError" in found.reason


def test_a_refusal_that_names_neither_option_nor_backend_is_unclean() -> None:
    found = judged(failed("nvfp4", "ValueError", "unsupported", declared=REFUSED))
    assert "unclean" == found.verdict
    assert "names neither option nor backend" in found.reason


def test_an_explicit_refusal_must_say_the_advice() -> None:
    advice = "kv-cache bfloat16: set `--kv-cache-dtype fp8`"
    assert "rejected" == judged(failed("bfloat16", "ValueError", advice), REJECTED).verdict
    bare = judged(failed("bfloat16", "ValueError", "no bfloat16 kv-cache"), REJECTED)
    assert "unclean" == bare.verdict
    assert "does not say '--kv-cache-dtype'" in bare.reason


def test_an_explicit_refusal_by_assertion_is_unclean_though_the_advice_is_there() -> None:
    seen = failed("bfloat16", "AssertionError", "--kv-cache-dtype fp8")
    assert "unclean" == judged(seen, REJECTED).verdict


@pytest.mark.parametrize(
    ("clear", "kind", "message"),
    [
        (True, "ValueError", "Invalid KV_CACHE_DTYPE"),
        (True, "ValidationError", "1 validation error for CacheConfig\ncache_dtype\n  Input ..."),
        (True, "NotImplementedError", "no such attention backend"),
        (True, "ValueError", "flashmla cannot do this"),
        (True, "ValueError", "fp8 is not for this model"),
        (False, "ValueError", "fp8_e5m2 is not for this model"),
        (False, "ValueError", "mxfp8 is not for this model"),
        (False, "ValueError", "head size 80"),
        (False, "RuntimeError", "kv_cache_dtype fp8"),
        (False, "AssertionError", "kv_cache_dtype fp8"),
    ],
)
def test_what_a_clear_refusal_is(clear: bool, kind: str, message: str) -> None:
    assert clear == clear_refusal(fault(kind, message), Case("dsv4", "FLASHMLA", "fp8"))


def test_auto_and_default_are_no_names_that_a_refusal_could_say() -> None:
    assert not clear_refusal(fault("ValueError", "auto default"), Case("dsv4", "default", "auto"))


def test_a_key_error_that_is_also_a_value_error_is_no_refusal() -> None:
    both = Fault("Odd", ("Odd", "KeyError", "ValueError", "Exception"), "kv_cache_dtype", "a.py:f")
    assert not clear_refusal(both, Case("dsv4"))


# ---- unguarded ----


def test_going_through_though_declared_unsupported_is_unguarded() -> None:
    found = judged(record("fp8_e5m2", declared=REFUSED))
    assert "unguarded" == found.verdict
    reasons = "kv_cache_dtype not supported; sinks not supported"
    assert f"went through although {BACKEND} declares it unsupported: {reasons}" == found.reason


def test_going_through_though_an_explicit_case_says_rejected_is_unguarded() -> None:
    found = judged(record("bfloat16"), REJECTED)
    assert ("unguarded", "must be refused (no bf16 form), yet it went through") == (
        found.verdict,
        found.reason,
    )


def test_a_contract_that_refuses_the_default_hides_no_difference() -> None:
    """A wrong page behind a known `unguarded` would pass for known."""
    small = replace(MAIN, page_size_bytes=32768)
    assert "unguarded" == judged(record(kv=(MAIN,), declared=REFUSED), OK).verdict
    found = judged(record(kv=(small,), declared=REFUSED), OK)
    assert "mismatch" == found.verdict
    assert "32768" in found.reason


def test_a_refusal_may_be_yet_to_come_where_nothing_was_built() -> None:
    seen = record("bfloat16", depth="config", stage="config", declared=REFUSED, kv=())
    assert "ok" == judged(replace(seen, resolved=Resolved()), REJECTED).verdict


def test_of_an_alias_that_went_through_the_serving_backend_counts() -> None:
    alias = Declared("FLASHMLA_SPARSE", ("not for this model",))
    seen = record(backend="FLASHMLA_SPARSE", declared=(alias, *SUPPORTED))
    assert SUPPORTED[0] == declared_for(seen)
    assert "ok" == judged(seen).verdict


def test_of_a_name_that_failed_its_own_entry_counts_else_the_only_one() -> None:
    asked = Declared("FLASHMLA_SPARSE", ("not for this model",))
    seen = failed("fp8", "ValueError", "no", backend="FLASHMLA_SPARSE", declared=(asked, *REFUSED))
    assert asked == declared_for(seen)
    assert REFUSED[0] == declared_for(replace(seen, declared=REFUSED))
    assert declared_for(replace(seen, declared=(*REFUSED, Declared("OTHER", ())))) is None


def test_of_the_engines_own_choice_the_selected_entry_counts() -> None:
    both = (Declared("OTHER", ("no",)), *SUPPORTED)
    assert SUPPORTED[0] == declared_for(record(declared=both))
    late = record(error=fault("KeyError", "x"), declared=both)
    assert SUPPORTED[0] == declared_for(late)
    assert declared_for(record(declared=both[:1])) is None


def test_of_several_serving_backends_one_that_refuses_counts_and_one_unknown_vouches_not() -> None:
    mixed = replace(PACKED, selected=f"{BACKEND}+OTHER")
    refusing = Declared("OTHER", ("no",))
    assert refusing == declared_for(record(resolved=mixed, declared=(*SUPPORTED, refusing)))
    assert declared_for(record(resolved=mixed, declared=SUPPORTED)) is None


@pytest.mark.parametrize(
    ("verdict", "asked", "lists", "reasons"),
    [
        ("ok", "fp8_e4m3", "fp8", ("kv_cache_dtype not supported",)),
        ("ok", "fp8", "fp8_e4m3", ("kv_cache_dtype not supported",)),
        ("unguarded", "fp8_e5m2", "fp8", ("kv_cache_dtype not supported",)),
        ("unguarded", "fp8_e4m3", "auto", ("kv_cache_dtype not supported",)),
        ("unguarded", "fp8_e4m3", "fp8", ("compute capability not supported",)),
    ],
)
def test_a_contract_that_lists_an_alias_does_not_refuse_the_dtype(
    verdict: str, asked: str, lists: str, reasons: tuple[str, ...]
) -> None:
    assert (
        verdict == judged(record(asked, declared=(Declared(BACKEND, reasons, (lists,)),))).verdict
    )


# ---- mismatch ----


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (
            "dtype written back to the cache config is auto, must be fp8_ds_mla",
            {"resolved": replace(PACKED, cache_config="auto")},
        ),
        (
            "resolved dtype is fp8, must be fp8_ds_mla",
            {"resolved": replace(PACKED, kv_cache_dtype="fp8")},
        ),
        (
            "storage dtype is bfloat16, must be uint8",
            {"resolved": replace(PACKED, storage_dtype="bfloat16")},
        ),
        (
            "page of attn (ratio 4) is 37376, must be 37440",
            {"kv": (replace(MAIN, page_size_bytes=37376),)},
        ),
        (
            "page of attn (ratio 4) is None, must be 37440",
            {"kv": (MAIN, replace(MAIN, compress_ratio=128)), "drop": True},
        ),
        (
            "last dimension of attn is 512, must be 584",
            {"kv": (replace(MAIN, shape=(-1, 1, 64, 512)),)},
        ),
        ("number of layers with a KV cache is 0, must be more", {"kv": ()}),
    ],
)
def test_anything_that_an_explicit_case_demands(reason: str, change: dict[str, Any]) -> None:
    if change.pop("drop", False):
        change["kv"] = change["kv"][1:]
    found = judged(record(**change), OK)
    assert "mismatch" == found.verdict
    assert reason == found.reason.split(" (and")[0]
    assert () == found.vouched


def test_one_byte_off_in_the_oracles_eyes_is_a_mismatch() -> None:
    def oracle(record: Record) -> list[str]:
        sizes = {kv.page_size_bytes for kv in record.kv}
        return [] if sizes == {37440} else [f"pages are {sizes}", "and so on"]

    assert "ok" == judged(record(), oracle=oracle).verdict
    found = judged(record(kv=(replace(MAIN, page_size_bytes=37441),)), oracle=oracle)
    assert ("mismatch", "pages are {37441} (and 1 more)") == (found.verdict, found.reason)


def test_no_kv_cache_is_a_mismatch_for_an_explicit_case_only() -> None:
    assert "ok" == judged(record(kv=())).verdict


@pytest.mark.parametrize("depth", ["config", "model"])
def test_what_a_shallow_depth_cannot_show_is_not_missed(depth: str) -> None:
    shown = PACKED if depth == "model" else Resolved(cache_config="auto")
    seen = record(depth=depth, stage=depth, kv=(), resolved=shown, declared=())
    found = judged(seen, OK, oracle=lambda record: ["everything is missing"])
    assert ("ok", ()) == (found.verdict, found.vouched)


def test_before_allocation_there_are_no_tensors_to_miss() -> None:
    seen = record(depth="plan", stage="plan", kv=(replace(MAIN, shape=None),))
    assert "ok" == judged(seen, OK).verdict


# ---- another dtype than was asked ----


def test_another_dtype_that_the_log_tells_of_is_coerced() -> None:
    found = judged(record("fp8"))
    assert ("ok", ("coerced",)) == (found.verdict, found.remarks)


@pytest.mark.parametrize("log", [(), ("INFO kv_cache_dtype fp8_ds_mla_v2",)])
def test_another_dtype_in_silence_is_a_mismatch(log: tuple[str, ...]) -> None:
    found = judged(record("fp8", log=log))
    assert ("mismatch", ()) == (found.verdict, found.remarks)
    assert "stored fp8_ds_mla though fp8 was asked, and no log line says so" == found.reason


@pytest.mark.parametrize(("stored", "verdict"), [("bfloat16", "ok"), ("float16", "mismatch")])
def test_the_models_own_dtype_may_be_the_one_asked_for(stored: str, verdict: str) -> None:
    """DeepSeek-V3.2 renames bfloat16 to auto, and stores bfloat16."""
    own = Resolved("auto", stored, "auto", (BACKEND,), BACKEND)
    assert verdict == judged(record("bfloat16", resolved=own, log=())).verdict


def test_of_layers_that_differ_each_name_must_be_told_of() -> None:
    mixed = Resolved("bfloat16+fp8", "bfloat16+float8_e4m3fn", "fp8", (BACKEND,), BACKEND)
    assert "mismatch" == judged(record("fp8", resolved=mixed, log=())).verdict
    told = judged(record("fp8", resolved=mixed, log=("WARNING some layers keep bfloat16",)))
    assert ("ok", ("coerced",)) == (told.verdict, told.remarks)


@pytest.mark.parametrize(
    ("verdict", "asked", "resolved", "stored"),
    [
        ("ok", "fp8", "fp8_e4m3", "float8_e4m3fn"),
        ("ok", "fp8_e4m3", "fp8", "uint8"),
        ("ok", "fp8_e5m2", "fp8_e5m2", "float8_e5m2"),
        ("ok", "bfloat16", "bfloat16", "bfloat16"),
        ("mismatch", "fp8", "fp8", "bfloat16"),
        ("mismatch", "fp8_e5m2", "fp8_e5m2", "float8_e4m3fn"),
        ("mismatch", "float16", "float16", "bfloat16"),
        ("mismatch", "bfloat16", "bfloat16", "uint8"),
        ("ok", "auto", "fp8", "bfloat16"),
        ("ok", "unset", "fp8", "bfloat16"),
        ("ok", "nvfp4", "nvfp4", "bfloat16"),
    ],
)
def test_a_dtype_that_was_ignored_shows_in_the_element_type(
    verdict: str, asked: str, resolved: str, stored: str
) -> None:
    seen = record(asked, resolved=Resolved(resolved, stored, resolved), declared=(), log=())
    assert (verdict, ()) == (judged(seen).verdict, judged(seen).remarks)


# ---- a child that died ----


@pytest.mark.parametrize(
    ("verdict", "reason", "seen"),
    [
        (
            "crashed",
            "died by SIGSEGV at stage model and left no record: last words",
            died("signal", "first\nlast words\n\n", -11),
        ),
        ("crashed", "exited with 127 at stage model and left no record", died("exit", "", 127)),
        ("crashed", "exited with 0 at stage model and left no record", died("silent", "", 0)),
        ("timeout", "deadline passed at stage model after 120 s", died("timeout", "", -9)),
        ("infra", "driver is gone", died("infra", "driver is gone")),
        ("infra", "host or device was not usable", died("infra")),
        ("crashed", "ended at stage spec without an error", record(stage="spec")),
    ],
)
def test_a_child_that_did_not_finish(verdict: str, reason: str, seen: Record) -> None:
    found = judged(seen, OK)
    assert (verdict, reason) == (found.verdict, found.reason)
    assert not found.passes


@pytest.mark.parametrize(
    "tail",
    ["torch.OutOfMemoryError: Allocation on device", "CUDA out of memory. Tried ...", MIG_ASSERT],
)
@pytest.mark.parametrize("end", ["signal", "exit", "silent"])
def test_out_of_memory_is_told_from_a_crash(end: str, tail: str) -> None:
    assert "oom" == judged(died(end, f"x\n{tail}\nbye", -6)).verdict


def test_another_nvml_assert_is_a_crash() -> None:
    text = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/other.cpp":1'
    assert "crashed" == judged(died("signal", text, -6)).verdict


@pytest.mark.parametrize("explicit", [None, OK, REJECTED])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("OutOfMemoryError", "Allocation on device"),
        ("RuntimeError", MIG_ASSERT),
        ("ValueError", "CUDA out of memory: no kv cache"),
    ],
)
def test_a_fault_that_is_out_of_memory(kind: str, message: str, explicit: Explicit | None) -> None:
    assert "oom" == judged(failed("bfloat16", kind, message), explicit).verdict


# ---- known failures ----


def test_a_known_failure_passes_with_its_link() -> None:
    found = judged(failed("unset", "AssertionError", GOT_AUTO), known=KNOWN)
    assert ("broken", KNOWN.link, None) == (found.verdict, found.known, found.stale)
    assert found.passes


def test_a_known_failure_is_recognised_by_its_place_too() -> None:
    known = replace(KNOWN, signature="deepseek_v4/attention.py:__init__")
    assert judged(failed("unset", "AssertionError", GOT_AUTO), known=known).passes


def test_a_known_failure_that_no_longer_fails_is_stale_and_fails_the_cell() -> None:
    found = judged(record(), known=KNOWN)
    assert ("ok", None) == (found.verdict, found.known)
    assert "known failure got-auto no longer fails: remove it from cases/known.yaml" == found.stale
    assert not found.passes


@pytest.mark.parametrize(
    ("verdict", "seen"),
    [
        ("broken", failed("unset", "AssertionError", "something else")),
        ("unguarded", record("fp8_e5m2", declared=REFUSED)),
        ("crashed", died("signal", "got auto", -11)),
    ],
)
def test_another_failure_than_the_known_one_fails(verdict: str, seen: Record) -> None:
    found = judged(seen, known=KNOWN)
    assert (verdict, None, None) == (found.verdict, found.known, found.stale)
    assert "known failure got-auto expects broken with 'got auto'" in found.reason
    assert not found.passes


def test_a_device_that_was_not_usable_says_nothing_of_a_known_failure() -> None:
    assert Judgement("infra", "driver is gone") == judged(
        died("infra", "driver is gone"), None, KNOWN
    )


# ---- the rest ----


def test_cells_without_a_record() -> None:
    assert Judgement("skipped", "needs 40 GiB") == skipped("needs 40 GiB")
    assert Judgement("notrun", "planned, but never reported") == notrun()
    assert not notrun().passes
    assert PASSING == {"ok", "rejected"}


def test_a_reason_is_one_line_of_a_sensible_length() -> None:
    found = judged(failed("nvfp4", "ValueError", "kv_cache_dtype\n" + "x" * 5000, declared=()))
    assert "ValueError: kv_cache_dtype xxx" == found.reason[:30]
    assert len("ValueError: ") + 300 == len(found.reason)


@pytest.mark.parametrize(
    ("verdict", "dtype", "message"),
    [
        ("rejected", "turboquant_k8v4", "TurboQuant KV cache requires full-attention layers"),
        # It speaks of the KV cache, and yet of nothing that was passed.
        ("unclean", "turboquant_k8v4", "No KV cache layout satisfies every supported set"),
        ("unclean", "ultraquant_4bit", "TurboQuant KV cache requires full-attention layers"),
    ],
)
def test_a_refusal_names_what_was_passed(verdict: str, dtype: str, message: str) -> None:
    assert verdict == judged(failed(dtype, "ValueError", message, declared=())).verdict
