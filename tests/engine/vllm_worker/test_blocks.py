"""Which bytes are a block: over grids of shapes, in each of vLLM's layouts, against a plain model of its strides."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch

from vllm_worker import blocks
from vllm_worker.blocks import RankBlocks, find_regions, join_runs, layer_parts

NUM_BLOCKS = 9


@dataclass
class Placed:
    """The fields of a `KVCacheTensor`."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


def place_layers(layout: str, layers: int, heads: int, page: int) -> list[Placed]:
    """How vLLM places `layers` layers, whose pages have `page` bytes for each of `heads` heads, in one allocation."""
    names, size = [f"layer.{index}" for index in range(layers)], layers * heads * page * NUM_BLOCKS
    match layout:
        case "LBHNC":
            return [Placed(size, names, heads * page * NUM_BLOCKS, heads * page)]
        case "LHBNC":
            return [Placed(size, names, heads * page * NUM_BLOCKS, page)]
        case "BLHNC":
            return [Placed(size, names, heads * page, layers * heads * page)]
        case "two tensors":
            stride, half = heads * page * NUM_BLOCKS, max(1, layers // 2)
            parts = [Placed(size, names[:half], stride, heads * page)]
            rest = Placed(size, names[half:], stride, heads * page, half * stride)
            return [*parts, rest] if names[half:] else parts
    raise AssertionError(layout)


def page_start(layout: str, layers: int, heads: int, page: int, layer: int, head: int, block: int) -> int:
    """The first byte of the page of one layer, head and block."""
    if layout == "LHBNC":
        return ((layer * heads + head) * NUM_BLOCKS + block) * page
    if layout == "BLHNC":
        return ((block * layers + layer) * heads + head) * page
    return ((layer * NUM_BLOCKS + block) * heads + head) * page


GRID = list(product(("LBHNC", "LHBNC", "BLHNC", "two tensors"), (1, 2, 5), (1, 4), (64, 96)))


@pytest.mark.parametrize(("layout", "layers", "heads", "page"), GRID)
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_survive_the_way_through_the_buffer(
    layout: str, layers: int, heads: int, page: int, ranks: int
) -> None:
    """Every byte of the chosen blocks comes to the same place of another block, and no other byte changes."""
    regions = find_regions(place_layers(layout, layers, heads, page), NUM_BLOCKS)
    part = layers * heads * page
    assert sum(one.block_bytes for one in layer_parts(regions)) == part
    slabs = torch.zeros((6, ranks * part), dtype=torch.uint8)
    old_blocks, own_slabs, target_blocks = [3, 4, 0], [1, 2, 5], [8, 1, 2]
    for rank in range(ranks):
        source = torch.randint(1, 256, (part * NUM_BLOCKS,), dtype=torch.uint8)
        target = torch.zeros_like(source)
        RankBlocks(source, regions, NUM_BLOCKS, slabs, rank).save(old_blocks, own_slabs)
        RankBlocks(target, regions, NUM_BLOCKS, slabs, rank).load(target_blocks, own_slabs)
        expected = torch.zeros_like(target)
        for (old, new), layer, head in product(
            zip(old_blocks, target_blocks, strict=True), range(layers), range(heads)
        ):
            begin, end = (page_start(layout, layers, heads, page, layer, head, block) for block in (old, new))
            expected[end : end + page] = source[begin : begin + page]
        assert torch.equal(target, expected)
    assert all(bool(slabs[slab].all()) == (slab in own_slabs) for slab in range(6)), "other slabs changed"


@pytest.mark.parametrize("most", [1, 1000, 1 << 20])
@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC", "BLHNC"])
def test_the_way_of_a_device_gives_the_same_bytes(
    layout: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_STAGED_BYTES", most)
    regions = find_regions(place_layers(layout, 3, 2, 64), NUM_BLOCKS)
    cache, part = torch.randint(0, 256, (3 * 2 * 64 * NUM_BLOCKS,), dtype=torch.uint8), 3 * 2 * 64
    slabs = [torch.zeros((5, 2 * part), dtype=torch.uint8) for _ in range(2)]
    direct, staged = (RankBlocks(cache, regions, NUM_BLOCKS, one, 1) for one in slabs)
    staged._is_staged = True
    for one in (direct, staged):
        one.save([7, 8, 2], [0, 1, 4])
    assert torch.equal(*slabs)
    staged.load([0, 3, 1], [0, 1, 4])
    again = torch.zeros((5, 2 * part), dtype=torch.uint8)
    RankBlocks(cache, regions, NUM_BLOCKS, again, 1).save([0, 3, 1], [0, 1, 4])
    assert torch.equal(again, slabs[0])


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC", "BLHNC"])
def test_a_zeroed_block_is_zero_in_every_layer_and_others_stay(layout: str) -> None:
    regions = find_regions(place_layers(layout, 3, 2, 64), NUM_BLOCKS)
    cache = torch.full((3 * 2 * 64 * NUM_BLOCKS,), 7, dtype=torch.uint8)
    RankBlocks(cache, regions, NUM_BLOCKS, torch.zeros((1, 384), dtype=torch.uint8), 0).zero([4])
    for layer, head, block in product(range(3), range(2), range(NUM_BLOCKS)):
        begin = page_start(layout, 3, 2, 64, layer, head, block)
        assert bool((cache[begin : begin + 64] == (0 if block == 4 else 7)).all())


def test_a_dtype_of_more_bytes_is_seen_as_bytes() -> None:
    regions = find_regions(place_layers("LBHNC", 2, 1, 64), NUM_BLOCKS)
    cache, slabs = (
        torch.arange(2 * 16 * NUM_BLOCKS, dtype=torch.float32),
        torch.zeros((1, 128), dtype=torch.uint8),
    )
    RankBlocks(cache, regions, NUM_BLOCKS, slabs, 0).save([5], [0])
    layers = slabs.view(torch.float32).view(2, 16)
    assert torch.equal(layers, cache.view(2, NUM_BLOCKS, 16)[:, 5])


@pytest.mark.parametrize(
    ("placed", "why"),
    [
        ([Placed(640, ["a"], 100, 40, 0), Placed(640, ["b"], 400, 40)], "whole regions|overlap"),
        ([Placed(99, ["a"], 360, 40)], "end behind the 99 bytes"),
        ([Placed(720, ["a"], 360, 40), Placed(720, ["b"], 360, 40, 40)], "overlap in part"),
        ([Placed(720, ["a"], 360, 40), Placed(720, ["b"], 180, 20)], "overlap in part"),
        ([Placed(720, ["a"], 400, 40)], "not whole regions"),
        ([Placed(720, [], 360, 40)], "without layers"),
    ],
)
def test_strides_that_are_no_whole_blocks_are_refused(placed: list[Placed], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        find_regions(placed, NUM_BLOCKS)


def test_layers_that_share_their_memory_are_copied_once() -> None:
    placed = place_layers("LBHNC", 2, 1, 64)
    assert find_regions([*placed, *placed], NUM_BLOCKS) == find_regions(placed, NUM_BLOCKS)


@pytest.mark.parametrize(
    ("numbers", "slabs", "error"),
    [([0], [0, 1], ValueError), ([9], [0], IndexError), ([-1], [0], IndexError), ([0], [2], IndexError)],
)
def test_copies_that_do_not_exist_change_nothing(
    numbers: list[int], slabs: list[int], error: type[Exception]
) -> None:
    regions = find_regions(place_layers("LBHNC", 2, 1, 64), NUM_BLOCKS)
    cache, buffer = (
        torch.ones(128 * NUM_BLOCKS, dtype=torch.uint8),
        torch.full((2, 128), 3, dtype=torch.uint8),
    )
    rank = RankBlocks(cache, regions, NUM_BLOCKS, buffer, 0)
    for copy in (rank.save, rank.load):
        with pytest.raises(error):
            copy(numbers, slabs)
    assert bool((cache == 1).all()) and bool((buffer == 3).all())


def test_a_slab_without_room_for_the_rank_is_refused() -> None:
    regions = find_regions(place_layers("LBHNC", 1, 1, 64), NUM_BLOCKS)
    with pytest.raises(ValueError, match="no room for rank 1"):
        RankBlocks(
            torch.zeros(64 * NUM_BLOCKS), regions, NUM_BLOCKS, torch.zeros((2, 64), dtype=torch.uint8), 1
        )


def test_runs_join_what_is_adjacent_on_both_sides() -> None:
    assert list(join_runs([4, 5, 6, 9, 10], [0, 1, 3, 4, 5])) == [(4, 0, 2), (6, 3, 1), (9, 4, 2)]
    assert list(join_runs([], [])) == []
