"""What a virtual device answers where construction reads a tokenizer: models come without one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENGRAM = "vllm.models.deepseek_v41.common.engram"
"""Maps each token to a class of tokens that read alike, for its n-gram tables (0.33.0)."""


class _Tokenizer:
    """As long as the vocabulary, and without a word."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


@contextmanager
def answered(hf_config: Any) -> Iterator[None]:
    """While a model is constructed: a token map of the size that config.json states
    (`engram_compressed_vocab_size`), whatever the words. Nothing of the KV cache depends on which
    tokens share a class."""
    classes = getattr(hf_config, "engram_compressed_vocab_size", None)
    if classes is None:
        yield
        return
    module: Any = importlib.import_module(_ENGRAM)
    transformers: Any = importlib.import_module("transformers")
    build, load = module.build_compressed_token_map, transformers.AutoTokenizer.from_pretrained
    vocabulary = int(hf_config.vocab_size)
    module.build_compressed_token_map = lambda tokenizer: (
        [token % classes for token in range(len(tokenizer))],
        classes,
    )
    transformers.AutoTokenizer.from_pretrained = lambda *args, **kwargs: _Tokenizer(vocabulary)
    try:
        yield
    finally:
        module.build_compressed_token_map = build
        transformers.AutoTokenizer.from_pretrained = load
