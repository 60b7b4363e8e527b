"""Kernels for pages of `fp16`, `bf16`, `fp8`: the bytes and numbers of `kvcache.codecs.plain.PlainCodec`, to the bit.

A page's sections are keys and values; `DETAIL` says which of `HALVES`, `BFLOATS` and `EIGHTHS` they hold. There are no
constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally

from engine.cpu.coded.exact import bits_of_float, jit_exact, jit_exact_part
from engine.cpu.coded.packed import load_bfloats, load_eighths, load_halves, round_half, store_halves
from engine.cpu.coded.page_kernels import DETAIL, SECTIONS
from engine.cpu.simd import LANES, load, store

HALVES, BFLOATS, EIGHTHS = range(3)
KINDS = ("fp16", "bf16", "fp8")
_LARGEST_BFLOAT = np.int32(0x7F7F)
# Of e4m3: the largest number, and the smallest with all its bits; below it numbers lie this far apart.
_LARGEST_EIGHTH, _LEAST_EIGHTH, _PER_ONE = np.float32(448), np.float32(2**-6), np.float32(2**9)
_ROUNDER = np.float32(1.5 * 2**23)


def find_kind(name: str) -> int:
    """What the pages of a codec hold."""
    return KINDS.index(name)


@jit_exact_part
def expand_side(
    data: Any, at: Any, page: Any, table: Any, side: Any, first: Any, count: Any, scratch: Any, to: Any, stride: Any,
    work: Any, heads: int, width: int,
) -> None:  # fmt: skip
    """As `engine.cpu.coded.page_kernels`."""
    literally(width)
    start, rows = at + page[SECTIONS + side], first * width
    # Sixteen rows are whole vectors for every width. The last one may go beyond `count` rows.
    if page[DETAIL] == HALVES:
        for i in range(0, count * width, LANES):
            store(scratch, to + i, load_halves(data, start + 2 * (rows + i)))
    elif page[DETAIL] == BFLOATS:
        for i in range(0, count * width, LANES):
            store(scratch, to + i, load_bfloats(data, start + 2 * (rows + i)))
    else:
        for i in range(0, count * width, LANES):
            store(scratch, to + i, load_eighths(data, start + rows + i))


@jit_exact
def _round_bfloat(number: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even; what is too large becomes the largest finite one."""
    bits = bits_of_float(number)
    size = np.int32(bits & np.int32(0x7FFFFFFF))
    rounded = np.int32((np.int64(size) + 0x7FFF + ((size >> np.int32(16)) & np.int32(1))) >> 16)
    return np.int32(min(rounded, _LARGEST_BFLOAT) | ((bits >> np.int32(16)) & np.int32(0x8000)))


@jit_exact
def _round_eighth(number: Any) -> Any:
    """Bits of the nearest e4m3, ties to even; what is too large becomes the largest one."""
    size = min(abs(number), _LARGEST_EIGHTH)
    bits, sign = bits_of_float(size), (bits_of_float(number) >> np.int32(24)) & np.int32(0x80)
    normal = np.int32(bits + np.int32(0x7FFFF) + ((bits >> np.int32(20)) & np.int32(1))) >> np.int32(20)
    small = np.int32((size * _PER_ONE + _ROUNDER) - _ROUNDER)
    return np.int32((small if size < _LEAST_EIGHTH else normal - np.int32(120 << 3)) | sign)


@jit_exact
def _encode_side(x: Any, data: Any, at: Any, row: Any, kind: Any) -> None:
    """The numbers x, rounded, as a row of the section at data[at:]."""
    first = row * x.shape[0]
    if kind == EIGHTHS:
        for i in range(x.shape[0]):
            data[at + first + i] = np.uint8(_round_eighth(x[i]))
        return
    at += 2 * first
    if kind == HALVES and x.shape[0] % LANES == 0:
        for i in range(0, x.shape[0], LANES):
            store_halves(data, at + 2 * i, load(x, i))
        return
    for i in range(x.shape[0]):
        bits = _round_bfloat(x[i]) if kind == BFLOATS else round_half(x[i])
        data[at + 2 * i] = np.uint8(bits & np.int32(0xFF))
        data[at + 2 * i + 1] = np.uint8((bits >> np.int32(8)) & np.int32(0xFF))


@jit_exact_part
def encode_row(
    keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: int
) -> None:
    """As `engine.cpu.coded.page_kernels`."""
    kind = page[DETAIL]
    _encode_side(keys, data, at + page[SECTIONS], row, kind)
    _encode_side(values, data, at + page[SECTIONS + 1], row, kind)
