"""What releases, one after the other, make of one model, kv_cache_dtype and capability: since when
it is supported, gaps, losses. Pure.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

OK, REFUSED, FAILS, ABSENT, UNKNOWN = "supported", "refused", "fails", "not offered", "not examined"
"""What a release makes of it. `REFUSED`: by a clear error, whatever backend was tried."""


@dataclass(frozen=True)
class State:
    """One release."""

    release: str
    support: str
    """One of `OK`, `REFUSED`, `FAILS`, `ABSENT`, `UNKNOWN`."""
    measured: bool = False
    """True where a real device, the CPU too, says so."""
    backends: tuple[str, ...] = ()
    """Those that serve it."""
    verdict: str = ""
    """What stands for cells that fail; the default's, where it does."""
    reason: str = ""
    """In words of vLLM's or the harness's; empty where it is supported."""

    @property
    def no(self) -> bool:
        """True where it is known to be not supported."""
        return self.support in (REFUSED, FAILS, ABSENT)


@dataclass(frozen=True)
class Row:
    """A model and kv_cache_dtype on one capability."""

    model: str
    kv_cache_dtype: str
    capability: str
    states: tuple[State, ...]
    """Of every release that the runs have for such a device, the oldest first."""

    @property
    def examined(self) -> tuple[State, ...]:
        """The releases of which it is known."""
        return tuple(state for state in self.states if state.support != UNKNOWN)

    @property
    def since(self) -> str | None:
        """The first release that supports it; None where none does."""
        return next((state.release for state in self.states if state.support == OK), None)

    @property
    def or_before(self) -> bool:
        """True where the release before `since` was not examined, or there is none."""
        first = self._first
        return first is not None and (not first or self.states[first - 1].support == UNKNOWN)

    @property
    def after(self) -> str | None:
        """The last release before `since` that is known not to support it."""
        before = self.states[: self._first or 0]
        return next((state.release for state in reversed(before) if state.no), None)

    @property
    def _first(self) -> int | None:
        return next((n for n, state in enumerate(self.states) if state.support == OK), None)

    @property
    def gaps(self) -> tuple[tuple[str, ...], ...]:
        """The releases in which it was lost and after which it came again, gap by gap."""
        groups = itertools.groupby(self.examined, key=lambda state: state.no)
        runs = [(no, tuple(state.release for state in group)) for no, group in groups]
        return tuple(releases for no, releases in runs[1:-1] if no)

    @property
    def lost(self) -> str | None:
        """The release since which it is supported no longer; None where it is, or never was."""
        if self.since is None:
            return None
        end = itertools.takewhile(lambda state: state.no, reversed(self.examined))
        return next((state.release for state in reversed([*end])), None)

    @property
    def newest(self) -> State | None:
        """The newest release that was examined; None where none was."""
        return self.examined[-1] if self.examined else None

    @property
    def unexamined(self) -> tuple[str, ...]:
        """Releases newer than that."""
        newest = self.newest
        if newest is None:
            return ()
        behind = itertools.takewhile(lambda state: state is not newest, reversed(self.states))
        return tuple(state.release for state in reversed([*behind]))

    def to_json(self) -> dict[str, Any]:
        """One entry of `rows`."""
        newest = self.newest
        return {
            "model": self.model,
            "kv_cache_dtype": self.kv_cache_dtype,
            "capability": self.capability,
            "since": self.since,
            "or_before": self.or_before,
            "after": self.after,
            "gaps": [list(gap) for gap in self.gaps],
            "lost": self.lost,
            "backends": list(newest.backends) if newest else [],
            "measured": bool(newest and newest.measured),
            "releases": [
                {
                    "release": state.release,
                    "support": state.support,
                    "measured": state.measured,
                    "backends": list(state.backends),
                    "verdict": state.verdict or None,
                    "reason": state.reason or None,
                }
                for state in self.states
            ],
        }
