"""Expands pages of `nuq*` in kernels: the numbers of `kvcache.codecs.nuq.NuqCodec`, to the bit.

A page's sections are codes, places and residuals of keys, the same of values, and scales and zeros of values; `DETAIL`
is the number of outlier slots of a row. Constants of a page (`page_constants`):

    scales, zeros of the key channels [2 · group]    levels of keys, values [2 · 16]    midpoints [2 · 15]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.coded.code_rows import expand_row
from engine.cpu.coded.exact import add_at, exact_add, exact_mul, jit_exact, jit_exact_part
from engine.cpu.coded.packed import byte_at, load_halves
from engine.cpu.coded.page_kernels import DETAIL, KEY_BITS, SECTIONS
from engine.cpu.simd import LANES, load, splat, spread, store
from kvcache.codecs.nuq import NuqCodec

PAGE = CHUNK_TOKENS


@jit_exact
def _add_residuals(
    data: Any, places: Any, residuals: Any, slots: int, count: Any, numbers: Any, scratch: Any, to: Any, stride: Any,
    group: int, width: int,
) -> None:  # fmt: skip
    """Add the outliers' residuals of `count` rows. A place beyond the group, in a damaged page, is ignored.

    `numbers` has room for them.
    """
    literally(width)
    used, i = count * slots, 0
    # Rows begin at a multiple of 16, so whole vectors stay within the page.
    for n in range(0, used, LANES):
        store(numbers, n, load_halves(data, residuals + 2 * n))
    for t in range(count):
        o = to + t * width
        for _ in range(slots):
            if group <= 256:
                place = byte_at(data, places + i)
            else:
                place = byte_at(data, places + 2 * i) | byte_at(data, places + 2 * i + 1) << 8
            if place < group:
                add_at(scratch, o + place // width * stride + place % width, numbers, i)
            i += 1


@jit_exact
def _expand_keys(
    data: Any, codes: Any, bits: int, table: Any, count: Any, scratch: Any, to: Any, stride: Any, heads: int, width: int
) -> None:  # fmt: skip
    literally(width)
    row, levels = (heads * width * bits + 7) // 8, 2 * heads * width
    for t in range(count):
        at = to + t * width
        expand_row(data, codes + t * row, bits, table, levels, table, scratch, at, stride, heads, width)


@jit_exact
def _expand_values(
    data: Any, codes: Any, bits: int, table: Any, count: Any, work: Any, scratch: Any, to: Any, stride: Any, heads: int,
    width: int,
) -> None:  # fmt: skip
    """The rows' scales are at work[0:], their zero points at work[64:]."""
    literally(width)
    row, levels, numbers = (heads * width * bits + 7) // 8, 2 * heads * width + LANES, 2 * PAGE
    for t in range(count):
        # No number may be −0, as in the sum of a dense and a sparse part.
        zero = exact_add(spread(work, PAGE + t), splat(np.float32(0)))
        store(work, numbers, exact_add(exact_mul(load(table, levels), spread(work, t)), zero))
        at = to + t * width
        expand_row(data, codes + t * row, bits, work, numbers, table[:0], scratch, at, stride, heads, width)


@jit_exact
def _expand_codes(
    data: Any, codes: Any, bits: int, table: Any, side: Any, count: Any, work: Any, scratch: Any, to: Any, stride: Any,
    heads: int, width: int,
) -> None:  # fmt: skip
    literally(width)
    if side == 0:
        _expand_keys(data, codes, bits, table, count, scratch, to, stride, heads, width)
    else:
        _expand_values(data, codes, bits, table, count, work, scratch, to, stride, heads, width)


@jit_exact_part
def expand_side(
    data: Any, at: Any, page: Any, table: Any, side: Any, first: Any, count: Any, scratch: Any, to: Any, stride: Any,
    work: Any, heads: int, width: int,
) -> None:  # fmt: skip
    """As `engine.cpu.coded.page_kernels`; keys before rotation."""
    literally(width)
    bits, slots, group = page[KEY_BITS], page[DETAIL], heads * width
    codes = at + page[SECTIONS + 3 * side] + first * ((group * bits + 7) // 8)
    for i in range(0, count if side == 1 else 0, LANES):
        half = 2 * (first + i)
        store(work, i, load_halves(data, at + page[SECTIONS + 6] + half))
        store(work, PAGE + i, load_halves(data, at + page[SECTIONS + 7] + half))
    _expand_codes(data, codes, bits, table, side, count, work, scratch, to, stride, heads, width)
    if slots > 0:
        wide = 1 if group <= 256 else 2
        places = at + page[SECTIONS + 3 * side + 1] + first * slots * wide
        residuals = at + page[SECTIONS + 3 * side + 2] + first * slots * 2
        _add_residuals(
            data, places, residuals, slots, count, work[2 * PAGE + LANES :], scratch, to, stride, group, width
        )


def page_constants(codec: NuqCodec) -> NDArray[np.float32]:
    """The constants of one page, as the kernels take them."""
    constants = codec.constants
    # A zero point of −0 becomes 0, so that no expanded number is −0.
    zeros = constants.key_zeros.astype(np.float32) + np.float32(0)
    levels, midpoints = np.zeros((2, 16), np.float32), np.zeros((2, 15), np.float32)
    for side, datatype in enumerate((constants.keys, constants.values)):
        levels[side, : len(datatype.levels)] = datatype.levels
        middle = (datatype.centroids[:-1] + datatype.centroids[1:]) * np.float32(0.5)
        midpoints[side, : len(middle)] = middle
    return np.concatenate(
        [constants.key_scales.astype(np.float32), zeros, levels.reshape(-1), midpoints.reshape(-1)]
    )
