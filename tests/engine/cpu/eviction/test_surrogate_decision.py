"""The rule `zap` in whole runs: the rows that stay are those that score enough, however they came to be there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diptych.eviction_spec import ADA, ZAP, KeepSpec
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.protocols import EvictionOrder
from engine.step_work import StepWork
from kvcache.eviction.policies import FULL, PREDICTED
from kvcache.eviction.zap import Angles
from kvcache.pool import KvPool
from tests.engine.cpu.eviction.evicted_runs import (
    CONTEXT,
    FOLDER,
    SETUP,
    EvictedRun,
    make_runner,
    source_tokens,
)
from tests.engine.cpu.eviction.rank_runs import SLABS, SpreadRun, release
from tests.engine.cpu.eviction.segmented_runs import CALIBRATED, SPEC, WEIGHTS
from tests.engine.cpu.spread_model import spread
from worker.ranks import RankEviction

PROMPT, ANSWER = 330, 200
TOKENS = source_tokens(PROMPT + ANSWER)


def make_coded(codec: str, setup: EvictionSetup = CALIBRATED) -> tuple[CpuModelRunner, KvPool]:
    """The embedded model over a pool with a codec."""
    files = Checkpoint.resolve(str(FOLDER))
    codec_id, calibration = resolve_kv_codec(files, codec)
    pool = KvPool(files.layout(codec=codec_id), 60)
    return CpuModelRunner.load(files, pool, CONTEXT, calibration, eviction=setup), pool


class CodedRun(EvictedRun):
    """A run whose unused memory is no valid code."""

    def _give_back(self, slabs: list[int]) -> None:
        for slab in slabs:
            self.pool.slab_bytes(slab)[:] = bytes([0xA5]) * len(self.pool.slab_bytes(slab))
        self.pool.give_back(slabs, self.key)


@pytest.fixture(scope="module")
def whole() -> tuple[EvictedRun, torch.Tensor]:
    run = EvictedRun(*make_runner(setup=CALIBRATED), TOKENS, PROMPT, SPEC)
    return run, run.run([PROMPT, 64, 64, 64, 8])


def same_maps(one: EvictedRun, other: EvictedRun) -> None:
    assert [kept.encode() for kept in one.maps] == [kept.encode() for kept in other.maps]


def test_rows_older_than_64_tokens_stay_if_they_score_enough(whole: tuple[EvictedRun, Any]) -> None:
    run, plain = whole[0], make_runner(setup=None)
    runner, pool = plain
    slabs = pool.take_slabs(9, "plain")
    runner.run([StepWork(TOKENS, 0, slabs, "none", TOKENS[0])])
    rows = pool.data[slabs].view(9, 6, 4, 2, 64, 32).permute(1, 2, 3, 0, 4, 5).reshape(6, 4, 2, 9 * 64, 32)
    evictor = run.runner._attentions[0].evictor
    assert evictor is not None and evictor._surrogate is not None
    threshold, angles = (
        WEIGHTS.find_threshold(0.6),
        Angles(np.arange(PROMPT), evictor._surrogate._frequencies),
    )
    first = run.maps[0]
    assert (first.policies == PREDICTED).all() and run.reports[0].policies == {"zap": 24}
    assert 0.1 < first.num_rows / first.all_rows < 0.8
    for layer, head in np.ndindex(6, 4):
        keys, values = rows[layer, head, :, :PROMPT].numpy()
        scores = WEIGHTS.score_rows(layer, head, keys, values, angles)
        wanted = (scores >= threshold) | (np.arange(PROMPT) >= PROMPT - 64)
        assert abs(scores - threshold).min() > 1e-6, "a score that rounding decides: take another prompt"
        assert (
            first.head_positions(layer, head).tolist() == np.flatnonzero(wanted)[wanted[:64].sum() :].tolist()
        )
        for before, after in zip(run.maps, run.maps[1:], strict=False):
            old, new = (one.head_positions(layer, head) for one in (before, after))
            scored = before.length - 64
            # What was scored stays; the 64 tokens before the newest are scored now.
            assert np.array_equal(old[old < scored], new[new < scored])
            assert np.isin(new[(new >= scored) & (new < before.length)], old).all()
            assert np.array_equal(new[new >= before.length], np.arange(before.length, after.length))


def test_steps_of_any_size_decide_the_same_and_nothing_is_recorded(
    whole: tuple[EvictedRun, torch.Tensor],
) -> None:
    one, expected = whole
    run = EvictedRun(*make_runner(setup=CALIBRATED), TOKENS, PROMPT, SPEC)
    evictor = run.runner._attentions[0].evictor
    assert evictor is not None
    run.run([1, 63, 200, 66])
    assert evictor.recorded_bytes == 0
    decoded = run.run([1] * 30 + [34, 64, 64, 8])
    torch.testing.assert_close(decoded, expected[PROMPT:], rtol=0, atol=2e-3)
    assert evictor.recorded_bytes == 0
    for mine, theirs in zip(run.maps, one.maps, strict=True):
        # Keys and values of another cut differ by rounding.
        assert len(np.setxor1d(mine.positions, theirs.positions)) <= 0.01 * len(theirs.positions)


def test_a_cached_prefix_is_scored_without_computing_it_again(whole: tuple[EvictedRun, torch.Tensor]) -> None:
    """Only the last token is computed by the second sequence; its KV before that is the first one's."""
    one, _ = whole
    runner, pool = make_runner(setup=CALIBRATED)
    first = EvictedRun(runner, pool, TOKENS, PROMPT, SPEC, "first")
    runner.run([first.next_work(PROMPT)])
    second = EvictedRun(runner, pool, TOKENS, PROMPT, SPEC, "second")
    for source, target in zip(first.slabs, second.slabs, strict=True):
        pool.slab_bytes(target)[:] = pool.slab_bytes(source)
    second.computed = PROMPT - 1
    second.run([1, 64, 64, 64, 8])
    assert len(second.maps) == len(one.maps)
    assert second.maps[0].encode() == one.maps[0].encode()


@pytest.mark.parametrize("codec", ["int8", "tq4", "nuq4-1%"])
def test_codes_are_scored_as_they_are_decoded(codec: str, whole: tuple[EvictedRun, Any]) -> None:
    raw = whole[0]
    run = CodedRun(*make_coded(codec), TOKENS, PROMPT, SPEC)
    run.run([PROMPT, 64, 64, 64])
    for mine, theirs in zip(run.maps, raw.maps, strict=True):
        assert len(np.setxor1d(mine.positions, theirs.positions)) <= 0.2 * len(theirs.positions)
    again = CodedRun(*make_coded(codec), TOKENS, PROMPT, SPEC)
    again.run([PROMPT, 1, 62, 1, 64, 64])
    same_maps(run, again)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp", "pp"])
def test_ranks_score_their_own_heads(tp: int, pp: int, whole: tuple[EvictedRun, Any]) -> None:
    one = whole[0]
    setup = RankEviction.of(CALIBRATED)
    with spread(FOLDER, tp, pp, slabs=SLABS, eviction=setup, max_model_len=CONTEXT) as made:
        run = SpreadRun(made, TOKENS, PROMPT, SPEC, "a")
        run.run([PROMPT, 64, 64])
        for maps, whole_map in zip(run.rank_maps, one.maps, strict=False):
            for (shard, _), kept in zip(made.pools, maps, strict=True):
                for layer, head in np.ndindex(kept.counts.shape):
                    there = whole_map.head_positions(layer + shard.layers[0], head + shard.heads[0])
                    assert len(np.setxor1d(kept.head_positions(layer, head), there)) <= 2
        release(run)


def test_short_prompts_keep_everything() -> None:
    run = EvictedRun(*make_runner(setup=CALIBRATED), TOKENS, 9, KeepSpec(0.5, 0, ZAP))
    run.run([9, 64, 64])
    assert (run.maps[-1].policies == FULL).all() and run.reports[-1].kept_rows == 24 * 137


def test_other_weights_or_none_are_refused() -> None:
    other = KeepSpec(0.5, 0, "zap@0123456789abcdef")
    for setup, spec in ((SETUP, KeepSpec(0.5, 0, ZAP)), (CALIBRATED, other)):
        runner, pool = make_runner(setup=setup)
        run = EvictedRun(runner, pool, TOKENS, 100, spec)
        runner.run([run.next_work(100)])
        with pytest.raises(ValueError, match="no KV is evicted here by zap"):
            runner.plan_eviction(EvictionOrder("a", TOKENS[:100], 100, spec, run.slabs))
    assert make_runner(setup=CALIBRATED)[0].keep_rules[-1] == WEIGHTS.rule
    assert ADA in make_runner()[0].keep_rules and ZAP not in "".join(make_runner()[0].keep_rules)
