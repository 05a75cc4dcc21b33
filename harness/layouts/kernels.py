"""Blocks that attention kernels take, as each backend documents them.

A block of a KV cache is a whole number of the kernels' own: a large one is handed to them in parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from harness.layouts.page import Capability, Config, NoLayout


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
        "B12X": Kernel((64, 128), preferred=128),
        "CPU_ATTN": Kernel((32,), multiples=True, preferred=128),
        "FLASH_ATTN": _ANY_16,
        "FLASHINFER": Kernel((16, 32, 64)),
        "FLEX_ATTENTION": _ANY_16,
        "HPC_ATTN": Kernel((64,)),
        "TRITON_ATTN": _ANY_16,
        # Two kernels each, for one cache: what both take.
        "TRITON_FLASHINFER": Kernel((64,)),
        "TRITON_FLASH_ATTN": _ANY_16,
        "TURBOQUANT": Kernel((16, 32, 64, 128)),
        # MLA
        "AMX_MLA": Kernel((32,), multiples=True),
        "CPU_MLA": Kernel((16,)),
        "CUTLASS_MLA": Kernel((128,)),
        "FLASHINFER_MLA": Kernel((32, 64)),
        "FLASHMLA": Kernel((64,)),
        "FLASH_ATTN_MLA": _ANY_16,
        "TOKENSPEED_MLA": Kernel((32, 64)),
        "TRITON_MLA": _ANY_16,
    }
)

_FA4_PAGES = Kernel((128,))
"""FlashAttention 4's kernel for heads of 256 on Blackwell: pages of 128 tokens and no other."""

_FA4_BACKENDS = ("FLASH_ATTN", "TRITON_FLASH_ATTN")
_FA4_WIDE, _FA4_WIDE_MAJORS = 256, (10, 11)

_TRTLLM_GEN = Kernel((16, 32, 64, 128, 256, 512, 1024))
"""FlashInfer's kernels on SM10x, where several heads share a key: they take large pages, too."""

_TRTLLM_GEN_MAJOR = 10

UNSAID = Kernel((16, 32, 64))
"""Where no backend is named: what most take."""


def kernel_of(config: Config, capability: Capability | None, backend: str) -> Kernel | None:
    """What `backend`, by its `get_name()`, takes on a device of a model's keys and values, or
    latent vectors; None where it is not written down."""
    major = capability[0] if capability else None
    if backend in _FA4_BACKENDS and major in _FA4_WIDE_MAJORS and _head_dim(config) == _FA4_WIDE:
        return _FA4_PAGES
    if backend == "FLASHINFER" and major == _TRTLLM_GEN_MAJOR and _heads_share_keys(config):
        return _TRTLLM_GEN
    return _KERNELS.get(backend)


def _head_dim(config: Config) -> int | None:
    dim: int | None = config.get("attention_head_dim") or config.get("head_dim")
    return dim


def _heads_share_keys(config: Config) -> bool:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return heads is not None and kv_heads is not None and heads > kv_heads


def kernels_of(
    config: Config, capability: Capability | None, backends: Iterable[str]
) -> list[Kernel]:
    """`kernel_of` of each of `backends`; those that are not written down are left out."""
    found = (kernel_of(config, capability, name) for name in backends)
    return [kernel for kernel in found if kernel is not None]


def handed(kernels: Iterable[Kernel], block: int) -> tuple[int, ...]:
    """Tokens of the blocks that `kernels` are handed for one of `block`: the whole where they take
    it, or else the largest of theirs that it is a multiple of. () where no kernel is known;
    NoLayout where one takes neither."""
    found: set[int] = set()
    for kernel in kernels:
        fitting = {tokens for tokens in kernel.tokens if block % tokens == 0}
        if kernel is UNSAID:
            found |= {block, *fitting}
        elif not fitting:
            sizes = " or ".join(map(str, kernel.tokens))
            raise NoLayout(f"a block of {block} tokens is none of {sizes}, nor a multiple")
        else:
            found.add(block if kernel.multiples else max(fitting))
    return tuple(sorted(found))


def common(kernels: Sequence[Kernel], asked: int) -> int:
    """Tokens that a hybrid's block is a multiple of: of what all `kernels` take, and of what was
    `asked` for, or else preferred."""
    least = math.lcm(*(kernel.least for kernel in kernels))
    return math.lcm(least, asked or max(kernel.preferred for kernel in kernels) or 1)
