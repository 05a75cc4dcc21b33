"""Explicit cases for Llama 3.1 8B: grouped-query attention with a plain cache, each number with its
arithmetic.
"""

from __future__ import annotations

from harness.expect import Explicit

MODEL = "llama3"

K_AND_V = 2
HEADS, HEAD_SIZE = 8, 128
BF16, FP8 = 2, 1

CUDA_BLOCK, CPU_BLOCK = 16, 128
"""Tokens; vLLM's defaults for attention of this kind."""


def page(block: int, element: int) -> int:
    """Bytes of one block of one layer, for values of `element` bytes."""
    return block * K_AND_V * HEADS * HEAD_SIZE * element


def row(dtype: str, resolved: str, storage: str | None, element: int, why: str) -> list[Explicit]:
    """`dtype` on GPUs and on a CPU, which differ in the block size alone."""
    return [
        Explicit(
            id=f"{MODEL}-default-{dtype}",
            outcome="ok",
            why=why,
            capabilities=capabilities,
            kv_cache_dtype=resolved,
            storage_dtype=storage,
            pages=(("self_attn.attn", 1, page(block, element)),),
            # A plain cache must also work: one token is decoded where that is possible.
            depth="generate",
        )
        for capabilities, block in (((8, 9, 10, 12), CUDA_BLOCK), ((None,), CPU_BLOCK))
    ]


EXPLICIT = (
    *row("unset", "auto", "bfloat16", BF16, "the default is the model's own dtype"),
    *row("fp8", "fp8", None, FP8, "one byte a value"),
)
