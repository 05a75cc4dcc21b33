"""Verdicts: a record against an expectation. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness import isa
from harness.case import DEFAULT, UNSET, Case
from harness.record import STAGES, Declared, Fault, Record

if TYPE_CHECKING:
    # known.py checks its verdicts against VERDICTS, so this module must load without it.
    from harness.expect import Expectation, Explicit
    from harness.known import Known

VERDICTS = (
    "ok",
    "rejected",
    "broken",
    "unguarded",
    "unclean",
    "mismatch",
    "crashed",
    "timeout",
    "oom",
    "infra",
    "skipped",
    "notrun",
)
"""Every verdict there is, in the order in which summaries list them."""

PASSING = frozenset({"ok", "rejected"})

Oracle = Callable[[Record], "list[str] | None"]
"""The layout oracle: disagreements, [] where it confirms, None where it has no opinion."""


@dataclass(frozen=True)
class Judgement:
    """What a record means."""

    verdict: str
    reason: str
    """One line for people: why. Empty only where there is nothing to say."""
    remarks: tuple[str, ...] = ()
    """`overdeclared`, `coerced`: they fail nothing."""
    vouched: tuple[str, ...] = ()
    """Which expectations confirmed an `ok`: of `explicit`, `oracle`, `contract`."""
    known: str | None = None
    """The bug link of the known failure that this verdict fulfils."""
    stale: str | None = None
    """What is wrong with a known failure that no longer fails; fails the cell."""

    @property
    def passes(self) -> bool:
        """True where pytest passes the cell: verdict as it should be, or a known failure."""
        return self.stale is None and (self.verdict in PASSING or self.known is not None)


def reached(record: Record, stage: str) -> bool:
    """True where `record` got to `stage` or beyond."""
    return STAGES.index(record.stage) >= STAGES.index(stage)


def skipped(reason: str) -> Judgement:
    """The judgement of a cell that cannot run here."""
    return Judgement("skipped", reason)


UNREPORTED = "planned, but never reported"


def notrun(reason: str = UNREPORTED) -> Judgement:
    """The judgement of a cell that was planned and left no record."""
    return Judgement("notrun", reason)


def judge(record: Record, expectation: Expectation, oracle: Oracle) -> Judgement:
    """What `record` means against all that is expected of it. `oracle` is asked only where
    initialisation went through far enough to have KV-cache specs."""
    found = _charged(record, _judged(record, expectation.explicit, oracle))
    return found if expectation.known is None else _against(expectation.known, found, record.error)


def _judged(record: Record, explicit: Explicit | None, oracle: Oracle) -> Judgement:
    if record.end != "finished":
        return _ended(record)
    if record.error is not None:
        return _failed(record, record.error, explicit)
    if record.stage != record.depth:
        return Judgement("crashed", f"ended at stage {record.stage} without an error")
    return _completed(record, explicit, oracle)


def _charged(record: Record, found: Judgement) -> Judgement:
    """The judgement with a leak of device memory charged to its cell."""
    if record.leaked_bytes is None:
        return found
    text = f"left {record.leaked_bytes >> 20} MiB of device memory in use after it had ended"
    if found.verdict in PASSING:
        return Judgement("crashed", text)
    return replace(found, reason=f"{found.reason}; {text}")


def _against(known: Known, found: Judgement, fault: Fault | None) -> Judgement:
    """The judgement of a cell that is known to fail."""
    if found.verdict in PASSING:
        text = f"known failure {known.name} no longer fails: remove it from cases/known.yaml"
        return replace(found, stale=text)
    told = (found.reason,) if fault is None else (found.reason, fault.message, fault.where)
    if found.verdict == known.verdict and any(known.signature in text for text in told):
        return replace(found, known=known.link)
    if found.verdict in ("infra", "skipped"):
        return found
    other = f"known failure {known.name} expects {known.verdict} with {known.signature!r}"
    return replace(found, reason=f"{found.reason} ({other})")


# ---- A child that died, or failed -------------------------------------------------------------

_OUT_OF_MEMORY = re.compile(
    r"torch\.(?:cuda\.)?OutOfMemoryError"
    r"|CUDA out of memory"
    # vLLM's own words where the KV cache does not fit.
    r"|No available memory for the cache blocks"
    r"|KV cache is needed, which is larger than the available KV cache memory"
    # How it surfaces on a MIG slice, where NVML refuses the allocator's question.
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED[^\n]*CUDACachingAllocator"
)

_REFUSALS = frozenset({"ValueError", "NotImplementedError"})
_ACCIDENTS = frozenset(
    {"AssertionError", "AttributeError", "IndexError", "KeyError", "TypeError"}
    | {"ZeroDivisionError"}
)

_OPTION_NAMES = (
    "kv_cache_dtype",
    "kv-cache-dtype",
    "kv cache dtype",
    "cache_dtype",
    "attention backend",
    "attention_backend",
)

_BLOCK_SIZE_NAMES = ("block_size", "block-size", "block size")
"""What a refusal may name where a block size was passed."""


def _ended(record: Record) -> Judgement:
    last = next((line for line in reversed(record.tail.splitlines()) if line.strip()), "")
    told = f": {_line(last)}" if last else ""
    if record.end == "infra":
        return Judgement("infra", _line(last) or "host or device was not usable")
    if record.end == "timeout":
        seconds = record.seconds.get("total")
        after = "" if seconds is None else f" after {seconds:.0f} s"
        return Judgement("timeout", f"deadline passed at stage {record.stage}{after}{told}")
    if _OUT_OF_MEMORY.search(record.tail):
        return Judgement("oom", f"out of device memory at stage {record.stage}{told}")
    how = f"{_exit(record.exit_code)} at stage {record.stage} and left no record"
    return Judgement("crashed", how + told)


def _exit(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"died by {signal.Signals(-code).name}"
    except ValueError:
        return f"died by signal {-code}"


def _failed(record: Record, fault: Fault, explicit: Explicit | None) -> Judgement:
    told = f"{fault.type}: {_line(fault.message)}"
    at = f"at stage {record.stage}: {told}"
    if "OutOfMemoryError" in (fault.type, *fault.bases) or _OUT_OF_MEMORY.search(fault.message):
        return Judgement("oom", f"out of device memory {at}")
    if record.stage == STAGES[0]:
        return Judgement("broken", f"the engine cannot be imported: {told}")
    if (lacking := _host_lacks(record, fault)) is not None:
        return skipped(lacking)
    case = Case(record.model, record.backend, record.kv_cache_dtype, record.block_size)
    flaw = _flaw(fault, case)
    must = ""
    remarks: tuple[str, ...] = ()
    if explicit is not None and explicit.outcome == "rejected":
        unsaid = [words for words in explicit.says if words not in fault.message]
        if unsaid and not flaw:
            flaw = f"the message does not say {' nor '.join(map(repr, unsaid))}"
    elif explicit is not None:
        must = f"must work ({explicit.why})"
    elif case.plain:
        must = "nothing was passed"
    elif (declared := declared_for(record)) is not None and not declared.reasons:
        must = f"{declared.backend} declares it supported" if flaw else ""
        remarks = ("overdeclared",)
    if must:
        return Judgement("broken", f"{must}, yet it failed {at}")
    if flaw:
        return Judgement("unclean", f"refused, but not clearly ({flaw}) {at}")
    return Judgement("rejected", told, remarks)


def _host_lacks(record: Record, fault: Fault) -> str | None:
    """Why the host of a CPU cell cannot compute the model's weights; None where it is not that.
    With other weights the cell would run, so it says nothing of the KV cache."""
    if record.device_kind != "cpu" or record.stage != "model" or fault.type != "ValueError":
        return None
    return isa.lacking(fault.message)


def clear_refusal(fault: Fault, case: Case) -> bool:
    """True where the exception is a ValueError or NotImplementedError, nothing that happens by
    accident, and its message names the option, the backend or the dtype that was passed."""
    return not _flaw(fault, case)


def _flaw(fault: Fault, case: Case) -> str:
    """Why `fault` is no clear refusal; empty where it is one."""
    classes = {fault.type, *fault.bases}
    if not classes & _REFUSALS or classes & _ACCIDENTS:
        return f"{fault.type} is no ValueError"
    message = fault.message.lower()
    names: tuple[str, ...] = _OPTION_NAMES
    names += () if case.backend == DEFAULT else (case.backend.lower(),)
    names += _BLOCK_SIZE_NAMES if case.block_size else ()
    if any(name in message for name in names):
        return ""
    # By its full name, or that of its format: `TurboQuant` for turboquant_k8v4.
    asked = case.kv_cache_dtype.lower()
    if asked not in (UNSET, "auto") and any(
        _names(message, name) for name in (asked, asked.partition("_")[0])
    ):
        return ""
    return "the message names neither option nor backend"


# ---- Initialisation that went through ---------------------------------------------------------

_ELEMENT_TYPES = {
    "bfloat16": {"bfloat16"},
    "float16": {"float16"},
    "fp8": {"float8_e4m3fn", "uint8"},
    "fp8_e4m3": {"float8_e4m3fn", "uint8"},
    "fp8_e5m2": {"float8_e5m2", "uint8"},
}
"""Plain kv_cache_dtype -> element types that can hold it; fp8 may be kept as bytes."""

_SAME = {"fp8": "fp8_e4m3"}
"""vLLM's aliases, as the documentation of `--kv-cache-dtype` has them."""


_DTYPE_REASON = "kv_cache_dtype not supported"


def _without_alias(entry: Declared, asked: str) -> Declared:
    """`entry` less its complaint of the dtype where it lists the alias of the one asked for."""
    aliases = {_SAME.get(asked, asked), *(a for a, of in _SAME.items() if of == asked)} - {asked}
    if not aliases & set(entry.kv_cache_dtypes):
        return entry
    return replace(entry, reasons=tuple(r for r in entry.reasons if r != _DTYPE_REASON))


def declared_for(record: Record) -> Declared | None:
    """What the backend that counts says of the configuration; None where nobody says anything.

    A name that was passed may be an alias, so where initialisation went through the backend that
    serves the main layers counts; so it does where the choice was the engine's own.
    """
    entries = {
        entry.backend: _without_alias(entry, record.kv_cache_dtype) for entry in record.declared
    }
    selected = record.resolved.selected
    if selected is not None and (record.error is None or record.backend == DEFAULT):
        # Layers may differ: unsupported where one is, unknown where one is unknown.
        serving = [entries.get(name) for name in selected.split("+")]
        refusing = next((entry for entry in serving if entry is not None and entry.reasons), None)
        found = refusing if None in serving else refusing or serving[0]
    else:
        found = entries.get(record.backend)
    if found is None and record.error is not None and len(record.declared) == 1:
        return next(iter(entries.values()))
    return found


def _completed(record: Record, explicit: Explicit | None, oracle: Oracle) -> Judgement:
    declared = declared_for(record)
    # Below this stage nothing has been built: a refusal may be yet to come.
    if reached(record, "model"):
        if explicit is not None and explicit.outcome == "rejected":
            return Judgement("unguarded", f"must be refused ({explicit.why}), yet it went through")
        # What is written by hand comes first: a wrong page must not hide behind a known
        # disagreement about the declaration.
        missed = explicit is not None and bool(explicit.differences(record))
        if declared is not None and declared.reasons and not missed:
            return Judgement("unguarded", _unguarded(declared, explicit))
    wrong, vouched = [], []
    specs = reached(record, "spec")
    if explicit is not None and explicit.outcome == "ok":
        wrong += explicit.differences(record)
        vouched += ["explicit"] if specs else []
    lines = oracle(record) if specs else None
    if lines is not None:
        wrong += lines
        vouched.append("oracle")
    if declared is not None and not declared.reasons:
        vouched.append("contract")
    if record.logits_finite is False:
        wrong.append("the decoded token's log-probabilities are not finite numbers")
    remarks, silent = _coercion(record)
    wrong += silent
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return Judgement("mismatch", _line(wrong[0]) + more, remarks)
    by = f"confirmed by {', '.join(vouched)}" if vouched else "initialised; nothing confirms it"
    return Judgement("ok", by, remarks, tuple(vouched))


def _unguarded(declared: Declared, explicit: Explicit | None) -> str:
    reasons = _line("; ".join(declared.reasons))
    text = f"went through although {declared.backend} declares it unsupported: {reasons}"
    if explicit is None:
        return text
    return f"{text}; it must work ({explicit.why}), so the declaration is wrong"


def _coercion(record: Record) -> tuple[tuple[str, ...], list[str]]:
    """Remarks, and what disagrees: the dtype that was passed against the one that was stored."""
    asked, resolved = record.kv_cache_dtype, record.resolved
    if asked in (UNSET, "auto"):
        return (), []
    names = resolved.kv_cache_dtype.split("+") if resolved.kv_cache_dtype else [asked]
    # The model's own dtype, which may be the one that was asked for.
    own = set((resolved.storage_dtype or "").split("+"))
    if own <= _ELEMENT_TYPES.get(asked, set()):
        names = [asked if name == "auto" else name for name in names]
    others = [name for name in names if _SAME.get(name, name) != _SAME.get(asked, asked)]
    unsaid = [n for n in others if not any(_names(line, n) for line in record.log)]
    wrong = [f"stored {name} though {asked} was asked, and no log line says so" for name in unsaid]
    if (
        asked in _ELEMENT_TYPES
        and resolved.storage_dtype is not None
        and all(name in _ELEMENT_TYPES for name in names)
    ):
        may = set().union(*(_ELEMENT_TYPES[name] for name in names))
        for stored in resolved.storage_dtype.split("+"):
            if stored not in may:
                told = f"element type {stored} does not hold {'+'.join(names)}"
                wrong.append(f"{told}: {asked} was asked, one of {', '.join(sorted(may))} expected")
    return (("coerced",) if others and not unsaid else ()), wrong


def _names(text: str, word: str) -> bool:
    """True where `word` stands in `text` as a whole word; `fp8` is no word of `fp8_ds_mla`."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


_LONGEST = 300
"""Letters of a message that a reason quotes; the record has all of it."""


def _line(text: str) -> str:
    """`text` as one line of a sensible length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
