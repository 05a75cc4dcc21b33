"""CPUs that cannot compute a checkpoint's weights."""

from __future__ import annotations

import pytest

from harness.isa import lacking

NO_AMX = "requires AMX tile support (Sapphire Rapids or newer).."
"""A kernel's own reason ends in a stop, and vLLM puts another behind it."""


def refusal(*reasons: str, layers: str = "ScaledMM") -> str:
    head = f"Failed to find a kernel that can implement the {layers} linear layer. Reasons: \n"
    return head + "\n".join(reasons)


def test_fp8_weights_without_amx_are_the_hosts_lack() -> None:
    told = lacking(
        refusal(f"CPUFp8W8A8BlockScaledMMKernel {NO_AMX}", f"CPUFp8BlockScaledMMKernel {NO_AMX}")
    )
    assert told is not None
    assert "this CPU lacks AMX tile support (Sapphire Rapids or newer):" in told
    assert "ScaledMM linear layers" in told
    assert 1 == told.count("AMX")
    assert "\n" not in told


def test_each_thing_that_is_lacking_is_named_once() -> None:
    told = lacking(
        refusal(
            "CPUFP8W8A8ScaledMMLinearKernel requires native AMX-FP8 hardware (Diamond Rapids); "
            "falls back to the Torch FP8 kernels otherwise..",
            f"CPUFp8BlockScaledMMKernel {NO_AMX}",
        )
    )
    assert told is not None
    assert (
        "lacks native AMX-FP8 hardware (Diamond Rapids) and "
        "AMX tile support (Sapphire Rapids or newer):" in told
    )


@pytest.mark.parametrize(
    "message",
    [
        refusal(),
        refusal(
            f"CPUFp8W8A8BlockScaledMMKernel {NO_AMX}",
            "CPUFp8BlockScaledMMKernel CPU FP8 kernel requires K-dimension block size of 128, "
            "got 64..",
        ),
        refusal(f"CPUFp8BlockScaledMMKernel {NO_AMX}", "SomeKernel fp8_scaled_mm_cpu op missing."),
        refusal("CPUFp8BlockScaledMMKernel requires CPU platform.."),
        refusal(" CPUFp8BlockScaledMMKernel is disabled by environment variable"),
        # A refusal of something else that speaks of AMX, too.
        f"CPUFp8BlockScaledMMKernel {NO_AMX}",
        "FP8 KV cache on CPU requires x86 with AVX-512 or AMX.",
        "AMXMLAImpl only supports an unquantized (bf16) KV cache; fp8 is not implemented",
        f"kv_cache_dtype fp8: {refusal(f'CPUFp8BlockScaledMMKernel {NO_AMX}')}",
    ],
)
def test_what_is_not_the_instruction_set_alone_is_not_the_hosts_lack(message: str) -> None:
    assert lacking(message) is None
