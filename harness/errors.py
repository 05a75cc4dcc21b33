"""Bad input: one line that names the thing, what is near it, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_USAGE = 2
EXIT_INFRA = 75
"""Exit codes that scripts depend on; 75 (`EX_TEMPFAIL` of sysexits.h) may be tried again."""


class UsageError(Exception):
    """The caller asked for something that does not exist. Shown as one line; EXIT_USAGE."""


class InfraError(Exception):
    """Host or device is not usable, which is not the product's fault. EXIT_INFRA."""


def near(word: str, known: Iterable[str]) -> list[str]:
    """Up to three of `known` that look like `word`, best first."""
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=3, cutoff=0.5)
    return [by_lower[f] for f in found]


def unknown(kind: str, word: str, known: Iterable[str], remedy: str) -> UsageError:
    """A UsageError such as `unknown device 'h20O': did you mean 'h200'? ... lists them`."""
    close = near(word, known)
    hint = f" did you mean {' or '.join(map(repr, close))}?" if close else ""
    return UsageError(f"unknown {kind} {word!r}:{hint} {remedy}")
