"""Kernels for pages of `tq4`, `tq3` and `tq-k8v4`: the bytes and numbers of `kvcache.codecs.turbo.TurboCodec`, to the
bit.

A page's sections are codes and scales of keys, then those of values; `DETAIL` is 1 if the scale of keys is their norm.
Constants of a page (`page_constants`):

    signs [head_dim]    levels of keys [256], of values [16]    midpoints of keys [255], of values [15]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.coded.code_rows import assign_codes, expand_row, pack_row
from engine.cpu.coded.exact import (
    MAX_HALF,
    bits_of_float,
    exact_add,
    exact_mul,
    exact_sub,
    jit_exact,
    load_half,
    store_half,
    transform_lanes,
)
from engine.cpu.coded.page_kernels import DETAIL, KEY_BITS, SECTIONS, VALUE_BITS
from engine.cpu.jit import float_of_bits
from engine.cpu.simd import LANES, load, splat, store
from kvcache.codecs.hadamard import random_signs
from kvcache.codecs.turbo import TurboCodec

_ZERO = np.float32(0)
_ANY_SIZE = np.float32(np.inf)
_KEY_LEVELS, _VALUE_LEVELS = 256, 16


def page_constants(codec: TurboCodec) -> NDArray[np.float32]:
    """The constants of one page, as the kernels take them."""
    parts = [random_signs(codec.seed, codec.shape.head_dim)]
    for levels, room in ((codec.levels["key"], _KEY_LEVELS), (codec.levels["value"], _VALUE_LEVELS)):
        parts.append(np.pad(levels, (0, room - len(levels))))
    for levels, room in ((codec.levels["key"], _KEY_LEVELS), (codec.levels["value"], _VALUE_LEVELS)):
        midpoints = (levels[:-1] + levels[1:]) * np.float32(0.5)
        parts.append(np.pad(midpoints, (0, room - 1 - len(midpoints))))
    return np.concatenate(parts)


@jit_exact
def _transform_head(row: Any, at: Any, width: int) -> None:
    """Walsh-Hadamard over √n of one head, row[at : at + width], in blocks as in `kvcache.codecs.hadamard`."""
    literally(width)
    block = width & -width
    root = np.float32(1 / np.sqrt(np.float64(block)))
    distance = 1
    if block % LANES == 0:
        for i in range(0, width, LANES):
            store(row, at + i, transform_lanes(load(row, at + i)))
        distance = LANES
    while distance < block:
        for first in range(0, width, 2 * distance):
            if distance >= LANES:
                for i in range(at + first, at + first + distance, LANES):
                    x, y = load(row, i), load(row, i + distance)
                    store(row, i, exact_add(x, y))
                    store(row, i + distance, exact_sub(x, y))
            else:
                for i in range(at + first, at + first + distance):
                    a, b = row[i], row[i + distance]
                    row[i], row[i + distance] = a + b, a - b
        distance *= 2
    for i in range(at, at + width):
        row[i] = row[i] * root


@jit_exact
def _expand_side(
    data: Any, codes: Any, scales: Any, bits: int, table: Any, levels: Any, count: Any, scratch: Any, at: Any,
    width: int,
) -> None:  # fmt: skip
    """The first `count` rows of keys or values to scratch[at:]."""
    literally(width)
    row = (width * bits + 7) // 8
    numbers = np.empty(LANES, np.float32)
    for t in range(count):
        o = at + t * width
        scale = load_half(data, scales + 2 * t)
        if bits == 8:
            for i in range(width):
                scratch[o + i] = table[levels + data[codes + t * row + i]] * scale
        else:
            store(numbers, 0, exact_mul(load(table, levels), splat(scale)))
            expand_row(data, codes + t * row, bits, numbers, 0, table[:0], scratch, o, 1, width)
        _transform_head(scratch, o, width)
        for i in range(width):
            scratch[o + i] = scratch[o + i] * table[i]


@jit_exact
def expand_page(
    data: Any, at: Any, page: Any, table: Any, count: Any, scratch: Any, heads: int, width: int
) -> None:
    """As `engine.cpu.coded.page_kernels`."""
    literally(width)
    _expand_side(
        data, at + page[SECTIONS], at + page[SECTIONS + 1], page[KEY_BITS], table, width, count, scratch, 0, width
    )  # fmt: skip
    _expand_side(
        data, at + page[SECTIONS + 2], at + page[SECTIONS + 3], page[VALUE_BITS], table, width + _KEY_LEVELS,
        count, scratch, CHUNK_TOKENS * width, width,
    )  # fmt: skip


@jit_exact
def _norm_scale(x: Any) -> Any:
    """‖x‖ / √d, to float32 in such a way that rounding it to float16 gives what rounding it once would: a number that
    is not exact becomes the neighbour with an odd last bit.
    """
    squares = np.float64(0)
    for i in range(x.shape[0]):
        squares += np.float64(x[i]) * np.float64(x[i])
    exact = np.sqrt(squares / np.float64(x.shape[0]))
    near = np.float32(exact)
    if np.float64(near) == exact:
        return near
    bits = bits_of_float(near)
    if np.float64(near) > exact:
        bits = np.int32(bits - np.int32(1))
    return float_of_bits(np.int32(bits | np.int32(1)))


@jit_exact
def _encode_side(
    x: Any, data: Any, codes_at: Any, scales: Any, row: Any, bits: int, by_norm: Any, table: Any, midpoints: Any,
    work: Any, width: int,
) -> None:  # fmt: skip
    """Code the numbers x of one head, which become their rotated ones, into a row."""
    literally(width)
    codes, largest = work[1], _ZERO
    for i in range(width):
        x[i] = min(max(x[i], -MAX_HALF), MAX_HALF)
    scale = _norm_scale(x) if by_norm else _ZERO
    for i in range(width):
        x[i] = x[i] * table[i]
    _transform_head(x, 0, width)
    for i in range(width):
        largest = max(largest, abs(x[i]))
    scale = store_half(data, scales + 2 * row, scale if by_norm else largest)
    for i in range(width):
        x[i] = x[i] / scale if scale > _ZERO else _ZERO
    assign_codes(x, _ANY_SIZE, table, midpoints, bits, codes)
    pack_row(codes, bits, data, codes_at + row * ((width * bits + 7) // 8))


@jit_exact
def encode_row(
    keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: int
) -> None:
    """As `engine.cpu.coded.page_kernels`."""
    literally(width)
    midpoints = width + _KEY_LEVELS + _VALUE_LEVELS
    _encode_side(
        keys, data, at + page[SECTIONS], at + page[SECTIONS + 1], row, page[KEY_BITS], page[DETAIL] == 1, table,
        midpoints, work, width,
    )  # fmt: skip
    _encode_side(
        values, data, at + page[SECTIONS + 2], at + page[SECTIONS + 3], row, page[VALUE_BITS], False, table,
        midpoints + _KEY_LEVELS - 1, work, width,
    )  # fmt: skip
