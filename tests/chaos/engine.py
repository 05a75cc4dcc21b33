"""A planted engine: the real server and keeper, with cells that go wrong in place of vLLM's.

Run as an engine's interpreter would be (`tests/chaos/planted.py` writes the wrapper): the
kv_cache_dtype of a cell names what it does; any other name is `fine`. Planning, facts and preflight
answer as the wrapper's variables say: CHAOS_PLATFORM, CHAOS_DTYPES, CHAOS_WEIGHTS (bytes),
CHAOS_LOSES (the reduced model has another page), CHAOS_MISLED (slices above 0 are other devices),
CHAOS_BECOMES (what every cell does, whatever its kv_cache_dtype).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.engine.environ import device_of_environment
from harness.engine.server import Server, write_record
from harness.record import Declared, Record, Resolved

VERSION = "0.29.0"


def record(request: dict[str, Any], name: str | None = None) -> Record:
    """A cell that was refused, as vLLM would: the plainest that passes."""
    from harness.record import Fault

    device = device_of_environment()
    dtype = name or request["case"]["kv_cache_dtype"]
    return Record(
        id=f"{request['case']['model']}-{request['case']['backend']}-{dtype}",
        model=request["case"]["model"],
        backend=request["case"]["backend"],
        kv_cache_dtype=dtype,
        device=device.spec,
        device_kind=device.kind,
        capability=device.capability,
        engine=VERSION,
        depth=request["depth"],
        stage="config",
        error=Fault("ValueError", ("ValueError", "Exception"), f"kv_cache_dtype {dtype}", "x:y"),
        resolved=Resolved(),
        declared=(Declared(request["case"]["backend"], ("no",)),),
        seconds={"total": 0.1},
    )


def fine(request: dict[str, Any]) -> None:
    write_record(record(request), Path(request["record"]))


def plan(request: dict[str, Any]) -> None:
    """What the proof of a reduction asks for."""
    from dataclasses import replace

    from harness.record import KVCache, Memory

    config = json.loads((Path(request["model_path"]) / "config.json").read_text())
    lost = bool(os.environ.get("CHAOS_LOSES")) and config["num_hidden_layers"] < 30
    page = 1024 if lost else 65536
    kv = KVCache("FullAttentionSpec", "attn", config["num_hidden_layers"], 16, page, page, "uint8")
    weights = int(os.environ.get("CHAOS_WEIGHTS", "1000"))
    found = replace(
        record(request),
        stage=request["depth"],
        error=None,
        kv=(kv,),
        kv_bytes_per_token=100,
        memory=Memory(10**12, weights, 10**9, True),
    )
    write_record(found, Path(request["record"]))


def preflight() -> dict[str, Any]:
    device = device_of_environment()
    misled = bool(os.environ.get("CHAOS_MISLED")) and bool(device.slice_index)
    capability = list(device.capability or (0, 0))
    return {
        "count": 1,
        "free_bytes": device.memory_bytes,
        "total_bytes": device.memory_bytes,
        "name": device.name,
        "capability": capability,
        "sm_count": device.sm_count,
        "uuid": "",
        "vllm": {
            "name": "NVIDIA H200",
            "capability": capability,
            "uuid": "GPU-another" if misled else device.parent or device.uuid,
        },
    }


def segfault(request: dict[str, Any]) -> None:
    ctypes.string_at(8)


def os_exit(request: dict[str, Any]) -> None:
    os._exit(3)


def killed(request: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kills_its_keeper(request: dict[str, Any]) -> None:
    daemon(request)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def stuck(request: dict[str, Any]) -> None:
    """Hangs before it can tell of anything, but only where it was forked from a warm process."""
    fine(request)


def spin(request: dict[str, Any]) -> None:
    """In C, with the interpreter's lock held, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    re.match(r"(a+)+$", "a" * 64 + "b")


def hang(request: dict[str, Any]) -> None:
    time.sleep(600)


def daemon(request: dict[str, Any]) -> None:
    """Leaves a process behind that has left group and session."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.wait()
    fine(request)


def half(request: dict[str, Any]) -> None:
    Path(request["record"]).write_text('{"id": "dsv4-def')


def other_id(request: dict[str, Any]) -> None:
    write_record(record(request, "fine"), Path(request["record"]))


def flood(request: dict[str, Any]) -> None:
    line = b"x" * 1023 + b"\n"
    for _ in range(200):
        os.write(1, line * 1024)
    fine(request)


def bomb(request: dict[str, Any]) -> None:
    """Five generations, each process in a session of its own: 2^5 of them at most."""
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def full_disk(request: dict[str, Any]) -> None:
    """The disk takes a few more bytes, and then nothing."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
    fine(request)


def secret(request: dict[str, Any]) -> None:
    print("\x1b[31mHF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123 <script>", flush=True)
    os._exit(4)


ACTS = {
    act.__name__: act
    for act in (
        *(fine, segfault, os_exit, killed, kills_its_keeper, spin, hang, stuck, daemon, half),
        *(other_id, flood, bomb, full_disk, secret),
    )
}


def main(arguments: list[str]) -> int:
    replies = os.dup(1)
    os.dup2(2, 1)
    if arguments == ["preflight"]:
        os.write(replies, json.dumps(preflight()).encode() + b"\n")
        return 0
    if arguments == ["facts"]:
        cpu = os.environ.get("CHAOS_PLATFORM") == "cpu"
        facts = {
            "python": "",
            "python_version": "3.11.0",
            "version": VERSION,
            "commit": None,
            "torch": "2.0",
            "cuda": None if cpu else "13.0",
            "flashinfer": None,
            "transformers": None,
            "kv_cache_dtypes": os.environ.get("CHAOS_DTYPES", " ".join(ACTS)).split(),
            "backends": [],
            "model_backends": {},
            "platform": "cpu" if cpu else "cuda",
            "cpu_backends": [],
            "kind_backends": {},
            "architectures": [],
        }
        os.write(replies, json.dumps(facts).encode() + b"\n")
        return 0

    warm = arguments[0] == "serve"

    def body(request: dict[str, Any], tell: Any) -> None:
        if warm and request["case"]["kv_cache_dtype"] == "stuck":
            time.sleep(600)
        tell("model")
        if os.environ.get("CHAOS_DTYPES") and request["depth"] == "allocate":
            plan(request)
            return
        act = os.environ.get("CHAOS_BECOMES") or request["case"]["kv_cache_dtype"]
        ACTS.get(act, fine)(request)

    server = Server(body, replies, warm=warm)
    server.say({"ready": {"forks": True}})
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
