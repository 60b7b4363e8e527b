"""Codecs `tq4`, `tq3` and `tq-k8v4`: a random rotation per head, one float16 scale per token and head, no calibration
(after TurboQuant, arXiv 2504.19874; rotation and datatypes in `kvcache.codecs.hadamard`).

    3 and 4 bits    Lloyd-Max levels      codes for the scale norm / √d; stored is norm / norm of the coded levels,
                                          so that what a reader gets has the norm of the row
    8 bits          uniform levels        scale = largest magnitude

    code = nearest level of the row in its basis / scale          expanded = levels[code] · scale

What is coded is in a basis (`kvcache.codecs.basis`): that of the rotation, and with a calibration of its factors.
"""

from __future__ import annotations

import numpy as np

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.basis import Basis
from kvcache.codecs.bit_packing import pack_codes, packed_bytes, unpack_codes
from kvcache.codecs.codec_id import CodecId
from kvcache.codecs.datatype import assign_codes
from kvcache.codecs.hadamard import MIN_BLOCK, block_size, lloyd_max_levels, uniform_levels
from kvcache.codecs.page import Bytes, Floats, PageSections, PageShape, check_rows, to_half

# Most bits for which levels are fitted. With more bits, uniform levels lose next to nothing and need no table.
MAX_LLOYD_BITS = 4
# Factors that are tried before numbers get their codes, by the number of levels: with few levels it matters where in
# them a row lies.
STRETCHES = {8: (1.0, 0.9, 1.1), 16: (1.0,)}
# Numbers are added in halves, from at least this many.
MIN_FOLD = 16


class TurboCodec:
    """Codes rotated keys and values of one head, in a basis with a random rotation.

    Raises:
        ValueError: the basis has no seed, or no power of two of at least 8 divides the head.
    """

    codes_rotated_keys = True

    def __init__(self, codec_id: CodecId, head_dim: int, basis: Basis | None = None) -> None:
        self.basis = Basis(seed=codec_id.seed) if basis is None else basis
        if self.basis.seed is None or block_size(head_dim) < MIN_BLOCK:
            raise ValueError(f"{codec_id} cannot rotate heads of {head_dim} values")
        self.codec_id, self.shape, self.seed = codec_id, PageShape(1, head_dim), self.basis.seed
        self.bits = dict(zip(("key", "value"), codec_id.code_bits, strict=True))
        self.levels = {
            side: lloyd_max_levels(bits, head_dim) if bits <= MAX_LLOYD_BITS else uniform_levels(bits)
            for side, bits in self.bits.items()
        }
        self.sections = PageSections(
            {
                "key codes": (np.uint8, packed_bytes(head_dim, self.bits["key"])),
                "key scales": (np.float16, 1),
                "value codes": (np.uint8, packed_bytes(head_dim, self.bits["value"])),
                "value scales": (np.float16, 1),
            }
        )
        self.page_bytes = self.sections.page_bytes

    def encode_rows(self, keys: Floats, values: Floats, page: Bytes, first_row: int = 0) -> None:
        """As `kvcache.codecs.page.Codec.encode_rows`."""
        flat = check_rows(keys, values, self.shape, np.finfo(np.float32).max)
        stored = self.basis.store_keys(flat[0]), self.basis.store_values(flat[1])
        for side, rows in zip(("key", "value"), stored, strict=True):
            codes, scales = self._code(side, rows)
            packed = pack_codes(codes, self.bits[side])
            self.sections.view_rows(page, f"{side} codes", first_row, len(rows))[:] = packed
            self.sections.view_rows(page, f"{side} scales", first_row, len(rows))[:] = to_half(scales)[
                :, None
            ]

    def expand_page(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """As `kvcache.codecs.page.Codec.expand_page`."""
        keys, values = self.expand_stored(page, num_rows)
        return self.basis.restore_keys(keys), self.basis.restore_values(values)

    def expand_stored(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """As `kvcache.codecs.page.Codec.expand_stored`."""
        return self._expand(page, "key", num_rows), self._expand(page, "value", num_rows)

    def round_rows(self, side: str, rows: Floats) -> Floats:
        """What is left of rows [tokens, head_dim] of keys or values, in the basis, once they are coded."""
        codes, scales = self._code(side, rows)
        return self.levels[side][codes] * to_half(scales).astype(np.float32)[:, None]

    def _code(self, side: str, rows: Floats) -> tuple[Bytes, Floats]:
        code = code_by_norm if self.bits[side] <= MAX_LLOYD_BITS else code_by_size
        return code(rows, self.levels[side])

    def _expand(self, page: Bytes, side: str, num_rows: int) -> Floats:
        packed = self.sections.view_rows(page, f"{side} codes", 0, num_rows)
        codes = unpack_codes(packed, self.bits[side], self.shape.head_dim)
        scales = self.sections.view_rows(page, f"{side} scales", 0, num_rows).astype(np.float32)
        return (self.levels[side][codes] * scales).reshape(num_rows, 1, self.shape.head_dim)


def code_by_norm(rows: Floats, levels: Floats) -> tuple[Bytes, Floats]:
    """Codes and scales of rows [tokens, d]: what is expanded has a row's norm, before its scale is rounded.

    Of the factors of `STRETCHES` the one whose codes point most in the direction of the row is taken, of equal ones the
    first.
    """
    squares = fold_sum(np.square(rows))
    numbers = _divide(rows, np.sqrt(squares / np.float32(rows.shape[-1])))
    codes, best = np.zeros(rows.shape, np.uint8), np.full(len(rows), -1, np.float32)
    size = np.ones(len(rows), np.float32)
    for stretch in STRETCHES[len(levels)]:
        tried = assign_codes(numbers * np.float32(stretch), levels)
        length, along = fold_sum(np.square(levels[tried])), fold_sum(numbers * levels[tried])
        close = along * along / length
        better = close > best
        codes[better], best[better], size[better] = tried[better], close[better], length[better]
    return codes, np.sqrt(squares / size)


def code_by_size(rows: Floats, levels: Floats) -> tuple[Bytes, Floats]:
    """Codes and scales of rows [tokens, d] for uniform levels, which reach to the largest magnitude."""
    middle = np.float32((len(levels) - 1) / 2)
    scales = to_half(np.abs(rows).max(axis=-1)).astype(np.float32)
    steps = np.rint(_divide(rows, scales) * middle + middle)
    return np.clip(steps, 0, len(levels) - 1).astype(np.uint8), scales


def _divide(rows: Floats, scales: Floats) -> Floats:
    """rows / scales, 0 where the scale is 0."""
    numbers: Floats = np.divide(rows, scales[:, None], out=np.zeros_like(rows), where=scales[:, None] > 0)
    return numbers


def fold_sum(rows: Floats) -> Floats:
    """The sum of each row, added in an order that vectors of any size can keep: filled up with zeros to a power of two
    of at least 16, then one half onto the other, until one number is left.
    """
    size = MIN_FOLD
    while size < rows.shape[-1]:
        size *= 2
    folded = np.pad(rows, ((0, 0), (0, size - rows.shape[-1])))
    while size > 1:
        size //= 2
        folded = folded[:, :size] + folded[:, size:]
    total: Floats = folded[:, 0]
    return total
