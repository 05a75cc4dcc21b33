"""How fast cells are: `uv run --extra vllm python benchmarks/warm.py`.

Prints the wall time of all DeepSeek-V4 cells on one virtual device with a warm child, the median
seconds per cell, and the ratio to a fresh process per cell (three cells, measured in the same run).
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import host, session
from harness.launch import Launcher
from harness.options import options
from harness.session import Run

FRESH = 3


def launching(run: Run, jobs: int, isolation: str) -> Launcher:
    """A launcher that runs `jobs` cells at a time."""
    return Launcher(
        lambda _: jobs,
        lambda request: session.launch_environ(run, request),
        lambda request: session.modules_file(run, request),
        isolation=isolation,
    )


def main() -> None:
    """Measure and print."""
    run = session.resolve(options(["virtual:h200"], []))
    requests = [run.request(cell) for cell in run.cells if cell.model.key == "dsv4"]
    launcher, spawning = launching(run, host.cores(), "fork"), launching(run, 1, "spawn")
    try:
        began = time.perf_counter()
        launcher.record(requests[0])
        start = time.perf_counter() - began
        began = time.perf_counter()
        launcher.plan(requests)
        warm = [launcher.record(request).seconds["total"] for request in requests]
        wall = time.perf_counter() - began
        fresh = []
        for request in requests[:FRESH]:
            began = time.perf_counter()
            spawning.record(request)
            fresh.append(time.perf_counter() - began)
    finally:
        launcher.close()
        spawning.close()
    forked = statistics.median(warm[:FRESH])
    print(f"warm-up, once per engine and device   {start:8.1f} s")
    print(f"all {len(warm)} cells, warm               {wall:8.1f} s")
    print(f"median of a cell, warm                {statistics.median(warm):8.2f} s")
    print(f"median of a cell, fresh process       {statistics.median(fresh):8.2f} s")
    print(f"fresh process : fork, same {FRESH} cells    {statistics.median(fresh) / forked:8.1f} x")


if __name__ == "__main__":
    main()
