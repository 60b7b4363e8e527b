"""Attention of decode rows whose heads keep different tokens, on the CPU: after eviction
(`engine.cpu.eviction.evictor`).

Such a row reads its segments, if it has any (`engine.cpu.eviction.segment_kernels`), then the whole chunks that no
head evicts from, then the frames of its head (`kvcache.eviction.kept_rows`), then the newest tokens. These are in the
ring: one ordinary slab, in which position p is row p % 64.

    row ──▶ segment · segment · ... │ chunk 0 · chunk 1 · ... │ frame · frame · ... (per head) │ ring

Segments that enough rows share are read once for all of them, so there a row's result may differ by rounding with the
rows beside it. All else of a row is computed alone, with the kernels of `engine.cpu.attention`: without segments, a
block of rows of one sequence gives the same bits as one row per step. Whole chunks that several rows share are read
once per row for that reason.

Keys and values are written as for any row: the ring is the slab of a row's token. `RaggedAttention` also records the
queries from which the next eviction is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numba.misc.special import literally
from numpy.typing import NDArray

from engine.batching.batch import ForwardBatch, PrefillSpan
from engine.batching.prefix_plan import SharingPrice
from engine.cpu.attention import PAGE, CpuAttention, PagedAttention, mix_values, score_page, softmax_page
from engine.cpu.eviction.decision import ROWS_PER_FRAME, BagColumns, ChunkColumns, ColumnSource, HeadColumns
from engine.cpu.eviction.evicted_works import EvictedWork, KeptBag, SegmentRows, pad_table
from engine.cpu.eviction.row_kernels import copy_rows, list_copy_kernels
from engine.cpu.eviction.segment_kernels import (
    FRAME,
    add_piece,
    attend_frames,
    build_segment_kernel,
    clear_state,
    hold_frames,
)
from engine.cpu.eviction.step_records import StepRecord
from engine.cpu.jit import LOG2_E, LOWEST, jit, jit_inner
from engine.cpu.simd import LANES
from kvcache.eviction.kept_rows import KeptRows
from kvcache.pool import KvPool

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class KeptStore(Protocol):
    """How the rows of a pool are found, moved into frames, and attended to there. Slabs are those of the pool."""

    def open_bag(self, kept: KeptRows, slabs: Sequence[int]) -> KeptBag:
        """The bag in `slabs`."""

    def prompt_columns(self, slabs: Sequence[int], length: int, sink: int) -> ColumnSource:
        """The columns of a prompt in whole chunks, whose first token is at `sink` among the sinks."""

    def answer_columns(self, bag: KeptBag, chunks: Sequence[int], ring: int, sink: int) -> ColumnSource:
        """The columns of an evicted sequence: those of `chunks`, of its bag, and of a ring full of new tokens.

        Those of segments are left out: they are not decided about again.
        """

    def pack_frames(
        self, kept_rows: KeptRows, heads: Sequence[HeadColumns], source: ColumnSource
    ) -> tuple[KeptRows, Bytes]:
        """The map of a bag, and its frames, [frames, frame_bytes]: that map, and a copy of the rows of each head.

        `source` is what the columns of the heads, those of layer 0 first, were found in.
        """

    def list_kernels(self, segments: bool) -> list[Any]:
        """The kernels that work with evicted sequences only; those of segments if there may be any."""

    def attend_to(self, evicted: Sequence[EvictedWork], records: Sequence[StepRecord]) -> PagedAttention:
        """The attention of a step in which sequences are evicted, or their queries recorded."""


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The ragged decode rows of a step, and the bags of the sequences that they belong to.

    A row may attend to the kept rows of its sequence from `skips` on, and to the ring from position `starts` on.
    """

    # [rows]: indices of the rows in the step, and the positions of their tokens.
    rows: Ints
    positions: Ints
    # [rows]: the sequence of each row; all below with [sequences] are indexed by it.
    owners: Ints
    # [sequences]: number of tokens at the last decision point, of whole chunks before the frames, and the ring's slab.
    starts: Ints
    prefixes: Ints
    rings: Ints
    # [sequences, max]: slabs of the whole chunks, and of the bag, padded with 0.
    chunks: Ints
    bags: Ints
    # By layer first, so that those of one layer are contiguous: the kernel is compiled for such arrays.
    # [layers, sequences, kv_heads]: number of kept rows, and the first frame that they are in.
    counts: Ints
    frames: Ints
    # [layers, rows, kv_heads]: kept rows that are before the layer's sliding window; 0 without a window.
    skips: Ints


@jit_inner
def _attend_chunks(
    q: Any, begin: Any, chunks: Any, count: Any, top: Any, total: Any, acc: Any, s: Any,
    pool: Any, slab: int, place: Any, width: int,
) -> None:  # fmt: skip
    """Add the first `count` chunks of one KV head, from position `begin` on; its pages are at `place` of a slab."""
    literally(width)
    page, group = PAGE * width, top.shape[0]
    for c in range(begin // PAGE, count):
        first, at = max(0, begin - c * PAGE), chunks[c] * slab + place
        score_page(q, pool[at : at + page], s, group, width)
        softmax_page(s, top, total, acc, first, PAGE, width)
        mix_values(s, pool[at + page : at + 2 * page], acc, group, first, PAGE, width)


@jit_inner
def attend_ring(
    q: Any, first: Any, count: Any, ring: Any, top: Any, total: Any, acc: Any, s: Any, pool: Any, width: int
) -> None:
    """Add `count` tokens of the ring's page at `ring`, from row `first` on; after row 63 comes row 0."""
    literally(width)
    page, group = PAGE * width, top.shape[0]
    value = pool[ring + page : ring + 2 * page]
    score_page(q, pool[ring : ring + page], s, group, width)
    if first + count <= PAGE:
        softmax_page(s, top, total, acc, first, first + count, width)
        mix_values(s, value, acc, group, first, first + count, width)
        return
    wrapped = first + count - PAGE
    for g in range(group):
        s[g * PAGE + wrapped : g * PAGE + first] = LOWEST
    softmax_page(s, top, total, acc, 0, PAGE, width)
    mix_values(s, value, acc, group, 0, wrapped, width)
    mix_values(s, value, acc, group, first, PAGE, width)


@jit_inner
def _attend_with_segments(
    q: Any, numbers: Any, head: Any, segments: Any, line: Any, held: Any, top: Any, total: Any, acc: Any, s: Any,
    pool: Any, slab: int, width: int,
) -> None:  # fmt: skip
    """Add the kept rows of one KV head in some segments, and in the bag, whose rows, first frame and slabs are `line`.

    Models with segments have no sliding windows, so nothing is skipped.
    """
    literally(width)
    (slabs, counts, frames), (rows, frame, bag), there = segments, line, 0
    for m in range(numbers.shape[0]):
        r = numbers[m]
        there = hold_frames(
            q, counts[r, head], frames[r, head], slabs[r], held, there, top, total, acc, s, pool, slab, width
        )
    there = hold_frames(q, rows, frame, bag, held, there, top, total, acc, s, pool, slab, width)
    if there > 0:
        add_piece(held, there, top, total, acc, s, pool, width)


@cache
def build_ragged_kernel(width: int) -> Callable[..., None]:
    """The decode kernel for ragged rows of one head dimension; `RaggedAttention.decode` calls it.

    Arrays are those of `RaggedRows` and `SegmentRows`; those by layer are of one layer. `state` and the rows of `out`
    have what came before, as `engine.cpu.eviction.segment_kernels.clear_state` makes it, or the kernel of segments
    leaves it.
    """

    @jit
    def run(
        qkv: Any, rows: Any, positions: Any, owners: Any, starts: Any, prefixes: Any, rings: Any, chunks: Any,
        bags: Any, counts: Any, frames: Any, skips: Any, pool: Any, slab: int, offset: int,
        heads: int, kv_heads: int, window: int, alone: Any, segments: Any, state: Any, out: Any,
    ) -> None:  # fmt: skip
        scale = np.float32(LOG2_E / np.sqrt(np.float32(width)))
        group, (tops, totals), (numbers, counts_alone) = heads // kv_heads, state, alone
        held = np.empty(PAGE // FRAME, np.int64), np.empty(PAGE // FRAME, np.int64)
        q, s = np.empty(group * width, np.float32), np.empty(group * PAGE, np.float32)
        for n in range(rows.shape[0]):
            o, length = owners[n], positions[n] + 1
            begin = max(0, length - window) if window > 0 else 0
            newest = max(starts[o], begin)
            for h in range(kv_heads):
                at, place = h * group * width, offset + h * 2 * PAGE * width
                for i in range(group * width):
                    q[i] = qkv[rows[n], at + i] * scale
                acc = out[rows[n], at : at + group * width]
                top, total = tops[n, h * group : (h + 1) * group], totals[n, h * group : (h + 1) * group]
                _attend_chunks(q, begin, chunks[o], prefixes[o], top, total, acc, s, pool, slab, place, width)
                line = counts[o, h], frames[o, h], bags[o]
                if counts_alone[o] == 0:
                    attend_frames(
                        q, skips[n, h], line[0], line[1], line[2], top, total, acc, s, pool, slab, width
                    )
                else:
                    mine = numbers[o, : counts_alone[o]]
                    _attend_with_segments(
                        q, mine, h, segments, line, held, top, total, acc, s, pool, slab, width
                    )
                ring = rings[o] * slab + place
                attend_ring(q, newest % PAGE, length - newest, ring, top, total, acc, s, pool, width)
                for g in range(group):
                    share = np.float32(1) / total[g]
                    for i in range(width):
                        acc[g * width + i] *= share

    return run


class RawStore:
    """`KeptStore` of a raw pool, with its attention and the sliding window of each layer (0: none)."""

    def __init__(self, pool: KvPool, attention: CpuAttention, windows: Sequence[int]) -> None:
        self._layout, self._attention, self._windows = pool.layout, attention, list(windows)
        # [rows, head_dim]: every key and value of the pool.
        self._rows = pool.data.view(-1, self._layout.head_dim).numpy()

    def open_bag(self, kept: KeptRows, slabs: Sequence[int]) -> KeptBag:
        """As `KeptStore.open_bag`."""
        return KeptBag(kept, list(slabs))

    def prompt_columns(self, slabs: Sequence[int], length: int, sink: int) -> ColumnSource:
        """As `KeptStore.prompt_columns`."""
        return ChunkColumns.of_prompt(self._layout, self._rows, slabs, length)

    def answer_columns(self, bag: KeptBag, chunks: Sequence[int], ring: int, sink: int) -> ColumnSource:
        """As `KeptStore.answer_columns`."""
        newest = np.arange(bag.kept.length, bag.kept.length + PAGE)
        prefix = ChunkColumns.of_prompt(self._layout, self._rows, chunks, len(chunks) * PAGE)
        last = ChunkColumns(self._layout, self._rows, np.full(PAGE, ring, np.int64), newest)
        return BagColumns(prefix, bag.kept, bag.slabs, last)

    def pack_frames(
        self, kept_rows: KeptRows, heads: Sequence[HeadColumns], source: ColumnSource
    ) -> tuple[KeptRows, Bytes]:
        """As `KeptStore.pack_frames`."""
        scratch = np.zeros((kept_rows.num_frames * ROWS_PER_FRAME, self._layout.head_dim), np.float32)
        frames = scratch.view(np.uint8).reshape(kept_rows.num_frames, -1)
        frames[: kept_rows.lead].reshape(-1)[:] = np.frombuffer(kept_rows.encode(), np.uint8)
        for first, columns in zip(kept_rows.first_frames.reshape(-1).tolist(), heads, strict=True):
            copy_rows(self._rows, columns.places, first, scratch)
        return kept_rows, frames

    def list_kernels(self, segments: bool) -> list[Any]:
        """As `KeptStore.list_kernels`."""
        more = [build_segment_kernel(self._layout.head_dim)] if segments else []
        width = self._layout.head_dim
        return [build_ragged_kernel(width), *list_copy_kernels(width), *more]

    def attend_to(self, evicted: Sequence[EvictedWork], records: Sequence[StepRecord]) -> PagedAttention:
        """As `KeptStore.attend_to`."""
        if not evicted:
            return RaggedAttention(self._attention, None, None, records)
        group = self._attention.heads // self._layout.kv_heads
        price = SharingPrice(self._attention.alone, group, LANES)
        segments = SegmentRows.of_works(evicted, self._layout, price)
        return RaggedAttention(self._attention, self._pack_rows(evicted), segments, records)

    def _pack_rows(self, evicted: Sequence[EvictedWork]) -> RaggedRows:
        """The ragged rows of a step."""
        bags = [work.bag for work in evicted]
        return RaggedRows(
            rows=np.concatenate([work.rows for work in evicted]),
            positions=np.concatenate([work.positions for work in evicted]),
            owners=np.repeat(np.arange(len(evicted)), [len(work.work.tokens) for work in evicted]),
            starts=np.array([bag.kept.length for bag in bags], np.int64),
            prefixes=np.array([len(work.chunks) for work in evicted], np.int64),
            rings=np.array([work.ring for work in evicted], np.int64),
            chunks=pad_table([work.chunks for work in evicted]),
            bags=pad_table([bag.slabs for bag in bags]),
            counts=np.stack([bag.counts for bag in bags], axis=1),
            frames=np.stack([bag.frames for bag in bags], axis=1),
            skips=np.ascontiguousarray(
                np.concatenate([work.count_skipped(self._windows) for work in evicted]).swapaxes(0, 1)
            ),
        )


class RaggedAttention:
    """Attention of a step with sequences whose KV is evicted: `attention` for the ordinary rows, and the ragged rows.

    It is made for one step. `records` say which queries the step records.
    """

    def __init__(
        self,
        attention: CpuAttention,
        ragged: RaggedRows | None,
        segments: SegmentRows | None,
        records: Sequence[StepRecord],
    ) -> None:
        self._attention, self._ragged, self._records = attention, ragged, list(records)
        self._segments, width = segments, attention.layout.head_dim
        self._kernel, self._read_segments = build_ragged_kernel(width), build_segment_kernel(width)

    def write(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, rotary: tuple[Floats, Floats],
        norms: tuple[Floats, Floats], eps: float,
    ) -> None:  # fmt: skip
        """As `CpuAttention.write`; the queries that a decision needs are recorded."""
        self._attention.write(layer, qkv, batch, rotary, norms, eps)
        for record in self._records:
            record.store(layer, qkv.numpy())

    def decode(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, window: int, out: torch.Tensor
    ) -> None:
        """Attention of the decode rows, and of the ragged rows, into the same rows of `out`."""
        self._attention.decode(layer, qkv, batch, window, out)
        if self._ragged is None or self._segments is None:
            return
        one, layout, itemsize = self._ragged, self._attention.layout, self._attention.layout.itemsize
        pool, slab, heads = (
            self._attention.data.view(-1).numpy(),
            layout.chunk_bytes // itemsize,
            self._attention.heads,
        )
        state = clear_state(one.rows, heads, out.numpy())
        segments, tables = self._segments, self._segments.of_layer(layer)
        if len(segments.runs):
            self._read_segments(
                qkv.numpy(), one.rows, segments.members, segments.bounds, segments.runs, tables, pool, slab, heads,
                layout.kv_heads, state, out.numpy(),
            )  # fmt: skip
        self._kernel(
            qkv.numpy(), one.rows, one.positions, one.owners, one.starts, one.prefixes, one.rings, one.chunks,
            one.bags, one.counts[layer], one.frames[layer], one.skips[layer], pool, slab,
            layer * layout.layer_bytes // itemsize, heads, layout.kv_heads, window,
            (segments.alone, segments.counts_alone), tables, state, out.numpy(),
        )  # fmt: skip

    def prefill(
        self, layer: int, qkv: torch.Tensor, span: PrefillSpan, window: int, out: torch.Tensor
    ) -> None:
        """As `CpuAttention.prefill`."""
        self._attention.prefill(layer, qkv, span, window, out)
