"""Codecs `raw`, `fp16`, `bf16` and `fp8`: every number by itself, in 32, 16 or 8 bits; pages are those of
docs/kv-layout.md.

`fp8` is e4m3fn: four bits of exponent, three of mantissa, ±448 at most, no infinities, no scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.basis import IDENTITY
from kvcache.codecs.codec_id import CodecId
from kvcache.codecs.page import Bytes, Floats, PageSections, PageShape, check_rows, to_half

STORED_TYPES: dict[str, type[np.generic]] = {
    "raw": np.float32,
    "fp16": np.float16,
    "bf16": np.uint16,
    "fp8": np.uint8,
}
# Of e4m3: the largest number, and the smallest with a full mantissa; below it numbers lie 1/512 apart.
LARGEST_EIGHTH, LEAST_EIGHTH, EIGHTHS_PER_ONE = np.float32(448), np.float32(2**-6), np.float32(512)


class PlainCodec:
    """Stores rotated keys and values as they are (`raw`), or rounded to the nearest shorter number, ties to even."""

    codes_rotated_keys = True
    basis = IDENTITY

    def __init__(self, codec_id: CodecId, head_dim: int) -> None:
        self.codec_id, self.shape = codec_id, PageShape(1, head_dim)
        stored = STORED_TYPES[codec_id.name]
        self.sections = PageSections({"keys": (stored, head_dim), "values": (stored, head_dim)})
        self.page_bytes = self.sections.page_bytes

    def encode_rows(self, keys: Floats, values: Floats, page: Bytes, first_row: int = 0) -> None:
        """As `kvcache.codecs.page.Codec.encode_rows`."""
        sides = check_rows(keys, values, self.shape, np.finfo(np.float32).max)
        for name, rows in zip(("keys", "values"), sides, strict=True):
            stored = self.sections.view_rows(page, name, first_row, len(rows))
            stored[:] = ROUNDERS[self.codec_id.name](rows)

    def expand_page(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """As `kvcache.codecs.page.Codec.expand_page`."""
        return self._expand(page, "keys", num_rows), self._expand(page, "values", num_rows)

    expand_stored = expand_page

    def _expand(self, page: Bytes, name: str, num_rows: int) -> Floats:
        stored = self.sections.view_rows(page, name, 0, num_rows)
        if self.codec_id.name == "bf16":
            expanded = (stored.astype(np.uint32) << 16).view(np.float32)
        elif self.codec_id.name == "fp8":
            expanded = expand_eighths(stored)
        else:
            expanded = stored.astype(np.float32)
        return expanded.reshape(num_rows, 1, self.shape.head_dim)


def round_to_bfloat16(numbers: Floats) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; what is too large becomes the largest finite one."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    magnitude, sign = bits & 0x7FFFFFFF, bits & np.uint32(0x80000000)
    rounded = np.minimum((magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16, 0x7F7F)
    halves: NDArray[np.uint16] = (rounded | (sign >> 16)).astype(np.uint16)
    return halves


def round_to_eighth(numbers: Floats) -> NDArray[np.uint8]:
    """Bits of the nearest e4m3, ties to even; what is too large becomes the largest one."""
    size = np.minimum(np.abs(numbers), LARGEST_EIGHTH)
    bits = np.ascontiguousarray(size, np.float32).view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - np.uint32(120 << 3)
    small = np.rint(size * EIGHTHS_PER_ONE).astype(np.uint32)
    found: NDArray[np.uint8] = np.where(size < LEAST_EIGHTH, small, normal).astype(np.uint8)
    found[np.signbit(numbers)] |= np.uint8(128)
    return found


def expand_eighths(stored: NDArray[np.uint8]) -> Floats:
    """The numbers of e4m3: its bits are those of a float32 with another bias."""
    size = ((stored & np.uint8(127)).astype(np.uint32) << 20).view(np.float32) * np.float32(2.0**120)
    return np.where(stored >> 7 == 1, -size, size)


def _keep(numbers: Floats) -> Floats:
    return numbers


ROUNDERS: dict[str, Callable[[Floats], NDArray[np.generic]]] = {
    "raw": _keep, "fp16": to_half, "bf16": round_to_bfloat16, "fp8": round_to_eighth,
}  # fmt: skip
