"""A child whose vLLM resolves the dtype but loses the write-back: MODEL_PATH RECORD."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import kvmatrix_virtual

sys.setdlopenflags(os.RTLD_LAZY)
kvmatrix_virtual.register()

from harness.case import Case  # noqa: E402 - importable once the plugin has made it so
from harness.engine import probe, server  # noqa: E402
from harness.engine.environ import device_of_environment  # noqa: E402


def main() -> None:
    """Break the resolver, run the cell, leave its record."""
    import vllm
    from vllm.models.deepseek_v4 import attention

    resolve = attention._resolve_dsv4_kv_cache_dtype

    def forgetful(packed: bool, dtype: str, cache_config: Any) -> Any:
        return resolve(packed, dtype, None)

    attention._resolve_dsv4_kv_cache_dtype = forgetful
    record = probe.run(
        Case("dsv4"),
        Path(sys.argv[1]),
        {},
        device_of_environment(),
        "allocate",
        vllm.__version__,
    )
    server.write_record(record, Path(sys.argv[2]))


main()
