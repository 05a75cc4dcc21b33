"""How fast cells are: `uv run --extra vllm python benchmarks/warm.py`.

Prints the wall time of all DeepSeek-V4 cells on one virtual device with a warm child, the median
seconds per cell, and the ratio to a fresh process per cell (three cells, measured in the same run).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import session
from harness.launch import Launcher

FRESH = 3


def main() -> None:
    """Measure and print."""
    run = session.resolve(session.options([], [], None, None, "matrix"))
    requests = [run.request(cell) for cell in run.cells if cell.model.key == "dsv4"]
    launcher = Launcher(
        len(os.sched_getaffinity(0)),
        lambda request: session.launch_environ(run.cache, request),
        lambda request: session.modules_file(run.cache, request),
    )
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
            launcher.fresh(request)
            fresh.append(time.perf_counter() - began)
    finally:
        launcher.close()
    forked = statistics.median(warm[:FRESH])
    print(f"warm-up, once per engine and device   {start:8.1f} s")
    print(f"all {len(warm)} cells, warm               {wall:8.1f} s")
    print(f"median of a cell, warm                {statistics.median(warm):8.2f} s")
    print(f"median of a cell, fresh process       {statistics.median(fresh):8.2f} s")
    print(f"fresh process : fork, same {FRESH} cells    {statistics.median(fresh) / forked:8.1f} x")


if __name__ == "__main__":
    main()
