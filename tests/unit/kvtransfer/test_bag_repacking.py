"""Bags of any split of ranks, rewritten for any other: every row of every head, the maps, and nothing beside them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from diptych.errors import CorruptChunk, StaleTicket
from diptych.keep_spec import KeepSpec
from kvcache.keep import FULL
from kvcache.kept_rows import KeptRows, count_frames, frame_bytes, frames_per_slab, map_frames
from kvcache.layout import KvLayout, Shard, split_layout
from kvcache.rank_bags import count_rank_slabs, cut_map, merge_maps
from kvtransfer.bag_repacking import BagRepacker
from kvtransfer.digests import BagSplit, DigestContext
from kvtransfer.resharding import ShardedPool, stage_moves
from kvtransfer.ticket import Ticket, issue_ticket

LAYOUT = KvLayout(layers=5, kv_heads=4, head_dim=8, dtype="float32")
SPLITS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3)]
NUM_SLABS, KEY = 40, bytes(32)
Bytes = NDArray[np.uint8]


@dataclass
class RandomBag:
    """A bag of random rows: its map, and the frames of each head, all over one rank."""

    kept: KeptRows
    frames: dict[tuple[int, int], Bytes]


def make_bag(seed: int, boundary: int, length: int) -> RandomBag:
    rng = np.random.default_rng(seed)
    policies = rng.integers(0, FULL + 1, (LAYOUT.layers, LAYOUT.kv_heads)).astype(np.uint8)
    positions = []
    for policy in policies.reshape(-1):
        share = 1.0 if policy == FULL else rng.choice([0, 0.05, 0.5, 1])
        chosen = np.flatnonzero(rng.random(length - boundary) < share) + boundary
        positions.append(chosen.astype(np.int32))
    kept = KeptRows.from_heads(LAYOUT, boundary, length, policies, positions)
    frames = {
        (layer, head): rng.integers(
            0, 256, (count_frames(int(kept.counts[layer, head])), frame_bytes(LAYOUT)), np.uint8
        )
        for layer, head in np.ndindex(kept.counts.shape)
    }
    return RandomBag(kept, frames)


def make_pool(split: tuple[int, int]) -> ShardedPool:
    """Filled with ones, so that untouched slabs are known."""
    shards = split_layout(LAYOUT, *split)
    sizes = [NUM_SLABS * LAYOUT.shard_layout(shard).chunk_bytes for shard in shards]
    return ShardedPool(
        LAYOUT,
        [(shard, memoryview(bytearray(b"\1" * size))) for shard, size in zip(shards, sizes, strict=True)],
    )


def part_of(pool: ShardedPool, rank: int, slab: int) -> Bytes:
    """A rank's part of a slab."""
    size = pool.slab_bytes[rank]
    return np.frombuffer(pool.memories[rank], np.uint8)[slab * size : (slab + 1) * size]


def write_bag(pool: ShardedPool, bag: RandomBag, slabs: list[int]) -> None:
    """As the ranks of a source write it."""
    for rank, shard in enumerate(pool.shards):
        kept = cut_map(bag.kept, shard)
        kept.check()
        heads = [bag.frames[place] for place in product(range(*shard.layers), range(*shard.heads))]
        data = kept.encode() + b"".join(one.tobytes() for one in heads)
        size = pool.slab_bytes[rank]
        for index in range(kept.num_slabs):
            piece = np.frombuffer(data[index * size : (index + 1) * size], np.uint8)
            part_of(pool, rank, slabs[index])[: len(piece)] = piece


def read_bag(pool: ShardedPool, rank: int, slabs: list[int]) -> tuple[KeptRows, list[Bytes]]:
    """A rank's map, and the frames of its heads."""
    layout, size = LAYOUT.shard_layout(pool.shards[rank]), frame_bytes(LAYOUT)
    frames = np.concatenate([part_of(pool, rank, slab) for slab in slabs]).reshape(-1, size)
    assert len(frames) == len(slabs) * frames_per_slab(layout)
    lead = map_frames(frames[0].tobytes(), layout, len(slabs))
    kept = KeptRows.decode(frames[:lead].tobytes(), layout)
    firsts = kept.first_frames.reshape(-1).tolist()
    counts = [count_frames(rows) for rows in kept.counts.reshape(-1).tolist()]
    return kept, [frames[first : first + count] for first, count in zip(firsts, counts, strict=True)]


def pull(source: ShardedPool, own: ShardedPool, far: list[int], slabs: list[int]) -> None:
    """Copy slabs page by page, as transports do."""
    for there, here in zip(far, slabs, strict=True):
        for move in (one for stage in stage_moves(LAYOUT, source.shards, own.shards) for one in stage):
            page = part_of(source, move.source, there)[move.far : move.far + move.num_bytes]
            part_of(own, move.target, here)[move.own : move.own + move.num_bytes] = page


def offer(source: ShardedPool, split: tuple[int, int], bag: RandomBag, slabs: list[int]) -> Ticket:
    kept = bag.kept
    terms = DigestContext(
        "r", 1, kept.length, (0, LAYOUT.layers), LAYOUT.dtype, LAYOUT.chunk_shape, "f" * 64, LAYOUT.chunk_bytes,
        keep=KeepSpec(0.5, kept.boundary), num_bag_slabs=len(slabs), bag=BagSplit(*split, frames_of(bag)),
    )  # fmt: skip
    prefix = list(range(NUM_SLABS, NUM_SLABS + kept.boundary // 64))
    return issue_ticket(KEY, terms, "p", "i", prefix + slabs, lambda slab, algorithm: bytes(16))


def frames_of(bag: RandomBag) -> tuple[int, ...]:
    return tuple(len(bag.frames[place]) for place in np.ndindex(bag.kept.counts.shape))


def slabs_of(shards: tuple[Shard, ...], bag: RandomBag) -> int:
    return count_rank_slabs(LAYOUT, shards, bag.kept.boundary, bag.kept.length, frames_of(bag))


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    here=st.sampled_from(SPLITS),
    there=st.sampled_from(SPLITS),
    chunks=st.integers(0, 2),
    more=st.integers(0, 300),
    seed=st.integers(0, 2**31),
)
def test_a_bag_of_any_split_is_read_by_any_other(
    here: tuple[int, int], there: tuple[int, int], chunks: int, more: int, seed: int
) -> None:
    bag = make_bag(seed, 64 * chunks, 64 * chunks + max(1, more))
    source, own = make_pool(there), make_pool(here)
    count = slabs_of(source.shards, bag)
    # The rank with the most rows says how many slabs all take.
    assert count == max(cut_map(bag.kept, shard).num_slabs for shard in source.shards)
    order = np.random.default_rng(seed).permutation(NUM_SLABS).tolist()
    far, rest = order[:count], order[::-1]
    write_bag(source, bag, far)
    ticket, repacker = offer(source, there, bag, far), BagRepacker(own)
    needed = repacker.needs(ticket)
    if here == there:
        assert needed is None
        return
    assert needed == slabs_of(own.shards, bag)
    slabs = rest[: max(count, needed)]
    pull(source, own, far, slabs[:count])
    repacker.repack(ticket, slabs)
    for rank, shard in enumerate(own.shards):
        kept, frames = read_bag(own, rank, slabs[:needed])
        assert kept.encode() == cut_map(bag.kept, shard).encode()
        places = product(range(*shard.layers), range(*shard.heads))
        for found, place in zip(frames, places, strict=True):
            assert np.array_equal(found, bag.frames[place])
        for slab in rest[max(count, needed) :]:
            assert (part_of(own, rank, slab) == 1).all()
    again = merge_maps(LAYOUT, own.shards, [cut_map(bag.kept, shard) for shard in own.shards])
    assert again.encode() == bag.kept.encode()


@pytest.mark.parametrize(
    ("written", "lost", "why"),
    [
        (None, None, "no map of kept rows"),
        (make_bag(1, 64, 364), None, "364 tokens"),
        (make_bag(1, 64, 300), 1, "no map of kept rows"),
        (make_bag(1, 64, 300), None, ""),
    ],
    ids=["nothing", "another decision", "the map of one rank is lost", "what the ticket says"],
)
def test_a_bag_that_is_not_what_its_ticket_says_is_corrupt(
    written: RandomBag | None, lost: int | None, why: str
) -> None:
    bag, source, own = make_bag(1, 64, 300), make_pool((2, 1)), make_pool((1, 1))
    slabs = list(range(10))
    ticket = offer(source, (2, 1), bag, slabs[: slabs_of(source.shards, bag)])
    if written is not None:
        write_bag(source, written, slabs)
    if lost is not None:
        part_of(source, lost, slabs[0])[:] = 1
    # More slabs than the ticket names, so that a larger bag is here, too.
    pull(source, own, slabs, slabs)
    terms = replace(ticket.terms, num_bag_slabs=len(slabs))
    whole = replace(ticket, terms=terms)
    if not why:
        BagRepacker(own).repack(whole, slabs)
        return
    with pytest.raises(CorruptChunk, match="does not say what its heads kept") as caught:
        BagRepacker(own).repack(whole, slabs)
    assert why in caught.value.why


def test_a_ticket_that_does_not_say_what_heads_need_is_refused_before_anything_is_pulled() -> None:
    bag = make_bag(3, 0, 200)
    source = make_pool((2, 1))
    ticket = offer(source, (2, 1), bag, list(range(slabs_of(source.shards, bag))))
    terms, frames, repacker = ticket.terms, frames_of(bag), BagRepacker(make_pool((1, 1)))
    wrong = [
        replace(terms, bag=BagSplit(2, 1)),
        replace(terms, bag=BagSplit(2, 1, frames[:-1])),
        replace(terms, bag=BagSplit(3, 1, frames)),
        replace(terms, num_bag_slabs=terms.num_bag_slabs + 1),
    ]
    for one in wrong:
        with pytest.raises(StaleTicket, match="cannot be read here"):
            repacker.needs(replace(ticket, terms=one))
