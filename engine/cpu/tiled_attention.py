"""Attention for sixteen queries at a time, which share each read of a page: for prefill, and for shared prefixes.

A tile is sixteen queries over the same pages, one per vector lane: decode rows times the query heads of a group, or
adjacent tokens of a prompt. Queries are stored transposed, so that one float of a key is multiplied with all sixteen
queries at once, and the softmax's maximum and sum run over tokens, never across lanes. So a lane's result depends only
on its own query and pages, and continuing from the saved state of an earlier run of chunks gives the same bits as
computing both at once.

    tile ──▶ q [head_dim, 16]   out [head_dim, 16]   top [16]   total [16]       s [64, 16] scores, then weights
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba.misc.special import literally

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.jit import LOG2_E, LOWEST, jit, jit_inner, prefetch
from engine.cpu.simd import LANES, add, floor, larger, load, mul, power, splat, spread, store, sub, within

PAGE = CHUNK_TOKENS
# Number of a prompt's tiles that use a page one after the other, while the page is in the cache.
TILES_PER_PAGE = 8
CACHE_LINE_FLOATS = 16
# Number of products computed side by side: enough to hide a multiply-add's latency, few enough for the registers.
UNROLL = 8

_C0, _C1, _C2, _C3 = (np.float32(c) for c in (1.0, 6.9314718e-1, 2.4022651e-1, 5.5504109e-2))
_C4, _C5, _C6, _C7 = (np.float32(c) for c in (9.6181291e-3, 1.3333558e-3, 1.5403530e-4, 1.5252734e-5))
_HALF, _LEAST = np.float32(0.5), np.float32(-126)


@jit_inner
def _exp2_lanes(x: Any) -> Any:
    """2**x in every lane for x <= 0, as `engine.cpu.jit.exp2`."""
    x = larger(x, splat(_LEAST))
    whole = floor(add(x, splat(_HALF)))
    y = sub(x, whole)
    p = add(splat(_C6), mul(y, splat(_C7)))
    p = add(splat(_C5), mul(y, p))
    p = add(splat(_C4), mul(y, p))
    p = add(splat(_C3), mul(y, p))
    p = add(splat(_C2), mul(y, p))
    p = add(splat(_C1), mul(y, p))
    p = add(splat(_C0), mul(y, p))
    return mul(p, power(whole))


@jit_inner
def score_tile(
    q: Any, at: Any, pool: Any, key: Any, count: Any, ahead: Any, high: Any, s: Any, width: int
) -> Any:
    """Scores s[t] = key[t] · q in every lane, for the first `count` tokens of a page; returns their maximum with
    `high`.

    `count` is a multiple of 8. `key` is the offset of the page in the pool, `at` the offset of the tile in q; memory is
    prefetched `ahead` floats after the keys.
    """
    literally(width)
    for t in range(0, count, UNROLL):
        k = key + t * width
        for line in range(UNROLL * width // CACHE_LINE_FLOATS if ahead > 0 else 0):
            prefetch(pool, k + ahead + line * CACHE_LINE_FLOATS)
        a = b = c = d = e = f = g = h = splat(np.float32(0))
        for i in range(width):
            x = load(q, at + i * LANES)
            a = add(a, mul(spread(pool, k + i), x))
            b = add(b, mul(spread(pool, k + i + width), x))
            c = add(c, mul(spread(pool, k + i + 2 * width), x))
            d = add(d, mul(spread(pool, k + i + 3 * width), x))
            e = add(e, mul(spread(pool, k + i + 4 * width), x))
            f = add(f, mul(spread(pool, k + i + 5 * width), x))
            g = add(g, mul(spread(pool, k + i + 6 * width), x))
            h = add(h, mul(spread(pool, k + i + 7 * width), x))
        o = t * LANES
        store(s, o, a)
        store(s, o + LANES, b)
        store(s, o + 2 * LANES, c)
        store(s, o + 3 * LANES, d)
        store(s, o + 4 * LANES, e)
        store(s, o + 5 * LANES, f)
        store(s, o + 6 * LANES, g)
        store(s, o + 7 * LANES, h)
        left = larger(larger(a, b), larger(c, d))
        high = larger(high, larger(left, larger(larger(e, f), larger(g, h))))
    return high


@jit_inner
def softmax_tile(s: Any, count: Any, high: Any, top: Any, total: Any, at: Any) -> Any:
    """Turn `count` scores into weights, and update maximum and sum; returns the factor by which to scale the output."""
    old = load(top, at)
    summed = splat(np.float32(0))
    for t in range(count):
        weight = _exp2_lanes(sub(load(s, t * LANES), high))
        store(s, t * LANES, weight)
        summed = add(summed, weight)
    fade = _exp2_lanes(sub(old, high))
    store(total, at, add(mul(load(total, at), fade), summed))
    store(top, at, high)
    return fade


@jit_inner
def mask_scores(s: Any, count: Any, low: Any, high: Any, first: int, old: Any) -> Any:
    """Set the scores of tokens outside low..high, lane by lane, to LOWEST; `first` is the position of the page's
    first.
    """
    largest = old
    for t in range(count):
        x = within(load(s, t * LANES), low, splat(np.float32(first + t)), high, splat(LOWEST))
        store(s, t * LANES, x)
        largest = larger(largest, x)
    return largest


@jit_inner
def _mix_tile(
    s: Any, fade: Any, pool: Any, value: Any, count: Any, next_page: Any, out: Any, at: Any, width: int
) -> None:
    """out = out * fade + the sum of s[t] * value[t] over the first `count` tokens, in every lane.

    The keys at `next_page` are prefetched meanwhile, unless it is negative.
    """
    literally(width)
    for i in range(0, width // UNROLL * UNROLL, UNROLL):
        v, o = value + i, at + i * LANES
        for line in range(UNROLL * PAGE // CACHE_LINE_FLOATS if next_page >= 0 else 0):
            prefetch(pool, next_page + i * PAGE + line * CACHE_LINE_FLOATS)
        a = mul(load(out, o), fade)
        b = mul(load(out, o + LANES), fade)
        c = mul(load(out, o + 2 * LANES), fade)
        d = mul(load(out, o + 3 * LANES), fade)
        e = mul(load(out, o + 4 * LANES), fade)
        f = mul(load(out, o + 5 * LANES), fade)
        g = mul(load(out, o + 6 * LANES), fade)
        h = mul(load(out, o + 7 * LANES), fade)
        for t in range(count):
            x = load(s, t * LANES)
            k = v + t * width
            a = add(a, mul(spread(pool, k), x))
            b = add(b, mul(spread(pool, k + 1), x))
            c = add(c, mul(spread(pool, k + 2), x))
            d = add(d, mul(spread(pool, k + 3), x))
            e = add(e, mul(spread(pool, k + 4), x))
            f = add(f, mul(spread(pool, k + 5), x))
            g = add(g, mul(spread(pool, k + 6), x))
            h = add(h, mul(spread(pool, k + 7), x))
        store(out, o, a)
        store(out, o + LANES, b)
        store(out, o + 2 * LANES, c)
        store(out, o + 3 * LANES, d)
        store(out, o + 4 * LANES, e)
        store(out, o + 5 * LANES, f)
        store(out, o + 6 * LANES, g)
        store(out, o + 7 * LANES, h)
    for i in range(width // UNROLL * UNROLL, width):
        a = mul(load(out, at + i * LANES), fade)
        for t in range(count):
            a = add(a, mul(spread(pool, value + i + t * width), load(s, t * LANES)))
        store(out, at + i * LANES, a)


@jit_inner
def read_run(
    first: Any, last: Any, slabs: Any, pool: Any, slab: int, offset: Any, tiles: Any,
    q: Any, out: Any, top: Any, total: Any, s: Any, width: int,
) -> None:  # fmt: skip
    """Add the whole chunks first..last-1 of `slabs`, of the KV head at `offset`, to the state of all tiles."""
    literally(width)
    size = PAGE * width
    for c in range(first, last):
        page = slabs[c] * slab + offset
        for tile in range(tiles):
            # Only the first tile has to wait until the page has come from memory.
            fresh = tile == 0
            lane, at = tile * LANES, tile * LANES * width
            high = score_tile(q, at, pool, page, PAGE, size if fresh else 0, load(top, lane), s, width)
            fade = softmax_tile(s, PAGE, high, top, total, lane)
            following = slabs[c + 1] * slab + offset if fresh and c + 1 < last else -1
            _mix_tile(s, fade, pool, page + size, PAGE, following, out, at, width)


@jit_inner
def read_piece(
    used: Any, pool: Any, page: Any, tiles: Any, q: Any, out: Any, top: Any, total: Any, s: Any, width: int
) -> None:
    """Add the first `used` tokens of the page at `page` to the state of all tiles; the others must be finite."""
    literally(width)
    count = (used + UNROLL - 1) // UNROLL * UNROLL
    for tile in range(tiles):
        lane, at = tile * LANES, tile * LANES * width
        old = load(top, lane)
        high = score_tile(q, at, pool, page, count, 0, old, s, width)
        if used < count:
            high = mask_scores(s, count, splat(np.float32(0)), splat(np.float32(used - 1)), 0, old)
        fade = softmax_tile(s, count, high, top, total, lane)
        _mix_tile(s, fade, pool, page + PAGE * width, used, -1, out, at, width)


@jit_inner
def _read_span(
    low: Any, high: Any, slabs: Any, pool: Any, slab: int, offset: Any, tiles: Any,
    q: Any, out: Any, top: Any, total: Any, s: Any, width: int,
) -> None:  # fmt: skip
    """Add all pages that a lane attends to, to the state of all tiles; lane i attends to tokens low[i] to high[i]."""
    literally(width)
    size = PAGE * width
    for c in range(int(low[0]) // PAGE, int(high[tiles * LANES - 1]) // PAGE + 1):
        page, first, fresh = slabs[c] * slab + offset, c * PAGE, True
        for tile in range(tiles):
            lane, at = tile * LANES, tile * LANES * width
            count = min(PAGE, int(high[lane + LANES - 1]) + 1 - first)
            if count <= 0 or low[lane] >= first + PAGE:
                continue
            used = (count + UNROLL - 1) // UNROLL * UNROLL
            old = load(top, lane)
            largest = score_tile(q, at, pool, page, used, size if fresh else 0, old, s, width)
            if high[lane] < first + used - 1 or low[lane + LANES - 1] > first:
                largest = mask_scores(s, used, load(low, lane), load(high, lane), first, old)
            fade = softmax_tile(s, used, largest, top, total, lane)
            _mix_tile(s, fade, pool, page + size, count, -1, out, at, width)
            fresh = False


@jit_inner
def clear_lanes(lanes: Any, q: Any, out: Any, top: Any, total: Any, width: int) -> None:
    """Reset the state of all lanes. Lanes without a query compute with zeros, and their results are ignored."""
    literally(width)
    q[: lanes * width] = np.float32(0)
    out[: lanes * width] = np.float32(0)
    top[:lanes] = LOWEST
    total[:lanes] = np.float32(0)


@jit_inner
def load_lane(row: Any, head: Any, scale: Any, tiles: Any, lane: Any, width: int) -> None:
    """Copy one head of a row of queries or outputs, times `scale`, into a lane of the tiles."""
    literally(width)
    at = lane // LANES * LANES * width + lane % LANES
    for i in range(width):
        tiles[at + i * LANES] = row[head * width + i] * scale


@jit_inner
def store_lane(tiles: Any, lane: Any, scale: Any, row: Any, head: Any, width: int) -> None:
    """Copy a lane of the tiles, times `scale`, into one head of a row: the reverse of `load_lane`."""
    literally(width)
    at = lane // LANES * LANES * width + lane % LANES
    for i in range(width):
        row[head * width + i] = tiles[at + i * LANES] * scale


@cache
def build_shared_prefix_kernel(width: int) -> Callable[..., None]:
    """The first phase of decode: every run of the plan is read once for all its rows. `CpuAttention.decode` calls it.

    Rows of `out` get weighted values; `tops` and `totals` ([rows, heads]) get the maxima and sums that belong to them.
    """

    @jit
    def run(
        qkv: Any, rows: Any, table: Any, runs: Any, pool: Any, slab: int, offset: int,
        heads: int, kv_heads: int, out: Any, tops: Any, totals: Any,
    ) -> None:  # fmt: skip
        scale, one = np.float32(LOG2_E / np.sqrt(np.float32(width))), np.float32(1)
        group = heads // kv_heads
        room = (rows.shape[0] * group + LANES - 1) // LANES * LANES
        q, o = np.empty(room * width, np.float32), np.empty(room * width, np.float32)
        top, total = np.empty(room, np.float32), np.empty(room, np.float32)
        s = np.empty(PAGE * LANES, np.float32)
        for r in range(runs.shape[0]):
            start, last, first = runs[r, 0], runs[r, 1], runs[r, 2]
            lanes = (runs[r, 3] - first) * group
            tiles = (lanes + LANES - 1) // LANES
            for h in range(kv_heads):
                clear_lanes(tiles * LANES, q, o, top, total, width)
                for lane in range(lanes):
                    n, g = first + lane // group, h * group + lane % group
                    load_lane(qkv[rows[n]], g, scale, q, lane, width)
                    if start > 0:
                        load_lane(out[rows[n]], g, one, o, lane, width)
                        top[lane], total[lane] = tops[n, g], totals[n, g]
                place = offset + h * 2 * PAGE * width
                read_run(start, last, table[first], pool, slab, place, tiles, q, o, top, total, s, width)
                for lane in range(lanes):
                    n, g = first + lane // group, h * group + lane % group
                    store_lane(o, lane, one, out[rows[n]], g, width)
                    tops[n, g], totals[n, g] = top[lane], total[lane]

    return run


@cache
def build_prefill_kernel(width: int) -> Callable[..., None]:
    """Causal attention of consecutive tokens of one sequence over its pages; `CpuAttention.prefill` calls it.

    qkv and out are the rows of these tokens, the first at position `start`; their KV is already in the pages.
    """

    @jit
    def run(
        qkv: Any, start: int, slabs: Any, pool: Any, slab: int, offset: int,
        heads: int, kv_heads: int, window: int, out: Any,
    ) -> None:  # fmt: skip
        scale = np.float32(LOG2_E / np.sqrt(np.float32(width)))
        group = heads // kv_heads
        whole, room = qkv.shape[0] * group, TILES_PER_PAGE * LANES
        q, o = np.empty(room * width, np.float32), np.empty(room * width, np.float32)
        top, total = np.empty(room, np.float32), np.empty(room, np.float32)
        # Positions are held as floats, which are exact below 2**24.
        low, high = (
            np.empty(room, np.float32),
            np.empty(room, np.float32),
        )
        s = np.empty(PAGE * LANES, np.float32)
        for block in range(0, whole, room):
            lanes = min(room, whole - block)
            tiles = (lanes + LANES - 1) // LANES
            for lane in range(tiles * LANES):
                at = start + (block + min(lane, lanes - 1)) // group
                low[lane], high[lane] = max(0, at + 1 - window) if window > 0 else 0, at
            for h in range(kv_heads):
                clear_lanes(tiles * LANES, q, o, top, total, width)
                for lane in range(lanes):
                    g = h * group + (block + lane) % group
                    load_lane(qkv[(block + lane) // group], g, scale, q, lane, width)
                place = offset + h * 2 * PAGE * width
                _read_span(low, high, slabs, pool, slab, place, tiles, q, o, top, total, s, width)
                for lane in range(lanes):
                    g = h * group + (block + lane) % group
                    store_lane(o, lane, np.float32(1) / total[lane], out[(block + lane) // group], g, width)

    return run
