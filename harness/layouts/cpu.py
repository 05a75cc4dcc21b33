"""What vLLM's CPU build keeps otherwise than a GPU, by the processor's instruction sets."""

from __future__ import annotations

from harness.layouts.page import Config

_WIDE_STATES = "avx512_bf16"
"""Where the CPU has it, vLLM's kernels for the gated delta net take states in float32, and the
platform then keeps those of every other recurrence so, too: "Reset SSM cache type to float32"
(`CpuPlatform.check_and_update_config`, 0.32.0). That is vLLM's own choice, not a document's."""

STATE_ELEMENT = "kvmatrix_state_element"
"""Key under which a config then says what states are kept in; no published config has it."""


def of(config: Config, features: tuple[str, ...]) -> Config:
    """The config as a CPU with `features` runs it; unchanged for any other device, which has none.

    The inputs of a state's convolution stay in the model's own dtype."""
    return {**config, STATE_ELEMENT: "float32"} if _WIDE_STATES in features else config
