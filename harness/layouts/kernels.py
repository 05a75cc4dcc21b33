"""Blocks that attention kernels take, as each backend documents them.

A block of a KV cache is a whole number of the kernels' own: a large one is handed to them in parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from harness.layouts.page import Capability, Config


@dataclass(frozen=True)
class Kernel:
    """What one backend takes."""

    tokens: tuple[int, ...]
    """Tokens of a block; any multiple of the first where `multiples`."""
    multiples: bool = False
    preferred: int = 0
    """Tokens of a block where nobody asks for another, if that is more than the least."""

    @property
    def least(self) -> int:
        """Tokens that every block is a multiple of."""
        return min(self.tokens)


_ANY_16 = Kernel((16,), multiples=True)

_KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "CPU_ATTN": Kernel((32,), multiples=True, preferred=128),
        "FLASH_ATTN": _ANY_16,
        "FLASHINFER": Kernel((16, 32, 64)),
        "FLEX_ATTENTION": _ANY_16,
        "TRITON_ATTN": _ANY_16,
        "TURBOQUANT": Kernel((16, 32, 64, 128)),
        # MLA
        "CPU_MLA": Kernel((16,)),
        "CUTLASS_MLA": Kernel((128,)),
        "FLASHINFER_MLA": Kernel((32, 64)),
        "FLASHMLA": Kernel((64,)),
        "FLASH_ATTN_MLA": _ANY_16,
        "TOKENSPEED_MLA": Kernel((32, 64)),
        "TRITON_MLA": _ANY_16,
    }
)

_FA4_WIDE = Kernel((128,))
"""FlashAttention 4's kernel for heads of 256 on Blackwell: pages of 128 tokens and no other."""

_FA4_WIDE_HEAD, _FA4_WIDE_MAJORS = 256, (10, 11)

_TRTLLM_GEN = Kernel((16, 32, 64, 128, 256, 512, 1024))
"""FlashInfer's kernels on SM10x, where several heads share a key: they take large pages, too."""

_TRTLLM_GEN_MAJOR = 10

UNSAID = Kernel((16, 32, 64))
"""Where no backend is named: what most take."""


def kernel_of(
    backend: str, capability: Capability | None, head_dim: int, heads_per_kv_head: int
) -> Kernel | None:
    """What `backend`, by its `get_name()`, takes on a device; None where it is not written down."""
    major = capability[0] if capability else None
    if backend == "FLASH_ATTN" and head_dim == _FA4_WIDE_HEAD and major in _FA4_WIDE_MAJORS:
        return _FA4_WIDE
    if backend == "FLASHINFER" and major == _TRTLLM_GEN_MAJOR and heads_per_kv_head > 1:
        return _TRTLLM_GEN
    return _KERNELS.get(backend)


def kernels_of(
    config: Config, capability: Capability | None, backends: Iterable[str]
) -> list[Kernel]:
    """What each of `backends` takes of a model's keys and values, or latent vectors; those that are
    not written down are left out."""
    heads = config.get("num_attention_heads") or 1
    shared = heads // (config.get("num_key_value_heads") or heads)
    head_dim = config.get("attention_head_dim") or config.get("head_dim") or 0
    found = (kernel_of(name, capability, head_dim, shared) for name in backends)
    return [kernel for kernel in found if kernel is not None]


def parts(kernels: Iterable[Kernel]) -> tuple[int, ...]:
    """Tokens of the blocks that a larger one may be handed out in: a kernel that takes any multiple
    is handed the whole."""
    fixed = {tokens for kernel in kernels if not kernel.multiples for tokens in kernel.tokens}
    return tuple(sorted(fixed))


def common(kernels: Sequence[Kernel], asked: int) -> int:
    """Tokens that a hybrid's block is a multiple of: of what all `kernels` take, and of what was
    `asked` for, or else preferred."""
    least = math.lcm(*(kernel.least for kernel in kernels))
    return math.lcm(least, asked or max(kernel.preferred for kernel in kernels) or 1)
