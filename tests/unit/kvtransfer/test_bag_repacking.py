"""Bags of any split of ranks, rewritten for any other: every row of every head, the maps, and nothing beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from diptych.errors import CorruptChunk, StaleTicket
from diptych.eviction_spec import KeepSpec
from kvcache.eviction.bag_sizes import shard_heads
from kvcache.eviction.coded_frames import HeadRows, RowMover
from kvcache.eviction.kept_rows import FrameFormat, KeptRows, frame_bytes, frames_per_slab, most_bag_slabs
from kvcache.eviction.policies import FULL
from kvcache.eviction.rank_bags import count_rank_slabs, cut_map, measure_bag, merge_maps, most_rank_extra
from kvcache.layout import KvLayout, Shard, split_layout
from kvtransfer.bag_repacking import BagRepacker
from kvtransfer.digests import BagSplit, DigestContext
from kvtransfer.resharding import ShardedPool, stage_moves
from kvtransfer.ticket import Ticket, issue_ticket

CALIBRATED = "@0123456789abcdef"
LAYOUTS = [
    KvLayout(layers=5, kv_heads=4, head_dim=8, dtype="float32", codec=codec)
    for codec in (
        "", "tq4.s0", "int8.g8", "bf16", f"nuq4-1%.g16{CALIBRATED}", f"nuq2-1%.g8{CALIBRATED}", f"nuq3.g16{CALIBRATED}",
    )
]  # fmt: skip
RAW, PAIRS = LAYOUTS[0], LAYOUTS[4]
SPLITS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3)]
NUM_SLABS, KEY = 40, bytes(32)
Bytes = NDArray[np.uint8]


class WholePages:
    """Stands for a codec: rows of pages with one head are one section."""

    def __init__(self, layout: KvLayout) -> None:
        self.sections, self.page_bytes, self.codec_id = self, layout.page_bytes, layout.codec_id
        self.offsets = {"rows": 0}


@dataclass
class RandomBag:
    """A bag of random rows: its map, and the rows of each head, all over one rank."""

    kept: KeptRows
    rows: dict[tuple[int, int], HeadRows]

    def pack(self, kept: KeptRows, shard: Shard) -> tuple[KeptRows, Bytes]:
        """The map and the frames of one rank, as it makes them; `kept` is its map, without the number of outliers."""
        codec: Any = WholePages(kept.layout)
        mover = RowMover(kept.layout, np.empty((0, kept.layout.chunk_bytes), np.uint8), codec)
        return mover.pack_frames(
            replace(kept, page_outliers=()), [self.rows[place] for place in shard_heads(shard)]
        )


def make_bag(seed: int, boundary: int, length: int, layout: KvLayout = RAW) -> RandomBag:
    rng = np.random.default_rng(seed)
    policies = rng.integers(0, FULL + 1, (layout.layers, layout.kv_heads)).astype(np.uint8)
    positions = []
    for policy in policies.reshape(-1):
        share = 1.0 if policy == FULL else rng.choice([0, 0.05, 0.5, 1])
        chosen = np.flatnonzero(rng.random(length - boundary) < share) + boundary
        positions.append(chosen.astype(np.int32))
    planned = KeptRows.from_heads(layout, boundary, length, policies, positions)
    rows: dict[tuple[int, int], HeadRows] = {}
    for layer, page in np.ndindex(layout.layers, layout.pages_per_layer):
        rows |= _random_rows(rng, planned, layer, page)
    bag = RandomBag(planned, rows)
    bag.kept, _ = bag.pack(planned, Shard((0, layout.layers), (0, layout.kv_heads)))
    return bag


def _random_rows(
    rng: np.random.Generator, kept: KeptRows, layer: int, page: int
) -> dict[tuple[int, int], HeadRows]:
    """Rows of a page's heads, which share each token's entry in the table, and its slots of outliers."""
    layout, span = kept.layout, kept.length - kept.boundary
    form, found = FrameFormat.of_layout(layout), dict[tuple[int, int], HeadRows]()
    tokens = rng.integers(0, 256, (span, form.token_bytes), np.uint8)
    owners = rng.integers(0, layout.page_heads + 1, (span, 2, form.slots))
    widths = (form.code_bytes,) * 2 if form.is_split else (layout.page_bytes // 64,)
    for place in range(layout.page_heads):
        head = page * layout.page_heads + place
        mine = kept.head_positions(layer, head) - kept.boundary
        counts = (owners == place).sum(axis=2).astype(np.uint8)[mine]
        found[layer, head] = HeadRows(
            tuple(rng.integers(0, 256, (len(mine), width), np.uint8) for width in widths),
            tokens[mine],
            counts,
            rng.integers(0, 256, (int(counts.sum()), form.outlier_bytes), np.uint8),
        )
    return found


def make_pool(split: tuple[int, int], layout: KvLayout = RAW) -> ShardedPool:
    """Filled with ones, so that untouched slabs are known."""
    shards = split_layout(layout, *split)
    sizes = [NUM_SLABS * layout.shard_layout(shard).chunk_bytes for shard in shards]
    return ShardedPool(
        layout,
        [(shard, memoryview(bytearray(b"\1" * size))) for shard, size in zip(shards, sizes, strict=True)],
    )


def part_of(pool: ShardedPool, rank: int, slab: int) -> Bytes:
    """A rank's part of a slab."""
    size = pool.slab_bytes[rank]
    return np.frombuffer(pool.memories[rank], np.uint8)[slab * size : (slab + 1) * size]


def write_bag(pool: ShardedPool, bag: RandomBag, slabs: list[int]) -> None:
    """As the ranks of a source write it."""
    for rank, shard in enumerate(pool.shards):
        kept, frames = bag.pack(cut_map(bag.kept, shard), shard)
        kept.check()
        per_slab = frames_per_slab(kept.layout)
        for index in range(kept.num_slabs):
            piece = frames[index * per_slab : (index + 1) * per_slab].reshape(-1)
            part_of(pool, rank, slabs[index])[: len(piece)] = piece


def read_frames(pool: ShardedPool, rank: int, slabs: list[int]) -> Bytes:
    """All frames of a rank's part of some slabs, [frames, frame bytes]."""
    layout = pool.layout.shard_layout(pool.shards[rank])
    size, per_slab = frame_bytes(layout), frames_per_slab(layout)
    parts = [part_of(pool, rank, slab)[: per_slab * size].reshape(per_slab, size) for slab in slabs]
    return np.concatenate(parts)


def pull(source: ShardedPool, own: ShardedPool, far: list[int], slabs: list[int]) -> None:
    """Copy slabs page by page, as transports do."""
    moves = [one for stage in stage_moves(own.layout, source.shards, own.shards) for one in stage]
    for there, here in zip(far, slabs, strict=True):
        for move in moves:
            page = part_of(source, move.source, there)[move.far : move.far + move.num_bytes]
            part_of(own, move.target, here)[move.own : move.own + move.num_bytes] = page


def offer(source: ShardedPool, split: tuple[int, int], bag: RandomBag, slabs: list[int]) -> Ticket:
    kept, layout = bag.kept, bag.kept.layout
    terms = DigestContext(
        "r", 1, kept.length, (0, layout.layers), layout.dtype, layout.chunk_shape, "f" * 64, layout.chunk_bytes,
        layout.codec, keep=KeepSpec(0.5, kept.boundary), num_bag_slabs=len(slabs),
        bag=BagSplit(*split, *measure_bag(kept)),
    )  # fmt: skip
    prefix = list(range(NUM_SLABS, NUM_SLABS + kept.boundary // 64))
    return issue_ticket(KEY, terms, "p", "i", prefix + slabs, lambda slab, algorithm: bytes(16))


def slabs_of(shards: tuple[Shard, ...], bag: RandomBag) -> int:
    kept = bag.kept
    return count_rank_slabs(kept.layout, shards, kept.boundary, kept.length, measure_bag(kept))


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    layout=st.sampled_from(LAYOUTS),
    here=st.sampled_from(SPLITS),
    there=st.sampled_from(SPLITS),
    chunks=st.integers(0, 2),
    more=st.integers(0, 300),
    seed=st.integers(0, 2**31),
)
def test_a_bag_of_any_split_is_read_by_any_other(
    layout: KvLayout, here: tuple[int, int], there: tuple[int, int], chunks: int, more: int, seed: int
) -> None:
    assume(layout.pages_per_layer % max(here[0], there[0]) == 0)
    bag = make_bag(seed, 64 * chunks, 64 * chunks + max(1, more), layout)
    source, own = make_pool(there, layout), make_pool(here, layout)
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
        # To the byte what these ranks would have written.
        kept, frames = bag.pack(cut_map(bag.kept, shard), shard)
        assert np.array_equal(read_frames(own, rank, slabs[:needed])[: kept.num_frames], frames)
        for slab in rest[max(count, needed) :]:
            assert (part_of(own, rank, slab) == 1).all()
    again = merge_maps(layout, own.shards, [cut_map(bag.kept, shard) for shard in own.shards])
    assert again.encode() == bag.kept.encode()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_bag_of_any_rank_is_larger_than_a_ticket_may_say(layout: KvLayout) -> None:
    """Nor than the room that is taken for the longest request."""
    splits = [split for split in SPLITS if layout.pages_per_layer % split[0] == 0]
    for tokens in (1, 64, 65, 1000):
        for split in splits:
            parts = [layout.shard_layout(shard) for shard in split_layout(layout, *split)]
            most, chunks = max(most_bag_slabs(part, tokens) for part in parts), layout.num_chunks(tokens)
            terms = DigestContext(
                "r", 1, tokens, (0, layout.layers), layout.dtype, layout.chunk_shape, "f" * 64, layout.chunk_bytes,
                keep=KeepSpec(0.5), num_bag_slabs=most,
            )  # fmt: skip
            assert terms.is_keep_sound
            assert 1 + most <= chunks + most_rank_extra(layout, [split], tokens)
        extra = most_rank_extra(layout, splits, tokens)
        assert extra == max(most_rank_extra(layout, [split], tokens) for split in splits)


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
    terms = structs.replace(ticket.context, num_bag_slabs=len(slabs))
    whole = structs.replace(ticket, context=terms)
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
    terms, frames, repacker = (
        ticket.context,
        measure_bag(bag.kept).head_frames,
        BagRepacker(make_pool((1, 1))),
    )
    wrong = [
        structs.replace(terms, bag=BagSplit(2, 1)),
        structs.replace(terms, bag=BagSplit(2, 1, frames[:-1])),
        structs.replace(terms, bag=BagSplit(3, 1, frames)),
        structs.replace(terms, bag=BagSplit(2, 1, frames, (1,) * 20)),
        structs.replace(terms, num_bag_slabs=terms.num_bag_slabs + 1),
    ]
    for one in wrong:
        with pytest.raises(StaleTicket, match="cannot be read here"):
            repacker.needs(structs.replace(ticket, context=one))


def test_a_ticket_of_codes_that_miscounts_tokens_or_outliers_is_refused() -> None:
    bag, source, own = make_bag(4, 0, 200, PAIRS), make_pool((2, 1), PAIRS), make_pool((1, 1), PAIRS)
    slabs = list(range(slabs_of(source.shards, bag)))
    ticket, sizes, repacker = offer(source, (2, 1), bag, slabs), measure_bag(bag.kept), BagRepacker(own)
    assert len(sizes.page_tokens) == len(sizes.page_outliers) == 10
    for tokens, outliers in (
        ((), ()),
        (sizes.page_tokens, ()),
        (sizes.page_tokens[:-1], sizes.page_outliers),
    ):
        split = BagSplit(2, 1, sizes.head_frames, tokens, outliers)
        with pytest.raises(StaleTicket, match="cannot be read here"):
            repacker.needs(structs.replace(ticket, context=structs.replace(ticket.context, bag=split)))
    # As many in all, so that only the map says otherwise.
    write_bag(source, bag, slabs)
    pull(source, own, slabs, slabs)
    moved = (sizes.page_outliers[0] - 1, sizes.page_outliers[1] + 1, *sizes.page_outliers[2:])
    split = BagSplit(2, 1, sizes.head_frames, sizes.page_tokens, moved)
    with pytest.raises(CorruptChunk) as caught:
        repacker.repack(structs.replace(ticket, context=structs.replace(ticket.context, bag=split)), slabs)
    assert "than the ticket counts" in caught.value.why


def test_a_frame_whose_outliers_are_not_those_of_its_page_is_corrupt() -> None:
    bag, source, own = make_bag(4, 0, 200, PAIRS), make_pool((2, 1), PAIRS), make_pool((1, 1), PAIRS)
    slabs = list(range(NUM_SLABS - 1))
    ticket = offer(source, (2, 1), bag, slabs[: slabs_of(source.shards, bag)])
    write_bag(source, bag, slabs)
    kept = cut_map(bag.kept, source.shards[1])
    first, size = int(kept.first_frames[kept.counts > 0][0]), frame_bytes(kept.layout)
    assert first < frames_per_slab(kept.layout)
    part_of(source, 1, slabs[0])[(first + 1) * size - 1] = 0x80
    pull(source, own, slabs, slabs)
    with pytest.raises(CorruptChunk) as caught:
        BagRepacker(own).repack(ticket, slabs)
    assert "outliers of a frame" in caught.value.why
