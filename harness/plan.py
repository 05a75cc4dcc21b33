"""The plan: which cells there are. Pure but for reading the models' config.json files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.case import DEFAULT, UNSET, Case, slug
from harness.device import Device
from harness.errors import UsageError
from harness.facts import EngineFacts

MODELS = Path(__file__).resolve().parent.parent / "cases" / "models"
"""Where the shipped models lie, one folder with a config.json each."""


@dataclass(frozen=True)
class Model:
    """A model as published: its geometry, no weights."""

    key: str
    path: Path
    """The folder that holds config.json."""
    config: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """vLLM's name for the class that implements it."""
        return str(self.config["architectures"][0])


@dataclass(frozen=True)
class Cell:
    """A case on one device with one engine."""

    id: str
    case: Case
    model: Model
    device: Device
    engine: EngineFacts


def models(folder: Path = MODELS) -> tuple[Model, ...]:
    """The models in `folder`, by key. UsageError names a config.json that cannot be used."""
    found = []
    for path in sorted(folder.glob("*/config.json")):
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            found.append(Model(path.parent.name, path.parent, config))
            _ = found[-1].architecture
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            name = f"{path.parent.name}/{path.name}"
            raise UsageError(f"model config {name} cannot be used: {error!r}") from None
    return tuple(found)


def cases(model: Model, engine: EngineFacts) -> tuple[Case, ...]:
    """Every backend that the model knows under this engine x every kv_cache_dtype of the engine,
    the options that are not passed first."""
    return tuple(
        Case(model.key, backend, dtype)
        for backend in (DEFAULT, *_backends(model, engine))
        for dtype in (UNSET, *engine.kv_cache_dtypes)
    )


def _backends(model: Model, engine: EngineFacts) -> tuple[str, ...]:
    own = engine.model_backends.get(model.architecture, ())
    if engine.platform != "cpu":
        return own
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
    """UsageError names a device that no engine serves, or an engine that serves no device."""
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


def cells(
    models: Iterable[Model], devices: Sequence[Device], engines: Sequence[EngineFacts]
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
                for case in cases(model, engine):
                    parts = [case.id]
                    if len(devices) > 1:
                        parts.append(device.id)
                    if len(engines) > 1:
                        parts.append(slug(engine.version))
                    planned.append(Cell("-".join(parts), case, model, device, engine))
    return tuple(planned)
