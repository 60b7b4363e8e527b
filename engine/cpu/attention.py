"""Attention on the CPU: rotates and stores new keys and values in pages, then computes attention over the pages.

Prefill, and chunks that several decode rows share, are computed for sixteen queries at a time
(`engine.cpu.tiled_attention`). The decode kernel here computes the rest of each decode row, chunk by chunk in order.
Within a slab the pages of one layer are adjacent, so each chunk is one forward stream through memory, and every key and
value is read once for all query heads of its group. The kernel keeps an online softmax (running maximum, sum and
weighted values in float32) and reads only its own sequence: other sequences in the batch do not change a bit of the
result, unless they share chunks that are read together.

    slab ──▶ [layers, kv_heads, 2, 64, head_dim]      one layer of it: k0 v0 k1 v1 ..., 64 × head_dim floats each
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numba.misc.special import literally
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.batching.batch import ForwardBatch, PrefillSpan
from engine.batching.prefix_plan import PrefixPlan
from engine.cpu.jit import LOG2_E, LOWEST, exp2, jit, jit_inner, prefetch
from engine.cpu.simd import LANES
from engine.cpu.tiled_attention import build_prefill_kernel, build_shared_prefix_kernel
from kvcache.layout import KvLayout

Floats = NDArray[np.float32]

PAGE = CHUNK_TOKENS
# Keys that one pass of the dot products takes, and values that one pass of the weighted sum takes.
KEYS_PER_PASS = 4
VALUES_PER_PASS = 8
CACHE_LINE_FLOATS = 16
# Number of floats by which prefetching runs ahead of the arithmetic: 8 KiB. 8 to 16 KiB were measured as best.
PREFETCH_FLOATS = 2048

# Smallest number of queries for which reading a shared run together is worth it, by query heads per KV head. The
# tiled kernel takes as long for a tile of sixteen queries as the decode kernel for this number. With more query heads
# per KV head the decode kernel reuses each key more often, so the number is larger. Measured by
# `benchmarks.prefix_attention --crossover` with the pages in the cache, which favours the decode kernel, and rounded
# up, so that sharing is never slower.
CROSSOVER_QUERIES = {1: 7, 2: 10, 3: 11, 4: 11}
MAX_CROSSOVER_QUERIES = 12


@jit_inner
def score_page(q: Any, key: Any, s: Any, group: int, width: int) -> None:
    """Scores of one page: s[g, t] = q[g] · key[t]. Four keys at a time keep their sums in vector registers."""
    literally(width)
    for t in range(0, PAGE, KEYS_PER_PASS):
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
            o = g * PAGE + t
            s[o], s[o + 1], s[o + 2], s[o + 3] = a, b, c, d


@jit_inner
def softmax_page(s: Any, top: Any, total: Any, out: Any, first: int, last: int, width: int) -> None:
    """Turn the scores of tokens first..last-1 into weights, and update the running maximum, sum and output."""
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
        if high == top[g]:
            # The maximum is unchanged; for most pages of a long sequence it is.
            total[g] += summed
            continue
        fade = exp2(top[g] - high)
        total[g] = total[g] * fade + summed
        top[g] = high
        for i in range(width):
            out[g * width + i] *= fade


@jit_inner
def mix_values(s: Any, value: Any, out: Any, group: int, first: int, last: int, width: int) -> None:
    """out[g] += sum of s[g, t] * value[t], for t in first..last-1. Other tokens are not read: they may be undefined."""
    literally(width)
    t = first
    while t + VALUES_PER_PASS <= last:
        v = value[t * width : (t + VALUES_PER_PASS) * width]
        for line in range(VALUES_PER_PASS * width // CACHE_LINE_FLOATS):
            prefetch(v, PREFETCH_FLOATS + line * CACHE_LINE_FLOATS)
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
        t += VALUES_PER_PASS
    while t < last:
        for g in range(group):
            p0 = s[g * PAGE + t]
            for i in range(width):
                out[g * width + i] += p0 * value[t * width + i]
        t += 1


@jit_inner
def _attend_sequence(
    q: Any, length: int, slabs: Any, done: int, top: Any, total: Any, pool: Any, slab: int, offset: int,
    kv_heads: int, window: int, acc: Any, width: int,
) -> None:  # fmt: skip
    """Attention of one sequence over its chunks from `done` on, in all KV heads.

    q and acc are [heads, width] flat; q is already scaled by log2(e) / sqrt(width). acc, top and total have the state
    after the chunks before `done`.
    """
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
            score_page(q[g0 * width : g1 * width], pool[at : at + page], s, group, width)
            softmax_page(s, top[g0:g1], total[g0:g1], mine, first, last, width)
            mix_values(s, pool[at + page : at + 2 * page], mine, group, first, last, width)
    for h in range(heads):
        share = np.float32(1) / total[h]
        for i in range(width):
            acc[h * width + i] *= share


@cache
def build_decode_kernel(width: int) -> Callable[..., None]:
    """The paged decode kernel for one head dimension, compiled as a constant; `CpuAttention.decode` calls it.

    The first `done[n]` chunks of row n are already accounted for in its rows of `out`, `tops` and `totals`
    ([rows, heads]); the kernel continues from there.
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
            _attend_sequence(
                q, lengths[n], table[n], done[n], tops[n], totals[n], pool, slab, offset,
                kv_heads, window, out[rows[n]], width,
            )  # fmt: skip

    return run


@jit_inner
def _norm_and_rotate(head: Any, weight: Any, eps: float, cos: Any, sin: Any, width: int) -> None:
    """Normalise one head (if `weight` is given) and rotate it, in place, in Hugging Face's half-split layout."""
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
def build_write_kernel(width: int) -> Callable[..., None]:
    """The kernel that rotates the queries and keys of every token in place and stores its keys and values in pages.

    `CpuAttention.write` calls it.
    """

    @jit
    def run(
        qkv: Any, positions: Any, slots: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, eps: float,
        pool: Any, slab: int, offset: int, heads: int, kv_heads: int,
    ) -> None:  # fmt: skip
        page = PAGE * width
        for n in range(positions.shape[0]):
            row, at = qkv[n], positions[n]
            for h in range(heads):
                _norm_and_rotate(row[h * width : (h + 1) * width], q_norm, eps, cos[at], sin[at], width)
            place = slots[n] * slab + offset + at % PAGE * width
            for h in range(kv_heads):
                key = row[(heads + h) * width : (heads + h + 1) * width]
                value = row[(heads + kv_heads + h) * width : (heads + kv_heads + h + 1) * width]
                _norm_and_rotate(key, k_norm, eps, cos[at], sin[at], width)
                k = place + h * 2 * page
                for i in range(width):
                    pool[k + i] = key[i]
                    pool[k + page + i] = value[i]

    return run


def crossover_queries(group: int) -> int:
    """Smallest number of queries for which a shared run is read together, with `group` query heads per KV head."""
    return CROSSOVER_QUERIES.get(group, MAX_CROSSOVER_QUERIES)


def worthwhile_plan(batch: ForwardBatch, window: int, alone: int, group: int) -> PrefixPlan:
    """The plan with the runs that are worth it, without rows whose sliding window excludes their prefix.

    Args:
        batch: of the step.
        window: tokens that a row sees; 0: all.
        alone: number of queries from which on a run is read together (`crossover_queries`).
        group: query heads per KV head.
    """
    plan = batch.plan.without_rows(batch.lengths > window) if window else batch.plan
    return plan.without_costly_runs(alone, group, LANES)


class PagedAttention(Protocol):
    """What the decoder needs of a pool's pages: `CpuAttention`, or `engine.cpu.coded.attention` for pools with a
    codec.
    """

    def write(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, rotary: tuple[Floats, Floats],
        norms: tuple[Floats, Floats], eps: float,
    ) -> None:  # fmt: skip
        """Normalise and rotate `qkv`, and store keys and values."""

    def decode(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, window: int, out: torch.Tensor
    ) -> None:
        """Attention of the decode rows, into the same rows of `out`."""

    def prefill(
        self, layer: int, qkv: torch.Tensor, span: PrefillSpan, window: int, out: torch.Tensor
    ) -> None:
        """Attention of one prefill span, into its rows of `out`."""


class CpuAttention:
    """Attention over a pool's memory, for a model with `heads` query heads.

    `alone` is the number of queries from which on a shared run is read together (`CROSSOVER_QUERIES`); 0: always.

    Raises:
        ValueError: the pool is not float32, the only type of these kernels, or its slabs are not contiguous.
    """

    def __init__(self, layout: KvLayout, data: torch.Tensor, heads: int) -> None:
        if data.dtype != torch.float32 or not data[0].is_contiguous():
            raise ValueError(f"CPU attention needs a contiguous float32 pool, not {data.dtype}")
        self.layout, self.data, self.heads = layout, data, heads
        # Slabs may lie further apart than they are long.
        self.slab_floats = data.stride(0)
        self.flat: Floats = data.as_strided((self.slab_floats * len(data),), (1,)).numpy()
        self.layer_floats = layout.layer_bytes // layout.itemsize
        self.write_kernel = build_write_kernel(layout.head_dim)
        self.decode_kernel = build_decode_kernel(layout.head_dim)
        self.shared_kernel = build_shared_prefix_kernel(layout.head_dim)
        self._span = build_prefill_kernel(layout.head_dim)
        self.alone = crossover_queries(heads // layout.kv_heads)

    def write(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, rotary: tuple[Floats, Floats],
        norms: tuple[Floats, Floats], eps: float,
    ) -> None:  # fmt: skip
        """Normalise (with the norms of queries and keys, unless empty) and rotate `qkv` in place; store keys and
        values.

        qkv: [rows, (heads + 2 * kv_heads) * head_dim]. rotary: cosines and sines, [positions, head_dim / 2].
        """
        self.write_kernel(
            qkv.numpy(), batch.positions, batch.slots, *rotary, *norms, eps,
            self.flat, self.slab_floats, layer * self.layer_floats, self.heads, self.layout.kv_heads,
        )  # fmt: skip

    def decode(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, window: int, out: torch.Tensor
    ) -> None:
        """Attention of the decode rows over their pages, into the same rows of `out` [rows, heads * head_dim].

        First, chunks that enough rows share are read once for all of them; then each row reads its other chunks.
        """
        if not len(batch.rows):
            return
        plan = worthwhile_plan(batch, window, self.alone, self.heads // self.layout.kv_heads)
        tops, totals = np.empty((2, len(batch.rows), self.heads), np.float32)
        place = (self.flat, self.slab_floats, layer * self.layer_floats, self.heads, self.layout.kv_heads)
        if len(plan.runs):
            self.shared_kernel(
                qkv.numpy(), batch.rows, batch.table, plan.runs, *place, out.numpy(), tops, totals
            )
        self.decode_kernel(
            qkv.numpy(), batch.rows, batch.lengths, batch.table, plan.shared, tops, totals, *place, window,
            out.numpy(),
        )  # fmt: skip

    def prefill(
        self, layer: int, qkv: torch.Tensor, span: PrefillSpan, window: int, out: torch.Tensor
    ) -> None:
        """Causal attention of one prefill span over its prefix and itself, into its rows of `out`."""
        rows = slice(span.row, span.row + span.count)
        self._span(
            qkv[rows].numpy(), span.start, span.slabs.numpy(), self.flat, self.slab_floats, layer * self.layer_floats,
            self.heads, self.layout.kv_heads, window, out[rows].numpy(),
        )  # fmt: skip
