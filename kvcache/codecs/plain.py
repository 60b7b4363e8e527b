"""Codecs `raw`, `fp16` and `bf16`: every number by itself, in 32 or 16 bits; pages are those of docs/kv-layout.md."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.codec_id import CodecId
from kvcache.codecs.page import Bytes, Floats, PageSections, PageShape, check_rows, to_half

STORED_TYPES: dict[str, type[np.generic]] = {"raw": np.float32, "fp16": np.float16, "bf16": np.uint16}


class PlainCodec:
    """Stores rotated keys and values as they are (`raw`), or rounded to the nearest 16-bit number, ties to even."""

    codes_rotated_keys = True

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
            if self.codec_id.name == "bf16":
                stored[:] = round_to_bfloat16(rows)
            else:
                stored[:] = to_half(rows) if self.codec_id.name == "fp16" else rows

    def expand_page(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """As `kvcache.codecs.page.Codec.expand_page`."""
        return self._expand(page, "keys", num_rows), self._expand(page, "values", num_rows)

    def _expand(self, page: Bytes, name: str, num_rows: int) -> Floats:
        stored = self.sections.view_rows(page, name, 0, num_rows)
        if self.codec_id.name == "bf16":
            expanded = (stored.astype(np.uint32) << 16).view(np.float32)
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
