"""The child, run under the engine's interpreter: `python harness/engine/__main__.py COMMAND`.

`facts` prints what the engine is as one line of JSON. `serve MODEL_PATH MODULES` runs cells (see
`server.py`). `cell MODEL BACKEND KV_CACHE_DTYPE MODEL_PATH DEPTH RECORD` runs one.
The device comes from the environment (`seams.DEVICE_VARIABLE`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Run one command; its exit status."""
    # vLLM's imports may print, so the way back to the parent is kept apart from stdout at once.
    replies = os.dup(1)
    os.dup2(2, 1)
    # The script's own folder must not be where modules are looked for: `platform` is one of ours.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    sys.path.insert(0, str(Path(here) / "site"))
    import kvmatrix_virtual

    # Operators must register; functions of the driver need not be there to be called.
    sys.setdlopenflags(os.RTLD_LAZY)
    kvmatrix_virtual.register()
    from harness.engine import seams

    device = seams.device_of_environment()
    import vllm

    if arguments[:1] == ["facts"]:
        from harness.engine import facts

        os.write(replies, json.dumps(facts.read()).encode() + b"\n")
        return 0
    if arguments[:1] == ["serve"] and len(arguments) == 3:
        from harness.engine import server

        server.main(device, vllm.__version__, Path(arguments[1]), Path(arguments[2]), replies)
        return 0
    if arguments[:1] == ["cell"] and len(arguments) == 7:
        from harness.case import Case
        from harness.engine import probe, server

        _, model, backend, kv_cache_dtype, model_path, depth, path = arguments
        server.die_with_parent()
        record = probe.run(
            Case(model, backend, kv_cache_dtype), Path(model_path), device, depth, vllm.__version__
        )
        server.write_record(record, Path(path))
        return 0
    print(f"unknown command: {' '.join(arguments) or '(none)'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
