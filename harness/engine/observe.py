"""What vLLM's objects say of the KV cache, as parts of a Record. Reads, and changes nothing."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

from harness.case import DEFAULT, UNSET, Case
from harness.engine import capacity, compat
from harness.record import Declared, Group, KVCache, Memory, Resolved

_LAYER = re.compile(r"^(?:.*\.)?layers\.\d+\.")

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class Observed:
    """What has been seen so far; a fault must not lose it."""

    stage: str = "import"
    seconds: dict[str, float] = field(default_factory=dict)
    vllm_config: Any = None
    built: bool = False
    """True once the model's layers have been constructed."""
    specs: dict[str, Any] = field(default_factory=dict)
    """Layer name -> KVCacheSpec."""
    drafts: frozenset[str] = frozenset()
    """Layers that draft tokens and do not say so themselves."""
    kv_cache_config: Any = None
    tensors: dict[str, Any] = field(default_factory=dict)
    """Layer name -> tensor, or list of tensors."""
    memory: Memory | None = None
    logits_finite: bool | None = None
    told: dict[str, Any] | None = None
    """Parts of the Record that a worker has told of itself, in place of all of the above."""
    log: list[str] = field(default_factory=list)
    failing_layer: Any = None
    error: BaseException | None = None
    """What ended the start."""


def failing_layer(error: BaseException) -> Any:
    """The attention layer whose construction failed: it alone knows which backend was chosen."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer = frame.f_locals.get("self")
        if callable(getattr(layer, "get_attn_backend", None)) and _has_backend(layer):
            found = layer
    return found


def _has_backend(layer: Any) -> bool:
    """False for a layer that failed before its backend was set."""
    try:
        layer.get_attn_backend()
    except AttributeError:
        return False
    return True


def recover(seen: Observed, error: BaseException) -> None:
    """Fill `seen` from the frames that `error` went through: an engine that fails while it is
    constructed leaves nobody to ask."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_locals
        config = names.get("vllm_config")
        if config is not None and hasattr(config, "cache_config"):
            seen.vllm_config = config
        specs = names.get("kv_cache_specs")
        if isinstance(specs, list) and specs and isinstance(specs[0], dict):
            seen.specs, seen.built = dict(specs[0]), True
        planned = names.get("kv_cache_configs")
        if isinstance(planned, list) and planned and hasattr(planned[0], "kv_cache_groups"):
            seen.kv_cache_config = planned[0]
    seen.failing_layer = failing_layer(error)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def role(layer: str) -> str:
    """The layer's name behind its layer number. Falcon-H1 numbers its mixers on behind the last
    layer, as `model.44.mixer`: a part that is a number alone becomes `N`."""
    return _NUMBER.sub("N", _LAYER.sub("", layer))


def layers(seen: Observed) -> dict[str, Any]:
    """Layer name -> attention layer or KV cache holder, as vLLM registered them."""
    context: dict[str, Any] = seen.vllm_config.compilation_config.static_forward_context
    return context


def _main_layers(seen: Observed) -> list[Any]:
    """The attention layers proper: those that resolved a kv_cache_dtype of their own."""
    return [layer for layer in layers(seen).values() if _is_main(layer)]


def _is_main(layer: Any) -> bool:
    return isinstance(getattr(layer, "kv_cache_dtype", None), str)


def _stored(layer: Any, spec: Any) -> Any:
    """The element type that a layer stores; MLA's layers leave it to their specs."""
    own = getattr(layer, "kv_cache_torch_dtype", None)
    return getattr(spec, "dtype", None) if own is None else own


def _backend_name(layer: Any) -> str | None:
    ask = getattr(layer, "get_attn_backend", None)
    return str(ask().get_name()) if ask is not None else None


def resolved(seen: Observed) -> Resolved:
    """What the request became."""
    if seen.vllm_config is None:
        return Resolved()
    cache_config = str(seen.vllm_config.cache_config.cache_dtype)
    if not seen.built:
        return Resolved(cache_config=cache_config)
    main = _main_layers(seen)
    names = sorted({str(layer.kv_cache_dtype) for layer in main})
    stored = sorted(
        {
            _dtype(dtype)
            for name, layer in layers(seen).items()
            if _is_main(layer) and (dtype := _stored(layer, seen.specs.get(name))) is not None
        }
    )
    holders = {_backend_name(layers(seen)[name]) for name in seen.specs}
    selected = sorted({name for layer in main if (name := _backend_name(layer))})
    return Resolved(
        kv_cache_dtype="+".join(names) or None,
        storage_dtype="+".join(stored) or None,
        cache_config=cache_config,
        backends=tuple(sorted(h for h in holders if h)),
        selected="+".join(selected) or None,
    )


def _whole(held: Any) -> Any:
    """The tensor that a layer holds; a state's views taken together, as bytes."""
    if not isinstance(held, (list, tuple)):
        return held
    return compat.together(held) if len(held) > 1 else held[0] if held else None


def _shape(tensor: Any, num_blocks: int) -> tuple[int, ...]:
    """The tensor's shape, the dimension that counts blocks given as -1."""
    shape = [int(n) for n in tensor.shape]
    for at, size in enumerate(shape):
        # A block may be stored as several kernel blocks.
        if size and size % num_blocks == 0:
            shape[at] = -1
            break
    return tuple(shape)


def kv(seen: Observed) -> tuple[KVCache, ...]:
    """The layers that hold a KV cache, those that are alike counted together."""
    found: dict[KVCache, int] = {}
    blocks = int(seen.kv_cache_config.num_blocks) if seen.kv_cache_config is not None else 0
    for name, spec in seen.specs.items():
        tensor = _whole(seen.tensors.get(name))
        one = KVCache(
            kind=type(spec).__name__,
            role=role(name),
            layers=0,
            block_size=int(spec.block_size),
            page_size_bytes=int(spec.page_size_bytes),
            content_bytes=compat.content_bytes(spec),
            dtype=_dtype(spec.dtype) if hasattr(spec, "dtype") else "",
            cache_dtype=getattr(spec, "cache_dtype_str", None),
            compress_ratio=compat.tokens_per_state(spec),
            draft=name in seen.drafts
            or bool(getattr(layers(seen).get(name), "is_draft_layer", False)),
            alignment=getattr(spec, "alignment", None),
            backend=_backend_name(layers(seen)[name]) if name in layers(seen) else None,
            shape=None if tensor is None or not blocks else _shape(tensor, blocks),
            tensor_dtype=None if tensor is None else _dtype(tensor.dtype),
            stride=None if tensor is None else tuple(int(n) for n in tensor.stride()),
            window=capacity.window(spec),
            grows=capacity.grows(spec),
            state_mode=compat.state_mode(spec),
        )
        found[one] = found.get(one, 0) + 1
    return tuple(replace(one, layers=count) for one, count in found.items())


def groups(seen: Observed) -> tuple[Group, ...]:
    """vLLM's KV-cache groups; () before stage `plan`."""
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


def num_blocks(seen: Observed) -> int | None:
    """Blocks that were planned; None before stage `plan`."""
    return None if seen.kv_cache_config is None else int(seen.kv_cache_config.num_blocks)


def bytes_per_token(seen: Observed) -> int | None:
    """`Record.kv_bytes_per_token`."""
    return None if seen.kv_cache_config is None else capacity.bytes_per_token(seen.specs)


def declared(seen: Observed, case: Case) -> tuple[Declared, ...]:
    """What the backends say of the request: the one asked for, and those that serve the model."""
    if seen.vllm_config is None:
        return ()
    asked = {} if case.backend == DEFAULT else _asked(case.backend)
    main = _main_layers(seen) if seen.built else []
    own: dict[str, bool] = {}
    for layer in [*main, seen.failing_layer]:
        if hasattr(layer, "get_attn_backend"):
            backend = layer.get_attn_backend()
            name = str(backend.get_name())
            asked.setdefault(name, backend)
            own[name] = own.get(name, True) and _skipped(seen, layer)
    from vllm.config import set_current_vllm_config

    out = []
    for name, backend in asked.items():
        try:
            # A contract may read the config that is being built.
            with set_current_vllm_config(seen.vllm_config):
                request = _request(seen, case, main)
                if own.get(name, False):
                    request["kv_cache_dtype"] = "auto"
                reasons = compat.declared_reasons(backend, request)
        except Exception:
            # A contract that cannot be asked says nothing, neither for nor against.
            traceback.print_exc()
            continue
        dtypes = getattr(backend, "supported_kv_cache_dtypes", ())
        out.append(Declared(name, tuple(reasons), tuple(str(d) for d in dtypes)))
    return tuple(out)


def _skipped(seen: Observed, layer: Any) -> bool:
    """True for a layer that vLLM keeps in the model's own dtype, whatever was asked."""
    skip = getattr(seen.vllm_config.cache_config, "kv_cache_dtype_skip_layers", ())
    numbers = re.findall(r"(?<=layers\.)\d+", str(getattr(layer, "layer_name", "")))
    return bool(numbers) and numbers[-1] in skip


def _asked(backend: str) -> dict[str, Any]:
    try:
        return {backend: compat.backend_class(backend)}
    except Exception:
        # Its module needs what this engine lacks: there is no class to ask.
        return {}


def _request(seen: Observed, case: Case, main: list[Any]) -> dict[str, Any]:
    """The configuration, in the words of `validate_configuration`."""
    from vllm.platforms import current_platform

    model = seen.vllm_config.model_config
    asked = case.kv_cache_dtype
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
