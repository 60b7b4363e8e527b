"""How kernels read coded rows that heads kept: the frames of a bag, and attention of the rows of an evicted sequence.

    row ──▶ chunk 0 · chunk 1 · ... │ frame · frame · ... (per head) │ ring

As `engine.cpu.eviction.ragged_attention`, with frames of codes (`kvcache.eviction.kept_rows.FrameFormat`). The rows
of a sequence in a step are computed together, so that a page or frame is expanded once for all of them; no row sees
another. Keys are rotated to their positions, which the map of kept rows says.

Frames of a page of one head are expanded as that page with fewer rows; others by the function of `register_frames`.
Arguments that belong together come as tuples, beside those of `engine.cpu.coded.page_kernels`:

    frames    the frame's figures, as `page`; constants by head, [kv_heads, n]; the bag's slabs; frames of a slab; first
              frames of the table of tokens and of the list of outliers; how many outliers there are; the layer's basis
    heads     of a layer: first frame and kept rows of each head, [kv_heads]; where its rows begin, [kv_heads]; and
              position, and number in the table, of each row, [rows]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload
from numba.misc.special import literally

from engine.cpu.attention import mix_values, score_page, softmax_page
from engine.cpu.coded.exact import jit_exact
from engine.cpu.coded.page_kernels import (
    BYTES,
    HEADS,
    NUM_FAMILIES,
    PAGE,
    expand_page_of,
    expand_whole,
    find_functions,
    rotate_head,
    work_floats,
)
from engine.cpu.coded.stored_space import match_queries, put_sink, restore_outputs
from engine.cpu.eviction.ragged_attention import attend_ring
from engine.cpu.eviction.segment_kernels import FRAME
from engine.cpu.jit import JIT_OPTIONS, LOG2_E, NO_WRAPPERS, jit_inner

# Families whose frames are not pages with fewer rows.
_FRAMES: dict[int, Any] = {}
_OPTIONS: Any = JIT_OPTIONS | NO_WRAPPERS


def register_frames(family: int, expand_frame: Any) -> None:
    """Make a family's function known that expands a frame: arguments are those of `_expand_frame` but the first one."""
    _FRAMES[family] = expand_frame


def _expand_frame(
    family: int, data: Any, slab: int, at: Any, frames: Any, head: Any, tokens: Any, scratch: Any, to: Any, work: Any,
    width: int,
) -> None:  # fmt: skip
    """The rows of a frame, as many as `tokens`, into scratch [2, 64, width] from number `to` on."""


@overload(_expand_frame, prefer_literal=True, jit_options=_OPTIONS)
def _choose_frame(
    family: Any, data: Any, slab: Any, at: Any, frames: Any, head: Any, tokens: Any, scratch: Any, to: Any, work: Any,
    width: Any,
) -> Any:  # fmt: skip
    if not isinstance(family, types.IntegerLiteral):
        return None  # numba tries again when it knows the number
    number = family.literal_value
    if number % NUM_FAMILIES not in _FRAMES:
        expand_side = find_functions(number).expand_side

        def call_page(
            family: Any, data: Any, slab: Any, at: Any, frames: Any, head: Any, tokens: Any, scratch: Any, to: Any,
            work: Any, width: Any,
        ) -> Any:  # fmt: skip
            table, count = frames[1][head], tokens.shape[0]
            for side in range(2):
                place = to + side * PAGE * width
                expand_side(data, at, frames[0], table, side, 0, count, scratch, place, 0, work, 1, width)

        return call_page
    expand_frame = _FRAMES[number % NUM_FAMILIES]

    def call(
        family: Any, data: Any, slab: Any, at: Any, frames: Any, head: Any, tokens: Any, scratch: Any, to: Any,
        work: Any, width: Any,
    ) -> Any:  # fmt: skip
        expand_frame(data, slab, at, frames, head, tokens, scratch[to:], width)

    return call


@jit_exact
def _rotate_row(scratch: Any, t: Any, cos: Any, sin: Any, position: Any, width: int) -> None:
    literally(width)
    rotate_head(scratch, t * width, cos, sin, position * (width // 2), width)


@jit_inner
def _expand_piece(
    family: int, data: Any, slab: int, frames: Any, heads: Any, head: Any, start: Any, sink: Any, angles: Any,
    scratch: Any, work: Any, width: int,
) -> Any:  # fmt: skip
    """Up to 64 kept rows of a head from number `start` on, a multiple of 64, into scratch [2, 64, width].

    Returns how many they are.
    """
    literally(width), literally(family)
    (firsts, counts, begins, positions, tokens), (cos, sin) = heads, angles
    figures, bag, per_slab = frames[0], frames[2], frames[3]
    used = min(PAGE, counts[head] - start)
    row = begins[head] + start
    for t in range(0, used, FRAME):
        f = firsts[head] + (start + t) // FRAME
        at = bag[f // per_slab] * slab + f % per_slab * figures[BYTES]
        mine = tokens[row + t : row + min(used, t + FRAME)]
        _expand_frame(family, data, slab, at, frames, head, mine, scratch, t * width, work, width)
    if cos.shape[0] > 0:
        for t in range(used):
            _rotate_row(scratch, t, cos, sin, positions[row + t], width)
    if start == 0 and used > 0 and positions[row] == 0:
        for side in range(2):
            put_sink(sink, side, head, scratch, side * PAGE * width, frames[7], width)
    return used


@jit_inner
def expand_rows(
    family: int, data: Any, slab: int, frames: Any, heads: Any, head: int, sink: Any, angles: Any, out: Any,
    width: int,
) -> None:  # fmt: skip
    """The rows that a head keeps, in the basis, keys rotated to their positions: into out [rows, 2, width].

    data: the pool's bytes, with slabs of `slab` bytes. sink: the first token's keys and values, [2, kv_heads, width].
    """
    literally(width), literally(family)
    scratch, work = np.zeros(2 * PAGE * width, np.float32), np.empty(work_floats(1, width), np.float32)
    for start in range(0, heads[1][head], PAGE):
        used = _expand_piece(
            family, data, slab, frames, heads, head, start, sink, angles, scratch, work, width
        )
        for t in range(used):
            for side in range(2):
                for i in range(width):
                    out[start + t, side, i] = scratch[(side * PAGE + t) * width + i]


@jit_inner
def _attend_piece(
    state: Any, n: Any, head: Any, scratch: Any, at: int, first: Any, last: Any, width: int
) -> None:
    """Add rows first..last-1 of an expanded page of one head, at scratch[at:], to row n."""
    literally(width)
    rows, q, top, total, out, s = state
    side, group = PAGE * width, s.shape[0] // PAGE
    g0, g1 = head * group, (head + 1) * group
    acc = out[rows[n], g0 * width : g1 * width]
    score_page(q[n, g0 * width : g1 * width], scratch[at : at + side], s, group, width)
    softmax_page(s, top[n, g0:g1], total[n, g0:g1], acc, first, last, width)
    mix_values(s, scratch[at + side : at + 2 * side], acc, group, first, last, width)


@jit_inner
def _add_chunks(
    family: int, state: Any, positions: Any, chunks: Any, sink: Any, pages: Any, p: Any, angles: Any, window: int,
    scratch: Any, work: Any, width: int,
) -> None:  # fmt: skip
    """Add page p of the whole chunks to all rows."""
    literally(width), literally(family)
    per_page = pages[3][HEADS]
    for c in range(chunks.shape[0]):
        if window > 0 and positions[0] + 1 - window >= (c + 1) * PAGE:
            continue
        expand_whole(family, chunks[c], c, PAGE, p, sink, pages, angles, scratch, work, width)
        for n in range(positions.shape[0]):
            first = max(0, positions[n] + 1 - window - c * PAGE) if window > 0 else 0
            for h in range(per_page if first < PAGE else 0):
                _attend_piece(state, n, p * per_page + h, scratch, h * 2 * PAGE * width, first, PAGE, width)


@jit_inner
def _add_frames(
    family: int, state: Any, skips: Any, data: Any, slab: int, frames: Any, heads: Any, head: Any, sink: Any,
    angles: Any, scratch: Any, work: Any, width: int,
) -> None:  # fmt: skip
    """Add the kept rows of a head to all rows; row n skips the first skips[n, head] of them."""
    literally(width), literally(family)
    for begin in range(skips[0, head] // PAGE * PAGE, heads[1][head], PAGE):
        used = _expand_piece(
            family, data, slab, frames, heads, head, begin, sink, angles, scratch, work, width
        )
        for n in range(skips.shape[0]):
            first = max(0, skips[n, head] - begin)
            if first < used:
                _attend_piece(state, n, head, scratch, 0, first, used, width)


@jit_inner
def _add_ring(
    family: int, state: Any, positions: Any, ring: int, start: int, pages: Any, p: Any, angles: Any, window: int,
    scratch: Any, work: Any, width: int,
) -> None:  # fmt: skip
    """Add page p of the ring, whose oldest token is at position `start`, to all rows."""
    literally(width), literally(family)
    (cos, sin), per_page = angles, pages[3][HEADS]
    rows, q, top, total, out, s = state
    group, last = s.shape[0] // PAGE, positions[positions.shape[0] - 1]
    data, slab, offset, page, constants, _ = pages
    at = ring * slab + offset + p * page[BYTES]
    expand_page_of(family, data, at, page, constants[p], PAGE, scratch, work, per_page, width)
    for h in range(per_page if cos.shape[0] > 0 else 0):
        for position in range(start, last + 1):
            _rotate_row(scratch, h * 2 * PAGE + position % PAGE, cos, sin, position, width)
    for n in range(positions.shape[0]):
        length = positions[n] + 1
        newest = max(start, length - window) if window > 0 else start
        for h in range(per_page):
            g0, g1 = (p * per_page + h) * group, (p * per_page + h + 1) * group
            attend_ring(
                q[n, g0 * width : g1 * width], newest % PAGE, length - newest, h * 2 * PAGE * width, top[n, g0:g1],
                total[n, g0:g1], out[rows[n], g0 * width : g1 * width], s, scratch, width,
            )  # fmt: skip


@jit_inner
def _load_queries(qkv: Any, rows: Any, kv_heads: Any, basis: Any, q: Any, width: int) -> None:
    """The queries of rows, scaled, in the basis."""
    literally(width)
    scale = np.float32(LOG2_E / np.sqrt(np.float32(width)))
    for n in range(rows.shape[0]):
        for i in range(q.shape[1]):
            q[n, i] = qkv[rows[n], i] * scale
        match_queries(q[n], kv_heads, basis, width)


@jit_inner
def add_segments(
    family: int, qkv: Any, rows: Any, sink: Any, data: Any, slab: int, frames: Any, heads: Any, angles: Any, state: Any,
    out: Any, width: int,
) -> None:  # fmt: skip
    """Add the kept rows of segments to rows that have them, of any sequences; each is expanded once for all.

    `frames` and `heads` are as elsewhere, but what a bag has of its own has a line for each segment; numbers and
    positions of all rows follow each other. state: maxima and sums, [rows, heads] each; weighted values are in rows of
    `out`, in the basis.
    """
    literally(width), literally(family)
    (tops, totals), (firsts, counts, begins, positions, tokens), size = state, heads, out.shape[1]
    figures, constants, slabs, per_slab, tables, lists, outliers, basis = frames
    kv_heads = counts.shape[1]
    q, s = np.empty((rows.shape[0], size), np.float32), np.empty(size // width // kv_heads * PAGE, np.float32)
    skips = np.zeros((rows.shape[0], kv_heads), np.int64)
    scratch, work = np.zeros(2 * PAGE * width, np.float32), np.empty(work_floats(1, width), np.float32)
    _load_queries(qkv, rows, kv_heads, basis, q, width)
    for head in range(kv_heads):
        for r in range(counts.shape[0]):
            mine = (figures, constants, slabs[r], per_slab, tables[r], lists[r], outliers[r], basis)
            kept = (firsts[r], counts[r], begins[r], positions, tokens)
            _add_frames(
                family, (rows, q, tops, totals, out, s), skips, data, slab, mine, kept, head, sink, angles, scratch,
                work, width,
            )  # fmt: skip


@jit_inner
def attend_rows(
    family: int, qkv: Any, batch: Any, chunks: Any, ring: int, start: int, sink: Any, pages: Any, frames: Any,
    heads: Any, angles: Any, window: int, softmax: Any, out: Any, width: int,
) -> None:  # fmt: skip
    """Attention of rows of one evicted sequence, into the same rows of `out` [rows, heads * width].

    batch: the rows, their positions, which ascend, and how many kept rows of each head each of them skips,
    [rows, kv_heads]. chunks: slabs of the whole chunks before the frames. ring: the slab of positions from `start` on.
    softmax: maxima and sums of what came before, [rows, heads] each (`engine.cpu.eviction.segment_kernels.clear_state`,
    `add_segments`).
    """
    literally(width), literally(family)
    (rows, positions, skips), (top, total) = batch, softmax
    kv_heads, per_page, size = heads[0].shape[0], pages[3][HEADS], out.shape[1]
    count, query_heads = rows.shape[0], size // width
    q, s = np.empty((count, size), np.float32), np.empty(query_heads // kv_heads * PAGE, np.float32)
    scratch = np.zeros(per_page * 2 * PAGE * width, np.float32)
    work = np.empty(work_floats(per_page, width), np.float32)
    _load_queries(qkv, rows, kv_heads, pages[5], q, width)
    state = (rows, q, top, total, out, s)
    for p in range(kv_heads // per_page):
        _add_chunks(family, state, positions, chunks, sink, pages, p, angles, window, scratch, work, width)
    for head in range(kv_heads):
        _add_frames(
            family, state, skips, pages[0], pages[1], frames, heads, head, sink, angles, scratch, work, width
        )
    for p in range(kv_heads // per_page):
        _add_ring(family, state, positions, ring, start, pages, p, angles, window, scratch, work, width)
    for n in range(count):
        for g in range(query_heads):
            share = np.float32(1) / total[n, g]
            for i in range(g * width, (g + 1) * width):
                out[rows[n], i] *= share
        restore_outputs(out[rows[n]], kv_heads, pages[5], width)
