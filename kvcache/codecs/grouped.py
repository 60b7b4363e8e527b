"""Codecs `int8` and `int4`: uniform codes with a scale and a minimum per group of neighbouring values of one token and
head (FlexGen, arXiv 2303.06865, section 5 "Group-wise quantization").

    m = fp16(minimum)    s = fp16((maximum − m) / (2^b − 1))    code = round((x − m) / s)    expanded = code · s + m

The scale is stored, so all arithmetic uses the rounded s and m. In a constant group s is 0: codes are 0, and the group
expands to m. With a calibration x is in a basis that flattens channels that stick out (`kvcache.codecs.basis`).
"""

from __future__ import annotations

import numpy as np

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.basis import IDENTITY, Basis
from kvcache.codecs.bit_packing import pack_codes, packed_bytes, unpack_codes
from kvcache.codecs.codec_id import CodecId
from kvcache.codecs.page import Bytes, Floats, Halves, PageSections, PageShape, check_rows, to_half

ZERO, LARGEST = np.float32(0), np.finfo(np.float32).max


class GroupedCodec:
    """Stores rotated keys and values in groups of `codec_id.group`. One head per page."""

    codes_rotated_keys = True

    def __init__(self, codec_id: CodecId, head_dim: int, basis: Basis = IDENTITY) -> None:
        if not codec_id.group or head_dim % codec_id.group:
            raise ValueError(f"{codec_id} does not divide a head of {head_dim} values into groups")
        self.codec_id, self.shape, self.basis = codec_id, PageShape(1, head_dim), basis
        self._bits, self.group = codec_id.code_bits[0], codec_id.group
        codes = (np.uint8, packed_bytes(head_dim, self._bits))
        groups = (np.float16, head_dim // self.group)
        self.sections = PageSections(
            {
                "key codes": codes,
                "key scales": groups,
                "key minima": groups,
                "value codes": codes,
                "value scales": groups,
                "value minima": groups,
            }
        )
        self.page_bytes = self.sections.page_bytes

    def encode_rows(self, keys: Floats, values: Floats, page: Bytes, first_row: int = 0) -> None:
        """As `kvcache.codecs.page.Codec.encode_rows`."""
        flat = check_rows(keys, values, self.shape, LARGEST)
        stored = self.basis.store_keys(flat[0]), self.basis.store_values(flat[1])
        for side, rows in zip(("key", "value"), stored, strict=True):
            codes, scales, minima = self._code(rows)
            packed = pack_codes(codes.reshape(len(rows), -1), self._bits)
            for part, content in {"codes": packed, "scales": scales, "minima": minima}.items():
                self.sections.view_rows(page, f"{side} {part}", first_row, len(rows))[:] = content

    def round_rows(self, side: str, rows: Floats) -> Floats:
        """What is left of rows [tokens, head_dim] of keys or values, in the basis, once they are coded."""
        codes, scales, minima = self._code(rows)
        steps, low = (part.astype(np.float32)[..., None] for part in (scales, minima))
        return (codes.astype(np.float32) * steps + low).reshape(rows.shape)

    def _code(self, rows: Floats) -> tuple[Bytes, Halves, Halves]:
        """Codes [tokens, groups, group], scales and minima [tokens, groups] of rows [tokens, head_dim]."""
        groups = rows.reshape(len(rows), -1, self.group)
        levels = np.float32((1 << self._bits) - 1)
        # −0 becomes 0: which of the two is the least or the largest would depend on the order of the search.
        minima = to_half(groups.min(axis=-1) + ZERO)
        low = minima.astype(np.float32)[..., None]
        scales = to_half((groups.max(axis=-1, keepdims=True) + ZERO - low) / levels)[..., 0]
        step = scales.astype(np.float32)[..., None]
        steps = np.divide(groups - low, step, out=np.zeros_like(groups), where=step > 0)
        return np.clip(np.rint(steps), 0, levels).astype(np.uint8), scales, minima

    def expand_page(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """As `kvcache.codecs.page.Codec.expand_page`."""
        keys, values = self.expand_stored(page, num_rows)
        return self.basis.restore_keys(keys), self.basis.restore_values(values)

    def expand_stored(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """As `kvcache.codecs.page.Codec.expand_stored`."""
        return self._expand(page, "key", num_rows), self._expand(page, "value", num_rows)

    def _expand(self, page: Bytes, side: str, num_rows: int) -> Floats:
        parts = {
            part: self.sections.view_rows(page, f"{side} {part}", 0, num_rows)
            for part in ("codes", "scales", "minima")
        }
        codes = unpack_codes(parts["codes"], self._bits, self.shape.width).astype(np.float32)
        scales, minima = (parts[part].astype(np.float32)[..., None] for part in ("scales", "minima"))
        expanded = codes.reshape(num_rows, -1, self.group) * scales + minima
        return expanded.reshape(num_rows, 1, self.shape.head_dim)
