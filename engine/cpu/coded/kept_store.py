"""How kept rows of a pool with a codec are found, moved and attended to
(`engine.cpu.eviction.ragged_attention.KeptStore`).

Rows are moved as codes (`kvcache.eviction.coded_frames`), and decisions and attention see what they expand to. So a
row has the same numbers in its page and in a frame, to the bit, and the first token stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.batching.batch import ForwardBatch, PrefillSpan
from engine.cpu.attention import PagedAttention
from engine.cpu.coded.compiled_attention import CompiledAttention
from engine.cpu.eviction.decision import ColumnSource, HeadColumns
from engine.cpu.eviction.evicted_works import EvictedWork, KeptBag, group_segments
from engine.cpu.eviction.segment_kernels import clear_state
from engine.cpu.eviction.step_records import StepRecord
from kvcache.eviction.coded_frames import HeadRows, RowMover
from kvcache.eviction.kept_rows import KeptRows
from kvcache.pool import KvPool

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class CodedColumns:
    """The columns of a sequence in a coded pool: whole chunks, and after eviction kept rows and a ring of new tokens.

    A column's place is its number in the chunks, or behind them in the bag, or behind that in the ring.

    Args:
        pages: the pool's attention.
        mover: of the pool.
        chunks: slabs of the whole chunks.
        length: tokens in them.
        sink: place of the first token among the sinks.
        bag: the kept rows; None at the end of the prompt, without a ring.
        ring: the slab of the tokens since the last decision.
    """

    def __init__(
        self, attention: CompiledAttention, mover: RowMover, chunks: Sequence[int], length: int, sink: int,
        bag: KeptBag | None = None, ring: int = 0,
    ) -> None:  # fmt: skip
        self._attention, self._mover, self._sink = attention, mover, sink
        self._chunks, self._length = np.asarray(chunks, np.int64), length
        self._bag, self._ring = bag, ring
        first = length if bag is None else bag.kept.length
        self._newest = np.arange(first, first if bag is None else first + CHUNK_TOKENS)
        # The layer whose rows in chunks and ring are expanded, and these keys and values, [2, columns, kv_heads,
        # head_dim].
        self._layer, self._rows = -1, (np.empty(0, np.float32),) * 2

    def find_columns(self, layer: int, head: int) -> HeadColumns:
        """The columns of one KV head."""
        kept = np.empty(0, np.int64)
        if self._bag is not None:
            kept = self._bag.kept.head_positions(layer, head).astype(np.int64)
        positions = np.concatenate([np.arange(self._length), kept, self._newest])
        return HeadColumns(positions, np.arange(len(positions)))

    def read_keys(self, layer: int, head: int, columns: HeadColumns) -> Floats:
        """The keys of all columns of one KV head, expanded and rotated."""
        return self._read_side(0, layer, head)

    def read_rows(self, layer: int, head: int, columns: HeadColumns) -> tuple[Floats, Floats]:
        """The keys and values of some columns of one KV head, expanded and rotated."""
        keys, values = (self._read_side(side, layer, head)[columns.places] for side in range(2))
        return keys, values

    def _read_side(self, side: int, layer: int, head: int) -> Floats:
        """The keys (0) or values (1) of all columns of one KV head."""
        if self._layer != layer:
            self._rows, self._layer = self._expand_layer(layer), layer
        prefix, newest = (rows[side, :, head] for rows in self._rows)
        if self._bag is None:
            return np.ascontiguousarray(prefix)
        kept = self._attention.expand_kept(layer, head, self._bag, self._sink)[:, side]
        return np.concatenate([prefix, kept, newest])

    def read_codes(self, layer: int, head: int, places: Ints) -> HeadRows:
        """Codes of columns behind the chunks that no head evicts from, or of a prompt."""
        if self._bag is None:
            return self._mover.read_pages(
                layer, head, self._chunks[places // CHUNK_TOKENS], places % CHUNK_TOKENS
            )
        bag, places = self._bag, places - self._length
        count = int(bag.counts[layer, head])
        slabs = np.asarray(bag.slabs, np.int64)
        kept = self._mover.read_frames(bag.kept, slabs, layer, head, bag.tokens)
        newest = self._newest[places[places >= count] - count] % CHUNK_TOKENS
        ring = np.full(len(newest), self._ring, np.int64)
        new = self._mover.read_pages(layer, head, ring, newest)
        return HeadRows.join([kept.select(places[places < count]), new])

    def _expand_layer(self, layer: int) -> tuple[Floats, Floats]:
        """Rows of the chunks and of the ring, [2, columns, kv_heads, head_dim]."""
        chunks = _rows_of(self._attention.expand_chunks(layer, self._chunks, 0, self._length, self._sink))
        prefix = chunks.reshape(2, -1, *chunks.shape[3:])[:, : self._length]
        if self._bag is None:
            return prefix, prefix[:, :0]
        # The ring has the end of one chunk of positions, and the beginning of the next.
        first, ring = int(self._newest[0]), np.array([self._ring])
        chunk, end = first // CHUNK_TOKENS, first + CHUNK_TOKENS
        both = [
            _rows_of(self._attention.expand_chunks(layer, ring, chunk + n, end, self._sink))[:, 0]
            for n in range(2)
        ]
        split = first % CHUNK_TOKENS
        return prefix, np.concatenate([both[0][:, split:], both[1][:, :split]], axis=1)


class CodedStore:
    """`KeptStore` of a pool with a codec, with its attention and the sliding window of each layer (0: none)."""

    def __init__(self, pool: KvPool, attention: CompiledAttention, windows: Sequence[int]) -> None:
        self._attention, self._windows = attention, list(windows)
        memory = pool.data.view(-1).numpy().reshape(pool.num_slabs, -1)
        self._mover = RowMover(pool.layout, memory, attention.first_codec)

    def open_bag(self, kept: KeptRows, slabs: Sequence[int]) -> KeptBag:
        """As `KeptStore.open_bag`."""
        return KeptBag(kept, list(slabs), kept.number_tokens())

    def prompt_columns(self, slabs: Sequence[int], length: int, sink: int) -> CodedColumns:
        """As `KeptStore.prompt_columns`."""
        return CodedColumns(self._attention, self._mover, slabs, length, sink)

    def answer_columns(self, bag: KeptBag, chunks: Sequence[int], ring: int, sink: int) -> CodedColumns:
        """As `KeptStore.answer_columns`."""
        length = len(chunks) * CHUNK_TOKENS
        return CodedColumns(self._attention, self._mover, chunks, length, sink, bag, ring)

    def pack_frames(
        self, kept_rows: KeptRows, heads: Sequence[HeadColumns], source: ColumnSource
    ) -> tuple[KeptRows, Bytes]:
        """As `KeptStore.pack_frames`."""
        assert isinstance(source, CodedColumns)
        places = np.ndindex(kept_rows.counts.shape)
        rows = [
            source.read_codes(layer, head, columns.places)
            for (layer, head), columns in zip(places, heads, strict=True)
        ]
        return self._mover.pack_frames(kept_rows, rows)

    def list_kernels(self, segments: bool) -> list[Any]:
        """As `KeptStore.list_kernels`."""
        return self._attention.list_kept_kernels(segments)

    def attend_to(self, evicted: Sequence[EvictedWork], records: Sequence[StepRecord]) -> PagedAttention:
        """As `KeptStore.attend_to`."""
        return RaggedCodes(self._attention, evicted, records, self._windows)


class RaggedCodes:
    """Attention of a step with evicted sequences: `attention` for the ordinary rows, and these sequences' rows."""

    def __init__(
        self,
        attention: CompiledAttention,
        evicted: Sequence[EvictedWork],
        records: Sequence[StepRecord],
        windows: Sequence[int],
    ) -> None:
        self._attention, self._evicted, self._records = attention, list(evicted), list(records)
        self._skips = [work.count_skipped(windows) for work in evicted]
        self._groups = group_segments(evicted)

    def write(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, rotary: tuple[Floats, Floats],
        norms: tuple[Floats, Floats], eps: float,
    ) -> None:  # fmt: skip
        """As `CompiledAttention.write`; the queries that a decision needs are recorded."""
        self._attention.write(layer, qkv, batch, rotary, norms, eps)
        for record in self._records:
            record.store(layer, qkv.numpy())

    def decode(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, window: int, out: torch.Tensor
    ) -> None:
        """Attention of the decode rows, and of the rows of evicted sequences, into the same rows of `out`."""
        self._attention.decode(layer, qkv, batch, window, out)
        if not self._evicted:
            return
        all_rows = np.concatenate([work.rows for work in self._evicted])
        tops, totals = clear_state(all_rows, self._attention.heads, out.numpy())
        for group in self._groups:
            members = group.members
            state = tops[members], totals[members]
            self._attention.add_segments(layer, qkv, all_rows[members], group, state, out)
            tops[members], totals[members] = state
        done = 0
        for work, skips in zip(self._evicted, self._skips, strict=True):
            rows: Any = (work.rows, work.positions, np.ascontiguousarray(skips[:, layer]))
            mine = slice(done, done + len(skips))
            self._attention.attend_kept(layer, qkv, rows, work, window, (tops[mine], totals[mine]), out)
            done += len(skips)

    def prefill(
        self, layer: int, qkv: torch.Tensor, span: PrefillSpan, window: int, out: torch.Tensor
    ) -> None:
        """As `CompiledAttention.prefill`."""
        self._attention.prefill(layer, qkv, span, window, out)


def _rows_of(chunks: Floats) -> Floats:
    """Keys and values [2, chunks, 64, kv_heads, head_dim] of chunks in the layout of a raw pool."""
    return np.ascontiguousarray(chunks.transpose(2, 0, 3, 1, 4))
