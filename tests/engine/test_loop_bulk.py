"""Bulk work beside online requests over the real runner: every answer is its own, and nobody's memory is mixed up."""

from __future__ import annotations

import math

import pytest
import torch

from diptych.messages import Output
from diptych.request import BULK_PRIORITY, SamplingParams, Tenancy
from engine.bulk.budget import BulkTime
from engine.bulk.engine import BulkEngine
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree, root_key
from tests.support.factories import make_folder

MODEL_LEN, NUM_SLABS, ROOT = 512, 20, root_key("the model", "")
ONLINE, BULK = Tenancy(), Tenancy("batch", "", BULK_PRIORITY)
SHARED = 70
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.resolve(str(make_folder(tmp_path_factory.mktemp("model"))))


def ask(name: str, length: int, temperature: float, origin: Tenancy, max_tokens: int) -> Sequence:
    """A request whose first tokens are those of all others, so that chunks are shared."""
    draw = torch.Generator().manual_seed(sum(name.encode()))
    first, own = torch.arange(3, 3 + SHARED), torch.randint(3, 259, (length,), generator=draw)
    asked = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=length, logprobs=0)
    return Sequence(name, 1, torch.cat([first, own]).tolist(), asked, math.inf, root=ROOT, tenancy=origin)


class TwoEngines:
    """An engine and that of bulk work over one small pool."""

    def __init__(self, model: Checkpoint) -> None:
        pool = KvPool(model.layout(), NUM_SLABS)
        self.holdings = KvAllocator(pool, PrefixTree())
        runner = CpuModelRunner.load(model, pool, MODEL_LEN)
        limits, sampler = EngineLimits(NUM_SLABS, MODEL_LEN, max_num_seqs=8), Sampler(runner.vocab_size)
        self.online = Engine(runner, Scheduler(limits), self.holdings, sampler)
        # Time passes by itself, and units are of any length.
        self.bulk = BulkEngine(runner, limits, self.holdings, sampler, BulkTime(1.0, 10.0))
        self.answers: dict[str, Answer] = {}
        self.now_s = 0.0

    def clock(self) -> float:
        self.now_s += 1e-3
        return self.now_s

    def run_round(self) -> None:
        """A step, and a unit if there is time for it."""
        outputs = [] if not self.online.has_work else self.online.step(self.clock)
        for one in [*outputs, *self.bulk.run_unit(self.online, self.clock)]:
            assert isinstance(one.message, Output), one.message
            tokens, logprobs = self.answers.setdefault(one.message.request, ([], []))
            tokens += one.message.tokens
            logprobs += [score.logprob for score in one.message.logprobs or ()]

    def settle(self) -> dict[str, Answer]:
        while len(self.online.scheduler) or len(self.bulk.scheduler):
            self.run_round()
        self.holdings.check_books()
        assert not self.holdings.used
        return self.answers


def serve(model: Checkpoint, online: int, bulk: int) -> tuple[dict[str, Answer], BulkEngine]:
    engines = TwoEngines(model)
    for i in range(bulk):
        engines.bulk.add(ask(f"b{i}", 40 + 30 * i, i % 2 * 0.9, BULK, 40), 0.0)
    for _ in range(15 if bulk else 0):
        engines.run_round()
    for i in range(online):
        engines.online.add(ask(f"r{i}", 50 + 45 * i, i % 2 * 0.9, ONLINE, 30), engines.now_s)
        engines.run_round()
    return engines.settle(), engines.bulk


def test_answers_do_not_depend_on_the_other_kind(model: Checkpoint) -> None:
    both, bulk = serve(model, 7, 5)
    assert bulk.units > 20 and bulk.table.counters.preempted.total(), "online requests took memory back"
    alone = serve(model, 7, 0)[0] | serve(model, 0, 5)[0]
    assert both.keys() == alone.keys() and len(both) == 12
    for name, (tokens, logprobs) in both.items():
        assert tokens == alone[name][0] and len(tokens) == (40 if name[0] == "b" else 30), name
        assert logprobs == pytest.approx(alone[name][1], abs=2e-3) and len(logprobs) == len(tokens)
