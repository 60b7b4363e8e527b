"""Splits: what each rank holds, and that every byte of a chunk finds its place between any two of them."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from diptych.errors import TransferError
from kvcache.layout import KvLayout, Shard, split_layout
from kvtransfer.digests import HASH_FUNCTIONS
from kvtransfer.resharding import PairedPools, ShardedPool, plan_spans, stage_moves, unsharded_pool

LAYOUT = KvLayout(layers=7, kv_heads=4, head_dim=2, dtype="float16")
# Groups of two KV heads are coded together, so two ranks at most can share them.
CODED = KvLayout(layers=7, kv_heads=4, head_dim=8, dtype="float32", codec="nuq3.g16@0123456789abcdef")
SPLITS = list(product([1, 2, 4], [1, 2, 3]))
SLABS = 3


def scattered(split: tuple[int, int], chunks: list[bytes], layout: KvLayout = LAYOUT) -> ShardedPool:
    """`chunks`, one for each slab, as the ranks of `split` hold them: page by page, the slow way."""
    held = []
    for shard in split_layout(layout, *split):
        pages = [
            (layer * layout.kv_heads + head) // layout.page_heads
            for layer in range(*shard.layers)
            for head in range(*shard.heads, layout.page_heads)
        ]
        size = layout.page_bytes
        held.append(
            (shard, b"".join(chunk[page * size : (page + 1) * size] for chunk in chunks for page in pages))
        )
    return ShardedPool(layout, [(shard, memoryview(bytearray(data))) for shard, data in held])


def random_chunks(seed: int, layout: KvLayout = LAYOUT) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(layout.chunk_bytes) for _ in range(SLABS)]


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_ranks_share_a_layout_evenly(layers: int, times: int, tp: int, pp: int) -> None:
    layout = KvLayout(max(layers, pp), times * tp, 2, "float32")
    held = split_layout(layout, tp, pp)
    assert len(held) == tp * pp
    cells = [cell for one in held for cell in product(range(*one.layers), range(*one.heads))]
    assert sorted(cells) == list(product(range(layout.layers), range(layout.kv_heads)))
    sizes = [one.layers[1] - one.layers[0] for one in held]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
    for rank, one in enumerate(held):
        assert one.heads == (rank % tp * times, (rank % tp + 1) * times)
        assert one.layers == held[rank - rank % tp].layers


@pytest.mark.parametrize("tp, pp", [(3, 1), (8, 1), (1, 8), (0, 1), (1, 0), (-1, 1)])
def test_a_split_that_is_not_even_is_refused(tp: int, pp: int) -> None:
    with pytest.raises(ValueError):
        split_layout(LAYOUT, tp, pp)


@pytest.mark.parametrize("here", SPLITS)
@pytest.mark.parametrize("there", SPLITS)
def test_a_chunk_moved_between_any_two_splits_is_the_chunk(
    here: tuple[int, int], there: tuple[int, int]
) -> None:
    """Byte for byte, and nothing else is touched, against pages that were placed one by one."""
    assert_moved_whole(here, there, LAYOUT)


@pytest.mark.parametrize("there", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_a_coded_chunk_moves_by_groups_of_heads(there: tuple[int, int]) -> None:
    for here in [(1, 1), (2, 2)]:
        assert_moved_whole(here, there, CODED)


def assert_moved_whole(here: tuple[int, int], there: tuple[int, int], layout: KvLayout) -> None:
    chunks, before, source, target = random_chunks(1, layout), random_chunks(2, layout), 2, 1
    far, own = scattered(here, chunks, layout), scattered(there, before, layout)
    stages = stage_moves(layout, far.shards, own.shards)
    assert len(stages) == there[1]
    for move in (move for stage in stages for move in stage):
        at = source * far.slab_bytes[move.source] + move.far
        to = target * own.slab_bytes[move.target] + move.own
        own.memories[move.target][to : to + move.num_bytes] = far.memories[move.source][
            at : at + move.num_bytes
        ]
    expected = scattered(there, [*before[:target], chunks[source], *before[target + 1 :]], layout)
    assert own.memories == expected.memories
    for algorithm, read in HASH_FUNCTIONS.items():
        assert own.hash_slab(target, algorithm) == far.hash_slab(source, algorithm) == read(chunks[source])


def test_equal_splits_need_as_few_pieces_as_there_can_be() -> None:
    def count(here: tuple[int, int], there: tuple[int, int]) -> list[int]:
        stages = stage_moves(LAYOUT, split_layout(LAYOUT, *here), split_layout(LAYOUT, *there))
        return [len(stage) for stage in stages]

    assert count((1, 1), (1, 1)) == [1]
    assert count((1, 3), (1, 3)) == [1, 1, 1]
    assert count((1, 2), (1, 1)) == [2]
    assert count((1, 1), (1, 2)) == [1, 1]
    assert count((2, 1), (4, 1)) == count((4, 1), (1, 1)) == [4 * LAYOUT.layers]


def test_every_stage_comes_after_the_one_before() -> None:
    for here, there in product(SPLITS, SPLITS):
        held = split_layout(LAYOUT, *there)
        stages = stage_moves(LAYOUT, split_layout(LAYOUT, *here), held)
        layers = [{held[move.target].layers for move in stage} for stage in stages]
        assert all(len(one) == 1 for one in layers)
        assert [min(one) for one in layers] == sorted({shard.layers for shard in held})


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [Shard((0, 7), (0, 3))],
        [Shard((0, 7), (0, 4)), Shard((6, 7), (3, 4))],
        [Shard((0, 7), (0, 2)), Shard((0, 7), (1, 4))],
        [Shard((0, 6), (0, 4))],
        [Shard((0, 8), (0, 4))],
        [Shard((0, 7), (0, 1 << 40))],
    ],
)
def test_parts_that_are_not_the_layout_once_are_refused(parts: list[Shard]) -> None:
    with pytest.raises(ValueError):
        stage_moves(LAYOUT, parts, split_layout(LAYOUT, 1, 1))
    with pytest.raises(ValueError):
        stage_moves(LAYOUT, split_layout(LAYOUT, 1, 1), parts)
    with pytest.raises(ValueError):
        stage_moves(LAYOUT, parts, parts)


def test_ranks_have_the_same_number_of_whole_slabs() -> None:
    split = split_layout(LAYOUT, 2, 1)
    size = LAYOUT.chunk_bytes // 2
    assert ShardedPool(LAYOUT, [(shard, memoryview(bytes(2 * size))) for shard in split]).num_slabs == 2
    for sizes in [(2 * size, 3 * size), (2 * size + 1, 2 * size + 1)]:
        with pytest.raises(ValueError, match="number of slabs"):
            ShardedPool(LAYOUT, [(one, memoryview(bytes(n))) for one, n in zip(split, sizes, strict=True)])
    for slab in (-1, 1):
        with pytest.raises(ValueError, match="no slab"):
            unsharded_pool(LAYOUT, memoryview(bytes(LAYOUT.chunk_bytes))).hash_slab(slab, "xxh3")


# ---- several classes in one pool


def mixed_pool(classes: list[tuple[KvLayout, int]], split: tuple[int, int], seed: int) -> ShardedPool:
    """Random bytes in arenas of these layouts and numbers of slabs."""
    rng, shards = random.Random(seed), split_layout(LAYOUT, *split)
    _, sizes = plan_spans(classes, shards)
    parts = [(one, memoryview(bytearray(rng.randbytes(n)))) for one, n in zip(shards, sizes, strict=True)]
    return ShardedPool(classes[0][0], parts, classes)


@pytest.mark.parametrize(
    ("here", "there"),
    [((1, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 2)), ((2, 1), (1, 3))],
)
def test_chunks_move_between_the_arenas_of_their_class(here: tuple[int, int], there: tuple[int, int]) -> None:
    """The arenas lie in another order there, with other slab numbers, beside a class that is not here."""
    tall = KvLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.dtype, "int8.g4")
    far = mixed_pool([(CODED, 2), (tall, 3), (LAYOUT, 2)], here, 1)
    own = mixed_pool([(LAYOUT, 2), (CODED, 4)], there, 2)
    sizes = [(shard, memory.nbytes) for shard, memory in zip(far.shards, far.memories, strict=True)]
    pools = PairedPools(own, sizes, far.spans)
    assert (pools.num_slabs, far.num_slabs, own.num_slabs) == (7, 7, 6)
    for source, target in ((6, 1), (0, 5)):
        moves = pools.moves_of(source, target)
        before = {slab: own.hash_slab(slab, "xxh3") for slab in range(6)}
        for move in (move for run in moves.stages for move in run.moves):
            at = moves.source.offset_of(source, move.source) + move.far
            to = moves.own_arena.offset_of(target, move.target) + move.own
            own.memories[move.target][to : to + move.num_bytes] = far.memories[move.source][
                at : at + move.num_bytes
            ]
        after = {slab: own.hash_slab(slab, "xxh3") for slab in range(6)}
        assert after == before | {target: far.hash_slab(source, "xxh3")}
    for source, target in ((0, 0), (2, 5), (6, 5), (7, 0), (-1, 5), (0, 6)):
        with pytest.raises(TransferError):
            pools.moves_of(source, target)
    assert own.layout_of(CODED.kv_class) == CODED
    with pytest.raises(ValueError, match="no KV of the class"):
        own.layout_of("int8.g4")


def test_arenas_that_do_not_fit_their_memory_are_refused() -> None:
    own = mixed_pool([(LAYOUT, 2), (CODED, 4)], (1, 1), 1)
    sizes = [(own.shards[0], own.memories[0].nbytes)]
    first, second = own.spans
    wrong = [
        [structs.replace(second, offsets=(second.offsets[0] + 1,))],
        [structs.replace(second, offsets=(0, 0))],
        [structs.replace(first, num_slabs=1 << 30)],
        [structs.replace(second, kv_class="tq4.s0")],
        [structs.replace(second, kv_class="tq4.s0", num_slabs=1 << 30), first],
    ]
    for spans in wrong:
        with pytest.raises(ValueError):
            PairedPools(own, sizes, spans)
    with pytest.raises(ValueError, match="do not fill"):
        ShardedPool(LAYOUT, [(own.shards[0], own.memories[0])], [(LAYOUT, 1), (CODED, 4)])
