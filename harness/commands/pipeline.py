"""`kvmatrix pipeline`: the pipeline of CI, for `buildkite-agent pipeline upload`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from harness import safe
from harness.errors import UsageError


def add(commands: Any) -> None:
    """Its parser."""
    command = commands.add_parser(
        "pipeline",
        help="print the pipeline of CI",
        description="Print the Buildkite pipeline that ci/nightly.yaml describes: a step before "
        "merging that needs no GPU, the nightly steps of each class of devices, and the merge of "
        "their shards.",
        epilog="example: kvmatrix pipeline | buildkite-agent pipeline upload; exit code: 0 "
        "printed, 2 settings that are wrong, or that Buildkite would not take",
    )
    command.add_argument(
        "--config", metavar="FILE", help="the settings (the checkout's ci/nightly.yaml)"
    )
    command.add_argument(
        "--only",
        metavar="PART",
        help="premerge or nightly alone, and without its condition (both)",
    )
    command.add_argument(
        "--format",
        default="buildkite",
        metavar="FORMAT",
        help="buildkite: JSON for `pipeline upload` (default); vllm: a file of vLLM's "
        ".buildkite/test_areas",
    )
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print the pipeline. UsageError where the settings are wrong; then nothing is printed."""
    try:
        # Here, since ci is part of a checkout, as cases are, and not of the installed package.
        from ci import pipeline, settings, testarea
    except ModuleNotFoundError as error:
        if error.name not in ("ci", "ci.pipeline", "ci.settings", "ci.testarea"):
            raise
        raise UsageError(
            "ci/ is part of a checkout of kvmatrix: run `python -m harness.cli pipeline` there"
        ) from None
    from harness.errors import unknown

    for option, value, known in (
        ("--only", options.only, pipeline.PARTS),
        ("--format", options.format, ("buildkite", "vllm")),
    ):
        if value is not None and value not in known:
            raise unknown(option, value, known, f"one of {', '.join(known)}")
    found = settings.read(Path(options.config) if options.config else settings.DEFAULT)
    if options.format == "vllm":
        text = testarea.render(testarea.area(found, options.only))
    else:
        text = pipeline.render(pipeline.pipeline(found, options.only))
    if safe.mask(text, os.environ) != text:
        raise UsageError(
            "the settings have the value of a secret variable of this environment: give it to the "
            "agents instead"
        )
    print(text, end="")
    return 0
