"""Every difference between vLLM 0.27.1 and 0.33.0 that the child meets, and no other.

Releases in between are served by asking the functions themselves what they take
(`call`), not by version numbers: a difference appears in some nightly before it has one.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch


def call(function: Callable[..., Any], **available: Any) -> Any:
    """Call `function` with those of `available` that it has parameters for.

    TypeError where it needs something that is not there: a vLLM that this file does not know.
    """
    wanted = inspect.signature(function).parameters
    return function(**{name: value for name, value in available.items() if name in wanted})


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

STAGE_FUNCTIONS = {
    "create_engine_config": "config",
    # Constructing and loading; between them and the specs lies what the weights need after.
    "_init_executor": "model",
    "init_device": "model",
    "load_model": "model",
    # EngineCore's planning: specs first, then the layout, memory and block counts.
    "_initialize_kv_caches": "spec",
    "get_kv_cache_specs": "spec",
    "determine_available_memory": "plan",
    "get_kv_cache_configs": "plan",
    "initialize_from_config": "allocate",
    "initialize_kv_cache": "allocate",
    "compile_or_warm_up_model": "warmup",
}
"""Function of vLLM -> the stage that has begun where it runs (the same in 0.27.1 - 0.33.0)."""


def planned_specs(worker: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Layer name -> the KVCacheSpec it was planned with.

    Not what the worker collects when it is asked again: planning has then changed the block size
    that specs are made with.
    """
    planned: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        # A group of several page sizes keeps its layers' own specs.
        own = getattr(spec, "kv_cache_specs", {})
        planned.update({name: own.get(name, spec) for name in group.layer_names})
    # Layers that share another's cache may be in a group too, but ask for none of their own.
    return {name: planned[name] for name in worker.get_kv_cache_spec() if name in planned}


def model_runner(runner: Any) -> str:
    """`v1` or `v2`: the newer runners live in packages `vllm.v1.worker.{gpu,cpu}`."""
    return "v2" if ".worker.gpu." in _module(runner) or ".worker.cpu." in _module(runner) else "v1"


def _module(thing: Any) -> str:
    return type(thing).__module__


def weights_bytes(model: Any, drafter: Any = None) -> int:
    """Bytes of a model's parameters and buffers, wherever they lie, and of its drafter's own: the
    embedding and the head are the model's."""
    own = [*model.parameters(), *model.buffers()]
    if drafter is not None:
        own += [
            tensor
            for name, tensor in (*drafter.named_parameters(), *drafter.named_buffers())
            if not _SHARED & set(name.split("."))
        ]
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


_SHARED = frozenset({"embed_tokens", "lm_head", "shared_head"})
"""Parts of a drafter that the speculator replaces by the model's."""


def available_bytes(llm: Any) -> int | None:
    """What planning was given for the KV cache, in bytes, where the engine core tells."""
    client = getattr(llm.llm_engine, "engine_core", None)
    core = getattr(client, "engine_core", None)
    value = getattr(core, "available_gpu_memory_for_kv_cache", None)
    return int(value) if isinstance(value, int) and value > 0 else None


def cuda_used_bytes() -> int | None:
    """Bytes in use on the current CUDA device; None before CUDA has been started here."""
    if not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def initialize_model(vllm_config: Any) -> Any:
    """The model, constructed but not loaded, through vLLM's own entry."""
    from vllm.model_executor.model_loader.utils import initialize_model

    return call(
        initialize_model, vllm_config=vllm_config, model_config=vllm_config.model_config, prefix=""
    )


def initialize_drafter(vllm_config: Any) -> Any:
    """The model that drafts tokens, constructed through vLLM's own entry beside the one it drafts
    for, its layers marked as the speculator marks them; None where there is none."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return None
    from vllm.compilation.backends import set_model_tag

    layers = vllm_config.compilation_config.static_forward_context
    before = set(layers)
    if hasattr(speculative, "apply_draft_overrides"):
        vllm_config = speculative.apply_draft_overrides(vllm_config)
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_model_tag("eagle_head"):
        model = call(initialize_model, vllm_config=vllm_config, model_config=draft, prefix="")
    for name in set(layers) - before:
        layers[name].is_draft_layer = True
    return model


def init_workspace(device: torch.device) -> None:
    """vLLM's workspace manager, which fp8 MLA layers ask for when constructed."""
    from vllm.v1.worker.workspace import init_workspace_manager

    call(init_workspace_manager, device=device, num_ubatches=1)


def kv_cache_specs(vllm_config: Any) -> dict[str, Any]:
    """Layer name -> KVCacheSpec, as the model runner collects them."""
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    specs: dict[str, Any] = get_kv_cache_spec(vllm_config)
    return specs


def supported_kv_cache_layouts(vllm_config: Any) -> list[str]:
    """Names of the KV cache layouts that all backends of the model support (0.33.0; not 0.27.1)."""
    from vllm.v1.worker.worker_base import WorkerBase

    worker: Any = SimpleNamespace(vllm_config=vllm_config)
    names: list[str] = WorkerBase.get_supported_kv_cache_layouts(worker)
    return names


def set_kv_cache_layout(vllm_config: Any, *args: Any) -> None:
    """Make the resolved layout known to the worker side (0.33.0; not 0.27.1)."""
    from vllm.v1.worker.worker_base import WorkerBase

    worker: Any = SimpleNamespace(vllm_config=vllm_config)
    WorkerBase.set_kv_cache_layout(worker, *args)


def attention_groups(vllm_config: Any, kv_cache_config: Any, device: torch.device) -> Any:
    """`(attention groups, kernel block sizes)` of a KV cache config."""
    from vllm.v1.worker.gpu.attn_utils import init_attn_backend

    groups, _, kernel_block_sizes = call(
        init_attn_backend, kv_cache_config=kv_cache_config, vllm_config=vllm_config, device=device
    )
    return groups, kernel_block_sizes


def kernel_block_sizes(runner: Any, kv_cache_config: Any) -> list[int]:
    """Tokens of the blocks that kernels take, for each KV-cache group of a v1 model runner."""
    from vllm.v1.worker import utils

    sizes: list[int] = utils.prepare_kernel_block_sizes(kv_cache_config, runner.attn_groups)
    return sizes


def allocate(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Any,
    kernel_block_sizes: list[int],
    device: torch.device,
) -> dict[str, Any]:
    """Layer name -> tensor (or list of tensors), allocated and reshaped by vLLM."""
    from vllm.v1.worker.gpu.attn_utils import init_kv_cache

    # `attn_groups` is a list of lists in 0.27.1 and an iterable of groups in 0.33.0, where
    # `runner_kv_caches` and `cache_dtype` are gone.
    flat = "runner_kv_caches" not in inspect.signature(init_kv_cache).parameters
    caches: dict[str, Any] = call(
        init_kv_cache,
        runner_kv_caches=[],
        forward_context=vllm_config.compilation_config.static_forward_context,
        kv_cache_config=kv_cache_config,
        attn_groups=[g for some in groups for g in some] if flat else groups,
        device=device,
        cache_dtype=vllm_config.cache_config.cache_dtype,
        kernel_block_sizes=kernel_block_sizes,
        vllm_config=vllm_config,
    )
    return caches


def plan(executor: Any, vllm_config: Any) -> Any:
    """vLLM's own KV planning, specs to allocation; `executor` stands for its executor."""
    from vllm.v1.engine.core import EngineCore

    core = SimpleNamespace(
        model_executor=executor,
        collective_rpc=lambda *args, **kwargs: [None],
        available_gpu_memory_for_kv_cache=-1,
    )
    return EngineCore._initialize_kv_caches(core, vllm_config)


def request_bytes(vllm_config: Any, specs: dict[str, Any]) -> int:
    """Bytes of KV cache that one request of the longest context needs."""
    return sum(int(spec.max_memory_usage_bytes(vllm_config)) for spec in specs.values())


def content_bytes(spec: Any) -> int:
    """Bytes of one block of one layer before alignment."""
    # The same in 0.33.0; in 0.27.1 the latter leaves out the scales of per-token-head formats.
    value = getattr(spec, "unpadded_page_size_bytes", None)
    if value is None:
        value = getattr(spec, "real_page_size_bytes", None)
    if value is None and getattr(spec, "page_size_padded", None) is not None:
        # 0.27.1's states know their padded page alone.
        value = dataclasses.replace(spec, page_size_padded=None).page_size_bytes
    return int(spec.page_size_bytes if value is None else value)


def draft_layers(runner: Any) -> frozenset[str]:
    """Names of the layers of the model that drafts tokens, as a worker's runner knows them.

    0.32's runner v1 keeps them with its drafter alone; elsewhere the layers themselves say so.
    """
    drafter = getattr(runner, "drafter", None)
    return frozenset(getattr(drafter, "_draft_attn_layer_names", None) or ())


def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Views of one block of memory after another as one tensor (blocks, bytes), without memory.

    A worker's layers hold a state so: the convolution's inputs, and the recurrence's matrix.
    """
    size = sum(part[0].numel() * part.element_size() for part in parts)
    step = parts[0].stride(0) * parts[0].element_size()
    return torch.empty_strided(
        (parts[0].shape[0], size), (step, 1), dtype=torch.int8, device="meta"
    )


def declared_reasons(backend: Any, facts: dict[str, Any]) -> list[str]:
    """Why `backend` says that it does not support a configuration; [] where it does."""
    if facts.get("device_capability") is None:
        # A CPU's. A class that is derived from a GPU's compares it all the same (DeepSeek-V4's in
        # 0.32.0), and would say nothing of the dtype.
        any_device = classmethod(lambda _cls, _capability: True)
        backend = type(backend.__name__, (backend,), {"supports_compute_capability": any_device})
    reasons = call(backend.validate_configuration, **facts)
    return [str(reason) for reason in reasons]


def backend_class(name: str) -> Any:
    """The backend class behind a name of `AttentionBackendEnum`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name].get_class()


def tokens_per_state(spec: Any) -> int:
    """Tokens per stored state: `compress_ratio` (0.27.1), `tokens_per_state` (0.33.0); -1 for a
    recurrent state, which stands for any number of them (0.27.1 does not say so, 0.33.0 does)."""
    for name in ("compress_ratio", "tokens_per_state"):
        value = getattr(spec, name, None)
        if value is not None:
            return int(value)
    return 1 if state_mode(spec) is None else -1


def state_mode(spec: Any) -> str | None:
    """`KVCache.state_mode`: `mamba_cache_mode`, the same name in 0.27.1 and 0.33.0."""
    mode = getattr(spec, "mamba_cache_mode", None)
    return None if mode is None else str(mode)


def has_sink(layer: Any) -> bool:
    """True where an attention layer has sinks."""
    return any(getattr(layer, name, None) is not None for name in ("attn_sink", "sinks"))


def is_sparse(hf_config: Any) -> bool:
    """True where the model selects tokens with an indexer (DSA and its kin)."""
    return hasattr(hf_config, "index_topk")


def kv_cache_dtypes() -> tuple[str, ...]:
    """Every value of vLLM's `CacheDType`, in its order."""
    from typing import get_args

    from vllm.config.cache import CacheDType

    return tuple(str(value) for value in get_args(CacheDType))


def backend_names() -> tuple[str, ...]:
    """Every name of vLLM's `AttentionBackendEnum`, in its order."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return tuple(AttentionBackendEnum.__members__)


def considered_backends(use_mla: bool) -> set[str]:
    """Names of the backends that vLLM's CUDA platform puts in order for a model, whatever the
    compute capability, the heads, and the kv_cache_dtype."""
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    return {
        str(backend.name)
        for major in range(7, 13)
        for kv_cache_dtype in (None, "fp8")
        for heads in (16, 128)
        for prefix in (False, True)
        for backend in call(
            cuda._get_backend_priorities,
            use_mla=use_mla,
            device_capability=DeviceCapability(major, 0),
            num_heads=heads,
            kv_cache_dtype=kv_cache_dtype,
            use_mm_prefix=prefix,
        )
    }


def commit() -> str | None:
    """The commit that this vLLM was built from, where it tells."""
    from vllm import _version

    value = getattr(_version, "__commit_id__", None) or getattr(_version, "commit_id", None)
    return None if value is None else str(value)


def model_modules() -> dict[str, str]:
    """Architecture -> module that holds it, without importing that module."""
    from vllm.model_executor.models.registry import ModelRegistry

    return {
        architecture: module
        for architecture, model in ModelRegistry.models.items()
        if isinstance(module := getattr(model, "module_name", None), str)
    }
