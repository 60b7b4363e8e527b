"""An engine over coded pages of the embedded model, and its answers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.messages import Output
from diptych.request import SamplingParams
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.outputs import SequenceOutput
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree, root_key
from kvcache.tiers.host import HostTier

TINY = Path(__file__).parents[2] / "models" / "tiny"
MODEL_LEN, NEW_TOKENS = 256, 8
LENGTHS = (1, 60, 63, 64, 65, 120, 129, 180)
# Two orders of adding may move a number over the edge of a code.
SAME = 2e-3
# Request -> its new tokens and their log-probabilities.
Answers = dict[str, tuple[list[int], list[float]]]


class CodedEngine:
    """One engine of the embedded model with its own pool, all of it in one codec."""

    def __init__(self, codec: str, num_slabs: int = 40, swap: int = 0, **limits: Any) -> None:
        model = Checkpoint.resolve(str(TINY))
        codec_id, calibration = resolve_kv_codec(model, codec)
        self.layout = model.layout(codec=codec_id)
        self.pool = KvPool(self.layout, num_slabs)
        self.holdings = KvAllocator(self.pool, PrefixTree())
        runner = CpuModelRunner.load(model, self.pool, MODEL_LEN, calibration)
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 96} | limits
        scheduler = Scheduler(EngineLimits(num_slabs, MODEL_LEN, **settings))
        host = HostTier([self.pool], swap * self.layout.chunk_bytes)
        self.engine = Engine(runner, scheduler, self.holdings, Sampler(runner.vocab_size), host)
        self.held: list[Sequence] = []
        self._ticks = itertools.count()

    def request(self, number: int, output: tuple[int, ...] = (), hold: bool = False) -> Sequence:
        random = torch.Generator().manual_seed(number)
        prompt = torch.randint(3, 4000, (LENGTHS[number],), generator=random).tolist()
        sampling = SamplingParams(max_tokens=NEW_TOKENS, seed=0, temperature=0.0, logprobs=0)
        root = root_key("the model", "", self.layout.codec)
        return Sequence(f"r{number}", 1, prompt, sampling, math.inf, list(output), hold_kv=hold, root=root)

    def run(
        self, numbers: range | None = None, hold: bool = False, defer: bool = False
    ) -> list[SequenceOutput]:
        """Serve these requests, all at once (None: those that are here), to the end. Those to hold may `defer` their
        first token.
        """
        for number in numbers or ():
            seq = self.request(number, hold=hold)
            seq.defer_first = defer
            self.engine.add(seq, 0.0)
        emitted: list[SequenceOutput] = []
        while len(self.engine.scheduler):
            emitted += self.engine.step(lambda: float(next(self._ticks)))
        self.held += [emission.held for emission in emitted if emission.held]
        return emitted


ALL = range(len(LENGTHS))


def answers(emitted: list[SequenceOutput]) -> Answers:
    gathered: Answers = {}
    for emission in emitted:
        output = emission.message
        assert isinstance(output, Output), output
        tokens, scores = gathered.get(output.request, ([], []))
        scores = scores + [one.logprob for one in output.logprobs or []]
        gathered[output.request] = (tokens + output.tokens, scores)
    return gathered


def check_same(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for name, (tokens, scores) in expected.items():
        assert found[name][0] == tokens, name
        assert found[name][1] == pytest.approx(scores, abs=SAME)
