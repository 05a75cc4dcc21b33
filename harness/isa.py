"""Instruction sets: CPUs that cannot compute a checkpoint's weights, in vLLM's own words. Pure."""

from __future__ import annotations

import re

_REFUSAL = re.compile(
    r"Failed to find a kernel that can implement the (?P<layers>.+? linear layer)\. Reasons:\s*\n"
    r"(?P<reasons>.*)",
    re.DOTALL,
)
"""vLLM 0.32's words where no kernel takes a quantised linear layer: one line for each that it tried
(`choose_scaled_mm_linear_kernel` and its siblings)."""

_LACKS = re.compile(r"\s*\w+ requires (?P<what>(?:native )?(?:AMX|AVX)\b[^;\n]*?)(?:;.*|\.*)")
"""A kernel that the CPU's instruction set rules out: `CPUFp8BlockScaledMMKernel requires AMX tile
support (Sapphire Rapids or newer)..`."""


def lacking(message: str) -> str | None:
    """Why this CPU cannot compute the checkpoint's weights, in one line; None where `message` says
    anything else, or gives one reason more that is not the instruction set."""
    refusal = _REFUSAL.fullmatch(message.strip())
    if refusal is None:
        return None
    lines = [line for line in refusal["reasons"].splitlines() if line.strip()]
    found = [_LACKS.fullmatch(line) for line in lines]
    wanted = list(dict.fromkeys(match["what"].strip() for match in found if match))
    if not wanted or None in found:
        return None
    return (
        f"this CPU lacks {' and '.join(wanted)}: vLLM has no other kernel for the weights of the "
        f"checkpoint's {refusal['layers']}s"
    )
