"""Explicit cases for DeepSeek sparse attention (DSA), whose kernels begin with Hopper."""

from __future__ import annotations

from harness.expect import Explicit

MODELS = ("dsv32", "glm5", "glm52")

EXPLICIT = tuple(
    Explicit(
        id=f"{model}-default-unset",
        outcome="rejected",
        why="no sparse MLA backend is for GPUs before SM90",
        capabilities=(7, 8),
        says=("attention backend", "compute capability not supported"),
    )
    for model in MODELS
)
