"""The record: what a child process observed of one cell. Facts only, no judgement.

A record crosses the process boundary as one JSON object. This module is the
contract of both sides, so it knows neither vLLM nor pytest.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
"""Version of the JSON form. Raised when a field changes its meaning or goes away."""

STAGES = ("import", "config", "model", "spec", "plan", "allocate", "warmup", "generate")
"""How far initialisation can get, in order."""

VIRTUAL_STAGES = STAGES[: STAGES.index("allocate") + 1]
"""What a virtual device can reach: there is no forward pass."""

ENDS = ("finished", "signal", "exit", "timeout", "silent", "infra")
"""How the child ended: `finished` wrote its record itself; `signal` and `exit` died before
that; `timeout` passed its deadline; `silent` exited 0 without a record; `infra` never ran
because host or device was not usable."""


class RecordError(ValueError):
    """A JSON text that is not a record of this schema."""


@dataclass(frozen=True)
class Fault:
    """The exception that ended initialisation."""

    type: str
    """Name of the exception's class."""
    bases: tuple[str, ...]
    """Names of all its classes up to `Exception`, most derived first."""
    message: str
    where: str
    """`file:function` of the innermost frame inside vLLM (else the innermost of all), the file
    relative to site-packages, such as `vllm/models/deepseek_v4/attention.py:__init__`."""


@dataclass(frozen=True)
class KVCache:
    """Layers whose KV-cache specs, backends and tensors are alike."""

    kind: str
    """Class name of vLLM's `KVCacheSpec`, such as `MLAAttentionSpec`."""
    role: str
    """The layer's name behind its layer number, such as `attn.swa_cache`."""
    layers: int
    """How many layers are like this."""
    block_size: int
    """Tokens a block stands for."""
    page_size_bytes: int
    """Bytes of one block of one layer, alignment included."""
    content_bytes: int
    """Bytes of one block of one layer before alignment."""
    dtype: str
    """torch name of the spec's element type without `torch.`, such as `uint8`."""
    cache_dtype: str | None = None
    """The spec's own `cache_dtype_str`, where the spec has one."""
    compress_ratio: int = 1
    """Tokens that share one stored state."""
    draft: bool = False
    """True for the layers of the model that drafts tokens."""
    alignment: int | None = None
    """The page is a multiple of this many bytes; None where the spec asks for none."""
    backend: str | None = None
    """`get_name()` of the attention backend that serves these layers."""
    shape: tuple[int, ...] | None = None
    """Shape of one layer's tensor after reshape, the number of blocks given as -1 so that pages
    can be compared between devices; None before stage `allocate`."""
    tensor_dtype: str | None = None
    """Element type of that tensor."""
    stride: tuple[int, ...] | None = None
    """Strides of that tensor in elements, as they are; they may depend on the number of blocks."""
    window: int | None = None
    """Tokens of a sequence that a layer with a sliding window or chunks keeps; None for others."""
    grows: bool = True
    """True where one more token of context costs more; not so for a window or a chunk, a state of
    fixed size a sequence, and an encoder's output."""
    state_mode: str | None = None
    """vLLM's `mamba_cache_mode` for a recurrent state: `none` keeps one for a whole sequence,
    `align` and `all` keep some at the end of blocks, for prefix caching; None for other caches."""


@dataclass(frozen=True)
class Group:
    """One of vLLM's KV-cache groups."""

    kind: str
    layers: int
    block_size: int
    page_size_bytes: int


@dataclass(frozen=True)
class Declared:
    """What one backend class says of this configuration (`validate_configuration`)."""

    backend: str
    """`get_name()` of the class."""
    reasons: tuple[str, ...]
    """Why the configuration is not supported; empty means declared supported."""
    kv_cache_dtypes: tuple[str, ...] = ()
    """The class's `supported_kv_cache_dtypes`."""


@dataclass(frozen=True)
class Candidate:
    """An attention backend that vLLM's selector considered where none was asked for."""

    backend: str
    """Name in vLLM's `AttentionBackendEnum`."""
    reasons: tuple[str, ...]
    """vLLM's own reasons for refusing it; empty where it could have served."""
    selected: bool = False
    asked: str = ""
    """What the layers asked for where other layers asked for something else, such as
    `has_sliding_window=True`; empty where all asked alike."""


@dataclass(frozen=True)
class Resolved:
    """What the request became."""

    kv_cache_dtype: str | None = None
    """The string that the main attention layers ended up with."""
    storage_dtype: str | None = None
    """torch name of the main cache's element type: the layers', or their specs' where the layers
    do not say (MLA)."""
    cache_config: str | None = None
    """`cache_config.cache_dtype` at the end: differs where the layers did not write back."""
    backends: tuple[str, ...] = ()
    """Backends of the layers that hold a KV cache, sorted."""
    selected: str | None = None
    """The backend of the main attention layers."""


@dataclass(frozen=True)
class Memory:
    """Bytes that KV planning worked with."""

    total_bytes: int
    weights_bytes: int
    available_bytes: int
    """What planning was given for the KV cache."""
    weights_fit: bool
    """False where the weights leave no room for one request: planned as if they lay elsewhere."""
    used_before_bytes: int | None = None
    """Measured in use before the engine started: on the device, for a CPU of the process. None on
    a virtual device, and where it could not be measured; the same for those that follow."""
    used_after_weights_bytes: int | None = None
    used_after_kv_bytes: int | None = None


@dataclass(frozen=True)
class Capacity:
    """What the planned KV cache holds, as vLLM computes it."""

    tokens: int
    """Tokens that fit where each request has the longest context."""
    concurrency: float
    """Requests of the longest context that fit at once."""
    request_bytes: int
    """Bytes that one such request needs, over all layers."""
    max_model_len: int
    """Tokens of the longest context."""
    gpu_memory_utilization: float
    """Share of the device's memory that vLLM may use."""


@dataclass(frozen=True)
class Record:
    """One cell as observed."""

    id: str
    model: str
    backend: str
    kv_cache_dtype: str
    device: str
    """Device SPEC that the cell ran on."""
    device_kind: str
    """`gpu`, `mig`, `cpu` or `virtual`."""
    capability: tuple[int, int] | None
    """Compute capability (major, minor); None on a CPU."""
    engine: str
    """vLLM version."""
    depth: str
    """The stage that was asked for."""
    stage: str
    """The stage that was reached, or that was running when it failed."""
    end: str = "finished"
    block_size: int = 0
    """Tokens asked for; 0 where the option was not passed."""
    tensor_parallel_size: int = 1
    """GPUs that the model is spread over; this is one of them."""
    error: Fault | None = None
    resolved: Resolved = Resolved()
    kv: tuple[KVCache, ...] = ()
    groups: tuple[Group, ...] = ()
    num_blocks: int | None = None
    kv_bytes_per_token: int | None = None
    """Bytes of KV cache that one more token of context costs at full blocks, over all layers
    that keep every token (`KVCache.grows`): 0 for a model that has none. None before stage
    `plan`."""
    capacity: Capacity | None = None
    """None before stage `plan`, and where there is no KV cache."""
    candidates: tuple[Candidate, ...] = ()
    """In vLLM's order; () where a backend was asked for, where the model chooses itself, and on a
    CPU."""
    declared: tuple[Declared, ...] = ()
    memory: Memory | None = None
    model_runner: str | None = None
    """vLLM's model runner that served, `v1` or `v2`; on a virtual device the one asked for, and
    None where none was: the newer runner's functions are then called without one."""
    logits_finite: bool | None = None
    """Whether every log-probability of the decoded token is a finite number; None before stage
    `generate`."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables of the caller that vLLM, torch or CUDA read, secrets masked; empty on
    a virtual device, where none is inherited."""
    leaked_bytes: int | None = None
    """Device memory that was still in use after the child and all it started had ended."""
    log: tuple[str, ...] = ()
    """Log lines of vLLM that speak of the KV cache, secrets masked."""
    tail: str = ""
    """Last output of a child that did not finish, or ran on a real device, secrets masked."""
    exit_code: int | None = None
    """The child's exit status; negative for a signal; None where it finished."""
    retried: bool = False
    """True where the first try hung at once and a fresh interpreter was used."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds per stage, and `total`."""
    schema: int = SCHEMA

    @property
    def complete(self) -> bool:
        """True where initialisation went through to the depth asked for."""
        return self.end == "finished" and self.error is None and self.stage == self.depth


def to_json(record: Any) -> dict[str, Any]:
    """A record, or one of its parts, as plain JSON data: what is read again is equal to it."""
    plain: dict[str, Any] = _listed(dataclasses.asdict(record))
    return plain


def _listed(value: Any) -> Any:
    """The value with lists for tuples."""
    if isinstance(value, dict):
        return {key: _listed(each) for key, each in value.items()}
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value


def parts(data: dict[str, Any]) -> dict[str, Any]:
    """Some of Record's fields, read from plain JSON data. RecordError as `loads`."""
    hints = typing.get_type_hints(Record)
    unknown = data.keys() - hints.keys()
    if unknown:
        raise RecordError(f"record: unknown {sorted(unknown)}")
    return {name: _build(hints[name], value, f"record.{name}") for name, value in data.items()}


def dumps(record: Record) -> str:
    """The record as one line of JSON, keys sorted."""
    return json.dumps(to_json(record), sort_keys=True, separators=(",", ":"))


def loads(text: str) -> Record:
    """Read what `dumps` wrote. RecordError says what is wrong with anything else."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RecordError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise RecordError(f"a record is a JSON object, not {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise RecordError(f"schema {data.get('schema')!r} is not {SCHEMA}, the one read here")
    record = _build(Record, data, "record")
    assert isinstance(record, Record)
    if record.stage not in STAGES or record.depth not in STAGES or record.end not in ENDS:
        raise RecordError(
            f"unknown stage, depth or end: {record.stage!r}, {record.depth!r}, {record.end!r}"
        )
    return record


def _build(kind: Any, value: Any, path: str) -> Any:
    """`value` as an instance of the annotation `kind`, which only holds what Record uses."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _build(next(a for a in args if a is not type(None)), value, path)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise RecordError(f"{path}: an object expected, got {type(value).__name__}")
        hints = typing.get_type_hints(kind)
        unknown = value.keys() - hints.keys()
        missing = {
            f.name
            for f in dataclasses.fields(kind)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        } - value.keys()
        if unknown or missing:
            raise RecordError(f"{path}: unknown {sorted(unknown)}, missing {sorted(missing)}")
        return typing.cast(Any, kind)(
            **{k: _build(hints[k], v, f"{path}.{k}") for k, v in value.items()}
        )
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise RecordError(f"{path}: a list expected, got {type(value).__name__}")
        return tuple(_build(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{path}: an object expected, got {type(value).__name__}")
        return {str(k): _build(args[1], v, f"{path}.{k}") for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecordError(f"{path}: {kind.__name__} expected, got {type(value).__name__}")
    return value
