"""Expands coded pages within Triton kernels: the numbers of the NumPy codecs (`kvcache.codecs`).

A tile is a range of channels of one head of one page, [64, COUNT]. Keys of `nuq*` come in two tiles, the halves that
rotate with each other. Heads of `tq*` come as they are stored, after the random rotation: queries take it too, which is
cheaper than to undo it for every key (`mix_heads`).
"""

from __future__ import annotations

from engine.gpu.batch import SPAN_FIELDS
from engine.gpu.coded.page_format import BF16, CALIBRATED, FP16, GROUPED, ROTATED
from engine.gpu.decode_rows import PAGE
from engine.gpu.triton_kernel import tl, triton_kernel

SPAN_NUMBERS = tl.constexpr(SPAN_FIELDS)


@triton_kernel
def _transform(x, ROWS: tl.constexpr, COUNT: tl.constexpr, MIX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The Walsh-Hadamard transform of x [ROWS, COUNT] in blocks of MIX, over √MIX: sums and differences at distance 1,
    2, 4 ..., to the bit as `kvcache.codecs.hadamard`.
    """
    LOG: tl.constexpr = MIX.bit_length() - 1
    for i in tl.static_range(LOG):
        pairs = tl.permute(tl.reshape(x, (ROWS, COUNT >> (i + 1), 2, 1 << i)), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        mixed = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        x = tl.reshape(mixed, (ROWS, COUNT))
    SHARE: tl.constexpr = MIX**-0.5
    return x * SHARE


@triton_kernel
def mix_heads(x, table, ROWS: tl.constexpr, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The random rotation of heads x [ROWS, block]: signs, then the transform."""
    d = tl.arange(0, FORMAT.block)
    signs = tl.load(table + d, mask=d < FORMAT.width, other=0.0)
    return _transform(x * signs[None, :], ROWS, FORMAT.block, FORMAT.mix)


@triton_kernel
def unmix_heads(x, table, ROWS: tl.constexpr, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of `mix_heads`."""
    d = tl.arange(0, FORMAT.block)
    signs = tl.load(table + d, mask=d < FORMAT.width, other=0.0)
    return _transform(x, ROWS, FORMAT.block, FORMAT.mix) * signs[None, :]


@triton_kernel
def read_codes(data, shorts, longs, at, first, limit, there, row, COUNT: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes `first` to `first + COUNT - 1` of each row of a section, [64, COUNT] int32.

    at: the section's first byte in `data`; `shorts` and `longs` are the same memory. row: bytes of a row. first: a
    multiple of 8. Codes from `limit` on, and those of rows that are not `there`, are 0.
    """
    t = tl.arange(0, PAGE)[:, None]
    if BITS == 8:
        i = tl.arange(0, COUNT)[None, :]
        codes = tl.load(data + at + t * row + first + i, mask=there[:, None] & (i < limit), other=0)
        codes = codes.to(tl.int32)
    else:
        w = tl.arange(0, COUNT // 8)[None, :]
        byte = at + t * row + (first // 8 + w) * BITS
        mask = there[:, None] & (w * 8 < limit)
        if BITS == 4:
            word = tl.load(longs + byte // 4, mask=mask, other=0)
        elif BITS == 2:
            word = tl.load(shorts + byte // 2, mask=mask, other=0).to(tl.int32)
        else:
            word = tl.load(data + byte, mask=mask, other=0).to(tl.int32)
            word |= tl.load(data + byte + 1, mask=mask, other=0).to(tl.int32) << 8
            word |= tl.load(data + byte + 2, mask=mask, other=0).to(tl.int32) << 16
        lanes = (word[:, :, None] >> (tl.arange(0, 8) * BITS)[None, None, :]) & ((1 << BITS) - 1)
        codes = tl.reshape(lanes, (PAGE, COUNT))
    return codes


@triton_kernel
def read_halves(shorts, place, mask):  # type: ignore[no-untyped-def]
    """float16 numbers in a pool's memory, as float32."""
    return tl.load(shorts + place, mask=mask, other=0).to(tl.float16, bitcast=True).to(tl.float32)


@triton_kernel
def _read_places(data, shorts, at, slot, mask, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places of outliers within their group; `slot` counts all slots of the section."""
    if WIDE:
        places = tl.load(shorts + at // 2 + slot, mask=mask, other=0).to(tl.int32) & 0xFFFF
    else:
        places = tl.load(data + at + slot, mask=mask, other=0).to(tl.int32)
    return places


@triton_kernel
def _read_outliers(data, shorts, at, slot, mask, FORMAT: tl.constexpr, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places and residuals of outliers; residuals are 0 where `mask` is not set."""
    place = _read_places(data, shorts, at + SIDE.places, slot, mask, FORMAT.wide)
    return place, read_halves(shorts, (at + SIDE.residuals) // 2 + slot, mask)


@triton_kernel
def add_outliers(  # type: ignore[no-untyped-def]
    x, data, shorts, at, first, limit, there, FORMAT: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr
):
    """x [64, COUNT], channels `first` to `first + limit - 1` of the group, with the residuals of their outliers added.

    Places ascend, so a row's outliers of these channels are neighbours. Slots that are not used have place 0 and
    residual 0, and come last.
    """
    t = tl.arange(0, PAGE)
    j = tl.arange(0, FORMAT.slot_block)[None, :]
    own = there[:, None] & (j < FORMAT.slots)
    place = _read_places(data, shorts, at + SIDE.places, t[:, None] * FORMAT.slots + j, own, FORMAT.wide)
    used = own & ((place > 0) | (j == 0))
    begin = tl.sum((used & (place < first)).to(tl.int32), 1)
    count = tl.sum((used & (place >= first) & (place < first + limit)).to(tl.int32), 1)
    i = tl.arange(0, COUNT)[None, :]
    slot = t * FORMAT.slots + begin
    channel, residual = _read_outliers(data, shorts, at, slot, count > 0, FORMAT, SIDE)
    for n in range(tl.max(count, 0)):
        # The next ones are read while these are added.
        further, next_residual = _read_outliers(data, shorts, at, slot + n + 1, n + 1 < count, FORMAT, SIDE)
        x += tl.where(i == (channel - first)[:, None], residual[:, None], 0.0)
        channel, residual = further, next_residual
    return x


@triton_kernel
def expand_tile(  # type: ignore[no-untyped-def]
    data, shorts, longs, table, at, head, first, limit, there,
    FORMAT: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Channels `first` to `first + limit - 1` of a head of the page at byte `at`, [64, COUNT] float32.

    head: within the page. BY_CHANNEL: scales and zero points are those of channels, as for keys of `nuq*`, and not of
    rows. Only rows that are `there` are read; the others hold any finite numbers.
    """
    t = tl.arange(0, PAGE)[:, None]
    i = tl.arange(0, COUNT)[None, :]
    mask = there[:, None] & (i < limit)
    if FORMAT.family == FP16:
        x = read_halves(shorts, (at + SIDE.codes) // 2 + t * FORMAT.width + first + i, mask)
    elif FORMAT.family == BF16:
        bits = tl.load(shorts + (at + SIDE.codes) // 2 + t * FORMAT.width + first + i, mask=mask, other=0)
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        begin = head * FORMAT.width + first
        row = FORMAT.heads * FORMAT.width * SIDE.bits // 8
        codes = read_codes(data, shorts, longs, at + SIDE.codes, begin, limit, there, row, COUNT, SIDE.bits)
        if FORMAT.family == GROUPED:
            number = t * (FORMAT.width // FORMAT.group) + (first + i) // FORMAT.group
            scale = read_halves(shorts, (at + SIDE.scales) // 2 + number, mask)
            x = codes.to(tl.float32) * scale + read_halves(shorts, (at + SIDE.zeros) // 2 + number, mask)
        else:
            x = tl.load(table + SIDE.levels + codes)
            if BY_CHANNEL:
                c, own = begin + tl.arange(0, COUNT), tl.arange(0, COUNT) < limit
                zeros = table + FORMAT.heads * FORMAT.width
                x = x * tl.load(table + c, mask=own, other=0.0)[None, :]
                x += tl.load(zeros + c, mask=own, other=0.0)[None, :]
            else:
                x = x * read_halves(shorts, (at + SIDE.scales) // 2 + t, there[:, None])
                if FORMAT.family == CALIBRATED:
                    x += read_halves(shorts, (at + SIDE.zeros) // 2 + t, there[:, None])
            if FORMAT.slots > 0:
                x = add_outliers(x, data, shorts, at, begin, limit, there, FORMAT, SIDE, COUNT)
    return x


@triton_kernel
def _put_sink(x, sink, limit, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [64, COUNT] with the exact numbers at `sink` in row 0."""
    i = tl.arange(0, COUNT)
    exact = tl.load(sink + i, mask=i < limit, other=0.0)
    return tl.where((tl.arange(0, PAGE) == 0)[:, None], exact[None, :], x)


@triton_kernel
def expand_head(  # type: ignore[no-untyped-def]
    data, shorts, longs, table, at, head, c, there, sink, FORMAT: tl.constexpr, SIDE: tl.constexpr
):
    """All channels of a head, as they are stored, [64, block]; with the sequence's sink in its first chunk."""
    x = expand_tile(
        data, shorts, longs, table, at, head, 0, FORMAT.width, there, FORMAT, SIDE, FORMAT.block, False
    )
    if c == 0:
        x = _put_sink(x, sink, FORMAT.width, FORMAT.block)
    return x


@triton_kernel
def expand_halves(  # type: ignore[no-untyped-def]
    data, shorts, longs, table, at, head, c, there, sink, cos, sin, places,
    FORMAT: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """The two halves of a head's keys, stored before rotation, each [64, half block]: rotated to `places` [64]."""
    HALF: tl.constexpr = FORMAT.width // 2
    COUNT: tl.constexpr = FORMAT.half_block
    x = expand_tile(data, shorts, longs, table, at, head, 0, HALF, there, FORMAT, SIDE, COUNT, True)
    y = expand_tile(data, shorts, longs, table, at, head, HALF, HALF, there, FORMAT, SIDE, COUNT, True)
    if c == 0:
        x = _put_sink(x, sink, HALF, COUNT)
        y = _put_sink(y, sink + HALF, HALF, COUNT)
    i = tl.arange(0, COUNT)[None, :]
    angle, mask = places.to(tl.int64)[:, None] * HALF + i, there[:, None] & (i < HALF)
    cosine, sine = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)
    return x * cosine - y * sine, y * cosine + x * sine


@triton_kernel
def _expand(  # type: ignore[no-untyped-def]
    spans, table, data, shorts, longs, tables, sinks, cos, sin, out,
    singles, chunks, line_stride, slab, offset, table_stride, sink_stride, window,
    KV_HEADS: tl.constexpr, FORMAT: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Program (span * chunks + chunk, KV head): one head of a chunk of a span as a raw page of `out`, keys rotated to
    their positions. Chunks that no token of the span attends to are left out.
    """
    number, c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    h = tl.program_id(1)
    span = spans + number * SPAN_NUMBERS
    start, end, sink = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    first = 0
    if window > 0:
        first = tl.maximum(start - window + 1, 0) // PAGE
    if (c >= first) & (c * PAGE < end):
        page, head = h // FORMAT.heads, h % FORMAT.heads
        at = tl.load(table + (singles + number) * line_stride + c).to(tl.int64) * slab + offset
        at += page * FORMAT.page_bytes
        t, d = tl.arange(0, PAGE), tl.arange(0, FORMAT.block)
        token = c * PAGE + t
        there = token < end
        own = tables + page * table_stride
        exact = sinks + sink.to(tl.int64) * sink_stride + h * FORMAT.width
        target = out + (tl.program_id(0).to(tl.int64) * KV_HEADS + h) * 2 * PAGE * FORMAT.width
        places = t[:, None] * FORMAT.width + d[None, :]
        inside = there[:, None] & (d < FORMAT.width)[None, :]
        if FORMAT.family == CALIBRATED:
            i = tl.arange(0, FORMAT.half_block)[None, :]
            x, y = expand_halves(
                data, shorts, longs, own, at, head, c, there, exact, cos, sin, token, FORMAT, KEYS
            )
            half = there[:, None] & (i < FORMAT.width // 2)
            left = target + t[:, None] * FORMAT.width + i
            tl.store(left, x, mask=half)
            tl.store(left + FORMAT.width // 2, y, mask=half)
        else:
            k = expand_head(data, shorts, longs, own, at, head, c, there, exact, FORMAT, KEYS)
            if FORMAT.family == ROTATED:
                k = unmix_heads(k, own, PAGE, FORMAT)
            tl.store(target + places, k, mask=inside)
        exact += KV_HEADS * FORMAT.width
        v = expand_head(data, shorts, longs, own, at, head, c, there, exact, FORMAT, VALUES)
        if FORMAT.family == ROTATED:
            v = unmix_heads(v, own, PAGE, FORMAT)
        tl.store(target + PAGE * FORMAT.width + places, v, mask=inside)
