"""Swaps the KV of a preempted sequence out to the host tier ("parking"), and back when the sequence runs again."""

from __future__ import annotations

from collections.abc import Callable

from diptych.chunks import CHUNK_TOKENS
from engine.scheduling.new_token_ratio import MeasuredRate, swap_is_cheaper
from engine.sequence import Sequence, num_chunks
from kvcache.allocator import KvAllocator
from kvcache.tiers.host import HostTier


def park_sequence(
    seq: Sequence,
    host: HostTier,
    allocator: KvAllocator,
    prefill_rate: MeasuredRate,
    copy_rate: MeasuredRate,
    clock: Callable[[], float],
) -> bool:
    """Copy the KV of `seq` to `host`, if there is room and computing it again would take longer.

    `prefill_rate` is in prefill tokens per second. `copy_rate`, in bytes per second, is updated with this copy. Returns
    whether the KV was copied. Chunks that other sequences hold stay in the pool: they are neither copied nor counted.
    Of an evicted sequence segments, ring and bag are copied, so it goes on with what its heads have kept. Segments that
    others hold are copied, too: were they gone when it comes back, it would have to compute all of its prompt.
    """
    shared = 0 if seq.scores_prompt else allocator.count_shared(seq.key)
    whole = seq.keep.boundary_chunks if seq.kept_slabs else seq.full_chunks(seq.computed)
    skip = min(shared, whole)
    slabs = seq.slabs[skip : None if seq.kept_slabs else num_chunks(seq.computed)]
    if not slabs or not host.has_room(len(slabs)):
        return False
    num_bytes, begun_s = len(slabs) * host.slab_bytes, clock()
    tokens = seq.computed - skip * CHUNK_TOKENS
    if not swap_is_cheaper(tokens, num_bytes, prefill_rate.value, copy_rate.value):
        return False
    try:
        host.put_slabs(seq.key, slabs)
    except MemoryError:
        # The machine has less free memory than the tier's configured capacity.
        return False
    copy_rate.add_sample(num_bytes, clock() - begun_s)
    seq.parked_from = skip
    return True


def restore_sequence(
    seq: Sequence, host: HostTier, num_found: int, copy_rate: MeasuredRate, clock: Callable[[], float]
) -> bool:
    """Copy the parked KV of `seq` back into its slabs; the first `num_found` chunks were found in the prefix cache.

    Returns False if nothing was parked, or if chunks before the parked ones are gone. Either way `host` holds nothing
    for `seq` afterwards.
    """
    skip, begun_s = seq.parked_from, clock()
    if not seq.parked or num_found < skip:
        host.drop_slabs(seq.key)
        return False
    num_bytes = host.restore_slabs(seq.key, seq.slabs[skip:], num_found - skip)
    copy_rate.add_sample(num_bytes, clock() - begun_s)
    return True
