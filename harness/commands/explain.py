"""`kvmatrix explain CELL`: the whole story of one cell."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.errors import UsageError


def add(commands: Any) -> None:
    """Its parser."""
    command = commands.add_parser(
        "explain",
        help="tell the whole story of one cell",
        description="Run one cell and tell what was asked, selected and why, what the KV cache "
        "became beside the oracle's arithmetic, what fits, the verdict, and how to see it by hand.",
        epilog="example: kvmatrix explain dsv4-default-unset --device virtual:h200/1g.35gb; exit "
        "code: 0 as expected, 1 a product failure, 2 usage, 75 infrastructure",
    )
    command.add_argument("cell", metavar="CELL", help="its id, as pytest shows it")
    for name, what in (
        ("--device", "where it starts (auto)"),
        ("--engine", "which vLLM (current)"),
        ("--max-model-len", "context that the KV cache is planned for"),
        ("--gpu-memory-utilization", "share of the device's memory that vLLM may use"),
    ):
        command.add_argument(name, help=what)
    command.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="read its record from a records.jsonl of an earlier run, without an engine",
    )
    command.add_argument("--json", action="store_true", help="print a JSON object")
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Tell the story. The exit code of the epilog."""
    # Here, since what runs cells loads pytest, which the lists must not wait for.
    from harness import explain

    devices = [options.device] if options.device else []
    engines = [options.engine] if options.engine else []
    if options.source is not None:
        if options.max_model_len or options.gpu_memory_utilization:
            raise UsageError("--from reads what was: leave --max-model-len and its like out")
        found = explain.read(Path(options.source), options.cell, devices=devices, engines=engines)
    else:
        found = explain.run(
            options.cell,
            devices=devices,
            engines=engines,
            max_model_len=options.max_model_len,
            gpu_memory_utilization=options.gpu_memory_utilization,
        )
    return explain.show(found, as_json=options.json)
