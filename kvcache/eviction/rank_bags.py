"""The bags of a worker with several ranks: each rank has one for its layers and heads, with a map of its own.

All ranks' bags are in the same slabs of a sequence, each in its rank's part of them. So the rank that needs the most
slabs says how many the sequence takes. What a head keeps does not depend on the ranks: the maps of any split say the
same of each head, and can be put together and cut again.

No rank has a part of a page alone, so a bag can be taken apart by page, and packed again for other ranks (`PagePart`):

    bag    map | head 0 | head 1 | head 2 | head 3 | tokens of page 0, of page 1 | outliers of page 0, of page 1
    parts       head 0, head 1, tokens and outliers of page 0     head 2, head 3, tokens and outliers of page 1

Only codecs that code several heads together have tokens and outliers behind their frames, and frames that say where
theirs begin (`kvcache.eviction.kept_rows.FrameFormat`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction.bag_sizes import BagSizes, merge_sizes, shard_heads, shard_pages
from kvcache.eviction.coded_frames import fill_entries, read_entries
from kvcache.eviction.kept_rows import FrameFormat, KeptRows, count_bag_slabs, count_frames, most_extra_slabs
from kvcache.layout import KvLayout, Shard, split_layout

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PagePart:
    """What a bag has of one page.

    Args:
        heads: frames of each of its heads, [frames, frame bytes].
        tokens: its entries in the table of tokens, [tokens, bytes].
        outliers: its entries in the list of outliers, [outliers, bytes].
        begin: the number of its first outlier in the bag, from which frames of its heads count.
    """

    heads: tuple[Bytes, ...]
    tokens: Bytes
    outliers: Bytes
    begin: int


def measure_bag(kept: KeptRows) -> BagSizes:
    """What the rows of a map need."""
    form = FrameFormat.of_layout(kept.layout)
    return BagSizes(
        tuple(count_frames(rows) for rows in kept.counts.reshape(-1).tolist()),
        kept.page_tokens if form.is_split else (),
        kept.page_outliers if form.slots else (),
    )


def count_rank_slabs(
    layout: KvLayout, shards: Sequence[Shard], boundary: int, length: int, sizes: BagSizes
) -> int:
    """The slabs of a bag on ranks with these `shards`; `boundary` and `length` are those of the map (`KeptRows`).

    Raises:
        ValueError: the sizes are not those of as many heads and pages, or a shard does not fit the layout.
    """
    form, pages = FrameFormat.of_layout(layout), layout.layers * layout.pages_per_layer
    counts = layout.layers * layout.kv_heads, pages * form.is_split, pages * (form.slots > 0)
    if tuple(map(len, sizes)) != counts:
        raise ValueError(
            f"sizes of {len(sizes.head_frames)} heads, and of the tokens and outliers of {len(sizes.page_tokens)} and"
            f" {len(sizes.page_outliers)} pages, are not those of {layout}"
        )
    needed = []
    for shard in shards:
        frames = sum(sizes.head_frames[layer * layout.kv_heads + head] for layer, head in shard_heads(shard))
        own = [layer * layout.pages_per_layer + page for layer, page in shard_pages(layout, shard)]
        if form.is_split:
            frames += form.table_frames(sum(sizes.page_tokens[page] for page in own))
        if form.slots:
            frames += form.list_frames(sum(sizes.page_outliers[page] for page in own))
        needed.append(count_bag_slabs(layout.shard_layout(shard), boundary, length, frames))
    return max(needed)


def most_rank_extra(layout: KvLayout, splits: Iterable[tuple[int, int]], tokens: int) -> int:
    """Slabs that a sequence which evicts may need beyond those of its tokens, up to `tokens`, on any of these ranks.

    `layout` is that of all ranks of a worker together; `splits` are the tensor-parallel lanes and pipeline stages of
    workers among which its bag moves. Smaller parts of a slab lose more to frames that are not full.

    Raises:
        ValueError: the layout cannot be split like this.
    """
    parts = {layout.shard_layout(shard) for split in splits for shard in split_layout(layout, *split)}
    return max(most_extra_slabs(part, tokens) for part in parts)


def merge_maps(layout: KvLayout, shards: Sequence[Shard], kept_rows: Sequence[KeptRows]) -> KeptRows:
    """The map of all heads from those of the ranks; `layout` is that of all ranks together.

    Raises:
        ValueError: the maps are of different decisions, or not of ranks with these shards.
    """
    first = kept_rows[0]
    if any((one.boundary, one.length) != (first.boundary, first.length) for one in kept_rows):
        raise ValueError("the maps of the ranks are those of different decisions")
    policies = np.zeros((layout.layers, layout.kv_heads), np.uint8)
    rows: dict[tuple[int, int], NDArray[np.int32]] = {}
    for shard, one in zip(shards, kept_rows, strict=True):
        policies[slice(*shard.layers), slice(*shard.heads)] = one.policies
        own = [one.head_positions(layer, head) for layer, head in np.ndindex(one.counts.shape)]
        rows |= dict(zip(shard_heads(shard), own, strict=True))
    outliers = merge_sizes(layout, shards, [measure_bag(one) for one in kept_rows]).page_outliers
    positions = [rows[place] for place in sorted(rows)]
    return KeptRows.from_heads(layout, first.boundary, first.length, policies, positions, outliers)


def cut_map(kept: KeptRows, shard: Shard) -> KeptRows:
    """The part of a map of all heads that is one rank's."""
    layout = kept.layout
    positions = [kept.head_positions(layer, head) for layer, head in shard_heads(shard)]
    policies = kept.policies[slice(*shard.layers), slice(*shard.heads)]
    own = shard_pages(layout, shard) if kept.page_outliers else []
    outliers = tuple(kept.page_outliers[layer * layout.pages_per_layer + page] for layer, page in own)
    part = layout.shard_layout(shard)
    return KeptRows.from_heads(part, kept.boundary, kept.length, policies, positions, outliers)


def cut_pages(kept: KeptRows, frames: Bytes) -> list[PagePart]:
    """What a bag has of each page, those of layer 0 first, without a copy of the frames of heads.

    Args:
        kept: the bag's map.
        frames: all its frames, [frames, frame bytes].
    """
    form, per_page = FrameFormat.of_layout(kept.layout), kept.layout.page_heads
    firsts = kept.first_frames.reshape(-1).tolist()
    ends = [*firsts[1:], kept.table_frame]
    heads = [frames[first:end] for first, end in zip(firsts, ends, strict=True)]
    pages = len(heads) // per_page
    tokens, outliers = [0] * (pages + 1), [0] * (pages + 1)
    table = entries = np.empty((0, 0), np.uint8)
    if form.is_split:
        tokens = np.cumsum([0, *kept.page_tokens]).tolist()
        table = read_entries(frames[kept.table_frame : kept.outlier_frame], form.token_bytes, tokens[-1])
    if form.slots:
        outliers = np.cumsum([0, *kept.page_outliers]).tolist()
        entries = read_entries(frames[kept.outlier_frame : kept.num_frames], form.outlier_bytes, outliers[-1])
    return [
        PagePart(
            tuple(heads[page * per_page : (page + 1) * per_page]),
            table[slice(*of_tokens)],
            entries[slice(*of_outliers)],
            of_outliers[0],
        )
        for page, (of_tokens, of_outliers) in enumerate(
            zip(pairwise(tokens), pairwise(outliers), strict=True)
        )
    ]


def join_pages(kept: KeptRows, parts: Sequence[PagePart]) -> Bytes:
    """All frames of a bag, [frames, frame bytes]: those of its map, and what it has of each page.

    Raises:
        ValueError: a frame says that its outliers begin beyond those of its page.
    """
    form = FrameFormat.of_layout(kept.layout)
    frames = np.zeros((kept.num_frames, form.frame_bytes), np.uint8)
    frames[: kept.lead].reshape(-1)[:] = np.frombuffer(kept.encode(), np.uint8)
    place, begin = kept.lead, 0
    for part in parts:
        count = sum(map(len, part.heads))
        mine = frames[place : place + count]
        np.concatenate(part.heads, out=mine)
        if form.slots:
            _move_outliers(mine, part, begin)
        place, begin = place + count, begin + len(part.outliers)
    if form.is_split:
        _fill_entries(frames[kept.table_frame : kept.outlier_frame], [part.tokens for part in parts])
        _fill_entries(frames[kept.outlier_frame :], [part.outliers for part in parts])
    return frames


def _move_outliers(frames: Bytes, part: PagePart, begin: int) -> None:
    """Have frames of a page, whose first outlier is now number `begin`, say where their outliers are."""
    first = frames[:, -4:].copy().view("<u4").astype(np.int64) - part.begin
    if len(first) and not 0 <= first.min() <= first.max() <= len(part.outliers):
        raise ValueError("outliers of a frame are not those of its page")
    frames[:, -4:] = (first + begin).astype("<u4").view(np.uint8)


def _fill_entries(frames: Bytes, parts: Sequence[Bytes]) -> None:
    entries = np.concatenate([part for part in parts if len(part)] or [np.empty((0, 0), np.uint8)])
    fill_entries(frames, np.arange(len(entries)), entries)
