"""Attention of one KV head over sixteen tokens at a time, whose numbers are in the cache: for coded pages, which are
expanded piece by piece.

A piece is [16, width], keys or values. Scores and weights of a page are [group, 64], as in `engine.cpu.attention`, and
the softmax between them is that of raw pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.jit import jit_inner
from engine.cpu.simd import LANES, add, load, mul, splat, spread, store, sum_four

PAGE = CHUNK_TOKENS
PIECE = 16
KEYS_PER_PASS = 4


@jit_inner
def score_piece(q: Any, at: Any, keys: Any, k: Any, s: Any, o: Any, group: int, width: int) -> None:
    """Scores of a piece: s[o + 64 · g + t] = q[g] · keys[t], with the queries at q[at:] and the piece at keys[k:]."""
    literally(width)
    zero = np.float32(0)
    if width % LANES == 0:
        for g in range(group):
            for t in range(0, PIECE, KEYS_PER_PASS):
                a = b = c = d = splat(zero)
                for i in range(0, width, LANES):
                    x, y = load(q, at + g * width + i), k + t * width + i
                    a = add(a, mul(x, load(keys, y)))
                    b = add(b, mul(x, load(keys, y + width)))
                    c = add(c, mul(x, load(keys, y + 2 * width)))
                    d = add(d, mul(x, load(keys, y + 3 * width)))
                sum_four(s, o + g * PAGE + t, a, b, c, d)
        return
    for g in range(group):
        for t in range(PIECE):
            score = zero
            for i in range(width):
                score += q[at + g * width + i] * keys[k + t * width + i]
            s[o + g * PAGE + t] = score


@jit_inner
def mix_piece(
    s: Any, o: Any, values: Any, v: Any, out: Any, at: Any, group: int, first: Any, last: Any, width: int
) -> None:
    """out[at + width · g :] += the sum of s[o + 64 · g + t] · values[t], for t in first..last-1."""
    literally(width)
    if width % LANES == 0:
        pairs = group // 2 * 2
        for g in range(0, pairs, 2):
            _mix_two(s, o + g * PAGE, values, v, out, at + g * width, first, last, width)
        for i in range(0, width if pairs < group else 0, LANES):
            place = at + pairs * width + i
            x = load(out, place)
            for t in range(first, last):
                x = add(x, mul(spread(s, o + pairs * PAGE + t), load(values, v + t * width + i)))
            store(out, place, x)
        return
    for g in range(group):
        for t in range(first, last):
            weight = s[o + g * PAGE + t]
            for i in range(width):
                out[at + g * width + i] += weight * values[v + t * width + i]


@jit_inner
def _mix_two(
    s: Any, o: Any, values: Any, v: Any, out: Any, at: Any, first: Any, last: Any, width: int
) -> None:
    """`mix_piece` for two queries: two vectors of each at a time, so that sums do not wait for each other."""
    literally(width)
    for i in range(0, width // (2 * LANES) * 2 * LANES, 2 * LANES):
        a, b = load(out, at + i), load(out, at + i + LANES)
        c, d = load(out, at + width + i), load(out, at + width + i + LANES)
        for t in range(first, last):
            k = v + t * width + i
            x, y = load(values, k), load(values, k + LANES)
            one, two = spread(s, o + t), spread(s, o + PAGE + t)
            a, b = add(a, mul(one, x)), add(b, mul(one, y))
            c, d = add(c, mul(two, x)), add(d, mul(two, y))
        store(out, at + i, a)
        store(out, at + i + LANES, b)
        store(out, at + width + i, c)
        store(out, at + width + i + LANES, d)
    for i in range(width // (2 * LANES) * 2 * LANES, width, LANES):
        a, c = load(out, at + i), load(out, at + width + i)
        for t in range(first, last):
            x = load(values, v + t * width + i)
            a, c = add(a, mul(spread(s, o + t), x)), add(c, mul(spread(s, o + PAGE + t), x))
        store(out, at + i, a)
        store(out, at + width + i, c)
