"""What the harness costs around a real engine: `python benchmarks/real.py [--engine SPEC]`.

Starts the same cell (Llama 3, reduced) on the CPU by a bare `LLM(...)` in a process of its own, by
the harness in a fresh interpreter, and by the harness forked from a warm parent, in turn, and
prints the medians and their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import host, session
from harness.launch import Launcher
from harness.options import options
from harness.request import Request
from harness.session import Run

ROUNDS = 3
BARE = Path(__file__).with_name("bare.py")
ARGUMENTS = (
    '{"skip_tokenizer_init": true, "load_format": "dummy", "enforce_eager": true, '
    '"max_model_len": 4096, "kv_cache_memory_bytes": 268435456}'
)
"""Those of `harness/engine/arguments.py` and `real.py`."""


def launcher(run: Run, isolation: str) -> Launcher:
    """One that runs a cell at a time."""
    return Launcher(
        lambda _: 1,
        lambda request: session.launch_environ(run, request),
        lambda request: session.modules_file(run, request),
        isolation=isolation,
    )


def seconds(action: Callable[[], object]) -> float:
    """Wall seconds of `action`."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def bare(run: Run, request: Request) -> None:
    """The same start without the harness. CalledProcessError where it fails."""
    subprocess.run(
        [request.engine.python, str(BARE), str(request.model_path), ARGUMENTS],
        env=dict(session.launch_environ(run, request)),
        check=True,
        capture_output=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="cpu:0.32.0")
    chosen = options(["cpu"], [parser.parse_args().engine], depth="warmup")
    run = session.resolve(chosen)
    (cell,) = (cell for cell in run.cells if cell.id == "llama3-default-auto")
    request = run.request(cell)
    spawn, fork = launcher(run, "spawn"), launcher(run, "fork")
    times: dict[str, list[float]] = {"bare": [], "spawn": [], "fork": []}
    try:
        record = fork.record(request)  # warms up, and learns what to import ahead
        assert record.complete, record.tail
        for _ in range(ROUNDS):
            times["bare"].append(seconds(lambda: bare(run, request)))
            times["spawn"].append(seconds(lambda: spawn.record(request)))
            times["fork"].append(seconds(lambda: fork.record(request)))
    finally:
        spawn.close()
        fork.close()
    middle = {name: statistics.median(values) for name, values in times.items()}
    print(f"{host.name()}, {host.cores()} cores, vLLM {cell.engine.version}, {cell.id}, warmup")
    print(f"bare LLM(...) in a process of its own   {middle['bare']:8.2f} s")
    print(f"harness, fresh interpreter (spawn)      {middle['spawn']:8.2f} s")
    print(f"harness, forked from a warm parent      {middle['fork']:8.2f} s")
    print(f"spawn : bare                            {middle['spawn'] / middle['bare']:8.3f} x")
    print(f"a fork saves                            {middle['spawn'] - middle['fork']:8.2f} s")


if __name__ == "__main__":
    main()
