"""Codes new keys and values into pages, in Triton: the bytes of the NumPy codecs (`kvcache.codecs`), to the bit.

A program codes a few tokens of one page, keys or values. It takes them from the rows of the step, after `_write` has
normalised them (and rotated them, if the codec stores them so). Kernels are launched without fused multiply-adds: every
operation rounds as NumPy's does. A row with a number that is not finite sets `broken`, which the host reads after the
step.
"""

from __future__ import annotations

from engine.gpu.coded.expand import mix_heads
from engine.gpu.coded.page_format import BF16, FP16, ROTATED
from engine.gpu.decode_rows import PAGE
from engine.gpu.triton_kernel import tl, triton_kernel
from kvcache.codecs.turbo import STRETCHES

MAX_HALF = tl.constexpr(65504.0)
MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
# Added to a number below 2^22 and taken away again, this leaves the nearest whole number, ties to even.
ROUNDER = tl.constexpr(12582912.0)
# The middle of uniform codes of 8 bits.
MIDDLE = tl.constexpr(127.5)
# Factors that are tried beside 1 (`kvcache.codecs.turbo.STRETCHES`).
LESS, MORE = (tl.constexpr(stretch) for stretch in STRETCHES[8][1:])
# Above every index.
NOWHERE = tl.constexpr(1 << 30)


@triton_kernel
def _to_half(x):  # type: ignore[no-untyped-def]
    """Nearest float16; what is too large becomes the largest one."""
    return tl.minimum(tl.maximum(x, -MAX_HALF), MAX_HALF).to(tl.float16)


@triton_kernel
def _store_half(shorts, place, x, mask):  # type: ignore[no-untyped-def]
    """Store x as float16; returns what a reader gets."""
    half = _to_half(x)
    tl.store(shorts + place, half.to(tl.int16, bitcast=True), mask=mask)
    return half.to(tl.float32)


@triton_kernel
def _store_codes(  # type: ignore[no-untyped-def]
    data, shorts, longs, at, codes, limit, stored,
    ROWS: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store codes [ROWS, COUNT] below `limit` as streams of bits from the bytes at [ROWS] on."""
    if BITS == 8:
        i = tl.arange(0, COUNT)[None, :]
        tl.store(data + at[:, None] + i, codes.to(tl.uint8), mask=stored[:, None] & (i < limit))
    else:
        lanes = tl.reshape(codes, (ROWS, COUNT // 8, 8)) << (tl.arange(0, 8) * BITS)[None, None, :]
        # The codes lie in bits of their own, so their sum is the word.
        word = tl.sum(lanes, 2)
        w = tl.arange(0, COUNT // 8)[None, :]
        byte, mask = at[:, None] + w * BITS, stored[:, None] & (w * 8 < limit)
        if BITS == 4:
            tl.store(longs + byte // 4, word, mask=mask)
        elif BITS == 2:
            tl.store(shorts + byte // 2, word.to(tl.int16), mask=mask)
        else:
            for n in tl.static_range(3):
                tl.store(data + byte + n, ((word >> (8 * n)) & 255).to(tl.uint8), mask=mask)


@triton_kernel
def _nearest(x, middles, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Code of the nearest level: how many midpoints lie below x. Halves the range bit by bit."""
    codes = (x * 0.0).to(tl.int32)
    for n in tl.static_range(BITS):
        middle = tl.load(middles + codes + ((1 << (BITS - 1 - n)) - 1))
        codes += tl.where(x > middle, 1 << (BITS - 1 - n), 0)
    return codes


@triton_kernel
def _pick(x, i, index):  # type: ignore[no-untyped-def]
    """x [ROWS, COUNT] at `index` of each row, the sign of zero included."""
    bits = tl.where(i == index[:, None], x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 1).to(tl.float32, bitcast=True)


@triton_kernel
def _store_outliers(  # type: ignore[no-untyped-def]
    data, shorts, at, row, taken, away, stored,
    FORMAT: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Fill the outlier slots of rows: the places where `taken`, ascending, and their residuals `away`."""
    i = tl.arange(0, COUNT)[None, :]
    for j in range(FORMAT.slots):
        index = tl.min(tl.where(taken, i, NOWHERE), 1)
        used = index < NOWHERE
        place, slot = tl.where(used, index, 0), row * FORMAT.slots + j
        if FORMAT.wide:
            tl.store(shorts + (at + SIDE.places) // 2 + slot, place.to(tl.int16), mask=stored)
        else:
            tl.store(data + at + SIDE.places + slot, place.to(tl.uint8), mask=stored)
        _store_half(shorts, (at + SIDE.residuals) // 2 + slot, _pick(away, i, index), stored)
        taken = taken & (i != index[:, None])


@triton_kernel
def _encode_nuq_keys(  # type: ignore[no-untyped-def]
    x, data, shorts, longs, table, at, row, stored,
    FORMAT: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = FORMAT.heads * FORMAT.width
    c = tl.arange(0, COUNT)
    own, i = c < GROUP, c[None, :]
    scale = tl.load(table + c, mask=own, other=1.0)[None, :]
    zero = tl.load(table + GROUP + c, mask=own, other=0.0)[None, :]
    numbers = tl.div_rn(x - zero, scale)
    clipped = tl.minimum(tl.maximum(numbers, -1.0), 1.0)
    codes = tl.where(own[None, :], _nearest(clipped, table + SIDE.middles, SIDE.bits), 0)
    begin = at + SIDE.codes + row * (GROUP * SIDE.bits // 8)
    _store_codes(data, shorts, longs, begin, codes, GROUP, stored, ROWS, COUNT, SIDE.bits)
    if FORMAT.slots > 0:
        away = x - (tl.load(table + SIDE.levels + codes) * scale + zero)
        outside = (tl.abs(numbers) > 1.0) & own[None, :]
        far = tl.where(outside, tl.abs(away), -1.0)
        taken = outside & (i < 0)
        for _ in range(FORMAT.slots):
            most = tl.max(far, 1)
            index = tl.min(tl.where((far == most[:, None]) & (far >= 0.0), i, NOWHERE), 1)
            taken = taken | (i == index[:, None])
            far = tl.where(i == index[:, None], -1.0, far)
        _store_outliers(data, shorts, at, row, taken, away, stored, FORMAT, SIDE, COUNT)


@triton_kernel
def _encode_nuq_values(  # type: ignore[no-untyped-def]
    x, data, shorts, longs, table, at, row, stored,
    FORMAT: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = FORMAT.heads * FORMAT.width
    i = tl.arange(0, COUNT)[None, :]
    own = i < GROUP
    # The smallest numbers, and the largest ones; among equal numbers, the one with the lower index counts as smaller.
    low, high = tl.where(own, x, float("inf")), tl.where(own, x, float("-inf"))
    taken = own & (x != x)
    for _ in range(FORMAT.slots // 2):
        least = tl.min(low, 1)
        first = tl.min(tl.where((low == least[:, None]) & own, i, NOWHERE), 1)
        most = tl.max(high, 1)
        last = tl.max(tl.where((high == most[:, None]) & own, i, -1), 1)
        taken = taken | (i == first[:, None]) | (i == last[:, None])
        low = tl.where(i == first[:, None], float("inf"), low)
        high = tl.where(i == last[:, None], float("-inf"), high)
    least, most = tl.min(low, 1), tl.max(high, 1)
    first = tl.min(tl.where((low == least[:, None]) & own, i, NOWHERE), 1)
    last = tl.max(tl.where((high == most[:, None]) & own, i, -1), 1)
    bottom, top = _pick(x, i, first), _pick(x, i, last)
    scale = _store_half(shorts, (at + SIDE.scales) // 2 + row, (top - bottom) * 0.5, stored)[:, None]
    zero = _store_half(shorts, (at + SIDE.zeros) // 2 + row, (top + bottom) * 0.5, stored)[:, None]
    numbers = tl.where(scale > 0.0, tl.div_rn(x - zero, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    clipped = tl.minimum(tl.maximum(numbers, -1.0), 1.0)
    codes = tl.where(own, _nearest(clipped, table + SIDE.middles, SIDE.bits), 0)
    begin = at + SIDE.codes + row * (GROUP * SIDE.bits // 8)
    _store_codes(data, shorts, longs, begin, codes, GROUP, stored, ROWS, COUNT, SIDE.bits)
    if FORMAT.slots > 0:
        away = x - (tl.load(table + SIDE.levels + codes) * scale + zero)
        _store_outliers(data, shorts, at, row, taken, away, stored, FORMAT, SIDE, COUNT)


@triton_kernel
def _encode_group(  # type: ignore[no-untyped-def]
    x, data, shorts, longs, at, row, number, stored,
    FORMAT: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Group `number` of a head, x [ROWS, COUNT], coded uniformly between its minimum and its maximum."""
    TOP: tl.constexpr = (1 << SIDE.bits) - 1
    own = tl.arange(0, COUNT)[None, :] < FORMAT.group
    place = row * (FORMAT.width // FORMAT.group) + number
    # −0 becomes 0: which of the two is the least or the largest would depend on the order of the search.
    least = tl.min(tl.where(own, x, float("inf")), 1) + 0.0
    most = tl.max(tl.where(own, x, float("-inf")), 1) + 0.0
    low = _store_half(shorts, (at + SIDE.zeros) // 2 + place, least, stored)
    step = tl.div_rn(most - low, low * 0.0 + TOP)
    step = _store_half(shorts, (at + SIDE.scales) // 2 + place, step, stored)[:, None]
    steps = tl.div_rn(x - low[:, None], tl.where(step > 0.0, step, 1.0))
    steps = tl.where(step > 0.0, tl.minimum(tl.maximum(steps, 0.0), TOP), 0.0)
    codes = tl.where(own, ((steps + ROUNDER) - ROUNDER).to(tl.int32), 0)
    begin = at + SIDE.codes + (row * FORMAT.width + number * FORMAT.group) * SIDE.bits // 8
    _store_codes(data, shorts, longs, begin, codes, FORMAT.group, stored, ROWS, COUNT, SIDE.bits)


@triton_kernel
def _fold_sum(x, ROWS: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of each row of x [ROWS, COUNT], one half added onto the other until one number is left: the order of
    `kvcache.codecs.turbo.fold_sum`.
    """
    LOG: tl.constexpr = COUNT.bit_length() - 1
    for i in tl.static_range(LOG):
        first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COUNT >> (i + 1))), (0, 2, 1)))
        x = tl.reshape(first + second, (ROWS, COUNT >> (i + 1)))
    return tl.reshape(x, (ROWS,))


@triton_kernel
def _divide_rows(x, scale):  # type: ignore[no-untyped-def]
    """x [ROWS, COUNT] over scale [ROWS]; 0 where the scale is."""
    there = scale[:, None] > 0.0
    return tl.where(there, tl.div_rn(x, tl.where(there, scale[:, None], 1.0)), 0.0)


@triton_kernel
def _try_stretch(  # type: ignore[no-untyped-def]
    numbers, stretch, own, table,
    FORMAT: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Codes of numbers times a factor, the square of their levels' length, and how close they are in direction."""
    codes = tl.where(own, _nearest(numbers * stretch, table + SIDE.middles, SIDE.bits), 0)
    levels = tl.where(own, tl.load(table + SIDE.levels + codes), 0.0)
    length = _fold_sum(levels * levels, ROWS, COUNT)
    along = _fold_sum(numbers * levels, ROWS, COUNT)
    return codes, length, tl.div_rn(along * along, length)


@triton_kernel
def _encode_mixed(  # type: ignore[no-untyped-def]
    x, data, shorts, longs, table, at, row, stored,
    FORMAT: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """A head x [ROWS, COUNT], rotated at random and coded with one scale."""
    mixed = mix_heads(x, table, ROWS, FORMAT)
    own = tl.arange(0, COUNT)[None, :] < FORMAT.width
    place = (at + SIDE.scales) // 2 + row
    if SIDE.bits == 8:
        scale = _store_half(shorts, place, tl.max(tl.abs(mixed), 1), stored)
        steps = _divide_rows(mixed, scale) * MIDDLE + MIDDLE
        codes = tl.minimum(tl.maximum((steps + ROUNDER) - ROUNDER, 0.0), 2.0 * MIDDLE).to(tl.int32)
        codes = tl.where(own, codes, 0)
    else:
        squares = _fold_sum(mixed * mixed, ROWS, COUNT)
        numbers = _divide_rows(mixed, tl.sqrt_rn(tl.div_rn(squares, squares * 0.0 + FORMAT.width)))
        codes, length, closest = _try_stretch(numbers, 1.0, own, table, FORMAT, SIDE, ROWS, COUNT)
        if SIDE.bits == 3:
            for n in tl.static_range(2):
                tried, size, close = _try_stretch(
                    numbers, LESS if n == 0 else MORE, own, table, FORMAT, SIDE, ROWS, COUNT
                )
                better = close > closest
                codes, length = tl.where(better[:, None], tried, codes), tl.where(better, size, length)
                closest = tl.where(better, close, closest)
        _store_half(shorts, place, tl.sqrt_rn(tl.div_rn(squares, length)), stored)
    begin = at + SIDE.codes + row * (FORMAT.width * SIDE.bits // 8)
    _store_codes(data, shorts, longs, begin, codes, FORMAT.width, stored, ROWS, COUNT, SIDE.bits)


@triton_kernel
def _encode_plain(  # type: ignore[no-untyped-def]
    x, shorts, at, row, stored, FORMAT: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr
):
    """A head x [ROWS, COUNT] in 16 bits: to the nearest number, ties to even."""
    i = tl.arange(0, COUNT)[None, :]
    if FORMAT.family == FP16:
        halves = _to_half(x).to(tl.int16, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        size = tl.minimum((size + 0x7FFF + ((size >> 16) & 1)) >> 16, 0x7F7F)
        halves = (size | ((bits >> 16) & 0x8000)).to(tl.int16)
    place = (at + SIDE.codes)[:, None] // 2 + row[:, None] * FORMAT.width + i
    tl.store(shorts + place, halves, mask=stored[:, None] & (i < FORMAT.width))


@triton_kernel
def _read_rows(source, limit, live, broken, COUNT: tl.constexpr, PLAIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers at source [ROWS] and after, [ROWS, COUNT] within float16's range (but for 16-bit pages: all), and whether
    each row is finite. Others set `broken`.
    """
    i = tl.arange(0, COUNT)[None, :]
    x = tl.load(source[:, None] + i, mask=live[:, None] & (i < limit), other=0.0).to(tl.float32)
    finite = tl.min((tl.abs(x) <= MAX_FLOAT).to(tl.int32), 1) > 0
    tl.store(broken + (live * 0), 1, mask=live & ~finite)
    x = tl.where(finite[:, None], x, 0.0)
    if not PLAIN:
        x = tl.minimum(tl.maximum(x, -MAX_HALF), MAX_HALF)
    return x, finite


@triton_kernel
def _encode_side(  # type: ignore[no-untyped-def]
    source, data, shorts, longs, table, at, row, number, live, broken,
    FORMAT: tl.constexpr, SIDE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    PLAIN: tl.constexpr = FORMAT.family == FP16 or FORMAT.family == BF16
    x, finite = _read_rows(source, LIMIT, live, broken, COUNT, PLAIN)
    stored = live & finite
    if PLAIN:
        _encode_plain(x, shorts, at, row, stored, FORMAT, SIDE, COUNT)
    elif FORMAT.family == ROTATED:
        _encode_mixed(x, data, shorts, longs, table, at, row, stored, FORMAT, SIDE, ROWS, COUNT)
    elif FORMAT.group > 0:
        _encode_group(x, data, shorts, longs, at, row, number, stored, FORMAT, SIDE, ROWS, COUNT)
    elif KEYS:
        _encode_nuq_keys(x, data, shorts, longs, table, at, row, stored, FORMAT, SIDE, ROWS, COUNT)
    else:
        _encode_nuq_values(x, data, shorts, longs, table, at, row, stored, FORMAT, SIDE, ROWS, COUNT)


@triton_kernel
def _encode(  # type: ignore[no-untyped-def]
    qkv, positions, slots, data, shorts, longs, tables, broken,
    count, stride, slab, offset, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, FORMAT: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COUNT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Program (tokens, part of a row, keys or values): code LIMIT numbers of each of ROWS tokens: a page's, or a
    group's. COUNT is the next power of two.
    """
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    PARTS: tl.constexpr = FORMAT.heads * FORMAT.width // LIMIT
    page, number = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    slot = tl.load(slots + n, mask=n < count, other=-1).to(tl.int64)
    live = slot >= 0
    row = tl.load(positions + n, mask=n < count, other=0) % PAGE
    at = tl.where(live, slot, 0) * slab + offset + page * FORMAT.page_bytes
    first = (HEADS + page * FORMAT.heads) * FORMAT.width + number * LIMIT
    source = qkv + tl.where(n < count, n, 0) * stride + first
    table = tables + page * table_stride
    if tl.program_id(2) == 0:
        _encode_side(
            source, data, shorts, longs, table, at, row, number, live, broken, FORMAT, KEYS, True, ROWS, COUNT,
            LIMIT,
        )  # fmt: skip
    else:
        _encode_side(
            source + KV_HEADS * FORMAT.width, data, shorts, longs, table, at, row, number, live, broken, FORMAT,
            VALUES, False, ROWS, COUNT, LIMIT,
        )  # fmt: skip
