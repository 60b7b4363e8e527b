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
from engine.cpu.coded.exact import add_at, byte_at, exact_add, exact_mul, jit_exact, load_half, load_halves
from engine.cpu.coded.page_kernels import DETAIL, KEY_BITS, SECTIONS
from engine.cpu.simd import LANES, load, splat, store
from kvcache.codecs.nuq import NuqCodec

PAGE = CHUNK_TOKENS


@jit_exact
def _add_residuals(
    data: Any, places: Any, residuals: Any, slots: int, count: Any, numbers: Any, scratch: Any, at: Any,
    group: int, width: int,
) -> None:  # fmt: skip
    """Add the outliers' residuals of the first `count` rows. A place beyond the group, in a damaged page, is ignored.

    `numbers` has room for the residuals of a page.
    """
    literally(width)
    used = count * slots
    # A page has 64 rows, so whole vectors cover them.
    for i in range(0, used, LANES):
        store(numbers, i, load_halves(data, residuals + 2 * i))
    i = 0
    for t in range(count):
        o = at + t * width
        for _ in range(slots):
            if group <= 256:
                place = byte_at(data, places + i)
            else:
                place = byte_at(data, places + 2 * i) | byte_at(data, places + 2 * i + 1) << 8
            if place < group:
                add_at(scratch, o + place // width * 2 * PAGE * width + place % width, numbers, i)
            i += 1


@jit_exact
def expand_page(
    data: Any, at: Any, page: Any, table: Any, count: Any, scratch: Any, heads: int, width: int
) -> None:
    """As `engine.cpu.coded.page_kernels`; keys before rotation."""
    literally(width)
    bits, slots = page[KEY_BITS], page[DETAIL]
    group, side, levels = heads * width, PAGE * width, 2 * heads * width
    row = (group * bits + 7) // 8
    numbers, outliers = np.empty(LANES, np.float32), np.empty(PAGE * slots, np.float32)
    codes, places, residuals = at + page[SECTIONS], at + page[SECTIONS + 1], at + page[SECTIONS + 2]
    for t in range(count):
        o = t * width
        expand_row(data, codes + t * row, bits, table, levels, table, scratch, o, heads, width)
    if slots > 0:
        _add_residuals(data, places, residuals, slots, count, outliers, scratch, 0, group, width)
    codes, places, residuals = at + page[SECTIONS + 3], at + page[SECTIONS + 4], at + page[SECTIONS + 5]
    scales, zeros = at + page[SECTIONS + 6], at + page[SECTIONS + 7]
    for t in range(count):
        o = t * width + side
        scale = load_half(data, scales + 2 * t)
        # No number may be −0, as in the sum of a dense and a sparse part.
        zero = load_half(data, zeros + 2 * t) + np.float32(0)
        scaled = exact_mul(load(table, levels + LANES), splat(scale))
        store(numbers, 0, exact_add(scaled, splat(zero)))
        expand_row(data, codes + t * row, bits, numbers, 0, table[:0], scratch, o, heads, width)
    if slots > 0:
        _add_residuals(data, places, residuals, slots, count, outliers, scratch, side, group, width)


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
