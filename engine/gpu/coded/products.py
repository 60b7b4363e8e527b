"""What decode does with a coded page: scores of queries over its keys, and sums of its values.

A row's scale is the same for all numbers of a head (or of a group of `int*`), so it is taken out of the products:

    q · (s · code + m)  =  s · (q · code) + m · sum(q)           Σ p · (s · code + m)  =  Σ (p · s) · code + Σ p · m

Numbers of a page then go from codes to a matrix product without any arithmetic. Keys of `nuq*` are scaled by channel
and rotated by their place in the chunk, so only they become float32 numbers first. `int*` has a scale per group: a head
of two groups is read as two halves.
"""

from __future__ import annotations

from engine.gpu.coded.expand import add_outliers, expand_tile, mix_heads, read_halves
from engine.gpu.coded.page_format import CALIBRATED, GROUPED, ROTATED
from engine.gpu.coded.unpack import read_integers, read_levels
from engine.gpu.decode_rows import PAGE, PRECISION
from engine.gpu.triton_kernel import tl, triton_kernel


@triton_kernel
def read_queries(  # type: ignore[no-untyped-def]
    queries, table, live, BLOCK_M: tl.constexpr, TYPE: tl.constexpr, FORMAT: tl.constexpr
):
    """The queries at [BLOCK_M], rotated as keys are stored: two halves where keys are read so, else twice the same.

    Those of `nuq*` stay float32, since each chunk rotates them; the others are of TYPE.
    """
    if FORMAT.halves:
        HALF: tl.constexpr = FORMAT.width // 2
        i = tl.arange(0, FORMAT.half_block)[None, :]
        mask = live[:, None] & (i < HALF)
        x = tl.load(queries[:, None] + i, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(queries[:, None] + HALF + i, mask=mask, other=0.0).to(tl.float32)
        if FORMAT.family != CALIBRATED:
            x, y = x.to(TYPE), y.to(TYPE)
    else:
        d = tl.arange(0, FORMAT.block)[None, :]
        x = tl.load(queries[:, None] + d, mask=live[:, None] & (d < FORMAT.width), other=0.0)
        if FORMAT.family == ROTATED:
            x = mix_heads(x.to(tl.float32), table, BLOCK_M, FORMAT)
        x = x.to(TYPE)
        y = x
    return x, y


@triton_kernel
def score_sink(x, y, sink, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of the queries and the exact key of the first token, [BLOCK_M]: at position 0 nothing is rotated."""
    COUNT: tl.constexpr = FORMAT.half_block if FORMAT.halves else FORMAT.block
    LIMIT: tl.constexpr = FORMAT.width // 2 if FORMAT.halves else FORMAT.width
    i = tl.arange(0, COUNT)
    s = tl.sum(x.to(tl.float32) * tl.load(sink + i, mask=i < LIMIT, other=0.0)[None, :], 1)
    if FORMAT.halves:
        s += tl.sum(y.to(tl.float32) * tl.load(sink + LIMIT + i, mask=i < LIMIT, other=0.0)[None, :], 1)
    return s


@triton_kernel
def score_page(  # type: ignore[no-untyped-def]
    x, y, words, data, shorts, longs, table, levels, at, head, there, cos, sin, c,
    TYPE: tl.constexpr, FORMAT: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Products of the queries (`read_queries`) and the keys of chunk c, whose page is at byte `at`, [BLOCK_M, 64].

    words: of the keys, as `load_words` returns them.
    """
    if FORMAT.family == CALIBRATED:
        s = _score_calibrated(
            x, y, words, data, shorts, longs, table, levels, at, head, there, cos, sin, c, TYPE, FORMAT, SIDE
        )
    elif FORMAT.folded == 0:
        k = _expand_whole(data, shorts, longs, table, at, head, there, FORMAT, SIDE)
        s = tl.dot(x, tl.trans(k.to(TYPE)), input_precision=PRECISION)
    elif FORMAT.family == ROTATED:
        row = FORMAT.width * SIDE.bits // 8
        k = read_levels(
            words[0], data, shorts, longs, table, levels, at + SIDE.codes, 0, FORMAT.width, there, row, FORMAT.block,
            SIDE, TYPE,
        )  # fmt: skip
        scale = read_halves(shorts, (at + SIDE.scales) // 2 + tl.arange(0, PAGE), there)
        s = tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale[None, :]
    else:
        s = _score_group(x, words[0], data, shorts, longs, at, 0, there, TYPE, FORMAT, SIDE)
        if FORMAT.halves:
            s += _score_group(y, words[1], data, shorts, longs, at, 1, there, TYPE, FORMAT, SIDE)
    return s


@triton_kernel
def _expand_whole(  # type: ignore[no-untyped-def]
    data, shorts, longs, table, at, head, there, FORMAT: tl.constexpr, SIDE: tl.constexpr
):
    """All channels of a head, [64, block] float32."""
    return expand_tile(
        data, shorts, longs, table, at, head, 0, FORMAT.width, there, FORMAT, SIDE, FORMAT.block, False
    )


@triton_kernel
def _group_scales(shorts, at, group, there, FORMAT: tl.constexpr, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales and minima of a group of `int*`, each [64]."""
    number = tl.arange(0, PAGE) * (FORMAT.width // FORMAT.group) + group
    scale = read_halves(shorts, (at + SIDE.scales) // 2 + number, there)
    return scale, read_halves(shorts, (at + SIDE.zeros) // 2 + number, there)


@triton_kernel
def _read_group(  # type: ignore[no-untyped-def]
    word, data, shorts, longs, at, group, there, TYPE: tl.constexpr, FORMAT: tl.constexpr, SIDE: tl.constexpr
):
    """Codes of a group of `int*` plus `SIDE.base`, [64, COUNT] of TYPE."""
    COUNT: tl.constexpr = FORMAT.half_block if FORMAT.halves else FORMAT.block
    row = FORMAT.width * SIDE.bits // 8
    first = group * FORMAT.group
    return read_integers(
        word, data, shorts, longs, at + SIDE.codes, first, FORMAT.group, there, row, COUNT, SIDE, TYPE
    )


@triton_kernel
def _score_group(  # type: ignore[no-untyped-def]
    x,
    word,
    data,
    shorts,
    longs,
    at,
    group,
    there,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Products of queries and keys over one group of `int*`."""
    k = _read_group(word, data, shorts, longs, at, group, there, TYPE, FORMAT, SIDE)
    scale, low = _group_scales(shorts, at, group, there, FORMAT, SIDE)
    offset = low - scale * SIDE.base
    sums = tl.sum(x.to(tl.float32), 1)
    return (
        tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale[None, :] + sums[:, None] * offset[None, :]
    )


@triton_kernel
def _score_calibrated(  # type: ignore[no-untyped-def]
    x, y, words, data, shorts, longs, table, levels, at, head, there, cos, sin, c,
    TYPE: tl.constexpr, FORMAT: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Scores over keys of `nuq*`: keys are rotated by their place in the chunk, queries back by its position."""
    HALF: tl.constexpr = FORMAT.width // 2
    i = tl.arange(0, FORMAT.half_block)
    left = _read_key_half(
        words[0], data, shorts, longs, table, levels, at, head * FORMAT.width, there, TYPE, FORMAT, SIDE
    )
    right = _read_key_half(
        words[1],
        data,
        shorts,
        longs,
        table,
        levels,
        at,
        head * FORMAT.width + HALF,
        there,
        TYPE,
        FORMAT,
        SIDE,
    )
    place = tl.arange(0, PAGE)[:, None] * HALF + i[None, :]
    cosine, sine = _load_half(cos, place, i[None, :], HALF), _load_half(sin, place, i[None, :], HALF)
    turned_left, turned_right = left * cosine - right * sine, right * cosine + left * sine
    angle = c * PAGE * HALF + i
    cosine, sine = _load_half(cos, angle, i, HALF)[None, :], _load_half(sin, angle, i, HALF)[None, :]
    back_x, back_y = (x * cosine + y * sine).to(TYPE), (y * cosine - x * sine).to(TYPE)
    s = tl.dot(back_x, tl.trans(turned_left.to(TYPE)), input_precision=PRECISION)
    return s + tl.dot(back_y, tl.trans(turned_right.to(TYPE)), input_precision=PRECISION)


@triton_kernel
def _load_half(numbers, place, i, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of half a head, 0 beyond it."""
    return tl.load(numbers + place, mask=i < HALF, other=0.0)


@triton_kernel
def _read_key_half(  # type: ignore[no-untyped-def]
    word, data, shorts, longs, table, levels, at, begin, there,
    TYPE: tl.constexpr, FORMAT: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Half a head of keys of `nuq*`, channels `begin` and after of the group, [64, half block] float32."""
    HALF: tl.constexpr = FORMAT.width // 2
    GROUP: tl.constexpr = FORMAT.heads * FORMAT.width
    row = GROUP * SIDE.bits // 8
    numbers = read_levels(
        word, data, shorts, longs, table, levels, at + SIDE.codes, begin, HALF, there, row, FORMAT.half_block, SIDE,
        TYPE,
    ).to(tl.float32)  # fmt: skip
    i = tl.arange(0, FORMAT.half_block)
    x = numbers * _load_half(table + begin, i, i, HALF)[None, :]
    x += _load_half(table + GROUP + begin, i, i, HALF)[None, :]
    if FORMAT.slots > 0:
        x = add_outliers(x, data, shorts, at, begin, HALF, there, FORMAT, SIDE, FORMAT.half_block)
    return x


@triton_kernel
def add_values(  # type: ignore[no-untyped-def]
    p, acc_x, acc_y, low_x, low_y, words, data, shorts, longs, table, levels, at, head, there,
    TYPE: tl.constexpr, FORMAT: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Add the values of a page, weighted by p [BLOCK_M, 64], to the sums of products acc and of zero points low.

    acc_y and low_y are those of the second half of `int*` with two groups; elsewhere they stay as they are.
    """
    if FORMAT.folded == 0:
        v = _expand_whole(data, shorts, longs, table, at, head, there, FORMAT, SIDE)
        acc_x += tl.dot(p.to(TYPE), v.to(TYPE), input_precision=PRECISION)
    elif FORMAT.family == GROUPED:
        acc_x, low_x = _add_group(
            p, acc_x, low_x, words[0], data, shorts, longs, at, 0, there, TYPE, FORMAT, SIDE
        )
        if FORMAT.halves:
            acc_y, low_y = _add_group(
                p, acc_y, low_y, words[1], data, shorts, longs, at, 1, there, TYPE, FORMAT, SIDE
            )
    else:
        row = FORMAT.heads * FORMAT.width * SIDE.bits // 8
        begin = head * FORMAT.width
        v = read_levels(
            words[0], data, shorts, longs, table, levels, at + SIDE.codes, begin, FORMAT.width, there, row,
            FORMAT.block, SIDE, TYPE,
        )  # fmt: skip
        scale = read_halves(shorts, (at + SIDE.scales) // 2 + tl.arange(0, PAGE), there)
        if FORMAT.family == CALIBRATED:
            zero = read_halves(shorts, (at + SIDE.zeros) // 2 + tl.arange(0, PAGE), there)
        if FORMAT.slots > 0:
            # Outliers belong to single numbers, so numbers are scaled too: a second product would cost more.
            x = v.to(tl.float32) * scale[:, None] + zero[:, None]
            x = add_outliers(x, data, shorts, at, begin, FORMAT.width, there, FORMAT, SIDE, FORMAT.block)
            acc_x += tl.dot(p.to(TYPE), x.to(TYPE), input_precision=PRECISION)
        else:
            scaled, unit = _scale_weights(p, scale, TYPE)
            acc_x += tl.dot(scaled, v, input_precision=PRECISION) * unit
            if FORMAT.family == CALIBRATED:
                low_x += tl.sum(p * zero[None, :], 1)
    return acc_x, acc_y, low_x, low_y


@triton_kernel
def _scale_weights(p, scale, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights p [BLOCK_M, 64] times scales [64] as numbers of TYPE, in units of the second result.

    float16 has few numbers near zero: there the unit is the largest scale, so that scaled weights are as large as
    weights. The other types have the range of float32.
    """
    unit = 1.0
    if tl.float16 == TYPE:
        most = tl.max(scale, 0)
        unit = tl.where(most > 0.0, most, 1.0)
        scale = scale / unit
    return (p * scale[None, :]).to(TYPE), unit


@triton_kernel
def _add_group(  # type: ignore[no-untyped-def]
    p, acc, low, word, data, shorts, longs, at, group, there,
    TYPE: tl.constexpr, FORMAT: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Add one group of values of `int*`."""
    v = _read_group(word, data, shorts, longs, at, group, there, TYPE, FORMAT, SIDE)
    scale, least = _group_scales(shorts, at, group, there, FORMAT, SIDE)
    scaled, unit = _scale_weights(p, scale, TYPE)
    # The base was multiplied by the rounded weights, so these are what is taken away.
    low += tl.sum(p * least[None, :] - scaled.to(tl.float32) * (SIDE.base * unit), 1)
    return acc + tl.dot(scaled, v, input_precision=PRECISION) * unit, low
