"""The child, run under the engine's interpreter: `python harness/engine/__main__.py COMMAND`.

`facts` prints what the engine is as one line of JSON, `preflight` what the device is to torch and
to vLLM. `serve` imports vLLM once and forks per cell; `once` runs each cell in an interpreter
that has imported nothing. Both speak the protocol of `server.py`.
The device comes from the environment (`environ.DEVICE_VARIABLE`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.device import Device

HERE = Path(__file__).resolve().parent


def _load_harness() -> Any:
    """The plugin's module, which makes the package `harness` importable and nothing else: of this
    project's folder no neighbour may come along into the engine's interpreter."""
    path = HERE / "site" / "kvmatrix_virtual.py"
    spec = importlib.util.spec_from_file_location("kvmatrix_virtual", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.load_harness()
    return module


def _become(device: Device) -> str:
    """Import vLLM on `device`; its version."""
    if not device.real:
        # Operators must register; functions of the driver need not be there to be called.
        sys.setdlopenflags(os.RTLD_LAZY)
        sys.modules["kvmatrix_virtual"].register()
    import vllm

    if not device.real:
        from harness.engine import logs

        logs.configure()
    return str(vllm.__version__)


def _cell(device: Device, settings: dict[str, str], request: dict[str, Any], tell: Any) -> None:
    """What one cell does: start the engine, observe it, leave the record."""
    before = set(sys.modules)
    engine = _become(device)
    from harness.case import Case
    from harness.engine import probe, server, warm

    record = probe.run(
        Case(**request["case"]),
        Path(request["model_path"]),
        request["engine_args"],
        device,
        request["depth"],
        engine,
        tell=tell,
        settings=settings,
    )
    server.write_record(record, Path(request["record"]))
    # A virtual cell that fails has imported what the next one needs, too.
    if record.complete or not device.real:
        warm.add_names(Path(request["modules"]), warm.new_modules(before))


def _serve(device: Device, settings: dict[str, str], replies: int) -> int:
    from harness.engine import warm
    from harness.engine.processes import die_with_parent
    from harness.engine.server import Server

    die_with_parent()
    began = time.perf_counter()
    engine = _become(device)
    if device.real:
        from vllm import LLM  # noqa: F401 - a lazy name: the import is what takes long

    server = Server(
        lambda request, tell: _cell(device, settings, request, tell),
        replies,
        warm=True,
        before=warm.learner(device, engine),
    )
    server.say(
        {
            "ready": {
                "engine": engine,
                "seconds": round(time.perf_counter() - began, 3),
                "threads": len(os.listdir("/proc/self/task")),
                # A process on CUDA cannot fork one that uses it.
                "forks": not device.real or device.kind == "cpu" or not warm.on_cuda(),
            }
        }
    )
    server.serve()
    return 0


def _once(device: Device, settings: dict[str, str], replies: int) -> int:
    from harness.engine.server import Server

    server = Server(
        lambda request, tell: _cell(device, settings, request, tell), replies, warm=False
    )
    server.say({"ready": {"forks": True}})
    server.serve()
    return 0


def main(arguments: list[str]) -> int:
    """Run one command; its exit status."""
    # vLLM's imports may print, so the way back to the parent is kept apart from stdout at once.
    replies = os.dup(1)
    os.dup2(2, 1)
    # The script's own folder must not be where modules are looked for: `platform` is one of ours.
    here = str(HERE)
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    _load_harness()
    from harness.engine import environ

    device = environ.device_of_environment()
    # Taken now: vLLM sets variables of its own when it is imported.
    settings = environ.settings(os.environ) if device.real else {}
    match arguments:
        case ["facts"]:
            _become(device)
            from harness.engine import facts

            os.write(replies, json.dumps(facts.read()).encode() + b"\n")
            return 0
        case ["preflight"]:
            from harness.engine import preflight

            os.write(replies, json.dumps(preflight.look()).encode() + b"\n")
            return 0
        case ["serve"]:
            return _serve(device, settings, replies)
        case ["once"]:
            return _once(device, settings, replies)
    print(f"unknown command: {' '.join(arguments) or '(none)'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
