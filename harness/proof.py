"""The proof of a reduction: the reduced model has every KV kind that the full one has.

Both are planned by the engine itself, at full depth and without weights: on a virtual device of
the real one's capability, or by the CPU build on its own CPU. Done once for an engine, a device,
a model and a kv_cache_dtype, and kept in the cache.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import output
from harness.case import DEFAULT
from harness.device import GIB, KIB, SHARED_MEMORY, Device
from harness.errors import InfraError, UsageError
from harness.kinds import differences
from harness.plan import Cell, Model
from harness.record import Record
from harness.reduce import Reduced, reduce
from harness.request import Request

ENGINE = Path(__file__).resolve().parent / "engine"

DEPTH = "allocate"
SECONDS = 300.0

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
    request_bytes: int
    """Of its KV cache, for one request of the planned context; 0 where it was not planned."""


@dataclass(frozen=True)
class Need:
    """The device memory that a cell needs, in bytes."""

    weights: int
    kv_cache: int
    """For one request."""
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
        proof.request_bytes,
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
        self._proofs: dict[tuple[str, ...], Proof] = {}
        self._said: set[tuple[str, str]] = set()

    def proof(self, cell: Cell) -> Proof:
        """The proof for a cell on a real device, made now if there is none yet. It is that of the
        cell's kv_cache_dtype with the backend left to vLLM: kinds come from the model and the dtype
        (TurboQuant, for one, spares the first and last layers)."""
        key = (cell.model.key, cell.engine.python, cell.device.id, cell.case.kv_cache_dtype)
        if key not in self._proofs:
            self._proofs[key] = self._kept(cell)
        return self._proofs[key]

    def requests(self, cells: Iterable[Cell]) -> list[Request]:
        """What is going to be planned for those of `cells` that have no proof yet, in order."""
        wanted: dict[tuple[str, ...], Request] = {}
        for cell in cells:
            with suppress(UsageError):  # cannot be reduced: `proof` says so
                if not self._path(cell).is_file():
                    wanted |= {request.key: request for request in self._plans(cell)}
        return list(wanted.values())

    def _path(self, cell: Cell) -> Path:
        return self._cache / "proofs" / f"{_digest(cell)}.json"

    def _plans(self, cell: Cell) -> tuple[Request, Request]:
        """The full and the reduced model, to be planned."""
        case = replace(cell.case, backend=DEFAULT, model_runner="")
        place = planning_device(cell.device)
        full = Request(
            case,
            place,
            cell.engine,
            DEPTH,
            SECONDS,
            cell.model.path,
            cell.model.start.engine_args,
        )
        return full, replace(full, model_path=reduced_folder(self._cache, cell.model))

    def _kept(self, cell: Cell) -> Proof:
        path = self._path(cell)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Workers of one run need the same proofs at the same time: one makes them.
            with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                with suppress(OSError, ValueError, TypeError, KeyError):
                    data = json.loads(path.read_text(encoding="utf-8"))
                    return Proof(
                        tuple(map(str, data["problems"])),
                        int(data["weights_bytes"]),
                        int(data["request_bytes"]),
                    )
                found, lasts = self._make(cell)
                if lasts:
                    with suppress(InfraError):
                        output.write_whole(path, json.dumps(asdict(found)) + "\n")
        except OSError as error:
            raise InfraError(f"cannot write {path}: {error.strerror or error}") from None
        return found

    def _make(self, cell: Cell) -> tuple[Proof, bool]:
        """The proof, and whether it holds for later runs: a child that passed its deadline on a
        busy host may finish then."""
        if (what := (cell.model.key, cell.engine.version)) not in self._said:
            self._said.add(what)
            self._say(
                f"planning {cell.model.key} at full size and reduced with vLLM "
                f"{cell.engine.version}, to prove that no KV kind is lost (once)"
            )
        full, small = map(self._ask, self._plans(cell))
        memory = small.memory
        found = Proof(
            tuple(f"{full.id}: {line}" for line in differences(full, small)),
            0 if memory is None else memory.weights_bytes,
            0 if small.capacity is None else small.capacity.request_bytes,
        )
        return found, full.end == small.end == "finished"


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
    if not _holds(folder / "config.json", text):
        output.write_whole(folder / "config.json", text)
    return folder


def _holds(path: Path, text: str) -> bool:
    """True where the file is there and whole: a cache may be cut short by a full disk."""
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


@functools.lru_cache(maxsize=1)
def code() -> bytes:
    """Names the code that plans."""
    digest = hashlib.sha256()
    for path in sorted(ENGINE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def _digest(cell: Cell) -> str:
    """Names what a proof depends on: engine, device, both configs, the dtype, and the code."""
    place = replace(planning_device(cell.device), index=None, slice_index=None)
    parts = (
        cell.engine.python,
        cell.engine.version,
        str(cell.engine.commit),
        cell.case.kv_cache_dtype,
        json.dumps(place.to_json(), sort_keys=True),
        json.dumps(dict(cell.model.config), sort_keys=True),
        json.dumps(reduced(cell.model).config, sort_keys=True),
    )
    digest = hashlib.sha256(code())
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]
