"""Sequences that share chunks say the same tokens as sequences that share nothing, while others come and go."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.chunks import CHUNK_TOKENS
from engine.batching.prefix_plan import PrefixPlan
from engine.cpu import attention, fused_step
from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.step_work import StepWork
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree, chunk_keys, root_key
from tests.support.factories import make_folder

REQUESTS, SEATS, MARGIN = 200, 24, 1e-4


@dataclass
class ServedRequest:
    """One request: its prompt, how many tokens it wants, what it has said."""

    name: str
    prompt: list[int]
    wanted: int
    said: list[int] = field(default_factory=list)
    slabs: list[int] = field(default_factory=list)


class GreedyServer:
    """Serves requests greedily, up to `SEATS` at once; a new one sits down whenever another one leaves."""

    def __init__(self, runner: CpuModelRunner, holdings: KvAllocator, seed: int) -> None:
        self.runner, self.holdings, self.seed = runner, holdings, seed
        self.cached = 0
        self.margin = float("inf")  # smallest lead of a chosen token over the next best

    def serve(self, talks: list[ServedRequest]) -> None:
        waiting, seated = talks[::-1], list[ServedRequest]()
        rng = random.Random(self.seed)
        while waiting or seated:
            arriving = min(SEATS - len(seated), len(waiting), rng.choice([0, 1, 1, 2, SEATS]))
            joined = [waiting.pop() for _ in range(arriving)]
            works = [self._begin(talk) for talk in joined] + [self._go_on(talk) for talk in seated]
            seated = joined + seated
            for talk, logits in zip(seated, self.runner.run(works), strict=True):
                best = logits[0].topk(2).values
                self.margin = min(self.margin, float(best[0] - best[1]))
                talk.said.append(int(logits[0].argmax()))
                self._share(talk)
            for talk in [talk for talk in seated if len(talk.said) == talk.wanted]:
                seated.remove(talk)
                self.holdings.release(talk.name)
            rng.shuffle(seated)
        self.holdings.check_books()

    def _begin(self, talk: ServedRequest) -> StepWork:
        keys = chunk_keys(talk.prompt, root_key("model", ""))[: (len(talk.prompt) - 1) // CHUNK_TOKENS]
        talk.slabs = self.holdings.attach_prefix(talk.name, keys)
        start = len(talk.slabs) * CHUNK_TOKENS
        self.cached += start
        self._grow(talk, len(talk.prompt))
        return StepWork(talk.prompt[start:], start, talk.slabs, "last")

    def _go_on(self, talk: ServedRequest) -> StepWork:
        length = len(talk.prompt) + len(talk.said)
        self._grow(talk, length)
        return StepWork(talk.said[-1:], length - 1, talk.slabs, "last")

    def _grow(self, talk: ServedRequest, tokens: int) -> None:
        missing = -(-tokens // CHUNK_TOKENS) - len(talk.slabs)
        if missing > 0:
            talk.slabs += self.holdings.allocate(talk.name, missing)

    def _share(self, talk: ServedRequest) -> None:
        known = [*talk.prompt, *talk.said[:-1]]  # the last one's KV is not computed yet
        self.holdings.publish(talk.name, chunk_keys(known, root_key("model", "")), talk.slabs)


def make_talks() -> list[ServedRequest]:
    """Three system prompts, some with an example behind them, and a question of their own for each request."""
    rng = random.Random(11)

    def words(count: int) -> list[int]:
        return [rng.randrange(300) for _ in range(count)]

    systems = [words(130), words(200), words(64)]
    heads = systems + [systems[0] + words(70), systems[1] + words(150)]
    return [
        ServedRequest(f"r{index}#0", rng.choice(heads) + words(rng.randint(1, 40)), rng.randint(1, 24))
        for index in range(REQUESTS)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.resolve(str(make_folder(tmp_path_factory.mktemp("shared"), "llama")))


def test_two_hundred_requests_say_the_same_with_and_without_sharing(
    files: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, shared = make_talks(), make_talks()
    pool = KvPool(files.layout(), SEATS * 8)
    desk = GreedyServer(CpuModelRunner.load(files, pool, files.config.context), KvAllocator(pool), seed=5)
    desk.serve(plain)
    assert desk.cached == 0 and desk.margin > MARGIN  # no token hangs by a rounding error

    small = KvPool(files.layout(), SEATS * 6)
    runner = CpuModelRunner.load(files, small, files.config.context)
    desk = GreedyServer(runner, KvAllocator(small, PrefixTree()), seed=6)
    read: list[int] = []

    def count(*arguments: Any) -> PrefixPlan:
        plan = attention.worthwhile_plan(*arguments)
        read.append(len(plan.runs))
        return plan

    # Steps that only decode are fused, others go layer by layer: only the former are counted.
    monkeypatch.setattr(fused_step, "worthwhile_plan", count)
    desk.serve(shared)
    assert len(read) > 40 and max(read) > 1  # trees, not one prefix
    assert desk.cached > sum(len(talk.prompt) for talk in shared) / 2
    assert [talk.said for talk in shared] == [talk.said for talk in plain]
    assert desk.holdings.used == 0


def test_a_prefix_computed_before_gives_the_same_bits(files: Checkpoint, tmp_path: Path) -> None:
    """Chunked, cached or in one go: attention goes page by page, whoever computed the pages."""
    pool = KvPool(files.layout(), 16)
    runner = CpuModelRunner.load(files, pool, files.config.context)
    prompt = [random.Random(9).randrange(300) for _ in range(300)]
    slabs = pool.take_slabs(5, "whole")
    (whole,) = runner.run([StepWork(prompt, 0, slabs, "all")])
    for cuts in ([64], [128, 192], [256], [2, 100, 298], [63, 65]):
        other, logits = pool.take_slabs(5, "parts"), list[torch.Tensor]()
        for start, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
            logits += runner.run([StepWork(prompt[start:end], start, other, "all")])
        assert torch.equal(torch.cat(logits), whole), cuts
        for mine, theirs in zip(slabs[:4], other[:4], strict=True):
            assert torch.equal(pool.data[mine], pool.data[theirs])
        pool.give_back(other, "parts")
