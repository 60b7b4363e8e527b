"""Kernels for pages of `tq4`, `tq3` and `tq-k8v4`: the bytes and numbers of `kvcache.codecs.turbo.TurboCodec`, to the
bit. Rows are those of the basis: the random rotation is not theirs (`engine.cpu.coded.stored_space`).

A page's sections are codes and scales of keys, then those of values. Constants of a page (`page_constants`):

    levels of keys, of values [2 · 16]    midpoints of keys, of values [2 · 15]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.coded.code_rows import assign_codes, expand_row, pack_row
from engine.cpu.coded.exact import (
    exact_add,
    exact_div,
    exact_mul,
    exact_sub,
    jit_exact,
    jit_exact_variant,
    sum_lanes,
)
from engine.cpu.coded.packed import load_bytes, load_halves, store_half
from engine.cpu.coded.page_kernels import KEY_BITS, SECTIONS, PageFunctions
from engine.cpu.simd import LANES, load, splat, spread, store
from kvcache.codecs.turbo import MAX_LLOYD_BITS, STRETCHES, TurboCodec

_ZERO, _ANY_SIZE = np.float32(0), np.float32(np.inf)
_LEVELS = 16
_ONE, _LESS, _MORE = (np.float32(stretch) for stretch in STRETCHES[8])
# Of uniform codes of 8 bits.
_MIDDLE, _STEP, _TOP = np.float32(127.5), np.float32(1) / np.float32(127.5), np.float32(255)
# Added and taken away, it rounds numbers below 2^22 to whole ones, ties to even.
_ROUNDER = np.float32(1.5 * 2**23)


def page_constants(codec: TurboCodec) -> NDArray[np.float32]:
    """The constants of one page, as the kernels take them; zeros for codes of 8 bits, which need none."""
    sides = [
        codec.levels[side] if codec.bits[side] <= MAX_LLOYD_BITS else np.zeros(1, np.float32)
        for side in ("key", "value")
    ]
    parts = [np.pad(levels, (0, _LEVELS - len(levels))) for levels in sides]
    for levels in sides:
        midpoints = (levels[:-1] + levels[1:]) * np.float32(0.5)
        parts.append(np.pad(midpoints, (0, _LEVELS - 1 - len(midpoints))))
    return np.concatenate(parts)


@jit_exact
def _expand_bytes(data: Any, codes: Any, count: Any, work: Any, scratch: Any, to: Any, width: int) -> None:
    """Rows of uniform codes of 8 bits; the rows' scales are at work[0:]."""
    literally(width)
    for t in range(count):
        o, at = to + t * width, codes + t * width
        if width % LANES == 0:
            middle, step, scale = splat(_MIDDLE), splat(_STEP), spread(work, t)
            for i in range(0, width, LANES):
                x = exact_mul(exact_sub(load_bytes(data, at + i), middle), step)
                store(scratch, o + i, exact_mul(x, scale))
        else:
            for i in range(width):
                scratch[o + i] = ((np.float32(data[at + i]) - _MIDDLE) * _STEP) * work[t]


@jit_exact
def _expand_rows(
    data: Any, codes: Any, bits: int, table: Any, levels: Any, count: Any, work: Any, scratch: Any, to: Any, width: int
) -> None:  # fmt: skip
    """Rows of codes to scratch[to:]: the levels at table[levels:] times the row's scale, at work[0:]."""
    literally(width)
    row, numbers = (width * bits + 7) // 8, CHUNK_TOKENS
    for t in range(count):
        store(work, numbers, exact_mul(load(table, levels), spread(work, t)))
        expand_row(
            data, codes + t * row, bits, work, numbers, table[:0], scratch, to + t * width, 0, 1, width
        )


@jit_exact
def _fold_sum(numbers: Any, used: Any, width: int) -> Any:
    """The sum of the first `used` numbers, in the order of `kvcache.codecs.turbo.fold_sum`; others become zeros."""
    literally(width)
    size = LANES
    while size < width:
        size *= 2
    for i in range(used, size):
        numbers[i] = _ZERO
    while size > LANES:
        size //= 2
        for i in range(0, size, LANES):
            store(numbers, i, exact_add(load(numbers, i), load(numbers, size + i)))
    return sum_lanes(load(numbers, 0))


@jit_exact
def _divide_row(x: Any, scale: Any, width: int) -> None:
    """x / scale; 0 where the scale is."""
    literally(width)
    if width % LANES == 0:
        for i in range(0, width, LANES):
            store(x, i, exact_div(load(x, i), splat(scale)) if scale > _ZERO else splat(_ZERO))
        return
    for i in range(width):
        x[i] = x[i] / scale if scale > _ZERO else _ZERO


@jit_exact
def _multiply_rows(x: Any, y: Any, out: Any, width: int) -> None:
    """out = x · y, number by number."""
    literally(width)
    if width % LANES == 0:
        for i in range(0, width, LANES):
            store(out, i, exact_mul(load(x, i), load(y, i)))
        return
    for i in range(width):
        out[i] = x[i] * y[i]


@jit_exact
def _try_stretch(
    x: Any, stretch: Any, bits: int, table: Any, levels: Any, midpoints: Any, work: Any, width: int
) -> Any:
    """Codes of x · stretch. Returns the square of their levels' length, and how close they are to x in direction."""
    literally(width)
    sums, codes, numbers = work[0], work[1], work[3]
    for i in range(width):
        numbers[i] = x[i] * stretch
    assign_codes(numbers[:width], _ANY_SIZE, table, midpoints, bits, codes)
    for i in range(width):
        numbers[i] = table[levels + codes[i]]
    _multiply_rows(numbers, numbers, sums, width)
    length = _fold_sum(sums, width, width)
    _multiply_rows(x, numbers, sums, width)
    along = _fold_sum(sums, width, width)
    return length, along * along / length


@jit_exact
def _code_by_norm(
    x: Any, data: Any, codes_at: Any, scale_at: Any, bits: int, table: Any, levels: Any, midpoints: Any, work: Any,
    width: int,
) -> None:  # fmt: skip
    """As `kvcache.codecs.turbo.code_by_norm`."""
    literally(width)
    _multiply_rows(x, x, work[0], width)
    squares = _fold_sum(work[0], width, width)
    _divide_row(x, np.float32(np.sqrt(squares / np.float32(width))), width)
    best, closest, last = _ONE, -_ONE, _ONE
    # The last turn codes with the best stretch, unless it is the one that was tried last.
    length, tries = _ONE, 1 if bits > 3 else 3
    for n in range(tries + 1):
        stretch = best if n == tries else (_ONE if n == 0 else (_LESS if n == 1 else _MORE))
        if n < tries or stretch != last:
            length, close = _try_stretch(x, stretch, bits, table, levels, midpoints, work, width)
            last = stretch
            if close > closest:
                best, closest = stretch, close
    pack_row(work[1], bits, data, codes_at)
    store_half(data, scale_at, np.float32(np.sqrt(squares / length)))


@jit_exact
def _code_by_size(x: Any, data: Any, codes_at: Any, scale_at: Any, width: int) -> None:
    """As `kvcache.codecs.turbo.code_by_size`, for 8 bits."""
    literally(width)
    largest = _ZERO
    for i in range(width):
        largest = max(largest, abs(x[i]))
    _divide_row(x, store_half(data, scale_at, largest), width)
    for i in range(width):
        step = (x[i] * _MIDDLE + _MIDDLE) + _ROUNDER
        data[codes_at + i] = np.uint8(min(max(step - _ROUNDER, _ZERO), _TOP))


def make_functions(by_size: bool) -> PageFunctions:
    """The functions for keys of 8 bits, coded by size, or of fewer, as values are; they are as
    `engine.cpu.coded.page_kernels` says.
    """
    sized = int(by_size)

    @jit_exact_variant(sized)
    def expand_side(
        data: Any, at: Any, page: Any, table: Any, side: Any, first: Any, count: Any, scratch: Any, to: Any,
        stride: Any, work: Any, heads: int, width: int,
    ) -> None:  # fmt: skip
        literally(width)
        bits, levels = page[KEY_BITS + side], side * _LEVELS
        codes = at + page[SECTIONS + 2 * side] + first * ((width * bits + 7) // 8)
        for i in range(0, count, LANES):
            store(work, i, load_halves(data, at + page[SECTIONS + 2 * side + 1] + 2 * (first + i)))
        if sized == 1 and side == 0:
            _expand_bytes(data, codes, count, work, scratch, to, width)
        else:
            _expand_rows(data, codes, bits, table, levels, count, work, scratch, to, width)

    @jit_exact_variant(sized)
    def encode_row(
        keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: int
    ) -> None:
        literally(width)
        for side in range(2):
            x, bits = keys if side == 0 else values, page[KEY_BITS + side]
            codes = at + page[SECTIONS + 2 * side] + row * ((width * bits + 7) // 8)
            scale = at + page[SECTIONS + 2 * side + 1] + 2 * row
            levels, midpoints = side * _LEVELS, 2 * _LEVELS + side * (_LEVELS - 1)
            if sized == 1 and side == 0:
                _code_by_size(x, data, codes, scale, width)
            else:
                _code_by_norm(x, data, codes, scale, bits, table, levels, midpoints, work, width)

    return PageFunctions(expand_side, encode_row)
