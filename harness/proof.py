"""The proof of a reduction: the reduced model has every KV kind that the full one has.

Both are planned by the engine itself, at full depth and without weights: on a virtual device of
the real one's capability, or by the CPU build on its own CPU. Done once for an engine, a device
and a model, and kept in the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness import output
from harness.case import Case
from harness.device import GIB, KIB, SHARED_MEMORY, Device
from harness.errors import InfraError, UsageError
from harness.facts import EngineFacts
from harness.kinds import differences
from harness.plan import Model
from harness.record import Record
from harness.reduce import Reduced, reduce
from harness.request import Request

ENGINE = Path(__file__).resolve().parent / "engine"

DTYPES = ("unset", "fp8")
"""What the proof plans with: the default must keep its kinds, and so must a cache of bytes, which
is planned where a release refuses the default. Kinds do not depend on other dtypes."""

DEPTH = "allocate"
SECONDS = 300.0

CONTEXT_TOKENS = 4096
"""`harness/engine/arguments.py` plans for as many."""

OVERHEAD = {"cpu": 2 * GIB}
GPU_OVERHEAD = 3 * GIB
"""Bytes beyond weights and KV cache. CPU: 0.9 - 1.1 GiB were measured for Llama and DeepSeek-V4
with vLLM 0.32.0, and as much again for a passing copy. GPU: an estimate (context, workspaces, the
activations of a profiling run), not measured."""

UTILISATION = 0.9
"""vLLM's default share of a GPU's memory, all told (`gpu_memory_utilization`)."""


@dataclass(frozen=True)
class Proof:
    """What planning the full and the reduced model showed."""

    problems: tuple[str, ...]
    """How the reduced model differs; () where it keeps every kind."""
    weights_bytes: int
    """Of the reduced model; 0 where it was not built."""
    bytes_per_token: int
    """Of its KV cache."""


@dataclass(frozen=True)
class Need:
    """The device memory that a cell needs, in bytes."""

    weights: int
    kv_cache: int
    """For one request of CONTEXT_TOKENS."""
    overhead: int
    utilisation: float

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        return int((self.weights + self.kv_cache + self.overhead) / self.utilisation)

    def lacking(self, device: Device) -> str | None:
        """Why it does not fit on `device`, with the numbers; None where it does, or where the
        device's memory is not known."""
        if not device.memory_bytes or self.total <= device.memory_bytes:
            return None
        parts = (
            f"weights {_gib(self.weights)}, KV cache {_gib(self.kv_cache)}, "
            f"overhead {_gib(self.overhead)}, at {self.utilisation:.0%} utilisation"
        )
        have = _gib(device.memory_bytes)
        return f"needs {_gib(self.total)} ({parts}), {device.name} has {have}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def need(proof: Proof, device: Device) -> Need:
    """The memory that a cell of the reduced model needs on `device`."""
    return Need(
        proof.weights_bytes,
        proof.bytes_per_token * CONTEXT_TOKENS,
        OVERHEAD.get(device.kind, GPU_OVERHEAD),
        1.0 if device.kind == "cpu" else UTILISATION,
    )


def planning_device(device: Device) -> Device:
    """Where the proof for `device` is planned: a CPU on itself, a GPU or slice as the virtual
    device with its numbers."""
    if device.kind == "cpu":
        return device
    shared = device.shared_memory_bytes or SHARED_MEMORY.get(device.capability or (0, 0), 99 * KIB)
    return replace(
        device,
        spec=f"virtual:{device.id}",
        kind="virtual",
        shared_memory_bytes=shared,
        uuid=None,
        alias=None,
        parent=None,
        driver=None,
    )


class Reductions:
    """Reduced models and their proofs, kept in `cache` between runs."""

    def __init__(
        self,
        cache: Path,
        ask: Callable[[Request], Record],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`ask` plans a request, and gives its record; `say` tells people what takes long."""
        self._cache = cache
        self._ask = ask
        self._say = say
        self._proofs: dict[tuple[str, str, str], Proof] = {}

    def proof(self, model: Model, engine: EngineFacts, device: Device) -> Proof:
        """The proof for a model on a real device, made now if there is none yet."""
        key = (model.key, engine.python, device.id)
        if key not in self._proofs:
            self._proofs[key] = self._kept(model, engine, device)
        return self._proofs[key]

    def _kept(self, model: Model, engine: EngineFacts, device: Device) -> Proof:
        path = self._cache / "proofs" / f"{_digest(model, engine, device)}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Workers of one run need the same proofs at the same time: one makes them.
            with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                with suppress(OSError, ValueError, TypeError):
                    data = json.loads(path.read_text(encoding="utf-8"))
                    return Proof(
                        tuple(map(str, data["problems"])),
                        int(data["weights_bytes"]),
                        int(data["bytes_per_token"]),
                    )
                found = self._make(model, engine, device)
                with suppress(InfraError):
                    output.write_whole(path, json.dumps(found.__dict__) + "\n")
        except OSError as error:
            raise InfraError(f"cannot write {path}: {error.strerror or error}") from None
        return found

    def _make(self, model: Model, engine: EngineFacts, device: Device) -> Proof:
        self._say(
            f"planning {model.key} at full size and reduced with vLLM {engine.version}, to prove "
            "that no KV kind is lost (once)"
        )
        place = planning_device(device)
        small = reduced_folder(self._cache, model)
        problems: list[str] = []
        built: Record | None = None
        for dtype in DTYPES:
            case = Case(model.key, "default", dtype)
            full, reduced = (
                self._ask(Request(case, place, engine, DEPTH, SECONDS, path))
                for path in (model.path, small)
            )
            problems += [f"{case.id}: {line}" for line in differences(full, reduced)]
            if reduced.memory is not None and built is None:
                built = reduced
        assert built is None or built.memory is not None
        return Proof(
            tuple(problems),
            0 if built is None or built.memory is None else built.memory.weights_bytes,
            0 if built is None else built.kv_bytes_per_token or 0,
        )


def reduced(model: Model) -> Reduced:
    """The model as it runs on a real device. UsageError where it cannot be reduced."""
    try:
        return reduce(model.config)
    except UsageError as error:
        raise UsageError(
            f"model {model.key} cannot be reduced for a real device: {error}"
        ) from None


def reduced_folder(cache: Path, model: Model) -> Path:
    """A folder with the config.json of the reduced model. InfraError where the disk is full."""
    text = json.dumps(reduced(model).config, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = cache / "reduced" / f"{model.key}-{digest}"
    if not (folder / "config.json").is_file():
        output.write_whole(folder / "config.json", text)
    return folder


def _digest(model: Model, engine: EngineFacts, device: Device) -> str:
    """Names what a proof depends on: engine, device, both configs, and the code that plans."""
    digest = hashlib.sha256()
    place = replace(planning_device(device), index=None, slice_index=None)
    for part in (
        engine.python,
        engine.version,
        str(engine.commit),
        json.dumps(place.to_json(), sort_keys=True),
        json.dumps(dict(model.config), sort_keys=True),
        json.dumps(reduced(model).config, sort_keys=True),
        str(DTYPES),
    ):
        digest.update(part.encode() + b"\0")
    for path in sorted(ENGINE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
