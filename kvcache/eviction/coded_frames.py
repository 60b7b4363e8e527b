"""Moves coded rows from pages into the frames of a bag as they are: a reader gets the numbers that it had, to the bit.

A coded row is taken apart into what belongs to one head and what its page's heads share (`HeadRows`), selected, and
packed again (`pack_frames`). Nothing is decoded. `kvcache.eviction.kept_rows.FrameFormat` says what is in a frame.

    page of one head       the row's part of each section
    page of several heads  codes of the head | scale and zero point of the token's values | the head's outliers

An outlier whose residual is zero changes nothing, so it is left out; free slots of keys look the same. No other one is
ever lost. Codes of a head that are no whole bytes within their page's row are packed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.bit_packing import pack_codes, packed_bytes, unpack_codes
from kvcache.codecs.page import Codec
from kvcache.eviction.kept_rows import FRAME_TOKENS, FRAMES_PER_PAGE, FrameFormat, KeptRows, frames_per_slab
from kvcache.layout import KvLayout

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

# Of a page of a codec with outliers.
OUTLIER_SECTIONS = ("key places", "key residuals", "value places", "value residuals")


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Coded rows of one layer and head, one per token, in the order of their positions.

    Args:
        parts: of each section of a frame with codes, [rows, bytes].
        tokens: what the heads of a page share of each token, [rows, bytes]; no bytes where a page is one head's.
        counts: outliers of each row's key and of its value, [rows, 2].
        outliers: of all rows, those of a row's key before those of its value, [outliers, bytes].
    """

    parts: tuple[Bytes, ...]
    tokens: Bytes
    counts: Bytes
    outliers: Bytes

    def select(self, rows: Ints) -> HeadRows:
        """Some of the rows, whose numbers ascend."""
        chosen = np.zeros(len(self.counts), np.bool_)
        chosen[rows] = True
        mine = np.repeat(chosen, self.counts.sum(axis=1, dtype=np.int64))
        return HeadRows(
            tuple(part[rows] for part in self.parts),
            self.tokens[rows],
            self.counts[rows],
            self.outliers[mine],
        )

    @staticmethod
    def join(row_pieces: Sequence[HeadRows]) -> HeadRows:
        """The rows of several pieces, one after the other."""
        return HeadRows(
            tuple(
                np.concatenate(parts)
                for parts in zip(*(head_rows.parts for head_rows in row_pieces), strict=True)
            ),
            np.concatenate([head_rows.tokens for head_rows in row_pieces]),
            np.concatenate([head_rows.counts for head_rows in row_pieces]),
            np.concatenate([head_rows.outliers for head_rows in row_pieces]),
        )


class RowMover:
    """Reads coded rows of a pool, and packs them into frames.

    Args:
        layout: of the pool, with a codec.
        memory: the pool's, [slabs, chunk_bytes].
        codec: of any of its pages: all have the same sections.
    """

    def __init__(self, layout: KvLayout, memory: Bytes, codec: Codec) -> None:
        self._layout, self._memory, self._codec = layout, memory, codec
        self.form = FrameFormat.of_layout(layout)
        offsets = codec.sections.offsets
        ends = [*list(offsets.values())[1:], codec.page_bytes]
        # First byte of each section within a page, and bytes of one row.
        self._sections = {
            name: (start, (end - start) // CHUNK_TOKENS)
            for (name, start), end in zip(offsets.items(), ends, strict=True)
        }

    @property
    def frame_sections(self) -> list[tuple[int, int]]:
        """First byte within a frame, and bytes of one row, of the sections with codes."""
        if self.form.is_split:
            keys, values, _, _ = self.form.offsets
            return [(keys, self.form.code_bytes), (values, self.form.code_bytes)]
        return [(start // FRAMES_PER_PAGE, size) for start, size in self._sections.values()]

    def read_pages(self, layer: int, head: int, slabs: Ints, rows: Ints) -> HeadRows:
        """Rows of pages: of each one its slab and its row in the chunk."""
        page, place = divmod(head, self._layout.page_heads)

        def view(name: str) -> Bytes:
            start, size = self._sections[name]
            start += layer * self._layout.layer_bytes + page * self._layout.page_bytes
            section = self._memory[:, start : start + CHUNK_TOKENS * size]
            found: Bytes = section.reshape(len(section), CHUNK_TOKENS, size)[slabs, rows]
            return found

        if not self.form.is_split:
            return _plain_rows(tuple(map(view, self._sections)))
        tokens = np.concatenate([view("value scales"), view("value zeros")], axis=1)
        parts = tuple(self._cut_codes(view(f"{side} codes"), place) for side in ("key", "value"))
        rest = replace(_plain_rows(parts), tokens=tokens)
        if not self.form.slots:
            return rest
        counts, outliers = self._find_outliers([view(name) for name in OUTLIER_SECTIONS], place)
        return replace(rest, counts=counts, outliers=outliers)

    def read_frames(
        self, kept: KeptRows, slabs: Ints, layer: int, head: int, numbers: NDArray[np.int32]
    ) -> HeadRows:
        """All rows that a head keeps in the bag in `slabs`; `numbers` are those of all rows' tokens in its table.

        Raises:
            ValueError: a frame says that it has outliers beyond those of the bag, where other bytes are.
        """
        rows = int(kept.counts[layer, head])
        frames = kept.first_frame(layer, head) + np.arange(-(-rows // FRAME_TOKENS))
        data, form = self._find_frames(slabs, frames), self.form
        parts = tuple(
            data[:, start : start + FRAME_TOKENS * size].reshape(-1, size)[:rows]
            for start, size in self.frame_sections
        )
        if not form.is_split:
            return _plain_rows(parts)
        before = int(kept.counts.reshape(-1)[: layer * kept.counts.shape[1] + head].sum())
        mine = numbers[before : before + rows]
        tokens = self._find_entries(slabs, kept.table_frame, mine, form.token_bytes)
        if not form.slots:
            return replace(_plain_rows(parts), tokens=tokens)
        _, _, first, last = form.offsets
        counts = unpack_codes(data[:, first:last], form.count_bits, 2 * FRAME_TOKENS).reshape(-1, 2)[:rows]
        begin = int(np.ascontiguousarray(data[0, last:]).view("<u4")[0]) if rows else 0
        end = begin + int(counts.sum(dtype=np.int64))
        if end > kept.outliers:
            raise ValueError(f"a frame has outliers up to number {end}, and its bag {kept.outliers}")
        entries = np.arange(begin, end)
        return HeadRows(
            parts, tokens, counts, self._find_entries(slabs, kept.outlier_frame, entries, form.outlier_bytes)
        )

    def pack_frames(self, kept_rows: KeptRows, heads: Sequence[HeadRows]) -> tuple[KeptRows, Bytes]:
        """The frames of a bag, [frames, frame_bytes], and its map, which says how many outliers there are.

        Args:
            planned: the map without the number of outliers.
            heads: what each head keeps, those of layer 0 first.
        """
        form = self.form
        counts, per_page = [len(head_rows.outliers) for head_rows in heads], self._layout.page_heads
        by_page = [sum(counts[first : first + per_page]) for first in range(0, len(counts), per_page)]
        kept = replace(kept_rows, page_outliers=tuple(by_page) if form.slots else ())
        frames = np.zeros((kept.num_frames, form.frame_bytes), np.uint8)
        frames[: kept.lead].reshape(-1)[:] = np.frombuffer(kept.encode(), np.uint8)
        begin = 0
        for first, head_rows in zip(kept.first_frames.reshape(-1).tolist(), heads, strict=True):
            count = -(-len(head_rows.counts) // FRAME_TOKENS)
            mine = frames[first : first + count]
            for (start, size), part in zip(self.frame_sections, head_rows.parts, strict=True):
                mine[:, start : start + FRAME_TOKENS * size] = _in_frames(part, count)
            if form.slots:
                self._pack_counts(mine, head_rows, begin)
                begin += len(head_rows.outliers)
        if form.is_split:
            self._pack_tokens(frames[kept.table_frame : kept.outlier_frame], kept, heads)
            if kept.outliers:
                entries = np.concatenate(
                    [head_rows.outliers for head_rows in heads if len(head_rows.outliers)]
                )
                fill_entries(frames[kept.outlier_frame :], np.arange(len(entries)), entries)
        return kept, frames

    def _cut_codes(self, rows: Bytes, place: int) -> Bytes:
        """Codes of head number `place` of a page, from rows of all its heads."""
        width, heads = self._layout.head_dim, self._layout.page_heads
        bits = self._codec.codec_id.code_bits[0]
        if heads == 1:
            return rows
        if width * bits % 8 == 0:
            size = packed_bytes(width, bits)
            return np.ascontiguousarray(rows[:, place * size : (place + 1) * size])
        codes = unpack_codes(rows, bits, heads * width)
        return pack_codes(np.ascontiguousarray(codes[:, place * width : (place + 1) * width]), bits)

    def _find_outliers(self, sections: Sequence[Bytes], place: int) -> tuple[Bytes, Bytes]:
        """The numbers of outliers of one head, [rows, 2], and the outliers, from the sections of its page's rows."""
        width, form = self._layout.head_dim, self.form
        index = "<u1" if sections[0].shape[1] == form.slots else "<u2"
        places = np.concatenate([sections[side].view(index) for side in (0, 2)], axis=1).astype(np.int64)
        residuals = np.concatenate([sections[side].view("<u2") for side in (1, 3)], axis=1)
        mine = (places // width == place) & (residuals & 0x7FFF != 0)
        counts = mine.reshape(len(mine), 2, form.slots).sum(axis=2).astype(np.uint8)
        kind = "<u1" if form.outlier_bytes == 3 else "<u2"
        where = (places[mine] % width).astype(kind).view(np.uint8).reshape(-1, form.outlier_bytes - 2)
        return counts, np.concatenate([where, residuals[mine].view(np.uint8).reshape(-1, 2)], axis=1)

    def _find_frames(self, slabs: Ints, frames: Ints) -> Bytes:
        """[frames, frame_bytes], copied."""
        per_slab, size = frames_per_slab(self._layout), self.form.frame_bytes
        view = self._memory[:, : per_slab * size].reshape(len(self._memory), per_slab, size)
        found: Bytes = view[slabs[frames // per_slab], frames % per_slab]
        return found

    def _find_entries(self, slabs: Ints, first: int, numbers: NDArray[Any], size: int) -> Bytes:
        """Entries of a table, or list, that begins at frame `first` of a bag, [entries, size]."""
        per_slab, per_frame = frames_per_slab(self._layout), self.form.frame_bytes // size
        frames = first + numbers // per_frame
        # Only the frames that are needed are copied, each once.
        needed, which = np.unique(frames, return_inverse=True)
        if len(needed) and needed[-1] >= per_slab * len(slabs):
            raise ValueError(f"entry {numbers.max()} is beyond a bag of {len(slabs)} slabs")
        data = self._find_frames(slabs, needed)[:, : per_frame * size].reshape(-1, per_frame, size)
        found: Bytes = data[which, numbers % per_frame]
        return found

    def _pack_counts(self, frames: Bytes, head_rows: HeadRows, begin: int) -> None:
        """Fill in the numbers of outliers of a head's frames, whose first outlier is number `begin`."""
        _, _, first, last = self.form.offsets
        counts = _in_frames(head_rows.counts, len(frames))
        frames[:, first:last] = pack_codes(counts, self.form.count_bits)
        sums = counts.sum(axis=1, dtype=np.int64)
        starts = begin + np.cumsum(sums) - sums
        frames[:, last:] = starts.astype("<u4").view(np.uint8).reshape(-1, 4)

    def _pack_tokens(self, frames: Bytes, kept: KeptRows, heads: Sequence[HeadRows]) -> None:
        """Fill in the table of tokens. Heads of a page have the same entry of a token."""
        fill_entries(frames, kept.number_tokens(), np.concatenate([head_rows.tokens for head_rows in heads]))


def _plain_rows(parts: tuple[Bytes, ...]) -> HeadRows:
    """Rows that share nothing with other heads, and have no outliers."""
    rows, none = len(parts[0]), np.empty((0, 0), np.uint8)
    return HeadRows(parts, np.empty((rows, 0), np.uint8), np.zeros((rows, 2), np.uint8), none)


def _in_frames(rows: Bytes, frames: int) -> Bytes:
    """Rows [rows, bytes] as [frames, 16 · bytes], filled up with zeros."""
    full = np.zeros((frames * FRAME_TOKENS, rows.shape[1]), np.uint8)
    full[: len(rows)] = rows
    return full.reshape(frames, FRAME_TOKENS * rows.shape[1])


def read_entries(frames: Bytes, size: int, count: int) -> Bytes:
    """The first `count` entries, of `size` bytes each, of a table, or list, from its frames."""
    per_frame = frames.shape[1] // size
    return frames[:, : per_frame * size].reshape(-1, size)[:count]


def fill_entries(frames: Bytes, numbers: NDArray[Any], entries: Bytes) -> None:
    """Put entries of a table, or list, into its frames."""
    if not len(entries):
        return
    per_frame = frames.shape[1] // entries.shape[1]
    flat = np.zeros((len(frames) * per_frame, entries.shape[1]), np.uint8)
    flat[numbers] = entries
    frames[:, : per_frame * entries.shape[1]] = flat.reshape(len(frames), -1)
