"""A case: what one cell asks the engine for, before any device or engine is chosen."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT = "default"
"""The backend option is not passed at all."""

UNSET = "unset"
"""The kv_cache_dtype option is not passed at all."""

_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_.]+")


def slug(text: str) -> str:
    """`text` with every run of characters that would upset `-k` or a test id made one `_`."""
    return _NOT_IN_IDS.sub("_", text).strip("_")


@dataclass(frozen=True, order=True)
class Case:
    """Model x backend x kv_cache_dtype."""

    model: str
    backend: str = DEFAULT
    kv_cache_dtype: str = UNSET

    @property
    def id(self) -> str:
        """`<model>-<backend>-<kv_cache_dtype>`, characters `[A-Za-z0-9_.-]` only."""
        return "-".join(slug(part) for part in (self.model, self.backend, self.kv_cache_dtype))

    @property
    def plain(self) -> bool:
        """True where the user passed nothing."""
        return self.backend == DEFAULT and self.kv_cache_dtype == UNSET
