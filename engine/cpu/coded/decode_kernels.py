"""How decode reads coded pages: each row by itself, or chunks that rows share once for all of them.

A row's page is expanded sixteen tokens at a time, keys for the scores and then values, so that they stay in the cache
(`engine.cpu.piece_attention`). Arguments that belong together are tuples, as `engine.cpu.coded.page_kernels` says; and

    softmax   maxima and sums of the row's heads, its output, and room for scores [heads of a page, group, 64]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.attention import softmax_page
from engine.cpu.coded.page_kernels import BYTES, HEADS, expand_side_of, expand_whole, rotate_head, work_floats
from engine.cpu.coded.stored_space import match_queries, put_sink, restore_outputs
from engine.cpu.jit import LOG2_E, LOWEST, jit_inner, prefetch
from engine.cpu.piece_attention import PIECE, mix_piece, score_piece
from engine.cpu.simd import LANES
from engine.cpu.tiled_attention import clear_lanes, load_lane, read_run, store_lane

PAGE = CHUNK_TOKENS
CACHE_LINE = 64


@jit_inner
def _rotate_back(q: Any, cos: Any, sin: Any, angles: Any, rotated: Any, width: int) -> None:
    """All heads of a query, rotated back by the angles at cos[angles :] and sin[angles :], into `rotated`."""
    literally(width)
    half = width // 2
    for head in range(0, q.shape[0], width):
        for i in range(half):
            x, y, c, s = q[head + i], q[head + half + i], cos[angles + i], sin[angles + i]
            rotated[head + i] = x * c + y * s
            rotated[head + half + i] = y * c - x * s


@jit_inner
def _attend_page(
    family: int, q: Any, at: Any, p: Any, first: Any, last: Any, ahead: Any, sink: Any, softmax: Any, pages: Any,
    angles: Any, scratch: Any, work: Any, heads: int, width: int,
) -> None:  # fmt: skip
    """Add tokens first..last-1 of page p of a chunk, at pages[0][at], to the running softmax of its heads.

    The page at `ahead`, if that is not negative, is prefetched meanwhile. `sink` is empty but in the first chunk.
    """
    literally(width), literally(family)
    (top, total, acc, s), (cos, sin), data, page, basis = softmax, angles, pages[0], pages[3], pages[5]
    group, begin, size = s.shape[0] // (PAGE * heads), first // PIECE * PIECE, PIECE * width
    line, share = ahead, page[BYTES] // (2 * PAGE // PIECE)
    for side in range(2):
        for t in range(begin, last, PIECE):
            for place in range(line if ahead >= 0 else share, line + share if ahead >= 0 else 0, CACHE_LINE):
                prefetch(data, place)
            line, count = line + share, min(PIECE, last - t)
            expand_side_of(
                family, data, at, page, pages[4][p], side, t, count, scratch, 0, size, work, heads, width
            )
            for h in range(heads if t == 0 and sink.shape[0] > 0 else 0):
                put_sink(sink, side, p * heads + h, scratch, h * size, basis, width)
            # The first token is rotated by the angle 0, which changes nothing.
            for h in range(heads if side == 0 and cos.shape[0] > 0 else 0):
                for n in range(count):
                    rotate_head(scratch, h * size + n * width, cos, sin, (t + n) * (width // 2), width)
            for h in range(heads):
                g, o = (p * heads + h) * group, h * group * PAGE + t
                if side == 0:
                    score_piece(q, g * width, scratch, h * size, s, o, group, width)
                else:
                    mix_piece(s, o, scratch, h * size, acc, g * width, group, max(0, first - t), count, width)
        for h in range(heads if side == 0 else 0):
            g0, g1 = (p * heads + h) * group, (p * heads + h + 1) * group
            mine = acc[g0 * width : g1 * width]
            scores = s[h * group * PAGE : (h + 1) * group * PAGE]
            softmax_page(scores, top[g0:g1], total[g0:g1], mine, first, last, width)


@jit_inner
def _attend_chunks(
    family: int, q: Any, rotated: Any, length: int, slabs: Any, done: int, sink: Any, softmax: Any, pages: Any,
    angles: Any, window: int, scratch: Any, work: Any, heads: int, width: int,
) -> None:  # fmt: skip
    """Attention of one sequence over its chunks from `done` on, as `engine.cpu.attention` does it over raw pages."""
    literally(width), literally(family)
    (top, total, acc, _), (cos, sin) = softmax, angles
    data, slab, offset, page, constants, basis = pages
    size = page[BYTES]
    if done == 0:
        top[:], total[:], acc[:] = LOWEST, np.float32(0), np.float32(0)
    begin, chunks = max(0, length - window) if window > 0 else 0, (length + PAGE - 1) // PAGE
    for c in range(max(done, begin // PAGE), chunks):
        first, last = max(0, begin - c * PAGE), min(PAGE, length - c * PAGE)
        if cos.shape[0] > 0:
            _rotate_back(q, cos, sin, c * PAGE * (width // 2), rotated, width)
        exact = sink if c == 0 else sink[:0]
        for p in range(constants.shape[0]):
            at = slabs[c] * slab + offset + p * size
            ahead = slabs[c + 1] * slab + offset + p * size if c + 1 < chunks else -1
            _attend_page(
                family, rotated, at, p, first, last, ahead, exact, softmax, pages, angles, scratch, work, heads, width
            )  # fmt: skip
    for h in range(q.shape[0] // width):
        share = np.float32(1) / total[h]
        for i in range(width):
            acc[h * width + i] *= share
    restore_outputs(acc, constants.shape[0] * heads, basis, width)


@jit_inner
def decode_rows(
    family: int,
    qkv: Any,
    batch: Any,
    state: Any,
    pages: Any,
    angles: Any,
    window: int,
    out: Any,
    width: int,
) -> None:
    """As `engine.cpu.attention.build_decode_kernel`; a page is expanded once for all query heads.

    batch: rows, lengths and slabs of the sequences, their sinks' places, and all sinks of the layer. state: chunks that
    are done, maxima and sums. Angles are empty if keys are stored rotated.
    """
    literally(width), literally(family)
    (rows, lengths, table, sinks, sink_rows), (done, tops, totals) = batch, state
    scale = np.float32(LOG2_E / np.sqrt(np.float32(width)))
    heads, size = pages[3][HEADS], out.shape[1]
    q, rotated = np.empty(size, np.float32), np.empty(size, np.float32)
    scratch = np.zeros(heads * PIECE * width, np.float32)
    work = np.zeros(work_floats(heads, width), np.float32)
    s = np.empty(size // width // pages[4].shape[0] * PAGE, np.float32)
    for n in range(rows.shape[0]):
        # Number by number: to copy an array, numba compiles an error text with both shapes, which takes seconds.
        for i in range(size):
            q[i] = qkv[rows[n], i] * scale
        match_queries(q, heads * pages[4].shape[0], pages[5], width)
        for i in range(size):
            rotated[i] = q[i]
        softmax = (tops[n], totals[n], out[rows[n]], s)
        _attend_chunks(
            family, q, rotated, lengths[n], table[n], done[n], sink_rows[sinks[n]], softmax, pages, angles, window,
            scratch, work, heads, width,
        )  # fmt: skip


@jit_inner
def read_runs(
    family: int, qkv: Any, batch: Any, runs: Any, pages: Any, angles: Any, state: Any, out: Any, width: int
) -> None:  # fmt: skip
    """The first phase of decode, as `engine.cpu.tiled_attention.build_shared_prefix_kernel`: every run is read once for
    all its rows, page by page, so that an expanded page stays in the cache.

    batch: rows and slabs of the sequences, their sinks' places, and all sinks of the layer. state: maxima and sums.
    """
    literally(width), literally(family)
    (rows, table, sinks, sink_rows), (tops, totals) = batch, state
    scale, one = np.float32(LOG2_E / np.sqrt(np.float32(width))), np.float32(1)
    heads, side, size = pages[3][HEADS], PAGE * width, out.shape[1]
    group = size // width // (heads * pages[4].shape[0])
    matched = np.empty((rows.shape[0], size), np.float32)
    for n in range(rows.shape[0]):
        for i in range(size):
            matched[n, i] = qkv[rows[n], i]
        match_queries(matched[n], heads * pages[4].shape[0], pages[5], width)
    room = (rows.shape[0] * group + LANES - 1) // LANES * LANES
    q, o = np.empty(heads * room * width, np.float32), np.empty(heads * room * width, np.float32)
    top, total = np.empty(heads * room, np.float32), np.empty(heads * room, np.float32)
    s, only = np.empty(PAGE * LANES, np.float32), np.zeros(1, np.int64)
    scratch = np.empty(heads * 2 * side, np.float32)
    work = np.empty(work_floats(heads, width), np.float32)
    for r in range(runs.shape[0]):
        start, last, first = runs[r, 0], runs[r, 1], runs[r, 2]
        lanes = (runs[r, 3] - first) * group
        tiles = (lanes + LANES - 1) // LANES
        for p in range(pages[4].shape[0]):
            for h in range(heads):
                at, place = h * room, h * room * width
                clear_lanes(tiles * LANES, q[place:], o[place:], top[at:], total[at:], width)
                for lane in range(lanes):
                    n, g = first + lane // group, (p * heads + h) * group + lane % group
                    load_lane(matched[n], g, scale, q[place:], lane, width)
                    if start > 0:
                        load_lane(out[rows[n]], g, one, o[place:], lane, width)
                        top[at + lane], total[at + lane] = tops[n, g], totals[n, g]
            for c in range(start, last):
                sink = sink_rows[sinks[first]]
                expand_whole(family, table[first, c], c, PAGE, p, sink, pages, angles, scratch, work, width)
                for h in range(heads):
                    at, place = h * room, h * room * width
                    read_run(
                        0, 1, only, scratch, 0, h * 2 * side, tiles, q[place:], o[place:], top[at:], total[at:], s,
                        width,
                    )  # fmt: skip
            for h in range(heads):
                for lane in range(lanes):
                    n, g, at = first + lane // group, (p * heads + h) * group + lane % group, h * room + lane
                    store_lane(o[h * room * width :], lane, one, out[rows[n]], g, width)
                    tops[n, g], totals[n, g] = top[at], total[at]
