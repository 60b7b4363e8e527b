"""Codes new keys and values into `nuq*` pages in kernels: the bytes of `kvcache.codecs.nuq.NuqCodec`, to the bit.

Sections and constants of a page are those of `engine.cpu.coded.families.nuq_expand`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.coded.code_rows import assign_codes, pack_row
from engine.cpu.coded.exact import (
    MAX_HALF,
    exact_add,
    exact_div,
    exact_mul,
    exact_sub,
    jit_exact,
    jit_exact_part,
    mask_above,
)
from engine.cpu.coded.packed import look_up, store_half
from engine.cpu.coded.page_kernels import DETAIL, KEY_BITS, SECTIONS, VALUE_BITS
from engine.cpu.simd import LANES, larger, load, splat, store

ALL_LANES = (1 << LANES) - 1
_ONE, _HALF = np.float32(1), np.float32(0.5)


@jit_exact
def _store_outlier(
    data: Any, places: Any, residuals: Any, j: int, group: int, place: Any, residual: Any
) -> None:
    """Fill slot j of a row's outliers."""
    if group <= 256:
        data[places + j] = np.uint8(place)
    else:
        data[places + 2 * j], data[places + 2 * j + 1] = np.uint8(place & 255), np.uint8(place >> 8)
    store_half(data, residuals + 2 * j, residual)


@jit_exact
def _sort_places(places: Any, count: int) -> None:
    """Sort the first `count` places, which are few, in place."""
    for i in range(1, count):
        place, j = places[i], i
        while j > 0 and places[j - 1] > place:
            places[j] = places[j - 1]
            j -= 1
        places[j] = place


@jit_exact
def _farthest(away: Any, outside: Any, found: Any, slots: int) -> Any:
    """Mark in `found` the outliers that get slots: the farthest ones, among equal ones those of the lowest index.

    `outside` holds the places of the `count` candidates, ascending. Returns how many get slots.
    """
    count = outside.shape[0]
    if count <= slots:
        for j in range(count):
            found[j] = outside[j]
        return count
    for j in range(slots):
        best, most = -1, -_ONE
        for k in range(count):
            place = outside[k]
            if place >= 0 and away[place] > most:
                best, most = k, away[place]
        found[j] = outside[best]
        outside[best] = -1
    _sort_places(found, slots)
    return slots


@jit_exact
def _encode_keys(x: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any) -> None:
    """Code one row of keys x [group], which become their residuals."""
    numbers, codes, places, _ = work
    group, bits, slots = x.shape[0], page[KEY_BITS], page[DETAIL]
    levels, whole = 2 * group, group % LANES == 0
    if whole:
        for i in range(0, group, LANES):
            moved = exact_sub(load(x, i), load(table, group + i))
            store(numbers, i, exact_div(moved, load(table, i)))
    else:
        for i in range(group):
            numbers[i] = (x[i] - table[group + i]) / table[i]
    assign_codes(numbers, _ONE, table, levels + 2 * LANES, bits, codes)
    pack_row(codes, bits, data, at + page[SECTIONS] + row * ((group * bits + 7) // 8))
    if slots == 0:
        return
    count = 0
    if whole:
        level, one, minus = load(table, levels), splat(_ONE), splat(-_ONE)
        for i in range(0, group, LANES):
            number = load(numbers, i)
            expanded = exact_add(exact_mul(look_up(codes, i, level), load(table, i)), load(table, group + i))
            residual = exact_sub(load(x, i), expanded)
            store(x, i, residual)
            store(numbers, i, larger(residual, exact_sub(splat(np.float32(0)), residual)))
            outside = mask_above(number, one) | mask_above(minus, number)
            for j in range(LANES if outside else 0):
                if outside >> j & 1:
                    places[slots + count] = i + j
                    count += 1
    else:
        for i in range(group):
            x[i] = x[i] - (table[levels + codes[i]] * table[i] + table[group + i])
            if abs(numbers[i]) > _ONE:
                places[slots + count] = i
                count += 1
            numbers[i] = abs(x[i])
    used = _farthest(numbers, places[slots : slots + count], places, slots)
    wide = 1 if group <= 256 else 2
    first, residuals = at + page[SECTIONS + 1] + row * slots * wide, at + page[SECTIONS + 2] + row * slots * 2
    for j in range(slots):
        place = places[j] if j < used else 0
        residual = x[place] if j < used else np.float32(0)
        _store_outlier(data, first, residuals, j, group, place, residual)


@jit_exact
def _insert(
    value: Any, place: Any, filled: Any, kept: Any, places: Any, first: Any, size: int, low: Any
) -> None:
    """Insert a number into the `size` smallest (`low`) or largest so far, at kept[first :], the extreme one first.

    Among equal numbers, the one with the lower index counts as the smaller; indices come in ascending order.
    """
    j = min(filled, size)
    while j > 0 and (value < kept[first + j - 1] if low else value >= kept[first + j - 1]):
        if j < size:
            kept[first + j], places[first + j] = kept[first + j - 1], places[first + j - 1]
        j -= 1
    if j < size:
        kept[first + j], places[first + j] = value, place


@jit_exact
def _find_extremes(x: Any, kept: Any, places: Any, size: int) -> None:
    """The `size` smallest numbers of x, and behind them the largest, into `kept`, and their indices into `places`."""
    group = x.shape[0]
    whole = max(0, group - size) // LANES * LANES
    first = group - whole
    for i in range(first):
        _insert(x[i], i, i, kept, places, 0, size, True)
        _insert(x[i], i, i, kept, places, size, size, False)
    # Few numbers are beyond those that were found before them.
    for i in range(first, group, LANES):
        row = load(x, i)
        below = mask_above(splat(kept[size - 1]), row)
        above = ~mask_above(splat(kept[2 * size - 1]), row) & ALL_LANES
        for j in range(LANES if below | above else 0):
            if below >> j & 1:
                _insert(x[i + j], i + j, i + j, kept, places, 0, size, True)
            if above >> j & 1:
                _insert(x[i + j], i + j, i + j, kept, places, size, size, False)


@jit_exact
def _encode_values(x: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any) -> None:
    """Code one row of values x [group]."""
    numbers, codes, places, kept = work
    group, bits, slots = x.shape[0], page[VALUE_BITS], page[DETAIL]
    levels, side = 2 * group + LANES, slots // 2
    size = side + 1
    _find_extremes(x, kept, places, size)
    low, high = kept[side], kept[size + side]
    scale = store_half(data, at + page[SECTIONS + 6] + 2 * row, (high - low) * _HALF)
    zero = store_half(data, at + page[SECTIONS + 7] + 2 * row, (high + low) * _HALF)
    if group % LANES == 0 and scale > np.float32(0):
        for i in range(0, group, LANES):
            store(numbers, i, exact_div(exact_sub(load(x, i), splat(zero)), splat(scale)))
    else:
        for i in range(group):
            numbers[i] = (x[i] - zero) / scale if scale > np.float32(0) else np.float32(0)
    assign_codes(numbers, _ONE, table, levels + LANES + 15, bits, codes)
    pack_row(codes, bits, data, at + page[SECTIONS + 3] + row * ((group * bits + 7) // 8))
    for j in range(side):
        places[side + j] = places[size + j]
    _sort_places(places, slots)
    wide = 1 if group <= 256 else 2
    first, residuals = at + page[SECTIONS + 4] + row * slots * wide, at + page[SECTIONS + 5] + row * slots * 2
    for j in range(slots):
        i = places[j]
        residual = x[i] - (table[levels + codes[i]] * scale + zero)
        _store_outlier(data, first, residuals, j, group, i, residual)


@jit_exact_part
def encode_row(
    keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: int
) -> None:
    """As `engine.cpu.coded.page_kernels`; keys before rotation."""
    for i in range(keys.shape[0]):
        keys[i] = min(max(keys[i], -MAX_HALF), MAX_HALF)
        values[i] = min(max(values[i], -MAX_HALF), MAX_HALF)
    _encode_keys(keys, data, at, page, row, table, work)
    _encode_values(values, data, at, page, row, table, work)
