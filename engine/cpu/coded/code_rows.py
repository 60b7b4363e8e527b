"""Rows of codes in kernels: the nearest level of each number, and codes as a stream of bits, lowest bit first.

As `kvcache.codecs.bit_packing` and `kvcache.codecs.datatype.assign_codes`, to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally

from engine.cpu.coded.exact import clip, count_above, exact_add, exact_mul, jit_exact
from engine.cpu.coded.packed import CODES_PER_WORD, lookup, pack_codes, store_counts, store_word
from engine.cpu.simd import LANES, load, splat, store

# With more bits, the code is found by halving the range: a pass over all midpoints would be longer.
MAX_COUNTED_BITS = 4


@jit_exact
def clip_row(x: Any, limit: Any) -> None:
    """Numbers beyond ±limit become that."""
    if x.shape[0] % LANES == 0:
        most = splat(limit)
        for i in range(0, x.shape[0], LANES):
            store(x, i, clip(load(x, i), most))
        return
    for i in range(x.shape[0]):
        x[i] = min(max(x[i], -limit), limit)


@jit_exact
def assign_codes(numbers: Any, limit: Any, midpoints: Any, first: Any, bits: int, codes: Any) -> None:
    """Codes of the nearest levels of numbers, clipped to ±limit: how many of midpoints[first :] lie below each."""
    if bits <= MAX_COUNTED_BITS and codes.shape[0] % LANES == 0:
        most = splat(limit)
        for i in range(0, codes.shape[0], LANES):
            x, count = clip(load(numbers, i), most), splat(np.float32(0))
            for m in range((1 << bits) - 1):
                count = count_above(count, x, splat(midpoints[first + m]))
            store_counts(codes, i, count)
        return
    for i in range(codes.shape[0]):
        codes[i] = 0
    if bits <= MAX_COUNTED_BITS:
        for m in range((1 << bits) - 1):
            middle = midpoints[first + m]
            for i in range(codes.shape[0]):
                codes[i] += np.int32(min(max(numbers[i], -limit), limit) > middle)
        return
    for i in range(codes.shape[0]):
        number, code, step = min(max(numbers[i], -limit), limit), 0, 1 << (bits - 1)
        while step > 0:
            if number > midpoints[first + code + step - 1]:
                code += step
            step >>= 1
        codes[i] = code


@jit_exact
def pack_row(codes: Any, bits: int, data: Any, at: Any) -> None:
    """Write codes as a stream of bits to data[at:]; the last byte is filled up with zeros."""
    if bits <= MAX_COUNTED_BITS and codes.shape[0] % CODES_PER_WORD == 0:
        for i in range(0, codes.shape[0], CODES_PER_WORD):
            packed = pack_codes(codes, i, bits)
            if bits == 4:
                store_word(data, at, packed)
            else:
                for j in range(bits):
                    data[at + j] = np.uint8((packed >> 8 * j) & 255)
            at += bits
        return
    stream: Any = 0
    held = 0
    for i in range(codes.shape[0]):
        stream |= np.int64(codes[i]) << held
        held += bits
        while held >= 8:
            data[at] = np.uint8(stream & 255)
            stream >>= 8
            held -= 8
            at += 1
    if held > 0:
        data[at] = np.uint8(stream & 255)


@jit_exact
def expand_row(
    data: Any, codes: Any, bits: int, table: Any, first: Any, channels: Any, scratch: Any, at: Any, stride: Any,
    heads: int, width: int,
) -> None:  # fmt: skip
    """Numbers of one row of codes of up to 4 bits into scratch: table[first + code], a table of sixteen, times scale
    plus zero of the channel if `channels` [2 · group, more] is not empty.

    Head h goes to scratch[at + h · stride :]. Up to two bytes after the codes are read, and ignored.
    """
    literally(width)
    group = heads * width
    if width % LANES == 0:
        numbers = load(table, first)
        for h in range(heads):
            for i in range(0, width, LANES):
                c = h * width + i
                x = lookup(data, codes + (c * bits >> 3), bits, numbers)
                if channels.shape[0] > 0:
                    x = exact_add(exact_mul(x, load(channels, c)), load(channels, group + c))
                store(scratch, at + h * stride + i, x)
        return
    for c in range(group):
        x = table[first + read_code(data, codes, bits, c)]
        if channels.shape[0] > 0:
            x = x * channels[c] + channels[group + c]
        scratch[at + c // width * stride + c % width] = x


@jit_exact
def read_code(data: Any, codes: Any, bits: int, i: Any) -> Any:
    """Code i of the row at data[codes:]; the byte after it is read too, and ignored."""
    byte = codes + (i * bits >> 3)
    word = np.int64(data[byte]) | (np.int64(data[byte + 1]) << 8)
    return (word >> (i * bits % 8)) & ((1 << bits) - 1)
