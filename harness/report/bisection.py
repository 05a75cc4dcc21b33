"""What a search through versions found, for a terminal and as JSON. Pure."""

from __future__ import annotations

from typing import Any

from harness.bisect import Found, Trial, told
from harness.matrix import cell_json
from harness.record import to_json
from harness.view import GAP, GLYPHS, Screen

COMPARE = "https://github.com/vllm-project/vllm/compare"
"""Where GitHub shows the commits between two of vLLM's tags or commits."""

_NAMES = {"passes": "whether it passes", "page_size_bytes": "its page", "backends": "its backends"}


def plain(found: Found) -> dict[str, Any]:
    """All of it as plain JSON data, with both records."""
    change = found.change
    return {
        "schema": 1,
        "cell": found.cell,
        "by": found.what,
        "certain": found.certain,
        "fix": found.fix,
        "before": change.before,
        "after": change.after,
        "untestable": list(change.untestable),
        "wavering": list(found.wavering),
        "trials": [
            {
                "version": version,
                "kept": trial.kept,
                "why": trial.why or None,
                "cell": None if trial.outcome is None else cell_json(trial.outcome),
            }
            for version, trial in found.trials.items()
        ],
        "records": {
            version: to_json(outcome.record)
            for version in (change.before, change.after)
            if (outcome := found.trials[version].outcome) is not None and outcome.record is not None
        },
    }


def render(found: Found, screen: Screen) -> list[str]:
    """Lines, none wider than the screen."""
    change = found.change
    kind = "good" if found.fix else "bad"
    lines = []
    if found.wavering:
        names = " and ".join(found.wavering)
        text = f"{found.cell} gives one result and then another with {names}: no change to name"
        lines += screen.lines(screen.clean(text), "bad")
    elif change.untestable:
        count = len(change.untestable)
        text = (
            f"first {kind}: one of {change.untestable[0]} ... {change.after}; {count} cannot tell"
        )
        lines += screen.lines(screen.clean(text), "known")
    else:
        what = _NAMES.get(found.what, f"its {found.what}")
        text = f"first {kind}: vLLM {change.after}, by {what}"
        lines += screen.lines(screen.clean(text), "bold")
    for version in (change.before, *change.untestable, change.after):
        lines += _trial(screen, version, found.trials.get(version))
    ends = [_tag(version) for version in (change.before, change.after)]
    lines += screen.lines(f"commits between: {COMPARE}/{ends[0]}...{ends[1]}", "dim", GAP, GAP * 2)
    return lines


def _trial(screen: Screen, version: str, trial: Trial | None) -> list[str]:
    if trial is None:
        return screen.lines(screen.clean(f"{version}  not tried"), "dim", GAP)
    outcome = trial.outcome
    if outcome is None:
        return screen.lines(screen.clean(f"{version}  {trial.words}"), "dim", GAP, GAP * 2)
    sign = GLYPHS[outcome.judgement.verdict][0 if screen.unicode else 1]
    style = "good" if outcome.judgement.verdict == "ok" else ""
    head = f"{sign} {version}  {trial.words}"
    lines = screen.lines(screen.clean(head), style, GAP, GAP * 2)
    seen = told(outcome)
    facts = [
        f"{name} {', '.join(value) if isinstance(value, list) else value}"
        for name, value in seen.items()
        if name not in ("passes", "verdict") and value
    ]
    if facts:
        lines += screen.lines(screen.clean("; ".join(facts)), "dim", GAP * 2)
    if outcome.record is not None and outcome.record.error is not None:
        lines += screen.lines(screen.clean(f"at {outcome.record.error.where}"), "dim", GAP * 2)
    return lines


def _tag(version: str) -> str:
    return f"v{version}" if "." in version else version
