"""Bags that come from ranks with another split: the frames of each head move to the rank that has the head here.

    source, 2 ranks   rank 0   map │ head 0 │ head 1          pulled page by page, hashed and verified as ever:
                      rank 1   map │ head 2 │ head 3          the pages are those of the same slabs here
    here, 1 rank      rank 0   map │ head 0 │ head 1 │ head 2 │ head 3

A bag of each rank is contiguous in its rank's part of the slabs (`kvcache.eviction.kept_rows`), so another split
needs other places, and may need more slabs or fewer. The ticket says what each head and page needs, so slabs are
reserved before anything is pulled. What was pulled and verified is then copied aside and written anew, with maps for
the ranks here. What heads of a page share of their tokens, and their outliers, moves with the page
(`kvcache.eviction.rank_bags.PagePart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych.errors import CorruptChunk, StaleTicket
from kvcache.eviction.bag_sizes import shard_pages
from kvcache.eviction.kept_rows import KeptRows, frame_bytes, frames_per_slab, map_frames
from kvcache.eviction.rank_bags import (
    PagePart,
    count_rank_slabs,
    cut_map,
    cut_pages,
    join_pages,
    measure_bag,
    merge_maps,
)
from kvcache.layout import KvLayout, Shard, split_layout
from kvtransfer.resharding import PoolArena, ShardedPool, stage_moves
from kvtransfer.ticket import Ticket

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RankBag:
    """The bag of one rank: its map, and all its frames, [frames, bytes of a frame]."""

    kept: KeptRows
    frames: Bytes


class BagRepacker:
    """Brings bags of other splits into the form that the ranks of the pool `own_pool` read.

    Only the thread that pulls writes to a bag that is repacked, and nothing else reads it yet.
    """

    def __init__(self, own_pool: ShardedPool) -> None:
        self._own_pool = own_pool

    def needs(self, ticket: Ticket) -> int | None:
        """The slabs of the bag of `ticket` on the ranks here; None if it needs no repacking, as they split alike.

        Raises:
            StaleTicket: it does not say what each head and page needs, or contradicts itself.
        """
        context, layout = ticket.context, self._own_pool.layout_of(ticket.context.kv_class)
        bag = context.bag
        try:
            source = split_layout(layout, bag.tp, bag.pp)
            if source == self._own_pool.shards:
                return None
            if context.segments:
                raise ValueError("its first rows are in segments, which only workers of one rank exchange")
            decided = context.keep.boundary, context.num_tokens
            if (found := count_rank_slabs(layout, source, *decided, bag.sizes)) != context.num_bag_slabs:
                raise ValueError(f"what its heads need are {found} slabs, not {context.num_bag_slabs}")
            return count_rank_slabs(layout, self._own_pool.shards, *decided, bag.sizes)
        except ValueError as error:
            what = f"a bag of {bag.tp} x {bag.pp} ranks cannot be read here"
            raise StaleTicket(what, str(error)) from error

    def repack(self, ticket: Ticket, slabs: Sequence[int]) -> None:
        """Rewrite a bag that was pulled into the first of `slabs`, in the bag's order, for the ranks here.

        The result is in the first slabs, as many as it needs (`needs`).

        Raises:
            CorruptChunk: the bag is not what its ticket says.
        """
        context, arena = ticket.context, self._own_pool.arena_at(slabs[0])
        source = split_layout(arena.layout, context.bag.tp, context.bag.pp)
        try:
            bags = self._read_bags(arena, source, slabs[: context.num_bag_slabs])
            whole = merge_maps(arena.layout, source, [bag.kept for bag in bags])
            if (whole.boundary, whole.length) != (context.keep.boundary, context.num_tokens):
                raise ValueError(f"it is the map of {whole.length} tokens from {whole.boundary} on")
            if measure_bag(whole) != context.bag.sizes:
                raise ValueError("its heads keep other rows than the ticket counts")
            found: dict[tuple[int, int], PagePart] = {}
            for shard, bag in zip(source, bags, strict=True):
                pages = shard_pages(arena.layout, shard)
                found |= dict(zip(pages, cut_pages(bag.kept, bag.frames), strict=True))
            for rank, shard in enumerate(arena.shards):
                kept = cut_map(whole, shard)
                if kept.num_slabs > len(slabs):
                    raise ValueError(f"rank {rank} needs {kept.num_slabs} slabs of {len(slabs)}")
                frames = join_pages(kept, [found[place] for place in shard_pages(arena.layout, shard)])
                self._write_frames(arena, rank, slabs[: kept.num_slabs], frames)
        except ValueError as error:
            what = f"KV of request {context.request} does not say what its heads kept"
            raise CorruptChunk(what, str(error)) from error

    def _read_bags(self, arena: PoolArena, source: Sequence[Shard], slabs: Sequence[int]) -> list[RankBag]:
        """A copy of the bag of each rank of the source; its slabs' pages were pulled to `slabs`."""
        layouts = [arena.layout.shard_layout(shard) for shard in source]
        parts = [np.empty((len(slabs), layout.chunk_bytes), np.uint8) for layout in layouts]
        moves = [move for stage in stage_moves(arena.layout, arena.shards, source) for move in stage]
        for index, slab in enumerate(slabs):
            for move in moves:
                at = arena.offset_of(slab, move.source) + move.far
                page = np.frombuffer(self._own_pool.memories[move.source], np.uint8, move.num_bytes, at)
                parts[move.target][index, move.own : move.own + move.num_bytes] = page
        return [_read_bag(part, layout) for part, layout in zip(parts, layouts, strict=True)]

    def _write_frames(self, arena: PoolArena, rank: int, slabs: Sequence[int], frames: Bytes) -> None:
        """Write the frames of a bag into a rank's part of its slabs."""
        per_slab = frames_per_slab(arena.layout.shard_layout(arena.shards[rank]))
        memory = np.frombuffer(self._own_pool.memories[rank], np.uint8)
        for index, slab in enumerate(slabs):
            part = frames[index * per_slab : (index + 1) * per_slab].reshape(-1)
            at = arena.offset_of(slab, rank)
            memory[at : at + len(part)] = part


def _read_bag(part: Bytes, layout: KvLayout) -> RankBag:
    """The bag in a rank's part of some slabs, [slabs, bytes]. Raises ValueError if it has no valid map."""
    per_slab, size = frames_per_slab(layout), frame_bytes(layout)
    frames = part[:, : per_slab * size].reshape(-1, size)
    lead = map_frames(frames[0].tobytes(), layout, len(part))
    kept = KeptRows.decode(frames[:lead].tobytes(), layout)
    if kept.num_slabs > len(part):
        raise ValueError(f"it takes {kept.num_slabs} slabs, and {len(part)} came")
    return RankBag(kept, frames)
