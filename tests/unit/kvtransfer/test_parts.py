"""Splits: what each rank holds, and that every byte of a chunk finds its place between any two of them."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.layout import KVLayout, Shard, shards
from kvtransfer.digests import HASHES
from kvtransfer.parts import Parts, moves, whole

LAYOUT = KVLayout(layers=7, kv_heads=4, head_dim=2, dtype="float16")
SPLITS = list(product([1, 2, 4], [1, 2, 3]))
SLABS = 3


def scattered(split: tuple[int, int], chunks: list[bytes]) -> Parts:
    """`chunks`, one for each slab, as the ranks of `split` hold them: page by page, the slow way."""
    held = []
    for shard in shards(LAYOUT, *split):
        pages = [
            layer * LAYOUT.kv_heads + head for layer in range(*shard.layers) for head in range(*shard.heads)
        ]
        size = LAYOUT.page_bytes
        held.append(
            (shard, b"".join(chunk[page * size : (page + 1) * size] for chunk in chunks for page in pages))
        )
    return Parts(LAYOUT, [(shard, memoryview(bytearray(data))) for shard, data in held])


def random_chunks(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(LAYOUT.chunk_bytes) for _ in range(SLABS)]


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_ranks_share_a_layout_evenly(layers: int, times: int, tp: int, pp: int) -> None:
    layout = KVLayout(max(layers, pp), times * tp, 2, "float32")
    held = shards(layout, tp, pp)
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
        shards(LAYOUT, tp, pp)


@pytest.mark.parametrize("here", SPLITS)
@pytest.mark.parametrize("there", SPLITS)
def test_a_chunk_moved_between_any_two_splits_is_the_chunk(
    here: tuple[int, int], there: tuple[int, int]
) -> None:
    """Byte for byte, and nothing else is touched, against pages that were placed one by one."""
    chunks, before, source, target = random_chunks(1), random_chunks(2), 2, 1
    far, own = scattered(here, chunks), scattered(there, before)
    stages = moves(LAYOUT, far.shards, own.shards)
    assert len(stages) == there[1]
    for move in (move for stage in stages for move in stage):
        at = source * far.slab_bytes[move.source] + move.far
        to = target * own.slab_bytes[move.target] + move.own
        own.memories[move.target][to : to + move.num_bytes] = far.memories[move.source][
            at : at + move.num_bytes
        ]
    expected = scattered(there, [*before[:target], chunks[source], *before[target + 1 :]])
    assert own.memories == expected.memories
    for algorithm, read in HASHES.items():
        assert own.payload(target, algorithm) == far.payload(source, algorithm) == read(chunks[source])


def test_equal_splits_need_as_few_pieces_as_there_can_be() -> None:
    def count(here: tuple[int, int], there: tuple[int, int]) -> list[int]:
        stages = moves(LAYOUT, shards(LAYOUT, *here), shards(LAYOUT, *there))
        return [len(stage) for stage in stages]

    assert count((1, 1), (1, 1)) == [1]
    assert count((1, 3), (1, 3)) == [1, 1, 1]
    assert count((1, 2), (1, 1)) == [2]
    assert count((1, 1), (1, 2)) == [1, 1]
    assert count((2, 1), (4, 1)) == count((4, 1), (1, 1)) == [4 * LAYOUT.layers]


def test_every_stage_comes_after_the_one_before() -> None:
    for here, there in product(SPLITS, SPLITS):
        held = shards(LAYOUT, *there)
        stages = moves(LAYOUT, shards(LAYOUT, *here), held)
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
        moves(LAYOUT, parts, shards(LAYOUT, 1, 1))
    with pytest.raises(ValueError):
        moves(LAYOUT, shards(LAYOUT, 1, 1), parts)
    with pytest.raises(ValueError):
        moves(LAYOUT, parts, parts)


def test_ranks_have_the_same_number_of_whole_slabs() -> None:
    split = shards(LAYOUT, 2, 1)
    size = LAYOUT.chunk_bytes // 2
    assert Parts(LAYOUT, [(shard, memoryview(bytes(2 * size))) for shard in split]).num_slabs == 2
    for sizes in [(2 * size, 3 * size), (2 * size + 1, 2 * size + 1)]:
        with pytest.raises(ValueError, match="number of slabs"):
            Parts(LAYOUT, [(one, memoryview(bytes(n))) for one, n in zip(split, sizes, strict=True)])
    for slab in (-1, 1):
        with pytest.raises(ValueError, match="no slab"):
            whole(LAYOUT, memoryview(bytes(LAYOUT.chunk_bytes))).payload(slab, "xxh3")
