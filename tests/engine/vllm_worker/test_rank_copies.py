"""A rank's copies, and what they say when a copy cannot be made: nothing is raised, and nothing stale stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvtransfer.transfer_buffer import TransferBuffer
from vllm_worker.blocks import BlockRegion
from vllm_worker.buffer import SaveMarks, slab_layout
from vllm_worker.exchange import BlockCopies, CopyPlan, KvExchange, ScheduledTokens
from vllm_worker.port import LoadPlan
from vllm_worker.rank_copies import FailedCopies, RankCopies

NUM_BLOCKS, PART = 8, 256
REGIONS = (BlockRegion("a", 0, PART // 2), BlockRegion("b", NUM_BLOCKS * PART // 2, PART // 2))


class TwoRanks:
    """An exchange, its buffer, and two ranks whose caches are full of numbers that are not finite."""

    def __init__(self) -> None:
        self.buffer = TransferBuffer(slab_layout(PART, 2), 6 * 2 * PART)
        self.exchange = KvExchange()
        self.exchange.attach_buffer(self.buffer, 2)
        self.caches = [torch.full((NUM_BLOCKS * PART // 4,), float("nan")) for _ in range(2)]
        self.ranks: list[FailedCopies] = [
            RankCopies(cache, REGIONS, NUM_BLOCKS, rank) for rank, cache in enumerate(self.caches)
        ]
        self.begun: list[tuple[tuple[int, ...], int]] = []
        self.exchange.on_save_begun = lambda saved, number: self.begun.append((saved.slabs, number))

    def step(self, *scheduled: ScheduledTokens) -> None:
        """Run a step's plan on both ranks."""
        self.run(self.exchange.plan_step(scheduled))

    def run(self, plan: CopyPlan) -> set[int]:
        for rank in self.ranks:
            rank.begin_step(plan)
            rank.load()
        invalid = self.ranks[0].take_invalid() | self.ranks[1].take_invalid()
        freed = [rank.take_ended() for rank in self.ranks]
        assert freed[0] == freed[1]
        results = [rank.take_results() for rank in self.ranks]
        self.exchange.end_step(freed[0], next((one for one in results if one is not None), None))
        return invalid

    def block(self, rank: int, block: int) -> torch.Tensor:
        """The bytes of a block."""
        raw = self.caches[rank].view(torch.uint8).view(2, NUM_BLOCKS, PART // 2)
        return raw[:, block].clone()

    def fill(self, rank: int, block: int, value: int) -> None:
        raw = self.caches[rank].view(torch.uint8).view(2, NUM_BLOCKS, PART // 2)
        raw[:, block] = value


@pytest.fixture
def two() -> Iterator[TwoRanks]:
    made = TwoRanks()
    yield made
    made.exchange.close()
    made.buffer.close()


def test_kv_moves_on_both_ranks_and_the_marks_say_when(two: TwoRanks) -> None:
    for rank in range(2):
        two.fill(rank, 3, 10 + rank)
        two.fill(rank, 5, 20 + rank)
    two.exchange.expect("r", "r#1", 128, save=True)
    assert two.exchange.finish("r", [3, 5], complete=True)
    plan = two.exchange.plan_step()
    ((slabs, number),) = two.begun
    two.ranks[0].begin_step(plan)
    assert two.exchange.is_saved(slabs, number) is None, "the other rank has not copied"
    two.ranks[1].begin_step(plan)
    assert two.exchange.is_saved(slabs, number) is True
    two.exchange.end_step(two.ranks[0].take_ended() & two.ranks[1].take_ended(), None)
    (saved,) = two.exchange.take_saved()
    assert (saved.key, saved.slabs, saved.num_tokens) == ("r#1", slabs, 128)
    two.exchange.expect("d", "d#1", 129, save=False, load=LoadPlan(slabs, 128))
    assert two.exchange.missing_tokens("d", 64) == 64
    two.exchange.begin_load("d", [0, 1, 2], 64)
    two.step()
    assert two.exchange.take_loaded() == ["d#1"] and two.exchange.take_failed_loads() == []
    for rank in range(2):
        assert bool((two.block(rank, 1) == 20 + rank).all()), "the second chunk is in the second block"
        assert not bool(two.caches[rank].view(2, NUM_BLOCKS, -1)[:, 0].isfinite().any()), (
            "the first was cached"
        )


def test_a_load_that_fails_on_one_rank_leaves_zeros_there_and_names_its_blocks(two: TwoRanks) -> None:
    two.exchange.expect("d", "d#1", 65, save=False, load=LoadPlan((0, 99), 65))
    two.exchange.begin_load("d", [2, 6], 64)
    two.exchange.expect("e", "e#1", 129, save=False, load=LoadPlan((0, 99), 128))
    two.exchange.begin_load("e", [3, 7], 128)
    plan = two.exchange.plan_step()
    assert two.run(plan) == {3, 7}
    assert sorted(two.exchange.take_loaded()) == ["d#1", "e#1"] and two.exchange.take_failed_loads() == [
        "e#1"
    ]
    assert all(not bool(two.block(rank, block).any()) for rank in range(2) for block in (3, 7))
    assert not bool(two.block(0, 2).any()), "the load of the other one, from an empty slab, went well"


def test_a_plan_that_is_shorter_than_expected_fails_as_a_load(two: TwoRanks) -> None:
    two.exchange.expect("d", "d#1", 129, save=False, load=LoadPlan((0,), 128))
    two.exchange.begin_load("d", [3, 7], 128)
    assert two.run(two.exchange.plan_step()) == {3, 7}
    assert two.exchange.take_failed_loads() == ["d#1"]


def test_a_save_that_fails_is_marked_so_and_its_blocks_are_free(two: TwoRanks) -> None:
    two.exchange.expect("r", "r#1", 64, save=True)
    assert two.exchange.finish("r", [99], complete=True)
    two.step()
    ((slabs, number),) = two.begun
    assert two.exchange.is_saved(slabs, number) is False
    (saved,) = two.exchange.take_saved()
    assert (saved.num_tokens, saved.slabs) == (0, slabs)
    assert two.exchange.take_saved() == [] and not two.exchange.can_progress


def test_a_buffer_that_cannot_be_opened_fails_only_what_needs_it(two: TwoRanks) -> None:
    two.exchange.expect("r", "r#1", 64, save=True)
    two.exchange.expect("d", "d#1", 65, save=False, load=LoadPlan((0,), 64))
    two.exchange.finish("r", [1], complete=True)
    two.exchange.begin_load("d", [4], 64)
    two.buffer.memory.close()
    assert two.run(two.exchange.plan_step()) == {4}
    assert [saved.num_tokens for saved in two.exchange.take_saved()] == [0]
    assert two.exchange.take_failed_loads() == ["d#1"]
    assert not bool(two.block(1, 4).any()), "no number that is not finite stays"


def test_a_wrong_block_to_zero_stops_nothing_else(two: TwoRanks) -> None:
    plan = replace(two.exchange.plan_step(), zeroed=(99,), loads=(BlockCopies(9, "x", (1,), (0,)),))
    assert two.run(plan) == set()
    assert not bool(two.block(0, 1).any())


def test_a_rank_that_knows_no_blocks_fails_all_and_holds_nothing(two: TwoRanks) -> None:
    two.ranks = [FailedCopies(), FailedCopies()]
    two.exchange.expect("r", "r#1", 64, save=True)
    two.exchange.expect("d", "d#1", 65, save=False, load=LoadPlan((0,), 64))
    two.exchange.finish("r", [1], complete=True)
    two.exchange.begin_load("d", [4, 5], 64)
    assert two.run(two.exchange.plan_step()) == {4}
    assert [(saved.key, saved.num_tokens) for saved in two.exchange.take_saved()] == [("r#1", 0)]
    assert two.exchange.take_failed_loads() == ["d#1"] and not two.exchange.can_progress


def test_marks_of_an_older_save_do_not_count() -> None:
    marks = SaveMarks(memoryview(bytearray(4 * 2 * 8)), 2)
    marks.write([1, 2], 0, 5)
    marks.write([1, 2], 1, 5)
    assert marks.read([1, 2], 5) is True and marks.read([1, 2], 6) is None and marks.read([0], 5) is None
    marks.write([2], 1, 6, failed=True)
    marks.write([2], 0, 6)
    assert marks.read([2], 6) is False and marks.read([1, 2], 6) is None
