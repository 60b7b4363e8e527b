"""Which slabs of a sequence others may attach, once it has their KV."""

from __future__ import annotations

from engine.sequence import Sequence
from kvcache.allocator import KvAllocator


def publish_shared(seq: Sequence, arena: KvAllocator) -> None:
    """Let others attach those slabs of `seq` that may be shared: whole chunks and segments, as far as they have KV.

    Slabs of which the tree has equal ones already are replaced by the tree's.
    """
    keys = seq.first_keys(seq.full_chunks(seq.computed))
    arena.publish(seq.key, keys, seq.slabs)
    seq.shared = len(keys)
    if seq.segment_keys:
        for node in arena.shared_nodes(seq.key)[seq.keep.boundary_chunks :]:
            # No prompt is looked up by segments, so tiers below the pool need none.
            node.lasting = False
