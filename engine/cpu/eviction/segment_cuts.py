"""Cuts what heads keep of a prompt into segments and a bag (`kvcache.eviction.kept_segments`).

Rows of codes that are taken apart may have outliers, which are counted only when they are packed. So a segment is made
as long as it could be without any, and loses chunks until it fits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import SEGMENT_SLABS
from engine.cpu.eviction.decision import ColumnSource, HeadColumns
from engine.cpu.eviction.ragged_attention import KeptStore
from kvcache.eviction.kept_rows import FRAME_TOKENS, FrameFormat, KeptRows, count_bag_slabs
from kvcache.eviction.kept_segments import DIGEST_BYTES, KeptSegment
from kvcache.layout import KvLayout

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
# A map, and the frames that it begins, [frames, frame_bytes].
PackedRows = tuple[KeptRows, Bytes]


def describe_segment(kept: KeptRows) -> KeptSegment:
    """The segment with a map, which says which rows are in it, and where."""
    digest = hashlib.blake2b(kept.encode(), digest_size=DIGEST_BYTES).digest()
    return KeptSegment(kept.length // CHUNK_TOKENS, kept.num_slabs, digest)


class RowCutter:
    """Packs kept rows of a pool, in segments and one bag.

    Args:
        layout: of the pool.
        store: moves its rows.
    """

    def __init__(self, layout: KvLayout, store: KeptStore) -> None:
        self._layout, self._store = layout, store

    def pack_rows(
        self,
        policies: NDArray[np.uint8],
        heads: Sequence[HeadColumns],
        source: ColumnSource,
        begin: int,
        end: int,
    ) -> PackedRows:
        """The rows that heads keep of positions `begin` to `end` - 1, those of layer 0 first.

        Args:
            policies: [layers, kv_heads].
            heads: all that they keep.
            source: what the columns were found in.
        """
        mine = [one.select((one.positions >= begin) & (one.positions < end)) for one in heads]
        positions = [one.positions.astype(np.int32) for one in mine]
        kept = KeptRows.from_heads(self._layout, begin, end, policies, positions)
        return self._store.pack_frames(kept, mine, source)

    def cut_segments(
        self,
        policies: NDArray[np.uint8],
        heads: Sequence[HeadColumns],
        source: ColumnSource,
        first: int,
        last: int,
    ) -> list[PackedRows]:
        """The segments of the chunks `first` to `last` - 1; arguments are those of `pack_rows`. Chunks are left if a
        segment of them would save nothing.
        """
        segments, sizes = list[PackedRows](), _ChunkSizes(self._layout, heads, first, last)
        while first < last:
            end = first
            while end < last and sizes.count_slabs(first, end + 1) <= SEGMENT_SLABS:
                end += 1
            packed = self.pack_rows(policies, heads, source, first * CHUNK_TOKENS, end * CHUNK_TOKENS)
            while packed[0].num_slabs > SEGMENT_SLABS:
                end -= 1
                packed = self.pack_rows(policies, heads, source, first * CHUNK_TOKENS, end * CHUNK_TOKENS)
            if end - first <= packed[0].num_slabs:
                break
            segments.append(packed)
            first = end
        return segments


class _ChunkSizes:
    """What the kept rows of the chunks `first` to `last` - 1 need of frames, outliers aside."""

    def __init__(self, layout: KvLayout, heads: Sequence[HeadColumns], first: int, last: int) -> None:
        self._layout, self._form, self._first = layout, FrameFormat.of_layout(layout), first
        edges = np.arange(first, last + 1) * CHUNK_TOKENS
        # [heads, chunks + 1]: rows before each chunk.
        self._rows: Ints = np.stack([np.searchsorted(one.positions, edges) for one in heads])
        # [chunks + 1]: tokens of all pages before each chunk, each page's counted alone.
        self._tokens = np.zeros(len(edges), np.int64)
        for page in range(0, len(heads) if self._form.is_split else 0, layout.page_heads):
            kept = np.unique(
                np.concatenate([one.positions for one in heads[page : page + layout.page_heads]])
            )
            self._tokens += np.searchsorted(kept, edges)

    def count_slabs(self, first: int, end: int) -> int:
        """The slabs that the chunks `first` to `end` - 1 need at least."""
        a, b = first - self._first, end - self._first
        frames = int((-(-(self._rows[:, b] - self._rows[:, a]) // FRAME_TOKENS)).sum())
        if self._form.is_split:
            frames += self._form.table_frames(int(self._tokens[b] - self._tokens[a]))
        return count_bag_slabs(self._layout, first * CHUNK_TOKENS, end * CHUNK_TOKENS, frames)
