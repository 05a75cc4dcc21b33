"""The search for the version that changed a cell. Pure: a caller says what a version gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from harness.errors import UsageError
from harness.matrix import Outcome, main_page, main_storage


@dataclass(frozen=True)
class Change:
    """Neighbours, one as the older end, the other not."""

    before: str
    """The last version that is as the older end."""
    after: str
    """The first that is not."""
    untestable: tuple[str, ...] = ()
    """Versions between them, in their order: the change may lie in any of these."""


def search(versions: Sequence[str], alike: Callable[[str], bool | None]) -> Change:
    """Where `versions`, oldest first, change.

    The first is as the older end and the last is not: neither is asked about. `alike` says of any
    other whether it is as the older end, None where that cannot be told; it is asked about as few
    as possible, and about none twice.
    """
    low, high = 0, len(versions) - 1
    if high < 1:
        raise ValueError("a change needs two versions")
    unclear: set[int] = set()
    while between := [at for at in range(low + 1, high) if at not in unclear]:
        middle = min(between, key=lambda at: abs(2 * at - low - high))
        answer = alike(versions[middle])
        if answer is None:
            unclear.add(middle)
        elif answer:
            low = middle
        else:
            high = middle
    return Change(versions[low], versions[high], tuple(versions[low + 1 : high]))


def steps(count: int) -> int:
    """How many of `count` versions, both ends among them, are asked about at most, where each can
    be told."""
    return ceil(log2(count - 1)) if count > 2 else 0


@dataclass(frozen=True)
class Trial:
    """What a version gave."""

    outcome: Outcome | None
    """None where the version could not be tried."""
    why: str = ""
    """Why it could not."""
    kept: bool = False
    """True where an earlier search had it already."""

    @property
    def clear(self) -> bool:
        """False where it says nothing of the version: not tried, or without a result."""
        return self.outcome is not None and self.outcome.judgement.verdict not in _UNCLEAR

    @property
    def words(self) -> str:
        """The verdict and why, or why there is none."""
        if self.outcome is None:
            return f"cannot be tried: {self.why}"
        judgement = self.outcome.judgement
        return judgement.verdict + (f": {judgement.reason}" if judgement.reason else "")


_UNCLEAR = ("infra", "skipped", "notrun")


@dataclass(frozen=True)
class Found:
    """What a search found."""

    cell: str
    what: str
    """Name of the thing of `told` that it went by."""
    change: Change
    trials: dict[str, Trial]
    """The first trial of each version that was tried, in the order in which they were."""
    wavering: tuple[str, ...] = ()
    """Versions that gave another result when they were run again."""
    fix: bool = False
    """True where the newer end is the good one."""

    @property
    def certain(self) -> bool:
        """True where one version is named, and it gave the same each time."""
        return not self.wavering and not self.change.untestable


def hunt(
    cell: str,
    versions: Sequence[str],
    good: str,
    bad: str,
    attempt: Callable[[str, bool], Trial],
    repeat: int = 1,
) -> Found:
    """Search `versions`, oldest first and with `good` and `bad` at their ends, for the change.

    `attempt` tries a version; its second argument says that it is to be run whatever is kept. Both
    ends, and both neighbours of the change, are run `repeat` times more: a result that does not
    stay is no ground to go by. UsageError where an end has no result, or both are alike.
    """
    trials = {version: _end(version, attempt) for version in (good, bad)}
    one, other = (trials[version].outcome for version in (good, bad))
    assert one is not None and other is not None
    what = difference(one, other)
    older = trials[versions[0]]

    def value(trial: Trial) -> Any:
        return told(trial.outcome)[what] if trial.clear and trial.outcome else None

    def alike(version: str) -> bool | None:
        trials[version] = attempt(version, False)
        return value(trials[version]) == value(older) if trials[version].clear else None

    def stays(version: str) -> bool:
        again = (attempt(version, True) for _ in range(repeat))
        return all(each.clear and value(each) == value(trials[version]) for each in again)

    # Before anything else is installed: between ends that waver there is nothing to find.
    wavering = [version for version in (good, bad) if not stays(version)]
    change = Change(versions[0], versions[-1]) if wavering else search(versions, alike)
    near = [] if wavering else [change.before, change.after]
    wavering += [version for version in near if version not in (good, bad) and not stays(version)]
    return Found(cell, what, change, trials, tuple(wavering), fix=versions[-1] == good)


def _end(version: str, attempt: Callable[[str, bool], Trial]) -> Trial:
    trial = attempt(version, False)
    if not trial.clear:
        raise UsageError(f"the end {version} tells nothing: {trial.words}")
    return trial


def told(outcome: Outcome) -> dict[str, Any]:
    """What of an outcome can change, the most important first."""
    record, judgement = outcome.record, outcome.judgement
    resolved = record.resolved if record else None
    return {
        "passes": judgement.passes and not judgement.known,
        "verdict": judgement.verdict,
        "kv_cache_dtype": resolved.kv_cache_dtype if resolved else None,
        "storage_dtype": main_storage(record),
        "backends": list(resolved.backends) if resolved else [],
        "page_size_bytes": main_page(record),
    }


def difference(good: Outcome, bad: Outcome) -> str:
    """What the search goes by: the first thing of `told` that differs. UsageError where nothing
    does, or where the ends are the wrong way round."""
    one, other = told(good), told(bad)
    if other["passes"] and not one["passes"]:
        raise UsageError(
            f"--good {good.cell.engine.version} is {one['verdict']} and --bad "
            f"{bad.cell.engine.version} is {other['verdict']}: exchange them"
        )
    for name, value in one.items():
        if value != other[name]:
            return name
    raise UsageError(
        f"{good.cell.case.id} is the same with vLLM {good.cell.engine.version} and "
        f"{bad.cell.engine.version} ({one['verdict']}): there is nothing to search for"
    )
