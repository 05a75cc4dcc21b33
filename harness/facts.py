"""Engine facts: which vLLM an interpreter has, and the names that this vLLM knows.

Pure. The child reads the facts (`harness/engine/facts.py`), the parent keeps them
(`harness/interpreter.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from harness.errors import UsageError

SCHEMA = 3
"""Version of the JSON form. Raised when a field changes its meaning or goes away."""

SUPPORTED = ">=0.27,<0.34"
"""vLLM releases whose differences `harness/engine/compat.py` knows."""

FIRST, LAST = "0.27", "0.33"
"""The same range for people."""

PLATFORMS = ("cuda", "cpu")

KINDS = ("regular", "mla", "sparse")
"""What attention layers need of a backend: heads of keys and values; the latent vector of
multi-head latent attention; that with a selection of tokens."""

_NAMES = ("kv_cache_dtypes", "backends", "cpu_backends", "architectures")
_NAMES_BY = ("model_backends", "kind_backends")
_OPTIONAL = ("commit", "cuda", "flashinfer", "transformers")


@dataclass(frozen=True)
class EngineFacts:
    """One Python interpreter that has a vLLM."""

    python: str
    """Path of the interpreter."""
    version: str
    """vLLM's version."""
    commit: str | None
    torch: str
    cuda: str | None
    """The CUDA that torch was built for; None for a CPU build."""
    flashinfer: str | None
    transformers: str | None
    python_version: str
    kv_cache_dtypes: tuple[str, ...]
    """vLLM's own `CacheDType` values, in its order."""
    backends: tuple[str, ...]
    """Names of the members of vLLM's `AttentionBackendEnum`, in its order."""
    model_backends: Mapping[str, tuple[str, ...]] = dataclasses.field(hash=False)
    """Architecture -> the backends that its own code names; no other architecture has any.
    Those for CUDA, whatever the platform."""
    platform: str = "cuda"
    """`cpu` for vLLM's CPU build, which serves the device `cpu` alone; else `cuda`."""
    cpu_backends: tuple[str, ...] = ()
    """The backends among `backends` that are the CPU's own; none for a CUDA build."""
    kind_backends: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict, hash=False
    )
    """One of `KINDS` -> the backends for CUDA that can be chosen for models of that kind, no
    model's own. Empty for a CPU build."""
    architectures: tuple[str, ...] = ()
    """Names of the model classes that this vLLM has, sorted."""

    def to_json(self) -> dict[str, Any]:
        """The facts as plain JSON data."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in _NAMES:
            data[name] = list(data[name])
        for name in _NAMES_BY:
            data[name] = {key: list(names) for key, names in data[name].items()}
        return {"schema": SCHEMA, **data}

    @classmethod
    def from_json(cls, data: Any) -> EngineFacts:
        """Read what `to_json` gave. ValueError says what is wrong with anything else."""
        if not isinstance(data, dict):
            raise ValueError(f"engine facts are a JSON object, not {type(data).__name__}")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"engine facts: schema {data.get('schema')!r} is not {SCHEMA}")
        values = {key: value for key, value in data.items() if key != "schema"}
        wrong = values.keys() ^ {f.name for f in dataclasses.fields(cls)}
        if wrong:
            raise ValueError(f"engine facts: missing or unknown {sorted(wrong)}")
        for name, value in values.items():
            if name in _NAMES:
                values[name] = _strings(name, value)
            elif name in _NAMES_BY:
                if not isinstance(value, dict):
                    raise ValueError(f"engine facts: {name} is not an object")
                values[name] = {key: _strings(name, names) for key, names in value.items()}
            elif not isinstance(value, str) and not (value is None and name in _OPTIONAL):
                raise ValueError(f"engine facts: {name} is not a string but {value!r}")
        if values["platform"] not in PLATFORMS:
            raise ValueError(
                f"engine facts: platform {values['platform']!r} is none of {PLATFORMS}"
            )
        return cls(**values)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"engine facts: {name} is not a list of strings")
    return tuple(value)


def cpu_backends(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `AttentionBackendEnum`'s member names that are the CPU's own, in their order: vLLM
    begins them with the processor, or with its matrix extension (AMX)."""
    return tuple(name for name in names if name.startswith(("CPU_", "AMX_")))


def dumps(facts: EngineFacts) -> str:
    """The facts as one line of JSON."""
    return json.dumps(facts.to_json(), separators=(",", ":"))


def loads(text: str) -> EngineFacts:
    """Read what `dumps` wrote. ValueError says what is wrong with anything else."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"engine facts: not JSON: {error}") from None
    return EngineFacts.from_json(data)


def check_supported(version: str) -> None:
    """UsageError where `version` is no vLLM that can be read. Development builds count."""
    try:
        inside = SpecifierSet(SUPPORTED).contains(Version(version), prereleases=True)
    except InvalidVersion:
        inside = False
    if not inside:
        raise UsageError(
            f"vLLM {version} is not supported: kvmatrix reads {FIRST} to {LAST}; "
            f"name one of them, such as --engine {LAST}.0"
        )
