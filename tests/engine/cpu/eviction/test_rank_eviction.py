"""Eviction on workers of several ranks, in real processes: each rank judges its own heads, as one rank judges all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from diptych.eviction_spec import ADA, KeepSpec
from engine.cpu.eviction.rank_eviction import ForgetKept
from engine.cpu.ranks.orders import encode_order
from engine.protocols import EvictionOrder
from kvcache.eviction.kept_rows import count_frames
from tests.engine.cpu.eviction.evicted_runs import (
    CONTEXT,
    FOLDER,
    SETUP,
    EvictedRun,
    make_runner,
)
from tests.engine.cpu.eviction.rank_runs import (
    COUNTS,
    PROMPT,
    SLABS,
    SPEC,
    TOKENS,
    SpreadRun,
    assert_same_rows,
    release,
)
from tests.engine.cpu.spread_model import SpreadModel, spread
from worker.ranks import RankEviction


@pytest.fixture(scope="module")
def alone() -> tuple[EvictedRun, torch.Tensor]:
    """One rank, and its logits."""
    run = EvictedRun(*make_runner(), TOKENS, PROMPT, SPEC)
    return run, run.run(COUNTS)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tp", "pp"])
def made(request: pytest.FixtureRequest) -> Iterator[SpreadModel]:
    """Two ranks, whose unused rows are not-a-number."""
    (tp, pp), setup = request.param, RankEviction.of(SETUP)
    with spread(FOLDER, tp, pp, slabs=SLABS, eviction=setup, max_model_len=CONTEXT) as model:
        for _, pool in model.pools:
            pool.data.fill_(float("nan"))
        yield model


def test_ranks_decide_for_their_heads_as_one_rank_does(
    made: SpreadModel, alone: tuple[EvictedRun, torch.Tensor]
) -> None:
    one, expected = alone
    run = SpreadRun(made, TOKENS, PROMPT, SPEC, "a")
    torch.testing.assert_close(run.run(COUNTS), expected, rtol=0, atol=2e-3)
    assert len(run.reports) == len(one.reports) == 3
    for report, maps, reference, whole in zip(run.reports, run.rank_maps, one.reports, one.maps, strict=True):
        assert report.policies == reference.policies and report.all_rows == reference.all_rows
        assert report.kept_rows == reference.kept_rows
        frames = [count_frames(rows) for rows in whole.counts.reshape(-1).tolist()]
        assert report.sizes.head_frames == reference.sizes.head_frames == tuple(frames)
        # The rank with the most rows says how many slabs both take.
        assert report.bag_slabs == max(kept.num_slabs for kept in maps)
        for (shard, _), kept in zip(made.pools, maps, strict=True):
            part = (slice(*shard.layers), slice(*shard.heads))
            assert np.array_equal(kept.policies, whole.policies[part])
            for layer, head in np.ndindex(kept.counts.shape):
                there = whole.head_positions(layer + shard.layers[0], head + shard.heads[0])
                assert_same_rows(kept.head_positions(layer, head), there, int(kept.policies[layer, head]))
    release(run)


def test_heads_of_all_ranks_compete_as_those_of_one_rank(made: SpreadModel) -> None:
    """Rows whose scores are at the edge of a bin may change places by rounding."""
    spec = KeepSpec(0.8, 64, ADA)
    one = EvictedRun(*make_runner(), TOKENS, PROMPT, spec)
    one.run(COUNTS)
    run = SpreadRun(made, TOKENS, PROMPT, spec, "ada")
    run.run(COUNTS)
    for maps, whole in zip(run.rank_maps, one.maps, strict=True):
        assert abs(sum(kept.num_rows for kept in maps) - whole.num_rows) < 0.01 * whole.num_rows
        for (shard, _), kept in zip(made.pools, maps, strict=True):
            for layer, head in np.ndindex(kept.counts.shape):
                there = whole.head_positions(layer + shard.layers[0], head + shard.heads[0])
                here = kept.head_positions(layer, head)
                assert len(np.setxor1d(here, there)) <= 0.02 * len(there) + 2
    release(run)


def test_a_bag_that_was_moved_goes_on_at_all_ranks(made: SpreadModel) -> None:
    run = SpreadRun(made, TOKENS, PROMPT, SPEC, "here")
    run.run([PROMPT, 64])
    moved = SpreadRun(made, TOKENS, PROMPT, SPEC, "there")
    moved.pool.give_back(moved.slabs, "there")
    moved.slabs = moved.pool.take_slabs(len(run.slabs), "there")[::-1]
    for source, target in zip(run.slabs, moved.slabs, strict=True):
        for _, pool in made.pools:
            pool.data[target] = pool.data[source]
    with pytest.raises(ValueError, match="not of 330 from 64 on"):
        moved.runner.load_kept("there", SPEC.boundary, PROMPT, moved.slabs[2:])
    moved.runner.load_kept("there", SPEC.boundary, PROMPT + 64, moved.slabs[2:])
    moved.computed, moved.evicted = run.computed, True
    assert torch.equal(moved.run([64, 7]), run.run([64, 7]))
    for one in (run, moved):
        release(one)
    with pytest.raises(ValueError, match="kept rows of there are unknown"):
        moved.run([1])


def test_an_error_of_another_rank_is_raised_and_leaves_them_in_step(
    made: SpreadModel, alone: tuple[EvictedRun, torch.Tensor]
) -> None:
    run = SpreadRun(made, TOKENS, PROMPT, SPEC, "broken")
    run.run([PROMPT])
    bag = run.slabs[2:]
    frame = made.pools[1][1].data[bag[0]].clone()
    made.pools[1][1].data[bag[0]] = 0
    with pytest.raises(ValueError, match="rank 1: ValueError: this is no map of kept rows"):
        run.runner.load_kept("broken", SPEC.boundary, PROMPT, bag)
    made.pools[1][1].data[bag[0]] = frame
    run.runner.load_kept("broken", SPEC.boundary, PROMPT, bag)
    with pytest.raises(ValueError, match="nothing of nobody was recorded"):
        run.runner.plan_eviction(EvictionOrder("nobody", TOKENS[:PROMPT], PROMPT, SPEC, run.slabs))
    torch.testing.assert_close(run.run([64]), alone[1][PROMPT : PROMPT + 64], rtol=0, atol=2e-3)
    release(run)
    assert made.lost.empty()


def test_a_rank_that_cannot_begin_a_step_fails_only_that_step(
    made: SpreadModel, alone: tuple[EvictedRun, torch.Tensor]
) -> None:
    """The other rank has exchanges with it all the same, and would wait for them otherwise."""
    run = SpreadRun(made, TOKENS, PROMPT, SPEC, "lost")
    run.run([PROMPT])
    made.ranks.send_order(encode_order(ForgetKept("lost")))
    assert made.ranks.wait_for_replies().error is None
    with pytest.raises(ValueError, match="rank 1: ValueError: the kept rows of lost are unknown"):
        made.runner.run([run.next_work(64)])
    run.pool.give_back(run.slabs, "lost")
    run.runner.forget_kept("lost")
    again = SpreadRun(made, TOKENS, PROMPT, SPEC, "again")
    torch.testing.assert_close(again.run([PROMPT, 64]), alone[1][: PROMPT + 64], rtol=0, atol=2e-3)
    release(again)
    assert made.lost.empty()
