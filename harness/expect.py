"""Expectations: what is written by hand for a cell. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.case import Case
from harness.known import Known
from harness.record import STAGES, KVCache, Record


def is_main(kv: KVCache) -> bool:
    """True for the caches that hold what attention reads: not an indexer's, not a state."""
    return "indexer" not in kv.role and "state" not in kv.role


@dataclass(frozen=True)
class Explicit:
    """A hand-written expectation of one case on some capabilities."""

    id: str
    """Case id, such as `dsv4-default-unset`."""
    outcome: str
    """`ok` or `rejected`."""
    why: str
    """One line: where the expectation comes from."""
    capabilities: tuple[int | None, ...] = ()
    """Majors of the compute capabilities for which it holds, None for a CPU; () means all."""
    kv_cache_dtype: str | None = None
    """What the main attention layers must resolve to; None where it is not defined."""
    storage_dtype: str | None = None
    """Element type of the main cache."""
    written_back: bool = False
    """True where `cache_config.cache_dtype` must be the resolved one at the end."""
    pages: tuple[tuple[str, int, int], ...] = ()
    """`(role, compress_ratio, page_size_bytes)`: each must be there, and nothing else of its
    role and ratio."""
    tail: int | None = None
    """Last dimension of the main cache's tensors."""
    says: tuple[str, ...] = ()
    """Words that a refusal must hold."""
    depth: str | None = None
    """On a real device, go on to this stage."""

    def differences(self, record: Record) -> list[str]:
        """One line per number or name of `record` that is not what was written down."""
        resolved = record.resolved
        facts: list[tuple[str, object, object]] = []
        if STAGES.index(record.stage) < STAGES.index("model"):
            return []
        if self.kv_cache_dtype is not None:
            facts.append(("resolved dtype", resolved.kv_cache_dtype, self.kv_cache_dtype))
        if self.storage_dtype is not None:
            facts.append(("storage dtype", resolved.storage_dtype, self.storage_dtype))
        if self.written_back:
            must = self.kv_cache_dtype or resolved.kv_cache_dtype
            facts.append(("dtype written back to the cache config", resolved.cache_config, must))
        if STAGES.index(record.stage) >= STAGES.index("spec"):
            if not record.kv:
                facts.append(("number of layers with a KV cache", 0, "more"))
            for role, ratio, page in self.pages:
                seen = {
                    kv.page_size_bytes
                    for kv in record.kv
                    if (kv.role, kv.compress_ratio) == (role, ratio)
                }
                what = f"page of {role} (ratio {ratio})"
                facts += [(what, size, page) for size in sorted(seen)] or [(what, None, page)]
        if self.tail is not None:
            facts += [
                (f"last dimension of {kv.role}", kv.shape[-1], self.tail)
                for kv in record.kv
                if kv.shape and is_main(kv)
            ]
        return [f"{what} is {seen}, must be {must}" for what, seen, must in facts if seen != must]


@dataclass(frozen=True)
class Expectation:
    """Everything that people wrote down about one cell."""

    explicit: Explicit | None = None
    known: Known | None = None


def find(
    explicit: Iterable[Explicit], case_id: str, capability: tuple[int, int] | None
) -> Explicit | None:
    """The explicit case for `case_id` on a device of `capability`; None where there is none."""
    major = capability[0] if capability else None
    for one in explicit:
        if one.id == case_id and (not one.capabilities or major in one.capabilities):
            return one
    return None


def expected_verdict(case: Case, expectation: Expectation) -> str:
    """What matrix.json names as expected: one verdict, or `ok or rejected` where the declared
    contract decides."""
    if expectation.known is not None:
        return expectation.known.verdict
    if expectation.explicit is not None:
        return expectation.explicit.outcome
    return "ok" if case.plain else "ok or rejected"
