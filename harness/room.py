"""What fits on a device, as a record has it, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from harness.device import GIB, MIB
from harness.record import Record


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,} B"


def rows(record: Record) -> Iterator[tuple[str, str]]:
    """Label and text of each fact: memory, weights, blocks, tokens; none where none was planned."""
    memory, capacity = record.memory, record.capacity
    if memory is not None:
        used = ""
        if capacity is not None and record.device_kind != "cpu":
            used = f", {capacity.gpu_memory_utilization:.0%} of it to use"
        yield "device", f"{_size(memory.total_bytes)}{used}"
        weights = _size(memory.weights_bytes)
        if not memory.weights_fit:
            weights += ": too much for this device, so planned as if they lay elsewhere"
        yield "weights", weights
        yield "KV cache", f"{_size(memory.available_bytes)}"
    if record.num_blocks is not None and record.kv:
        yield "blocks", f"{record.num_blocks:,}"
    if record.kv_bytes_per_token is not None and record.kv:
        yield "per token", _per_token(record)
    if capacity is not None:
        context = f"{capacity.max_model_len:,} tokens"
        yield "per request", f"{_size(capacity.request_bytes)} for a context of {context}"
        yield (
            "fits",
            f"{capacity.tokens:,} tokens: {capacity.concurrency:.2f} requests of {context}",
        )


def _per_token(record: Record) -> str:
    fixed = sum(cache.layers for cache in record.kv if not cache.grows)
    text = f"{record.kv_bytes_per_token:,} B for one more token of context"
    if not fixed:
        return text
    if all(not cache.grows for cache in record.kv):
        return f"{text}: every layer keeps a window or a state of fixed size"
    return f"{text}; {'1 layer' if fixed == 1 else f'{fixed} layers'} of fixed size not counted"
