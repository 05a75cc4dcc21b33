"""Explicit cases for DeepSeek-V4: the rows of the founding fix, each number with its arithmetic.

The fault: the packed backends declared `auto` supported and nothing resolved it, so that a start
with default options died on an assertion (vLLM issues 47174, 45091, 55134).
"""

from __future__ import annotations

from harness.expect import Explicit

MODEL = "dsv4"

# One state of the packed layout: 448 fp8 values, 64 RoPE values in bf16, 8 bytes of UE8M0 scales.
PACKED_STATE = 448 + 64 * 2 + 8
# One state of the plain layout: 512 values.
PLAIN_STATE = 512
# One key of the indexer: 128 fp8 values and one fp32 scale.
INDEXER_KEY = 128 + 4
ALIGNMENT = 448 + 64 * 2


def up(content: int) -> int:
    """`content` bytes up to a multiple of the packed layout's alignment."""
    return -(-content // ALIGNMENT) * ALIGNMENT


PACKED_PAGES = (
    ("attn.swa_cache", 1, up(64 * PACKED_STATE)),
    ("attn", 4, up(256 // 4 * PACKED_STATE)),
    ("attn", 128, up(256 // 128 * PACKED_STATE)),
    ("attn.indexer.k_cache", 4, up(256 // 4 * INDEXER_KEY)),
    # fp32 key-value and score of the tokens of an open window. C4 windows overlap, so each token
    # has two vectors: 4 tokens x 2 x 2 x 512 x 4 B. C128: 8 tokens x 2 x 512 x 4 B. The same bytes.
    ("attn.compressor.state_cache", 1, up(4 * 2 * 2 * 512 * 4)),
    ("attn.indexer.compressor.state_cache", 1, up(4 * 2 * 2 * 128 * 4)),
)


def plain_pages(element: int) -> tuple[tuple[str, int, int], ...]:
    """Pages of the plain layout for values of `element` bytes: no padding is needed."""
    return (
        ("attn.swa_cache", 1, 64 * PLAIN_STATE * element),
        ("attn", 4, 256 // 4 * PLAIN_STATE * element),
        ("attn", 128, 256 // 128 * PLAIN_STATE * element),
    )


def packed(dtype: str) -> Explicit:
    """`dtype` must become the packed layout and be written back, or the SWA page is too small."""
    return Explicit(
        id=f"{MODEL}-default-{dtype}",
        outcome="ok",
        why="the founding fix: resolves to fp8_ds_mla and is written back",
        # FlashMLA on SM90 and SM100, FlashInfer on SM120.
        capabilities=(9, 10, 12),
        kv_cache_dtype="fp8_ds_mla",
        storage_dtype="uint8",
        written_back=True,
        pages=PACKED_PAGES,
        tail=PACKED_STATE,
    )


def plain(dtype: str, storage: str, element: int) -> Explicit:
    """FlashInfer on SM100 keeps plain rows, and passes what was asked for through."""
    return Explicit(
        id=f"{MODEL}-FLASHINFER_MLA_SPARSE_DSV4-{dtype}",
        outcome="ok",
        why="the plain layout passes through on SM100",
        capabilities=(10,),
        storage_dtype=storage,
        pages=plain_pages(element),
        tail=PLAIN_STATE,
    )


EXPLICIT = (
    *(packed(dtype) for dtype in ("unset", "auto", "fp8", "fp8_e4m3", "fp8_ds_mla")),
    Explicit(
        id=f"{MODEL}-default-bfloat16",
        outcome="rejected",
        why="the packed layout has no bf16 form; the message must tell what to do",
        capabilities=(9, 10, 12),
        says=("kv-cache", "--kv-cache-dtype fp8"),
    ),
    *(plain(dtype, "bfloat16", 2) for dtype in ("unset", "auto", "bfloat16")),
    *(plain(dtype, "float8_e4m3fn", 1) for dtype in ("fp8", "fp8_e4m3")),
)
