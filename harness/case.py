"""A case: what one cell asks the engine for, before any device or engine is chosen."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT = "default"
"""The backend option is not passed at all."""

UNSET = "unset"
"""The kv_cache_dtype option is not passed at all."""

_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_.-]+")


def slug(text: str) -> str:
    """`text` with every run of characters that would upset `-k` or a test id made one `_`."""
    return _NOT_IN_IDS.sub("_", text).strip("_")


RUNNERS = ("v1", "v2")
"""vLLM's model runners."""


@dataclass(frozen=True, order=True)
class Case:
    """Model x backend x kv_cache_dtype."""

    model: str
    backend: str = DEFAULT
    kv_cache_dtype: str = UNSET
    block_size: int = 0
    """Tokens; 0 where the option is not passed."""
    tensor_parallel_size: int = 1
    """GPUs that the model is spread over; what is observed is one of them."""
    model_runner: str = ""
    """One of `RUNNERS`; empty where vLLM chooses."""

    @property
    def id(self) -> str:
        """`<model>-<backend>-<kv_cache_dtype>`, then what was passed beyond, such as `-block64` or
        `-tp2`; characters `[A-Za-z0-9_.-]` only."""
        return "-".join([self.base, *self._axes])

    @property
    def base(self) -> str:
        """The id without what was passed beyond backend and kv_cache_dtype."""
        return "-".join(slug(part) for part in (self.model, self.backend, self.kv_cache_dtype))

    @property
    def _axes(self) -> list[str]:
        axes = [f"block{self.block_size}"] if self.block_size else []
        axes += [f"tp{self.tensor_parallel_size}"] if self.tensor_parallel_size > 1 else []
        return axes + ([self.model_runner] if self.model_runner else [])

    @property
    def plain(self) -> bool:
        """True where the user passed neither backend nor kv_cache_dtype nor block size."""
        return self.backend == DEFAULT and self.kv_cache_dtype == UNSET and not self.block_size
