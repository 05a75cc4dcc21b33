"""Formats: the bytes in which keys and values of one token and head are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from harness.layouts.page import UnknownLayout

K_AND_V = 2

_BITS_PER_BYTE = 8


@dataclass(frozen=True)
class Format:
    """How one key or one value vector of a head is stored, both alike."""

    bits: int
    """Of one element."""
    elements: tuple[str, ...]
    """torch's element types that can hold it."""
    scale_bytes: int = 0
    """Of one scale; 0 where none is stored with the elements."""
    per_scale: int | None = None
    """Elements that share a scale; None: all of a token and head."""

    def size(self, head_dim: int) -> int:
        """Bytes of one vector of `head_dim` elements. UnknownLayout where it does not divide."""
        return self._data(head_dim) + self._scales(head_dim) * self.scale_bytes

    def sum(self, head_dim: int) -> str:
        """`size` as people write it."""
        each = f"{head_dim} x {self.bits} bit"
        scales = self._scales(head_dim)
        return f"{each} + {scales} x {self.scale_bytes} scale" if self.scale_bytes else each

    def pair(self, head_dim: int) -> int:
        """Bytes of a key and its value."""
        return K_AND_V * self.size(head_dim)

    def token(self, heads: int, head_dim: int) -> str:
        """Bytes of one token and `heads` heads as people write them."""
        size = f"{self.size(head_dim)} B ({self.sum(head_dim)})"
        return f"{K_AND_V} (K and V) x {heads} heads x {size}"

    def _data(self, head_dim: int) -> int:
        if head_dim * self.bits % _BITS_PER_BYTE:
            raise UnknownLayout(f"{head_dim} elements of {self.bits} bits fill no whole bytes")
        return head_dim * self.bits // _BITS_PER_BYTE

    def _scales(self, head_dim: int) -> int:
        per_scale = self.per_scale or head_dim
        if head_dim % per_scale:
            raise UnknownLayout(f"head_dim {head_dim} does not divide by {per_scale} to a scale")
        return head_dim // per_scale


_FP8_BITS, _FP16 = 8, 2


@dataclass(frozen=True)
class Packed:
    """TurboQuant: a key and its value one behind the other in a slot, each in a way of its own.

    Keys in 3 or 4 bits are indices into a codebook, and keep the vector's norm in fp16; keys in fp8
    keep nothing beside. Values are spread evenly over 3 or 4 bits: a scale and a zero point in
    fp16. Indices are packed without gaps, up to a whole byte; a slot has an even number of bytes.
    Norm correction, which `_nc` stands for, costs time and no bytes.
    """

    key_bits: int
    value_bits: int
    elements: tuple[str, ...] = ("uint8",)

    def pair(self, head_dim: int) -> int:
        """Bytes of a key and its value."""
        size = sum(size for size, _ in self._parts(head_dim))
        return size + size % 2

    def token(self, heads: int, head_dim: int) -> str:
        """Bytes of one token and `heads` heads as people write them."""
        parts = " + ".join(text for _, text in self._parts(head_dim))
        return f"{heads} heads x {self.pair(head_dim)} B ({parts})"

    def _parts(self, head_dim: int) -> list[tuple[int, str]]:
        norm = 0 if self.key_bits == _FP8_BITS else _FP16
        parts = [(_whole_bytes(head_dim, self.key_bits), f"K {head_dim} x {self.key_bits} bit")]
        if norm:
            parts.append((norm, f"{norm} norm"))
        data = _whole_bytes(head_dim, self.value_bits)
        return [
            *parts,
            (data, f"V {head_dim} x {self.value_bits} bit"),
            (2 * _FP16, f"2 x {_FP16} scale and zero"),
        ]


def _whole_bytes(elements: int, bits: int) -> int:
    return -(-elements * bits // _BITS_PER_BYTE)


_FP32_SCALE, _FP8_SCALE = 4, 1

_E4M3 = Format(8, ("uint8", "float8_e4m3fn"))
"""Scaled per tensor: the scale is the layer's, not the page's."""

_NVFP4 = Format(4, ("uint8",), _FP8_SCALE, per_scale=16)

ALIKE: Mapping[str, Format] = MappingProxyType(
    {
        "bfloat16": Format(16, ("bfloat16",)),
        "float16": Format(16, ("float16",)),
        "float32": Format(32, ("float32",)),
        "fp8": _E4M3,
        "fp8_e4m3": _E4M3,
        # Gaudi's name for it.
        "fp8_inc": _E4M3,
        "fp8_e5m2": Format(8, ("uint8", "float8_e5m2")),
        "int8_per_token_head": Format(8, ("int8", "uint8"), _FP32_SCALE),
        "fp8_per_token_head": Format(8, ("uint8", "float8_e4m3fn"), _FP32_SCALE),
        # Asymmetric: the zero point is hidden in the scale's lowest bits.
        "int4_per_token_head": Format(4, ("uint8",), _FP32_SCALE),
        "nvfp4": _NVFP4,
        # Four Over Six: the same format, its scales chosen with more care.
        "nvfp4_4over6": _NVFP4,
    }
)
"""kv_cache_dtype -> what it stores of one vector, which is also the layout's name."""

PACKED: Mapping[str, Packed] = MappingProxyType(
    {
        "turboquant_k8v4": Packed(key_bits=8, value_bits=4),
        "turboquant_4bit_nc": Packed(key_bits=4, value_bits=4),
        "turboquant_k3v4_nc": Packed(key_bits=3, value_bits=4),
        "turboquant_3bit_nc": Packed(key_bits=3, value_bits=3),
    }
)
"""The presets that vLLM documents for TurboQuant (arXiv 2504.19874), by kv_cache_dtype."""

FORMATS: Mapping[str, Format | Packed] = MappingProxyType({**ALIKE, **PACKED})
