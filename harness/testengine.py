"""Buildkite's Test Engine, where `buildkite-test-collector` is installed: what became of a cell, as
tags. It has no word for a known failure, which it shows as skipped, nor for a verdict.
"""

from __future__ import annotations

import pytest

from harness.verdict import Judgement

COLLECTOR = "buildkite-test-collector"
"""The name of its pytest plugin (1.9.1)."""


def tags(judgement: Judgement) -> dict[str, str]:
    """Verdict and known apart from each other, which may be filtered by."""
    return {
        "kvmatrix.verdict": judgement.verdict,
        "kvmatrix.known": "yes" if judgement.known else "no",
        "kvmatrix.stale": "yes" if judgement.stale else "no",
    }


def tag(config: pytest.Config, item: pytest.Item, judgement: Judgement) -> None:
    """Tag the execution of `item`; nothing without the collector."""
    if config.pluginmanager.hasplugin(COLLECTOR):
        for name, value in tags(judgement).items():
            # Its marker, which it reads when the test has ended.
            item.add_marker(pytest.mark.execution_tag(name, value))
