"""The plan: which cells there are. Pure but for reading the models' config.json files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.case import DEFAULT, UNSET, Case, slug
from harness.device import Device
from harness.errors import UsageError
from harness.facts import EngineFacts
from harness.start import Start
from harness.start import load as load_start

MODELS = Path(__file__).resolve().parent.parent / "cases" / "models"
"""Where the shipped models lie, one folder with a config.json each."""


@dataclass(frozen=True)
class Model:
    """A model as published: its geometry, no weights."""

    key: str
    path: Path
    """The folder that holds config.json."""
    config: Mapping[str, Any]
    start: Start = field(default_factory=Start, hash=False)

    @property
    def architecture(self) -> str:
        """vLLM's name for the class that implements it."""
        return str(self.config["architectures"][0])

    @property
    def kind(self) -> str:
        """What its attention layers need of a backend, one of `facts.KINDS`."""
        if not self.config.get("kv_lora_rank"):
            return "regular"
        return "sparse" if self.config.get("index_topk") else "mla"


@dataclass(frozen=True)
class Axes:
    """What is passed beyond backend and kv_cache_dtype: a cell for each combination."""

    block_sizes: tuple[int, ...] = (0,)
    """Tokens; 0 where the option is not passed."""
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    model_runners: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Cell:
    """A case on one device with one engine."""

    id: str
    case: Case
    model: Model
    device: Device
    engine: EngineFacts

    @property
    def lacks(self) -> str | None:
        """Why the case cannot run on this engine or device at all; None where it can."""
        architectures = self.engine.architectures
        if architectures and self.model.architecture not in architectures:
            return f"vLLM {self.engine.version} has no {self.model.architecture}"
        if self.model.start.virtual and self.device.real:
            return f"{self.model.key} is for virtual devices: {self.model.start.virtual}"
        needs, has = self.model.start.capability, self.device.capability
        if needs is not None and has is not None and has < needs:
            return (
                f"{self.model.key} needs SM{needs[0]}{needs[1]} ({self.model.start.why}), "
                f"{self.device.spec} is SM{has[0]}{has[1]}"
            )
        return None


def models(folder: Path = MODELS) -> tuple[Model, ...]:
    """The models in `folder`, by key. UsageError names a file that cannot be used.

    A model is a folder with a config.json, or with a start.json that names the model whose
    config.json it shares.
    """
    found = []
    for path in sorted({*folder.glob("*/config.json"), *folder.glob("*/start.json")}):
        if path.name == "start.json" and (path.parent / "config.json").exists():
            continue
        key = path.parent.name
        start = load_start(path.parent / "start.json")
        place = folder / start.config if start.config else path.parent
        name = f"{key}/{path.name}"
        if not start.config and path.name == "start.json":
            raise UsageError(f"model {key} has no config.json, and {name} names none")
        try:
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
            found.append(Model(key, place, config, start))
            _ = found[-1].architecture
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UsageError(f"model config {name} cannot be used: {error!r}") from None
    return tuple(found)


def cases(model: Model, engine: EngineFacts, axes: Axes = Axes()) -> tuple[Case, ...]:
    """Every backend for models of this kind under this engine x every kv_cache_dtype of the
    engine, the options that are not passed first."""
    return tuple(
        Case(model.key, backend, dtype, *more)
        for more in itertools.product(
            axes.block_sizes, axes.tensor_parallel_sizes, axes.model_runners
        )
        for backend in (DEFAULT, *_backends(model, engine))
        for dtype in (UNSET, *engine.kv_cache_dtypes)
    )


def _backends(model: Model, engine: EngineFacts) -> tuple[str, ...]:
    own = engine.model_backends.get(model.architecture, ())
    if engine.platform != "cpu":
        # A model with a package of its own takes its own backends only; one without attention none.
        return own or (engine.kind_backends.get(model.kind, ()) if model.start.attention else ())
    if own:
        # Its package chooses the CPU's form itself, and names none of the general backends.
        return ()
    mla = "kv_lora_rank" in model.config
    return tuple(name for name in engine.cpu_backends if name.endswith("_MLA") == mla)


def serves(engine: EngineFacts, device: Device) -> bool:
    """True where `engine` can start on `device`: vLLM's CPU build on the CPU, and any other build
    everywhere else."""
    return (engine.platform == "cpu") == (device.kind == "cpu")


def check_pairs(devices: Sequence[Device], engines: Sequence[EngineFacts]) -> None:
    """UsageError names a device that no engine serves, an engine that serves no device, or two
    engines that a cell's id, and so the matrix, could not tell apart."""
    for device in devices:
        if not any(serves(engine, device) for engine in engines):
            versions = ", ".join(engine.version for engine in engines)
            if device.kind == "cpu":
                raise UsageError(
                    f"device cpu needs vLLM's CPU build, not {versions}: pass --engine cpu:0.32.0"
                )
            raise UsageError(
                f"device {device.spec} needs a CUDA build of vLLM, and {versions} is a CPU build: "
                "pass --device cpu, or another --engine"
            )
    for engine in engines:
        if not any(serves(engine, device) for device in devices):
            need = "--device cpu" if engine.platform == "cpu" else "another --device than cpu"
            raise UsageError(f"engine {engine.version} ({engine.platform}) needs {need}")
    for one, other in itertools.combinations(engines, 2):
        if slug(one.version) == slug(other.version) and one.platform == other.platform:
            raise UsageError(
                f"engines {one.python} and {other.python} are both vLLM {one.version}, and cells "
                "are told apart by the version: run one of them, or one after the other"
            )


def cells(
    models: Iterable[Model],
    devices: Sequence[Device],
    engines: Sequence[EngineFacts],
    axes: Axes = Axes(),
) -> tuple[Cell, ...]:
    """The whole matrix. Ids name the device and the engine only where there is more than one;
    cells of one device and engine follow each other, for one warm child serves them."""
    models = tuple(models)
    planned = []
    for engine in engines:
        for device in devices:
            if not serves(engine, device):
                continue
            for model in models:
                for case in cases(model, engine, axes):
                    parts = [case.id]
                    if len(devices) > 1:
                        parts.append(device.id)
                    if len(engines) > 1:
                        parts.append(slug(engine.version))
                    planned.append(Cell("-".join(parts), case, model, device, engine))
    return tuple(planned)
