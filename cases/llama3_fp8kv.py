"""Explicit cases for a checkpoint with an fp8 KV cache of its own: `unset` and `auto` follow it,
and an explicit dtype comes before it.
"""

from __future__ import annotations

from harness.expect import Explicit

MODEL = "llama3-fp8kv"

K_AND_V = 2
HEADS, HEAD_SIZE = 8, 128
BLOCK = 16
BF16, FP8 = 2, 1


def row(dtype: str, resolved: str, element: int, why: str) -> Explicit:
    """`dtype` on GPUs, where it must become `resolved` with values of `element` bytes."""
    return Explicit(
        id=f"{MODEL}-default-{dtype}",
        outcome="ok",
        why=why,
        capabilities=(8, 9, 10, 12),
        kv_cache_dtype=resolved,
        written_back=True,
        pages=(("self_attn.attn", 1, BLOCK * K_AND_V * HEADS * HEAD_SIZE * element),),
    )


EXPLICIT = (
    row("unset", "fp8_e4m3", FP8, "nothing was asked: the checkpoint's scheme counts"),
    row("auto", "fp8_e4m3", FP8, "auto is no dtype: the checkpoint's scheme counts"),
    row("fp8", "fp8", FP8, "what was asked, and the checkpoint's scheme too"),
    row("bfloat16", "bfloat16", BF16, "what was asked comes before the checkpoint's scheme"),
)
