"""Codecs `nuq4`, `nuq3`, `nuq2`, with `-1%` outliers or without (KVQuant, arXiv 2401.18079).

Keys are coded before rotation, with a scale and a zero point per channel from calibration. Values are coded per token
over all heads of the page, with a scale and a zero point of the token. An outlier keeps, in one of a fixed number of
slots of its token, the float16 difference between itself and what its code expands to: dense and sparse part add up.

    expanded = levels[code] · scale + zero (+ residual)

A key is an outlier when it lies beyond its channel's range. If a token has more of them than slots, those with the
largest residuals get the slots; the others stay at the end of their range.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.basis import IDENTITY
from kvcache.codecs.bit_packing import pack_codes, packed_bytes, unpack_codes
from kvcache.codecs.codec_id import CodecId
from kvcache.codecs.datatype import (
    Datatype,
    LayerConstants,
    assign_codes,
    normalise_keys,
    normalise_values,
    value_ranges,
)
from kvcache.codecs.page import Bytes, Floats, PageSections, PageShape, check_rows, to_half
from kvcache.codecs.storage import index_bits, outliers_per_side

ONE = np.float32(1)


class NuqCodec:
    """Codes one group of heads of one layer.

    Args:
        codec_id: canonical; its group is `shape.width`.
        shape: heads of the group.
        constants: of this layer, its channels cut to this group.

    Raises:
        ValueError: they do not belong together.
    """

    codes_rotated_keys = False
    basis = IDENTITY

    def __init__(self, codec_id: CodecId, shape: PageShape, constants: LayerConstants) -> None:
        width, (self.bits, _) = shape.width, codec_id.code_bits
        if codec_id.group != width or constants.key_scales.shape != (width,):
            raise ValueError(f"{codec_id} does not fit {shape} with {len(constants.key_scales)} channels")
        self.codec_id, self.shape, self.constants = codec_id, shape, constants
        self.per_side = outliers_per_side(codec_id, width)
        slots = 2 * self.per_side
        if slots >= width:
            raise ValueError(f"{width} values are too few for {slots} outliers")
        index = np.uint8 if index_bits(width) == 8 else np.uint16
        codes = (np.uint8, packed_bytes(width, self.bits))
        self.sections = PageSections(
            {
                "key codes": codes,
                "key places": (index, slots),
                "key residuals": (np.float16, slots),
                "value codes": codes,
                "value places": (index, slots),
                "value residuals": (np.float16, slots),
                "value scales": (np.float16, 1),
                "value zeros": (np.float16, 1),
            }
        )
        self.page_bytes = self.sections.page_bytes

    def encode_rows(self, keys: Floats, values: Floats, page: Bytes, first_row: int = 0) -> None:
        """As `kvcache.codecs.page.Codec.encode_rows`."""
        flat_keys, flat_values = check_rows(keys, values, self.shape)
        rows = self._encode_keys(flat_keys) | self._encode_values(flat_values)
        for name, content in rows.items():
            self.sections.view_rows(page, name, first_row, len(flat_keys))[:] = content

    def _encode_keys(self, keys: Floats) -> dict[str, NDArray[np.generic]]:
        scales, zeros = self.constants.key_scales, self.constants.key_zeros
        numbers = normalise_keys(keys, scales, zeros)
        codes = assign_codes(np.clip(numbers, -ONE, ONE), self.constants.keys.centroids)
        dense = self._dense_keys(codes)
        outside = np.abs(numbers) > ONE
        far = np.where(outside, np.abs(keys - dense), -ONE)
        order = np.argsort(-far, axis=-1, kind="stable")[:, : 2 * self.per_side]
        taken = np.take_along_axis(outside, order, axis=-1)
        places = np.sort(np.where(taken, order, self.shape.width), axis=-1)
        used = places < self.shape.width
        places = np.where(used, places, 0)
        residuals = np.where(used, np.take_along_axis(keys - dense, places, axis=-1), 0)
        return {
            "key codes": pack_codes(codes, self.bits),
            "key places": places,
            "key residuals": to_half(residuals),
        }

    def _encode_values(self, values: Floats) -> dict[str, NDArray[np.generic]]:
        scales, zeros, places = value_ranges(values, self.per_side)
        numbers = normalise_values(values, scales, zeros)
        codes = assign_codes(np.clip(numbers, -ONE, ONE), self.constants.values.centroids)
        dense = expand_values(codes, self.constants.values, scales[:, None], zeros[:, None])
        return {
            "value codes": pack_codes(codes, self.bits),
            "value places": places,
            "value residuals": to_half(np.take_along_axis(values - dense, places, axis=-1)),
            "value scales": scales[:, None],
            "value zeros": zeros[:, None],
        }

    def _dense_keys(self, codes: Bytes) -> Floats:
        constants = self.constants
        return expand_values(codes, constants.keys, constants.key_scales, constants.key_zeros)

    def expand_page(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """As `kvcache.codecs.page.Codec.expand_page`."""

        def view(name: str) -> NDArray[np.generic]:
            return self.sections.view_rows(page, name, 0, num_rows)

        def unpack(name: str) -> Bytes:
            return unpack_codes(view(name).view(np.uint8), self.bits, self.shape.width)

        keys = self._dense_keys(unpack("key codes"))
        values = expand_values(
            unpack("value codes"), self.constants.values, view("value scales"), view("value zeros")
        )
        for side, dense in (("key", keys), ("value", values)):
            sparse = np.zeros_like(dense)
            places = view(f"{side} places").astype(np.intp) + np.arange(num_rows)[:, None] * self.shape.width
            np.add.at(sparse.reshape(-1), places, view(f"{side} residuals").astype(np.float32))
            dense += sparse
        shape = (num_rows, self.shape.heads, self.shape.head_dim)
        return keys.reshape(shape), values.reshape(shape)

    expand_stored = expand_page


def expand_values(
    codes: Bytes, datatype: Datatype, scales: NDArray[np.generic], zeros: NDArray[np.generic]
) -> Floats:
    """levels[code] · scale + zero, for float16 scales and zeros that broadcast to the codes' shape."""
    dense: Floats = datatype.levels[codes] * scales.astype(np.float32) + zeros.astype(np.float32)
    return dense
