"""Kernels for pages of `fp16` and `bf16`: the bytes and numbers of `kvcache.codecs.plain.PlainCodec`, to the bit.

A page's sections are keys and values; `DETAIL` is 1 for bf16. There are no constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.coded.exact import bits_of_float, jit_exact, load_bfloats, load_halves, round_half
from engine.cpu.coded.page_kernels import DETAIL, SECTIONS
from engine.cpu.simd import LANES, store

_LARGEST_BFLOAT = np.int32(0x7F7F)


@jit_exact
def expand_page(
    data: Any, at: Any, page: Any, table: Any, count: Any, scratch: Any, heads: int, width: int
) -> None:
    """As `engine.cpu.coded.page_kernels`."""
    literally(width)
    bfloat = page[DETAIL] == 1
    for side in range(2):
        numbers, o = at + page[SECTIONS + side], side * CHUNK_TOKENS * width
        # A page has 64 rows, so whole vectors cover it for every width. The last one may go beyond `count` rows.
        for i in range(0, count * width, LANES):
            if bfloat:
                store(scratch, o + i, load_bfloats(data, numbers + 2 * i))
            else:
                store(scratch, o + i, load_halves(data, numbers + 2 * i))


@jit_exact
def _round_bfloat(number: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even; what is too large becomes the largest finite one."""
    bits = bits_of_float(number)
    size = np.int32(bits & np.int32(0x7FFFFFFF))
    rounded = np.int32((np.int64(size) + 0x7FFF + ((size >> np.int32(16)) & np.int32(1))) >> 16)
    return np.int32(min(rounded, _LARGEST_BFLOAT) | ((bits >> np.int32(16)) & np.int32(0x8000)))


@jit_exact
def _encode_side(x: Any, data: Any, at: Any, bfloat: bool) -> None:
    """Numbers x, rounded to 16 bits, to data[at:]."""
    for i in range(x.shape[0]):
        bits = _round_bfloat(x[i]) if bfloat else round_half(x[i])
        data[at + 2 * i] = np.uint8(bits & np.int32(0xFF))
        data[at + 2 * i + 1] = np.uint8((bits >> np.int32(8)) & np.int32(0xFF))


@jit_exact
def encode_row(
    keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: int
) -> None:
    """As `engine.cpu.coded.page_kernels`."""
    bfloat = page[DETAIL] == 1
    _encode_side(keys, data, at + page[SECTIONS] + 2 * row * width, bfloat)
    _encode_side(values, data, at + page[SECTIONS + 1] + 2 * row * width, bfloat)
