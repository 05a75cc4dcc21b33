"""One cell on the virtual device: vLLM's own initialisation, stage by stage, into a Record."""

from __future__ import annotations

import logging
import math
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.case import DEFAULT, UNSET, Case
from harness.device import Device
from harness.engine import compat, seams
from harness.record import (
    VIRTUAL_STAGES,
    Declared,
    Fault,
    Group,
    KVCache,
    Memory,
    Record,
    Resolved,
)

MAX_MODEL_LEN = 4096
"""Tokens of context that the KV cache is planned for; pages do not depend on it."""

_ABOUT_KV = re.compile(r"kv.?cache|cache.?dtype|fp8_ds_mla|attention backend", re.IGNORECASE)
_LAYER = re.compile(r"^(?:.*\.)?layers\.\d+\.")


class _Reached(Exception):  # noqa: N818 - no error: the depth asked for is done
    """The stage that was asked for has been passed."""


@dataclass
class _Observed:
    """What has been seen so far; a fault must not lose it."""

    stage: str = "import"
    seconds: dict[str, float] = field(default_factory=dict)
    vllm_config: Any = None
    model: Any = None
    specs: dict[str, Any] = field(default_factory=dict)
    kv_cache_config: Any = None
    tensors: dict[str, Any] = field(default_factory=dict)
    memory: Memory | None = None
    log: list[str] = field(default_factory=list)
    failing_layer: Any = None


class _Executor:
    """Stands where vLLM's model executor stands while EngineCore plans the KV cache."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        # A group's planning may replace specs; what the layers asked for is kept.
        return [dict(self._run.seen.specs)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [compat.supported_kv_cache_layouts(self._run.seen.vllm_config)]

    def set_kv_cache_layout(self, *args: Any) -> None:
        compat.set_kv_cache_layout(self._run.seen.vllm_config, *args)

    def determine_available_memory(self) -> list[int]:
        return [self._run.available_memory()]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self._run.allocate(kv_cache_configs[0])

    def compile_or_warm_up_model(self, *args: Any) -> Any:
        # There is no forward pass on a virtual device.
        raise _Reached


class _Run:
    def __init__(self, model_path: Path, case: Case, device: Device, depth: str) -> None:
        self.model_path = model_path
        self.case = case
        self.device = device
        self.depth = depth
        self.seen = _Observed()
        self._since = time.perf_counter()
        self._tell: Callable[[str], None] = lambda stage: None

    def enter(self, stage: str) -> None:
        """Leave the running stage for `stage`; _Reached where the depth asked for lies behind."""
        now = time.perf_counter()
        if self.seen.stage != "import":
            self.seen.seconds[self.seen.stage] = round(now - self._since, 3)
        self._since = now
        if VIRTUAL_STAGES.index(stage) > VIRTUAL_STAGES.index(self.depth):
            raise _Reached
        self.seen.stage = stage
        self._tell(stage)

    def go(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.enter("config")
        self.seen.vllm_config = config = self._config()
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with ExitStack() as stack:
            stack.enter_context(set_current_vllm_config(config))
            self.enter("model")
            # Before meta becomes the default place: the group exchanges real tensors on the host.
            self._distributed()
            stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
            stack.enter_context(seams.META)
            stack.enter_context(seams.OnMeta())
            compat.init_workspace(seams.META)
            self.seen.model = compat.initialize_model(config)
            # The executor does this between loading and the KV cache.
            from vllm.platforms import current_platform

            current_platform.update_block_size_for_backend(config)
            self.enter("spec")
            self.seen.specs = compat.kv_cache_specs(config)
            self.enter("plan")
            compat.plan(_Executor(self), config)

    def _config(self) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        options: dict[str, Any] = {}
        if self.case.kv_cache_dtype != UNSET:
            options["kv_cache_dtype"] = self.case.kv_cache_dtype
        if self.case.backend != DEFAULT:
            options["attention_backend"] = self.case.backend
        arguments = EngineArgs(
            model=str(self.model_path),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            **options,
        )
        return arguments.create_engine_config()

    def _distributed(self) -> None:
        """A group of one rank, which layers ask for their share of the model."""
        from vllm.distributed import (
            ensure_model_parallel_initialized,
            init_distributed_environment,
        )

        rendezvous = Path(tempfile.mkdtemp()) / "store"
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)

    def available_memory(self) -> int:
        """Bytes for the KV cache: utilisation x memory less weights, as if the weights lay
        elsewhere (other ranks) where they do not fit on one device."""
        weights = sum(
            t.numel() * t.element_size()
            for t in (*self.seen.model.parameters(), *self.seen.model.buffers())
        )
        share = self.seen.vllm_config.cache_config.gpu_memory_utilization
        budget = int(self.device.memory_bytes * share)
        fits = weights < budget
        self.seen.memory = Memory(
            total_bytes=self.device.memory_bytes,
            weights_bytes=weights,
            available_bytes=budget - weights if fits else budget,
            weights_fit=fits,
        )
        return budget - weights if fits else budget

    def allocate(self, kv_cache_config: Any) -> None:
        self.seen.kv_cache_config = kv_cache_config
        self.enter("allocate")
        config = self.seen.vllm_config
        groups, kernel_block_sizes = compat.attention_groups(config, kv_cache_config, seams.META)
        self.seen.tensors = compat.allocate(
            config, kv_cache_config, groups, kernel_block_sizes, seams.META
        )


@contextmanager
def _kept_log(into: list[str]) -> Iterator[None]:
    """Keep what vLLM says of the KV cache, level first.

    Records are caught where they are made: vLLM configures its handlers anew with each config.
    """
    make = logging.getLogRecordFactory()

    def keep(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith("vllm") and record.levelno >= logging.INFO and len(into) < 50:
            message = record.getMessage()
            if _ABOUT_KV.search(message):
                into.append(f"{record.levelname} {message}")
        return record

    logging.setLogRecordFactory(keep)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def run(
    case: Case,
    model_path: Path,
    device: Device,
    depth: str,
    engine: str,
    tell: Callable[[str], None] = lambda stage: None,
) -> Record:
    """Start `case` on `device` up to stage `depth` and return what was seen. Never raises for
    anything that vLLM does; `tell` hears of each stage before it runs."""
    began = time.perf_counter()
    this = _Run(model_path, case, device, depth)
    seen = this.seen
    fault: Fault | None = None
    try:
        with _kept_log(seen.log):
            this.go(tell)
    except _Reached:
        pass
    except Exception as error:
        fault = _fault(error)
        seen.failing_layer = _failing_layer(error)
    finally:
        seen.seconds.setdefault(seen.stage, round(time.perf_counter() - this._since, 3))
    kv = _kv(seen) if seen.specs else ()
    seen.seconds["total"] = round(time.perf_counter() - began, 3)
    clean = _Cleaner(model_path)
    return Record(
        id=case.id,
        model=case.model,
        backend=case.backend,
        kv_cache_dtype=case.kv_cache_dtype,
        device=device.spec,
        device_kind=device.kind,
        capability=device.capability,
        engine=engine,
        depth=depth,
        stage=seen.stage,
        error=None if fault is None else clean.fault(fault),
        resolved=_resolved(seen),
        kv=kv,
        groups=_groups(seen),
        num_blocks=None if seen.kv_cache_config is None else int(seen.kv_cache_config.num_blocks),
        kv_bytes_per_token=_per_token(seen) if seen.kv_cache_config is not None else None,
        declared=_declared(this),
        memory=seen.memory,
        log=tuple(clean(line) for line in seen.log),
        seconds=seen.seconds,
    )


class _Cleaner:
    """Takes this machine's paths and addresses out of a text: two hosts must say the same."""

    def __init__(self, model_path: Path) -> None:
        import vllm

        packages = Path(vllm.__file__).resolve().parent.parent
        self._names = [
            (str(model_path), "<model>"),
            (str(packages), "<site-packages>"),
            (tempfile.gettempdir(), "<tmp>"),
        ]

    def __call__(self, text: str) -> str:
        for path, name in self._names:
            text = text.replace(path, name)
        return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)

    def fault(self, fault: Fault) -> Fault:
        return Fault(fault.type, fault.bases, self(fault.message), fault.where)


def _fault(error: BaseException) -> Fault:
    import vllm

    root = Path(vllm.__file__).resolve().parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).resolve().is_relative_to(root / "vllm")]
    last = (inside or list(frames))[-1]
    file = Path(last.filename).resolve()
    shown = file.relative_to(root) if file.is_relative_to(root) else Path(file.name)
    return Fault(
        type=type(error).__name__,
        bases=tuple(c.__name__ for c in type(error).__mro__ if issubclass(c, Exception)),
        message=str(error),
        where=f"{shown}:{last.name}",
    )


def _failing_layer(error: BaseException) -> Any:
    """The attention layer whose construction failed: it alone knows which backend was chosen."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer = frame.f_locals.get("self")
        if callable(getattr(layer, "get_attn_backend", None)):
            found = layer
    return found


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _layers(seen: _Observed) -> dict[str, Any]:
    context: dict[str, Any] = seen.vllm_config.compilation_config.static_forward_context
    return context


def _main_layers(seen: _Observed) -> list[Any]:
    """The attention layers proper: those that resolved a kv_cache_dtype of their own."""
    return [
        layer
        for layer in _layers(seen).values()
        if isinstance(getattr(layer, "kv_cache_dtype", None), str)
    ]


def _backend_name(layer: Any) -> str | None:
    ask = getattr(layer, "get_attn_backend", None)
    return str(ask().get_name()) if ask is not None else None


def _resolved(seen: _Observed) -> Resolved:
    if seen.vllm_config is None:
        return Resolved()
    cache_config = str(seen.vllm_config.cache_config.cache_dtype)
    if seen.model is None:
        return Resolved(cache_config=cache_config)
    main = _main_layers(seen)
    names = sorted({str(layer.kv_cache_dtype) for layer in main})
    stored = sorted(
        {
            _dtype(dtype)
            for layer in main
            if (dtype := getattr(layer, "kv_cache_torch_dtype", None)) is not None
        }
    )
    holders = {_backend_name(_layers(seen)[name]) for name in seen.specs}
    selected = sorted({name for layer in main if (name := _backend_name(layer))})
    return Resolved(
        kv_cache_dtype="+".join(names) or None,
        storage_dtype="+".join(stored) or None,
        cache_config=cache_config,
        backends=tuple(sorted(h for h in holders if h)),
        selected="+".join(selected) or None,
    )


def _shape(tensor: Any, num_blocks: int) -> tuple[int, ...] | None:
    """The tensor's shape, the dimension that counts blocks given as -1."""
    if isinstance(tensor, (list, tuple)):
        tensor = tensor[0] if tensor else None
    if tensor is None:
        return None
    shape = [int(n) for n in tensor.shape]
    for at, size in enumerate(shape):
        # A block may be stored as several kernel blocks.
        if size and size % num_blocks == 0:
            shape[at] = -1
            break
    return tuple(shape)


def _kv(seen: _Observed) -> tuple[KVCache, ...]:
    found: dict[tuple[Any, ...], int] = {}
    blocks = int(seen.kv_cache_config.num_blocks) if seen.kv_cache_config is not None else 0
    for name, spec in seen.specs.items():
        tensor: Any = seen.tensors.get(name)
        one: Any = tensor[0] if isinstance(tensor, (list, tuple)) and tensor else tensor
        alike = (
            type(spec).__name__,
            _LAYER.sub("", name),
            int(spec.block_size),
            int(spec.page_size_bytes),
            compat.content_bytes(spec),
            _dtype(spec.dtype) if hasattr(spec, "dtype") else "",
            getattr(spec, "cache_dtype_str", None),
            compat.tokens_per_state(spec),
            getattr(spec, "alignment", None),
            _backend_name(_layers(seen)[name]) if name in _layers(seen) else None,
            _shape(tensor, blocks) if blocks else None,
            None if one is None else _dtype(one.dtype),
        )
        found[alike] = found.get(alike, 0) + 1
    return tuple(
        KVCache(
            kind=kind,
            role=role,
            layers=layers,
            block_size=block_size,
            page_size_bytes=page,
            content_bytes=content,
            dtype=dtype,
            cache_dtype=cache_dtype,
            compress_ratio=ratio,
            alignment=alignment,
            backend=backend,
            shape=shape,
            tensor_dtype=tensor_dtype,
        )
        for (
            kind,
            role,
            block_size,
            page,
            content,
            dtype,
            cache_dtype,
            ratio,
            alignment,
            backend,
            shape,
            tensor_dtype,
        ), layers in found.items()
    )


def _groups(seen: _Observed) -> tuple[Group, ...]:
    if seen.kv_cache_config is None:
        return ()
    return tuple(
        Group(
            kind=type(group.kv_cache_spec).__name__,
            layers=len(group.layer_names),
            block_size=int(group.kv_cache_spec.block_size),
            page_size_bytes=int(group.kv_cache_spec.page_size_bytes),
        )
        for group in seen.kv_cache_config.kv_cache_groups
    )


def _per_token(seen: _Observed) -> int:
    return math.ceil(
        sum(
            int(spec.page_size_bytes) / int(spec.block_size)
            for spec in seen.specs.values()
            if getattr(spec, "sliding_window", None) is None
        )
    )


def _declared(this: _Run) -> tuple[Declared, ...]:
    """What the backends say of the request: the one asked for, and those that serve the model."""
    seen = this.seen
    if seen.vllm_config is None:
        return ()
    asked = {} if this.case.backend == DEFAULT else _asked(this.case.backend)
    main = _main_layers(seen) if seen.model is not None else []
    for layer in [*main, seen.failing_layer]:
        if hasattr(layer, "get_attn_backend"):
            backend = layer.get_attn_backend()
            asked.setdefault(str(backend.get_name()), backend)
    from vllm.config import set_current_vllm_config

    out = []
    for name, backend in asked.items():
        try:
            # A contract may read the config that is being built.
            with set_current_vllm_config(seen.vllm_config):
                reasons = compat.declared_reasons(backend, _request(this, main))
        except Exception:
            # A contract that cannot be asked says nothing, neither for nor against.
            traceback.print_exc()
            continue
        dtypes = getattr(backend, "supported_kv_cache_dtypes", ())
        out.append(Declared(name, tuple(reasons), tuple(str(d) for d in dtypes)))
    return tuple(out)


def _asked(backend: str) -> dict[str, Any]:
    try:
        return {backend: compat.backend_class(backend)}
    except Exception:
        # Its module needs what this engine lacks: there is no class to ask.
        return {}


def _request(this: _Run, main: list[Any]) -> dict[str, Any]:
    """The configuration, in the words of `validate_configuration`."""
    from vllm.platforms import current_platform

    config = this.seen.vllm_config
    model = config.model_config
    asked = this.case.kv_cache_dtype
    return {
        "head_size": model.get_head_size(),
        "dtype": model.dtype,
        "kv_cache_dtype": "auto" if asked == UNSET else asked,
        "block_size": None,
        "use_mla": model.use_mla,
        "has_sink": any(compat.has_sink(layer) for layer in main),
        "use_sparse": compat.is_sparse(model.hf_text_config),
        "use_mm_prefix": bool(getattr(model, "is_mm_prefix_lm", False)),
        "use_per_head_quant_scales": False,
        "device_capability": current_platform.get_device_capability(),
        "attn_type": "decoder",
    }
