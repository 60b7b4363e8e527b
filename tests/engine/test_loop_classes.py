"""Two KV classes in one loop: the answers of each are those of a worker that has this class alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.sampling.sampler import Sampler
from engine.scheduling.new_token_ratio import NewTokenRatio
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from engine.step_work import StepWork
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree, root_key
from kvcache.tiers.host import HostArenas, HostTier
from tests.engine.coded_engine import ALL, MODEL_LEN, TINY, Answers, CodedEngine, answers, check_same

CODED = "nuq4-1%"


class TwoClassEngine:
    """One engine of the embedded model with an arena for raw KV and one for coded KV."""

    def __init__(self, raw_slabs: int = 40, coded_slabs: int = 40, **limits: Any) -> None:
        model = Checkpoint.resolve(str(TINY))
        codec, calibration = resolve_kv_codec(model, CODED)
        self.raw = KvPool(model.layout(), raw_slabs)
        self.coded = KvPool(model.layout(codec=codec), coded_slabs, first=raw_slabs)
        self.pools = {pool.layout.kv_class: pool for pool in (self.raw, self.coded)}
        self.holdings = KvArenas({name: KvAllocator(pool, PrefixTree()) for name, pool in self.pools.items()})
        self.runner = CpuModelRunner.load(model, self.raw, MODEL_LEN, others=[(self.coded, calibration)])
        settings = {"max_num_seqs": 16, "max_num_batched_tokens": 96} | limits
        sizes = {name: pool.num_slabs for name, pool in self.pools.items()}
        scheduler = Scheduler(EngineLimits(sum(sizes.values()), MODEL_LEN, arena_slabs=sizes, **settings))
        host = HostArenas({name: HostTier([pool], 1 << 24, pool.first) for name, pool in self.pools.items()})
        self.engine = Engine(self.runner, scheduler, self.holdings, Sampler(self.runner.vocab_size), host)
        self._ticks = itertools.count()

    def add(self, seq: Sequence, pool: KvPool) -> None:
        """Queue the request in the arena of a pool."""
        layout = pool.layout
        seq.root, seq.kv_class = root_key("the model", "", layout.codec), layout.kv_class
        seq.id = f"{seq.id}@{layout.kv_class}"
        seq.key = f"{seq.id}#{seq.epoch}"
        self.engine.add(seq, 0.0)

    def run(self) -> tuple[Answers, Answers]:
        """Serve everything to the end: the answers of raw and of coded requests."""
        answered = []
        while len(self.engine.scheduler):
            assert self.engine.has_work
            answered += self.engine.step(lambda: float(next(self._ticks)))
        found = answers(answered)
        raw, coded = (
            {
                name.partition("@")[0]: one
                for name, one in found.items()
                if name.endswith("@" + pool.layout.kv_class)
            }
            for pool in (self.raw, self.coded)
        )
        return raw, coded


@pytest.fixture(scope="module")
def alone() -> tuple[Answers, Answers]:
    """All requests, by an engine with raw KV alone and by one with coded KV alone."""
    return answers(CodedEngine("raw").run(ALL)), answers(CodedEngine(CODED).run(ALL))


def test_each_class_gives_the_answers_of_a_worker_that_has_it_alone(alone: tuple[Answers, Answers]) -> None:
    """Cold and from the cache; equal prompts of two classes share nothing."""
    worker, requests = TwoClassEngine(), CodedEngine("raw")
    for _ in ("cold", "cached"):
        for number in ALL:
            for pool in (worker.raw, worker.coded):
                worker.add(requests.request(number), pool)
        for found, wanted in zip(worker.run(), alone, strict=True):
            check_same(found, wanted)
        assert worker.holdings.used == 0
        worker.holdings.check_books()
    raw, coded = worker.holdings.arenas.values()
    assert raw.prefix_hits == coded.prefix_hits > 0


@pytest.mark.parametrize("full", ["raw", "coded"])
def test_a_full_arena_preempts_none_of_the_other(alone: tuple[Answers, Answers], full: str) -> None:
    worker, requests = TwoClassEngine(**{f"{full}_slabs": 5}), CodedEngine("raw")
    worker.engine.scheduler.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now
    preempted = []
    drop = worker.engine._preempt_sequence

    def watch(key: str, *rest: Any) -> None:
        preempted.append(key.partition("@")[2].partition("#")[0])
        drop(key, *rest)

    worker.engine._preempt_sequence = watch  # type: ignore[method-assign,assignment]
    for number in ALL:
        for pool in (worker.raw, worker.coded):
            worker.add(requests.request(number), pool)
    for found, wanted in zip(worker.run(), alone, strict=True):
        check_same(found, wanted)
    tight = worker.raw if full == "raw" else worker.coded
    assert set(preempted) == {tight.layout.kv_class}
    assert worker.holdings.used == 0


def test_a_row_has_the_same_bits_whichever_classes_are_beside_it() -> None:
    """Prefills and decodes of both classes in one step, and the same works class by class."""
    worker, draw = TwoClassEngine(), torch.Generator().manual_seed(3)
    base = worker.coded.first
    tokens = [torch.randint(3, 4000, (n,), generator=draw).tolist() for n in (70, 5, 130, 64)]

    def works(start: int, first: int) -> list[StepWork]:
        count = 1 if start else None
        return [
            StepWork(
                one[start : start + count] if count else one[:64],
                start,
                [first + 3 * i, first + 3 * i + 1],
                "last",
                one[0],
            )
            for i, one in enumerate(tokens)
            if len(one) > start
        ]

    for start in (0, 64):
        raw, coded = works(start, 0), works(start, base)
        mixed = [work for pair in zip(coded, raw, strict=True) for work in pair]
        together = worker.runner.run(mixed)
        apart = [worker.runner.run(coded), worker.runner.run(raw)]
        for number, logits in enumerate(together):
            assert torch.equal(logits, apart[number % 2][number // 2])
    assert math.isfinite(float(together[0].sum()))


def test_work_whose_slabs_are_in_two_pools_is_refused() -> None:
    worker = TwoClassEngine(raw_slabs=4, coded_slabs=4)
    with pytest.raises(ValueError, match="not all in a pool"):
        worker.runner.run([StepWork([5] * 65, 0, [3, 4], "last")])
