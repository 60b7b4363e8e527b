"""Kernels for pages of `int8` and `int4`: the bytes and numbers of `kvcache.codecs.grouped.GroupedCodec`, to the bit.

A page's sections are codes, scales and minima of keys, then those of values; `DETAIL` is the size of a group. There are
no constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.coded.code_rows import pack_row, read_code
from engine.cpu.coded.exact import (
    MAX_HALF,
    exact_add,
    exact_mul,
    jit_exact,
    load_bytes,
    load_half,
    lookup,
    store_half,
)
from engine.cpu.coded.page_kernels import DETAIL, KEY_BITS, SECTIONS
from engine.cpu.simd import LANES, load, splat, store

_ZERO = np.float32(0)
# Added and taken away, it rounds numbers below 2^22 to whole ones, ties to even.
_ROUNDER = np.float32(1.5 * 2**23)
_DIGITS = np.arange(LANES, dtype=np.float32)


@jit_exact
def _expand_group(
    data: Any, codes: Any, bits: int, first: Any, group: int, scale: Any, minimum: Any, out: Any, at: Any
) -> None:
    """Codes first..first + group − 1 of the row at data[codes:], times scale plus minimum, to out[at + first :]."""
    if group % LANES == 0:
        steps, low = splat(scale), splat(minimum)
        if bits == 8:
            for i in range(first, first + group, LANES):
                store(out, at + i, exact_add(exact_mul(load_bytes(data, codes + i), steps), low))
            return
        numbers = exact_add(exact_mul(load(_DIGITS, 0), steps), low)
        for i in range(first, first + group, LANES):
            store(out, at + i, lookup(data, codes + (i * bits >> 3), bits, numbers))
        return
    for i in range(first, first + group):
        out[at + i] = np.float32(read_code(data, codes, bits, i)) * scale + minimum


@jit_exact
def expand_page(
    data: Any, at: Any, page: Any, table: Any, count: Any, scratch: Any, heads: int, width: int
) -> None:
    """As `engine.cpu.coded.page_kernels`."""
    literally(width)
    bits, group = page[KEY_BITS], page[DETAIL]
    groups, row = width // group, (width * bits + 7) // 8
    for side in range(2):
        codes = at + page[SECTIONS + 3 * side]
        scales, minima = at + page[SECTIONS + 3 * side + 1], at + page[SECTIONS + 3 * side + 2]
        for t in range(count):
            o = (side * CHUNK_TOKENS + t) * width
            for g in range(groups):
                half = 2 * (t * groups + g)
                scale, minimum = load_half(data, scales + half), load_half(data, minima + half)
                _expand_group(data, codes + t * row, bits, g * group, group, scale, minimum, scratch, o)


@jit_exact
def _encode_side(x: Any, data: Any, at: Any, page: Any, first: Any, row: Any, codes: Any, width: int) -> None:
    """Code the numbers x of one head into a row of the three sections from `first` on."""
    literally(width)
    bits, group = page[KEY_BITS], page[DETAIL]
    groups, most = width // group, np.float32((1 << bits) - 1)
    for g in range(groups):
        begin = g * group
        low = high = min(max(x[begin], -MAX_HALF), MAX_HALF)
        for i in range(begin, begin + group):
            x[i] = min(max(x[i], -MAX_HALF), MAX_HALF)
            low, high = min(low, x[i]), max(high, x[i])
        half = 2 * (row * groups + g)
        # A minimum or maximum of −0 becomes 0: which zero is found would depend on the order of the search.
        low = store_half(data, at + page[first + 2] + half, low + _ZERO)
        scale = store_half(data, at + page[first + 1] + half, ((high + _ZERO) - low) / most)
        for i in range(begin, begin + group):
            steps = (x[i] - low) / scale if scale > _ZERO else _ZERO
            codes[i] = np.int32((min(max(steps, _ZERO), most) + _ROUNDER) - _ROUNDER)
    pack_row(codes, bits, data, at + page[first] + row * ((width * bits + 7) // 8))


@jit_exact
def encode_row(
    keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: int
) -> None:
    """As `engine.cpu.coded.page_kernels`."""
    codes = work[1]
    _encode_side(keys, data, at, page, SECTIONS, row, codes, width)
    _encode_side(values, data, at, page, SECTIONS + 3, row, codes, width)
