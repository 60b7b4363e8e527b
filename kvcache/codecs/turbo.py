"""Codecs `tq4`, `tq3` and `tq-k8v4`: a random rotation per head, one float16 scale per token and head, no calibration
(after TurboQuant, arXiv 2504.19874; rotation and datatypes in `kvcache.codecs.hadamard`).

    tq4, tq3     keys: Lloyd-Max levels, scale = norm / √d       values: uniform levels, scale = largest magnitude
    tq-k8v4      keys: 8-bit uniform levels, as values           values: 4-bit uniform levels

    code = nearest level of rotated / scale          expanded = rotated back (levels[code] · scale)
"""

from __future__ import annotations

import numpy as np

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.bit_packing import pack_codes, packed_bytes, unpack_codes
from kvcache.codecs.codec_id import CodecId
from kvcache.codecs.datatype import assign_codes, normalise_values
from kvcache.codecs.hadamard import (
    MIN_BLOCK,
    block_size,
    lloyd_max_levels,
    rotate_heads,
    uniform_levels,
    unrotate_heads,
)
from kvcache.codecs.page import Bytes, Floats, Halves, PageSections, PageShape, check_rows, to_half

# Most bits for which levels are fitted. With more bits, uniform levels lose next to nothing and need no table.
MAX_LLOYD_BITS = 4


class TurboCodec:
    """Codes rotated keys and values of one head.

    Raises:
        ValueError: the id has no seed, or no power of two of at least 8 divides the head.
    """

    codes_rotated_keys = True

    def __init__(self, codec_id: CodecId, head_dim: int) -> None:
        if codec_id.seed is None or block_size(head_dim) < MIN_BLOCK:
            raise ValueError(f"{codec_id} cannot rotate heads of {head_dim} values")
        self.codec_id, self.shape, self.seed = codec_id, PageShape(1, head_dim), codec_id.seed
        key_bits, value_bits = codec_id.code_bits
        self._bits = {"key": key_bits, "value": value_bits}
        self.by_norm = key_bits <= MAX_LLOYD_BITS
        key_levels = lloyd_max_levels(key_bits, head_dim) if self.by_norm else uniform_levels(key_bits)
        self.levels = {"key": key_levels, "value": uniform_levels(value_bits)}
        self.sections = PageSections(
            {
                "key codes": (np.uint8, packed_bytes(head_dim, key_bits)),
                "key scales": (np.float16, 1),
                "value codes": (np.uint8, packed_bytes(head_dim, value_bits)),
                "value scales": (np.float16, 1),
            }
        )
        self.page_bytes = self.sections.page_bytes

    def encode_rows(self, keys: Floats, values: Floats, page: Bytes, first_row: int = 0) -> None:
        """As `kvcache.codecs.page.Codec.encode_rows`."""
        for side, rows in zip(("key", "value"), check_rows(keys, values, self.shape), strict=True):
            mixed = rotate_heads(rows, self.seed)
            by_norm = side == "key" and self.by_norm
            scales = norm_scales(rows) if by_norm else to_half(np.abs(mixed).max(axis=-1))
            numbers = normalise_values(mixed, scales, np.zeros_like(scales))
            codes = pack_codes(assign_codes(numbers, self.levels[side]), self._bits[side])
            self.sections.view_rows(page, f"{side} codes", first_row, len(rows))[:] = codes
            self.sections.view_rows(page, f"{side} scales", first_row, len(rows))[:] = scales[:, None]

    def expand_page(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """As `kvcache.codecs.page.Codec.expand_page`."""
        return self._expand(page, "key", num_rows), self._expand(page, "value", num_rows)

    def _expand(self, page: Bytes, side: str, num_rows: int) -> Floats:
        packed = self.sections.view_rows(page, f"{side} codes", 0, num_rows)
        codes = unpack_codes(packed, self._bits[side], self.shape.head_dim)
        scales = self.sections.view_rows(page, f"{side} scales", 0, num_rows).astype(np.float32)
        rows = unrotate_heads(self.levels[side][codes] * scales, self.seed)
        return rows.reshape(num_rows, 1, self.shape.head_dim)


def norm_scales(rows: Floats) -> Halves:
    """‖row‖ / √d of each row [tokens, d], summed in float64 from the first to the last, rounded once, to float16."""
    # `sum` adds in an order of NumPy's own, which may differ from one version to the next.
    squares = np.add.accumulate(np.square(rows.astype(np.float64)), axis=-1)[..., -1]
    return to_half(np.sqrt(squares / rows.shape[-1]))
