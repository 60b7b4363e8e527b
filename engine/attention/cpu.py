"""Attention on the CPU: rotate and write KV into pages, then attend over the pages.

Prompts, and chunks that several decoding sequences share, are read for sixteen queries at a time
(`engine.attention.tile`). What a decoding sequence has for itself is left to the decode kernel, which walks its chunks
in order. Within a slab the pages of one layer lie side by side, so the walk is one forward stream per chunk; every key
and value is read once for all query heads of its group. It keeps an online softmax (running maximum, sum and weighted
values in float32) and touches only its own sequence: what else is in the batch cannot change a bit of the result,
unless it shares chunks with it and they are read together.

    slab ──▶ [layers, kv_heads, 2, 64, head_dim]      one layer of it: k0 v0 k1 v1 ..., 64 × head_dim floats each
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba.misc.special import literally
from numpy.typing import NDArray

from engine.attention.batch import Batch, Span
from engine.attention.lanes import LANES
from engine.attention.shared import Plan
from engine.attention.tile import shared_kernel, span_kernel
from engine.jit import LOG2_E, LOWEST, exp2, jit, prefetch
from kvcache.layout import CHUNK_TOKENS, KVLayout

Floats = NDArray[np.float32]

PAGE = CHUNK_TOKENS
ROWS = 4  # keys per pass of the dot products
BLOCK = 8  # values per pass of the weighted sum
LINE = 16  # floats in a cache line
AHEAD = 2048  # floats; how far ahead of the arithmetic memory is asked for, measured best at 8 to 16 KiB

# Queries that the kernel for one row serves in the time in which a tile serves its sixteen, by queries per KV head:
# the more of them, the more often it uses a key while it holds it. Measured by `benchmarks.prefix_attention
# --crossover` with the pages in the cache, which is best for that kernel, and rounded up: sharing is never slower.
ALONE = {1: 7, 2: 10, 3: 11, 4: 11}
MOST_ALONE = 12


@jit
def _scores(q: Any, key: Any, s: Any, group: int, width: int) -> None:
    """s[g, t] = q[g] · key[t] for one page. Four rows at a time keep their sums in vector registers."""
    literally(width)
    for t in range(0, PAGE, ROWS):
        for line in range(ROWS * width // LINE):
            prefetch(key, t * width + AHEAD + line * LINE)
        for g in range(group):
            a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(width):
                x = q[g * width + i]
                k = t * width + i
                a += x * key[k]
                b += x * key[k + width]
                c += x * key[k + 2 * width]
                d += x * key[k + 3 * width]
            o = g * PAGE + t
            s[o], s[o + 1], s[o + 2], s[o + 3] = a, b, c, d


@jit
def _weigh(s: Any, top: Any, total: Any, out: Any, first: int, last: int, width: int) -> None:
    """Scores of rows first..last-1 become weights; running maximum, sum and output are brought to the new maximum."""
    literally(width)
    for g in range(top.shape[0]):
        row = s[g * PAGE : (g + 1) * PAGE]
        for t in range(first):
            row[t] = LOWEST
        for t in range(last, PAGE):
            row[t] = LOWEST
        high = top[g]
        for t in range(PAGE):
            high = max(high, row[t])
        summed = np.float32(0)
        for t in range(PAGE):
            weight = exp2(row[t] - high)
            row[t] = weight
            summed += weight
        if high == top[g]:  # as in most pages of a long sequence
            total[g] += summed
            continue
        fade = exp2(top[g] - high)
        total[g] = total[g] * fade + summed
        top[g] = high
        for i in range(width):
            out[g * width + i] *= fade


@jit
def _mix(s: Any, value: Any, out: Any, group: int, first: int, last: int, width: int) -> None:
    """out[g] += sum of s[g, t] * value[t]. Rows outside first..last-1 are never read: they may hold anything."""
    literally(width)
    t = first
    while t + BLOCK <= last:
        v = value[t * width : (t + BLOCK) * width]
        for line in range(BLOCK * width // LINE):
            prefetch(v, AHEAD + line * LINE)
        for g in range(group):
            o = g * PAGE + t
            p0, p1, p2, p3 = s[o], s[o + 1], s[o + 2], s[o + 3]
            p4, p5, p6, p7 = s[o + 4], s[o + 5], s[o + 6], s[o + 7]
            for i in range(width):
                low = p0 * v[i] + p1 * v[i + width] + p2 * v[i + 2 * width] + p3 * v[i + 3 * width]
                high = (
                    p4 * v[i + 4 * width]
                    + p5 * v[i + 5 * width]
                    + p6 * v[i + 6 * width]
                    + p7 * v[i + 7 * width]
                )
                out[g * width + i] += low + high
        t += BLOCK
    while t < last:
        for g in range(group):
            p0 = s[g * PAGE + t]
            for i in range(width):
                out[g * width + i] += p0 * value[t * width + i]
        t += 1


@jit
def _attend(
    q: Any, length: int, slabs: Any, done: int, top: Any, total: Any, pool: Any, slab: int, offset: int,
    kv_heads: int, window: int, acc: Any, width: int,
) -> None:  # fmt: skip
    """One sequence from chunk `done` on: q and acc are [heads, width], q already scaled by log2(e) / sqrt(width)."""
    literally(width)
    page = PAGE * width
    heads = q.shape[0] // width
    group = heads // kv_heads
    s = np.empty(group * PAGE, np.float32)
    if done == 0:
        top[:], total[:], acc[:] = LOWEST, np.float32(0), np.float32(0)
    begin = max(0, length - window) if window > 0 else 0
    for c in range(max(done, begin // PAGE), (length + PAGE - 1) // PAGE):
        first, last = max(0, begin - c * PAGE), min(PAGE, length - c * PAGE)
        for h in range(kv_heads):
            at = slabs[c] * slab + offset + h * 2 * page
            g0, g1 = h * group, (h + 1) * group
            mine = acc[g0 * width : g1 * width]
            _scores(q[g0 * width : g1 * width], pool[at : at + page], s, group, width)
            _weigh(s, top[g0:g1], total[g0:g1], mine, first, last, width)
            _mix(s, pool[at + page : at + 2 * page], mine, group, first, last, width)
    for h in range(heads):
        share = np.float32(1) / total[h]
        for i in range(width):
            acc[h * width + i] *= share


@cache
def decode_kernel(width: int) -> Callable[..., None]:
    """The paged decode kernel with `head_dim == width` as a constant; called by `Pages.decode`.

    Row n goes on behind the `done[n]` chunks that its row of `out`, `tops` and `totals` [rows, heads] account for.
    """

    @jit
    def run(
        qkv: Any, rows: Any, lengths: Any, table: Any, done: Any, tops: Any, totals: Any,
        pool: Any, slab: int, offset: int, heads: int, kv_heads: int, window: int, out: Any,
    ) -> None:  # fmt: skip
        scale = np.float32(LOG2_E / np.sqrt(np.float32(width)))
        q = np.empty(heads * width, np.float32)
        for n in range(rows.shape[0]):
            for i in range(heads * width):
                q[i] = qkv[rows[n], i] * scale
            _attend(
                q, lengths[n], table[n], done[n], tops[n], totals[n], pool, slab, offset,
                kv_heads, window, out[rows[n]], width,
            )  # fmt: skip

    return run


@jit
def _turn(head: Any, weight: Any, eps: float, cos: Any, sin: Any, width: int) -> None:
    """Normalise one head (when `weight` is given) and rotate it, in place, in Hugging Face's half-split layout."""
    literally(width)
    half = width // 2
    if weight.shape[0] > 0:
        squares = np.float32(0)
        for i in range(width):
            squares += head[i] * head[i]
        share = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for i in range(width):
            head[i] = head[i] * share * weight[i]
    for i in range(half):
        x, y = head[i], head[half + i]
        head[i] = x * cos[i] - y * sin[i]
        head[half + i] = y * cos[i] + x * sin[i]


@cache
def write_kernel(width: int) -> Callable[..., None]:
    """Rotates queries and keys of every token in place and stores its keys and values; called by `Pages.write`."""

    @jit
    def run(
        qkv: Any, positions: Any, slots: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, eps: float,
        pool: Any, slab: int, offset: int, heads: int, kv_heads: int,
    ) -> None:  # fmt: skip
        page = PAGE * width
        for n in range(positions.shape[0]):
            row, at = qkv[n], positions[n]
            for h in range(heads):
                _turn(row[h * width : (h + 1) * width], q_norm, eps, cos[at], sin[at], width)
            place = slots[n] * slab + offset + at % PAGE * width
            for h in range(kv_heads):
                key = row[(heads + h) * width : (heads + h + 1) * width]
                value = row[(heads + kv_heads + h) * width : (heads + kv_heads + h + 1) * width]
                _turn(key, k_norm, eps, cos[at], sin[at], width)
                k = place + h * 2 * page
                for i in range(width):
                    pool[k + i] = key[i]
                    pool[k + page + i] = value[i]

    return run


class Pages:
    """The pool's memory as attention sees it, for a model with `heads` query heads.

    `alone`: what a run of shared chunks has to beat, see `ALONE`; with 0 all are read together.

    Raises:
        ValueError: the pool is not float32; the kernels accumulate in float32 and read what they wrote.
    """

    def __init__(self, layout: KVLayout, data: torch.Tensor, heads: int) -> None:
        if data.dtype != torch.float32 or not data.is_contiguous():
            raise ValueError(f"CPU attention needs a contiguous float32 pool, not {data.dtype}")
        self.layout, self.data, self.heads = layout, data, heads
        self._flat = data.view(-1).numpy()
        self._slab = layout.chunk_bytes // layout.itemsize  # floats
        self._layer = layout.layer_bytes // layout.itemsize
        self._write = write_kernel(layout.head_dim)
        self._decode = decode_kernel(layout.head_dim)
        self._shared = shared_kernel(layout.head_dim)
        self._span = span_kernel(layout.head_dim)
        self.alone = ALONE.get(heads // layout.kv_heads, MOST_ALONE)

    def write(
        self, layer: int, qkv: torch.Tensor, batch: Batch, rotary: tuple[Floats, Floats],
        norms: tuple[Floats, Floats], eps: float,
    ) -> None:  # fmt: skip
        """Normalise (with `norms` of queries and keys, unless empty) and rotate `qkv` in place; store keys and values.

        qkv: [rows, (heads + 2 * kv_heads) * head_dim]. rotary: cosines and sines, [positions, head_dim / 2].
        """
        self._write(
            qkv.numpy(), batch.positions, batch.slots, *rotary, *norms, eps,
            self._flat, self._slab, layer * self._layer, self.heads, self.layout.kv_heads,
        )  # fmt: skip

    def decode(self, layer: int, qkv: torch.Tensor, batch: Batch, window: int, out: torch.Tensor) -> None:
        """Attention of the single-token rows over their pages, into the same rows of `out` [rows, heads * head_dim].

        In two phases: chunks that enough rows share are read once for all of them, then each row reads its own.
        """
        if not len(batch.rows):
            return
        plan = self._paying(batch, window)
        tops, totals = np.empty((2, len(batch.rows), self.heads), np.float32)
        place = (self._flat, self._slab, layer * self._layer, self.heads, self.layout.kv_heads)
        if len(plan.runs):
            self._shared(qkv.numpy(), batch.rows, batch.table, plan.runs, *place, out.numpy(), tops, totals)
        self._decode(
            qkv.numpy(), batch.rows, batch.lengths, batch.table, plan.shared, tops, totals, *place, window,
            out.numpy(),
        )  # fmt: skip

    def _paying(self, batch: Batch, window: int) -> Plan:
        """The runs that are worth reading together, without rows whose window hides the beginning from them."""
        plan = batch.plan.apart(batch.lengths > window) if window else batch.plan
        return plan.paying(self.alone, self.heads // self.layout.kv_heads, LANES)

    def prefill(self, layer: int, qkv: torch.Tensor, span: Span, window: int, out: torch.Tensor) -> None:
        """Causal attention of one span over its prefix and itself, into its rows of `out`."""
        rows = slice(span.row, span.row + span.count)
        self._span(
            qkv[rows].numpy(), span.start, span.slabs.numpy(), self._flat, self._slab, layer * self._layer,
            self.heads, self.layout.kv_heads, window, out[rows].numpy(),
        )  # fmt: skip
