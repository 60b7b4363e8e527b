"""Eviction of coded KV on two ranks, in real processes, against one rank: each rank moves its own heads' codes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import KvClassChoice, resolve_kv_classes
from engine.outputs import SequenceOutput
from engine.step_work import StepWork
from kvcache.codecs.calibration import FILE_NAME, write_calibration
from kvcache.eviction.kept_rows import count_frames
from kvcache.pool import KvPool
from kvtransfer.bag_repacking import BagRepacker
from kvtransfer.digests import BagSplit, DigestContext
from kvtransfer.resharding import ShardedPool, stage_moves, unsharded_pool
from kvtransfer.ticket import issue_ticket
from tests.engine.cpu.eviction.evicted_runs import CONTEXT, FOLDER, SETUP, EvictedRun
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
from tests.engine.cpu.spread_model import CLOSE, FAR, SpreadModel, spread
from tests.engine.evicting_engine import Answers, EvictingEngine, answers
from tests.unit.engine.fakes import FixedRate
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


def memory_of(pool: KvPool) -> memoryview:
    return memoryview(bytes_of(pool).reshape(-1).data)


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
        assert report.sizes.head_frames == reference.sizes.head_frames == frames
        assert report.sizes.page_tokens == reference.sizes.page_tokens
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


def test_a_bag_of_one_rank_goes_on_at_two(pair: Pair) -> None:
    """Moved page by page and repacked: what two ranks read is what one rank reads."""
    one = LoneRun(pair.one.runner, pair.one.pool, TOKENS, PROMPT, SPEC, "source")
    one.run([PROMPT])
    run = CodedRun(pair.made, TOKENS, PROMPT, SPEC, "target")
    move_sequence(one, run)
    found, wanted = run.run([64, 8]), one.run([64, 8])
    assert_close(pair, found, wanted)
    # Not a code has moved to the next one yet.
    assert (found - wanted)[:8].abs().max() < 1e-4
    release(run)
    one.pool.give_back(one.slabs, one.key)
    one.runner.forget_kept(one.key)


def move_sequence(source: LoneRun, target: CodedRun) -> None:
    """As a decode worker takes a sequence over at the end of its prompt."""
    layout, chunks, key = source.pool.layout, SPEC.boundary_chunks, target.key
    far, own = unsharded_pool(layout, memory_of(source.pool)), target.made.pools
    near = ShardedPool(layout, [(shard, memory_of(pool)) for shard, pool in own])
    prefix, bag, sizes = source.slabs[:chunks], source.slabs[chunks + 1 :], source.reports[-1].sizes
    terms = DigestContext(
        "r", 1, PROMPT, (0, layout.layers), layout.dtype, layout.chunk_shape, "f" * 64, layout.chunk_bytes,
        layout.codec, keep=SPEC, num_bag_slabs=len(bag), bag=BagSplit(1, 1, *sizes),
    )  # fmt: skip
    ticket = issue_ticket(bytes(32), terms, "p", "i", prefix + bag, lambda slab, algorithm: bytes(16))
    repacker = BagRepacker(near)
    needed = repacker.needs(ticket)
    assert needed is not None
    target.pool.give_back(target.slabs, key)
    slabs = target.pool.take_slabs(chunks + 1 + max(needed, len(bag)), key)
    moves = [move for stage in stage_moves(layout, far.shards, near.shards) for move in stage]
    here = slabs[chunks + 1 :]
    for there, slab in zip(prefix + bag, slabs[:chunks] + here[: len(bag)], strict=True):
        for move in moves:
            page = bytes_of(source.pool)[there, move.far : move.far + move.num_bytes]
            bytes_of(own[move.target][1])[slab, move.own : move.own + move.num_bytes] = page
    repacker.repack(ticket, here)
    target.pool.give_back(here[needed:], key)
    target.slabs = slabs[: chunks + 1 + needed]
    target.runner.load_kept(key, SPEC.boundary, PROMPT, here[:needed])
    target.computed, target.evicted = PROMPT, True


def test_a_sequence_that_is_parked_and_recomputed_goes_on_where_it_was(pair: Pair) -> None:
    """Behind the end of its prompt, and behind a decision in its answer, each time in the middle of a block."""
    found = list[Answers]()
    for preempted in ({}, {20: "park", 100: "recompute"}):
        worker = EvictingEngine(SLABS, swap=SLABS, ranks=pair.made)
        engine, emitted = worker.engine, list[SequenceOutput]()
        engine.add(worker.request(1), 0.0)
        for step in itertools.count():
            emitted += worker.step()
            if not len(engine.scheduler):
                break
            if step in preempted:
                engine.copy_rate = FixedRate(1e15 if preempted[step] == "park" else 1e-15)
                engine._preempt_sequence(next(iter(engine.scheduler.running)), lambda: 0.0)
        assert engine.stats.preemptions == dict.fromkeys(preempted.values(), 1)
        worker.holdings.evict_cached()
        assert worker.holdings.used == 0 and len(engine.host or ()) == 0
        found.append(answers(emitted))
    assert found[0] == found[1] and len(found[0]["r1"]) > 128


def assert_close(pair: Pair, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Stages compute the same to the bit. Ranks of a stage add in another order: `test_rank_classes` says how close."""
    if pair.is_staged:
        assert torch.equal(found, wanted)
        return
    errors = (found - wanted).abs()
    assert errors.max() <= FAR and errors.mean() <= CLOSE
    assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() >= 0.97
