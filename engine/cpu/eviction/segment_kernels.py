"""Attention of decode rows over frames of kept rows, on the CPU; over segments, once for all rows that have them.

Rows of different sequences may have the same segments (`kvcache.eviction.kept_segments`). If they are enough, the
kernel here reads each piece of a segment, up to 64 rows of one head, for sixteen queries at a time, as
`engine.cpu.tiled_attention` does; then the kernel of each sequence's own rows goes on from that state
(`engine.cpu.eviction.ragged_attention`). That one also reads the segments that few rows have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba.misc.special import literally
from numpy.typing import NDArray

from engine.cpu.attention import (
    CACHE_LINE_FLOATS,
    KEYS_PER_PASS,
    PAGE,
    PREFETCH_FLOATS,
    mix_values,
    softmax_page,
)
from engine.cpu.jit import LOG2_E, LOWEST, jit, jit_inner, prefetch
from engine.cpu.simd import LANES
from engine.cpu.tiled_attention import clear_lanes, load_lane, read_piece, store_lane
from kvcache.eviction.kept_rows import FRAME_TOKENS

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

FRAME = FRAME_TOKENS
# Maxima and sums of rows, [rows, heads] each.
State = tuple[Floats, Floats]


def clear_state(rows: Ints, heads: int, out: Floats) -> State:
    """The state of rows before anything is added; `rows` are those of `out`."""
    out[rows] = 0
    return np.full((len(rows), heads), LOWEST, np.float32), np.zeros((len(rows), heads), np.float32)


@jit_inner
def _score_frame(q: Any, key: Any, s: Any, at: Any, group: int, width: int) -> None:
    """Scores of one frame: s[g, at + t] = q[g] · key[t]; as `score_page`."""
    literally(width)
    for t in range(0, FRAME, KEYS_PER_PASS):
        for line in range(KEYS_PER_PASS * width // CACHE_LINE_FLOATS):
            prefetch(key, t * width + PREFETCH_FLOATS + line * CACHE_LINE_FLOATS)
        for g in range(group):
            a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(width):
                x = q[g * width + i]
                k = t * width + i
                a += x * key[k]
                b += x * key[k + width]
                c += x * key[k + 2 * width]
                d += x * key[k + 3 * width]
            o = g * PAGE + at + t
            s[o], s[o + 1], s[o + 2], s[o + 3] = a, b, c, d


@jit_inner
def attend_frames(
    q: Any, skip: Any, count: Any, frame: Any, bag: Any, top: Any, total: Any, acc: Any, s: Any,
    pool: Any, slab: int, width: int,
) -> None:  # fmt: skip
    """Add the kept rows skip..count-1 of one KV head, in the frames from `frame` on, four frames at a time."""
    literally(width)
    group, half = top.shape[0], FRAME * width
    per_slab = slab // (2 * half)
    for start in range(skip // PAGE * PAGE, count, PAGE):
        used = min(PAGE, count - start)
        for t in range(0, used, FRAME):
            f = frame + (start + t) // FRAME
            at = bag[f // per_slab] * slab + f % per_slab * 2 * half
            _score_frame(q, pool[at : at + half], s, t, group, width)
        first = max(0, skip - start)
        softmax_page(s, top, total, acc, first, used, width)
        for t in range(first // FRAME * FRAME, used, FRAME):
            f = frame + (start + t) // FRAME
            at = bag[f // per_slab] * slab + f % per_slab * 2 * half + half
            low, high = max(0, first - t), min(FRAME, used - t)
            mix_values(s[t:], pool[at : at + half], acc, group, low, high, width)


@jit_inner
def add_piece(held: Any, count: Any, top: Any, total: Any, acc: Any, s: Any, pool: Any, width: int) -> None:
    """Add the first `count` frames of a piece (`hold_frames`) to a row."""
    literally(width)
    values, filled = held
    softmax_page(s, top, total, acc, 0, count * FRAME, width)
    for k in range(count):
        at = values[k]
        mix_values(s[k * FRAME :], pool[at : at + FRAME * width], acc, top.shape[0], 0, filled[k], width)


@jit_inner
def hold_frames(
    q: Any, rows: Any, frame: Any, slabs: Any, held: Any, count: Any, top: Any, total: Any, acc: Any, s: Any, pool: Any,
    slab: int, width: int,
) -> Any:  # fmt: skip
    """Add the `rows` kept rows of one KV head in the frames from `frame` on of `slabs` to a row, in pieces.

    A piece has frames of several segments, so that few of its 64 places are empty: where their values are, and how many
    rows they have, is in `held`. Of it `count` frames are there, whose scores are in `s`. Returns how many are then.
    """
    literally(width)
    values, filled = held
    group, half = top.shape[0], FRAME * width
    per_slab = slab // (2 * half)
    for t in range(0, rows, FRAME):
        f, used = frame + t // FRAME, min(FRAME, rows - t)
        at = slabs[f // per_slab] * slab + f % per_slab * 2 * half
        _score_frame(q, pool[at : at + half], s, count * FRAME, group, width)
        for g in range(group):
            o = g * PAGE + count * FRAME
            for i in range(used, FRAME):
                s[o + i] = LOWEST
        values[count], filled[count] = at + half, used
        count += 1
        if count * FRAME == PAGE:
            add_piece(held, count, top, total, acc, s, pool, width)
            count = 0
    return count


@jit_inner
def _gather_piece(
    start: Any, end: Any, frame: Any, slabs: Any, pool: Any, slab: int, scratch: Any, width: int
) -> None:
    """Copy rows start..end-1 of a head, whose first frame is `frame`, into a page: [2, 64, width], flat."""
    literally(width)
    half, per_slab = FRAME * width, slab // (2 * FRAME * width)
    for t in range(0, end - start, FRAME):
        f = frame + (start + t) // FRAME
        at = slabs[f // per_slab] * slab + f % per_slab * 2 * half
        for side in range(2):
            to, source = (side * PAGE + t) * width, at + side * half
            for i in range(half):
                scratch[to + i] = pool[source + i]


@jit_inner
def _read_together(
    mine: Any, head: Any, count: Any, frame: Any, slabs: Any, qkv: Any, rows: Any, pool: Any, slab: int, group: Any,
    state: Any, tiles: Any, out: Any, width: int,
) -> None:  # fmt: skip
    """Add all rows of a head of a segment to its members, sixteen queries at a time."""
    literally(width)
    (tops, totals), (q, o, top, total, s, scratch) = state, tiles
    scale, one = np.float32(LOG2_E / np.sqrt(np.float32(width))), np.float32(1)
    lanes = mine.shape[0] * group
    used = (lanes + LANES - 1) // LANES
    clear_lanes(used * LANES, q, o, top, total, width)
    for lane in range(lanes):
        n, g = mine[lane // group], head * group + lane % group
        load_lane(qkv[rows[n]], g, scale, q, lane, width)
        load_lane(out[rows[n]], g, one, o, lane, width)
        top[lane], total[lane] = tops[n, g], totals[n, g]
    for start in range(0, count, PAGE):
        end = min(start + PAGE, count)
        _gather_piece(start, end, frame, slabs, pool, slab, scratch, width)
        read_piece(end - start, scratch, 0, used, q, o, top, total, s, width)
    for lane in range(lanes):
        n, g = mine[lane // group], head * group + lane % group
        store_lane(o, lane, one, out[rows[n]], g, width)
        tops[n, g], totals[n, g] = top[lane], total[lane]


@cache
def build_segment_kernel(width: int) -> Callable[..., None]:
    """The kernel for segments of one head dimension that are read together; `RaggedAttention.decode` calls it.

    Run r is the segment number `runs[r]`, for the rows `members[bounds[r] : bounds[r + 1]]` of `rows`. `segments` are
    the slabs of all segments, and how many rows each head has, from which frame on: [segments, kv_heads] each.
    """

    @jit
    def run(
        qkv: Any, rows: Any, members: Any, bounds: Any, runs: Any, segments: Any, pool: Any, slab: int, heads: int,
        kv_heads: int, state: Any, out: Any,
    ) -> None:  # fmt: skip
        slabs, counts, frames = segments
        group = heads // kv_heads
        room = (rows.shape[0] * group + LANES - 1) // LANES * LANES
        q, o = np.empty(room * width, np.float32), np.empty(room * width, np.float32)
        top, total = np.empty(room, np.float32), np.empty(room, np.float32)
        tiles = q, o, top, total, np.empty(PAGE * LANES, np.float32), np.zeros(2 * PAGE * width, np.float32)
        for r in range(runs.shape[0]):
            mine, n = members[bounds[r] : bounds[r + 1]], runs[r]
            for h in range(kv_heads):
                _read_together(
                    mine, h, counts[n, h], frames[n, h], slabs[n], qkv, rows, pool, slab, group, state, tiles, out,
                    width,
                )  # fmt: skip

    return run
