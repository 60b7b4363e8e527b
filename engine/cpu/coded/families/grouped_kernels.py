"""Kernels for pages of `int8` and `int4`: the bytes and numbers of `kvcache.codecs.grouped.GroupedCodec`, to the bit.

A page's sections are codes, scales and minima of keys, then those of values; `DETAIL` is the size of a group. There are
no constants. A variant has the bits of a code, and whether a group is a whole head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.coded.code_rows import clip_row, pack_row, read_code
from engine.cpu.coded.exact import (
    MAX_HALF,
    exact_add,
    exact_div,
    exact_mul,
    exact_sub,
    jit_exact,
    jit_exact_variant,
    largest_lane,
    least_lane,
)
from engine.cpu.coded.packed import load_bytes, load_codes, load_halves, store_bytes, store_half, store_whole
from engine.cpu.coded.page_kernels import DETAIL, SECTIONS, PageFunctions
from engine.cpu.simd import LANES, larger, load, smaller, splat, spread, store

_ZERO = np.float32(0)
# Added and taken away, it rounds numbers below 2^22 to whole ones, ties to even.
_ROUNDER = np.float32(1.5 * 2**23)


@jit_exact
def _expand_rows(
    data: Any, codes: Any, bits: int, group: int, count: Any, work: Any, minima: Any, scratch: Any, to: Any, width: int
) -> None:  # fmt: skip
    """Rows of codes, those of each group times its scale plus its minimum, at work[0:] and at work[minima:]."""
    literally(width)
    row, number = (width * bits + 7) // 8, 0
    for t in range(count):
        o = to + t * width
        if group % LANES == 0:
            for first in range(0, width, group):
                scale, low = spread(work, number), spread(work, minima + number)
                for i in range(first, first + group, LANES):
                    at = codes + (i * bits >> 3)
                    x = load_bytes(data, at) if bits == 8 else load_codes(data, at, bits)
                    store(scratch, o + i, exact_add(exact_mul(x, scale), low))
                number += 1
        else:
            for i in range(width):
                g = number + i // group
                scratch[o + i] = np.float32(read_code(data, codes, bits, i)) * work[g] + work[minima + g]
            number += width // group
        codes += row


@jit_exact
def _find_range(x: Any, begin: Any, group: Any) -> Any:
    """The least and the largest of x[begin : begin + group]."""
    if group % LANES == 0:
        least = most = load(x, begin)
        for i in range(begin + LANES, begin + group, LANES):
            least, most = smaller(least, load(x, i)), larger(most, load(x, i))
        return least_lane(least), largest_lane(most)
    low = high = x[begin]
    for i in range(begin + 1, begin + group):
        low, high = min(low, x[i]), max(high, x[i])
    return low, high


@jit_exact
def _code_group(
    x: Any, begin: Any, group: Any, low: Any, scale: Any, most: Any, bits: int, codes: Any, data: Any, at: Any
) -> None:
    """Codes of x[begin : begin + group]: those of 8 bits into the row at data[at:], others into `codes`."""
    if group % LANES == 0:
        least, step, zero, top = splat(low), splat(scale), splat(_ZERO), splat(most)
        for i in range(begin, begin + group, LANES):
            steps = exact_div(exact_sub(load(x, i), least), step) if scale > _ZERO else zero
            steps = smaller(larger(steps, zero), top)
            whole = exact_sub(exact_add(steps, splat(_ROUNDER)), splat(_ROUNDER))
            if bits == 8:
                store_bytes(data, at + i, whole)
            else:
                store_whole(codes, i, whole)
        return
    for i in range(begin, begin + group):
        steps = (x[i] - low) / scale if scale > _ZERO else _ZERO
        codes[i] = np.int32((min(max(steps, _ZERO), most) + _ROUNDER) - _ROUNDER)


@jit_exact
def _encode_side(
    x: Any, data: Any, at: Any, page: Any, first: Any, row: Any, codes: Any, bits: int, group: Any, width: int
) -> None:
    """Code the numbers x of one head into a row of the three sections from `first` on."""
    literally(width)
    groups, most = width // group, np.float32((1 << bits) - 1)
    place = at + page[first] + row * ((width * bits + 7) // 8)
    clip_row(x, MAX_HALF)
    for g in range(groups):
        half = 2 * (row * groups + g)
        low, high = _find_range(x, g * group, group)
        # A minimum or maximum of −0 becomes 0: which zero is found would depend on the order of the search.
        low = store_half(data, at + page[first + 2] + half, low + _ZERO)
        scale = store_half(data, at + page[first + 1] + half, ((high + _ZERO) - low) / most)
        _code_group(x, g * group, group, low, scale, most, bits, codes, data, place)
    if bits < 8 or group % LANES != 0:
        pack_row(codes, bits, data, place)


def find_variant(bits: int, group: int, width: int) -> int:
    """The variant for codes of `bits` in groups of `group`."""
    return 2 * bits + int(group == width)


def make_functions(bits: int, whole: bool) -> PageFunctions:
    """The functions for codes of `bits`, with a group that is a whole head or less; they are as
    `engine.cpu.coded.page_kernels` says.
    """
    by_head = int(whole)

    @jit_exact_variant(bits, by_head)
    def expand_side(
        data: Any, at: Any, page: Any, table: Any, side: Any, first: Any, count: Any, scratch: Any, to: Any,
        stride: Any, work: Any, heads: int, width: int,
    ) -> None:  # fmt: skip
        literally(width)
        group = width if by_head == 1 else page[DETAIL]
        groups, section, minima = width // group, SECTIONS + 3 * side, CHUNK_TOKENS * width
        for i in range(0, count * groups, LANES):
            half = 2 * (first * groups + i)
            store(work, i, load_halves(data, at + page[section + 1] + half))
            store(work, minima + i, load_halves(data, at + page[section + 2] + half))
        codes = at + page[section] + first * ((width * bits + 7) // 8)
        _expand_rows(data, codes, bits, group, count, work, minima, scratch, to, width)

    @jit_exact_variant(bits, by_head)
    def encode_row(
        keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: int
    ) -> None:
        literally(width)
        group = width if by_head == 1 else page[DETAIL]
        for side in range(2):
            x = keys if side == 0 else values
            _encode_side(x, data, at, page, SECTIONS + 3 * side, row, work[1], bits, group, width)

    return PageFunctions(expand_side, encode_row)
