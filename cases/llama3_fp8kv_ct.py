"""Explicit cases for an fp8 KV cache that a compressed-tensors checkpoint brings along."""

from __future__ import annotations

from harness.expect import Explicit

MODEL = "llama3-fp8kv-ct"

EXPLICIT = (
    Explicit(
        id=f"{MODEL}-default-unset",
        outcome="rejected",
        why="no backend has fp8 on Turing; the message must tell what to pass instead",
        capabilities=(7,),
        says=("FP8 KV cache", "--kv-cache-dtype float16"),
    ),
)
