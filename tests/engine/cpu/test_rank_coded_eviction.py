"""Eviction of coded KV on two ranks, in real processes, against one rank: each rank moves its own heads' codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import KvClassChoice, resolve_kv_classes
from engine.step_work import StepWork
from kvcache.codecs.calibration import FILE_NAME, write_calibration
from kvcache.kept_rows import count_frames
from kvcache.pool import KvPool
from tests.engine.cpu.evicted_runs import CONTEXT, FOLDER, SETUP, EvictedRun
from tests.engine.cpu.test_rank_classes import CLOSE, FAR
from tests.engine.cpu.test_rank_eviction import (
    COUNTS,
    PROMPT,
    SLABS,
    SPEC,
    TOKENS,
    SpreadRun,
    assert_same_rows,
    release,
)
from tests.engine.cpu.test_tensor_parallel import SpreadModel, spread
from worker.ranks import RankClass, RankEviction

# A byte that fills slabs which were given back.
UNUSED = 255
# One slot: a second first token pushes the first one out of the table of sinks.
SINK_SLOTS = 1


class CodedRun(SpreadRun):
    """A sequence of coded KV on two ranks; slabs that it gave back have no numbers that it wrote."""

    def _give_back(self, slabs: list[int]) -> None:
        for _, pool in self.made.pools:
            bytes_of(pool)[slabs] = UNUSED
        self.pool.give_back(slabs, self.key)


class LoneRun(EvictedRun):
    """The same on one rank."""

    def _give_back(self, slabs: list[int]) -> None:
        bytes_of(self.pool)[slabs] = UNUSED
        self.pool.give_back(slabs, self.key)


def bytes_of(pool: KvPool) -> np.ndarray:
    return pool.data.view(-1).numpy().view(np.uint8).reshape(pool.num_slabs, -1)


@dataclass
class Pair:
    """Two ranks, and what one rank with the same codec has answered."""

    made: SpreadModel
    one: LoneRun
    expected: torch.Tensor
    is_staged: bool


def choose_class(codec: str, file: Path) -> tuple[KvClassChoice, RankClass]:
    """A class whose groups of values two ranks do not cut, and what ranks are rank_class of it."""
    model = Checkpoint.resolve(str(FOLDER))
    own = resolve_kv_classes(model, "nuq4-1%")[0].calibration
    assert own is not None
    write_calibration(replace(own, group=64), file)
    (chosen,) = resolve_kv_classes(model, codec, str(file) if codec.startswith("nuq") else "")
    known = None if chosen.calibration is None else (str(file), chosen.calibration.model)
    return chosen, RankClass(SLABS, chosen.codec, known)


@pytest.fixture(scope="module", params=["tq4 tp", "nuq4-1% tp", "nuq4-1% pp"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    codec, way = request.param.split()
    chosen, rank_class = choose_class(codec, tmp_path_factory.mktemp("calibration") / FILE_NAME)
    files = Checkpoint.resolve(str(FOLDER))
    pool = KvPool(files.layout(codec=chosen.codec), SLABS)
    runner = CpuModelRunner.load(files, pool, CONTEXT, chosen.calibration, eviction=SETUP)
    one = LoneRun(runner, pool, TOKENS, PROMPT, SPEC)
    expected, setup = one.run(COUNTS), RankEviction.of(SETUP)
    ranks = (2, 1) if way == "tp" else (1, 2)
    with spread(
        FOLDER, *ranks, kv=rank_class, eviction=setup, max_model_len=CONTEXT, sink_slots=SINK_SLOTS
    ) as made:
        yield Pair(made, one, expected, way == "pp")
        assert made.lost.empty()


def test_two_ranks_keep_the_rows_that_one_keeps(pair: Pair) -> None:
    run, one = CodedRun(pair.made, TOKENS, PROMPT, SPEC, "a"), pair.one
    found = run.run(COUNTS)
    assert_close(pair, found, pair.expected)
    assert len(run.reports) == len(one.reports) == 3
    for report, maps, reference, whole in zip(run.reports, run.rank_maps, one.reports, one.maps, strict=True):
        assert report.policies == reference.policies
        assert (report.kept_rows, report.all_rows) == (reference.kept_rows, reference.all_rows)
        frames = tuple(count_frames(rows) for rows in whole.counts.reshape(-1).tolist())
        assert report.head_frames == reference.head_frames == frames
        assert report.bag_slabs == max(kept.num_slabs for kept in maps)
        for (shard, _), kept in zip(pair.made.pools, maps, strict=True):
            for layer, head in np.ndindex(kept.counts.shape):
                there = whole.head_positions(layer + shard.layers[0], head + shard.heads[0])
                assert_same_rows(kept.head_positions(layer, head), there, int(kept.policies[layer, head]))
    release(run)


def test_a_first_token_that_has_left_the_table_is_computed_by_all_ranks(pair: Pair) -> None:
    """Before a decision, which needs it: each rank on its own would compute what no other has an exchange for."""
    run, runner = CodedRun(pair.made, TOKENS, PROMPT, SPEC, "left"), pair.made.runner
    found = [run.run([PROMPT])]
    other = run.pool.take_slabs(1, "other")
    work = run.next_work(64)
    found += runner.run([work])
    runner.run([StepWork([TOKENS[0] + 1], 0, other, "last", TOKENS[0] + 1)])
    run.finish(work)
    found.append(run.run([8]))
    assert_close(pair, torch.cat(found), pair.expected[: PROMPT + 72])
    run.pool.give_back(other, "other")
    release(run)


def assert_close(pair: Pair, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Stages compute the same to the bit. Ranks of a stage add in another order: `test_rank_classes` says how close."""
    if pair.is_staged:
        assert torch.equal(found, wanted)
        return
    errors = (found - wanted).abs()
    assert errors.max() <= FAR and errors.mean() <= CLOSE
    assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() >= 0.97
