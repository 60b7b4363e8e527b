"""An engine of the embedded model whose heads drop rows, and its answers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from diptych.eviction_spec import KeepSpec
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
from tests.engine.cpu.eviction.evicted_runs import SETUP, source_tokens
from tests.engine.cpu.spread_model import SpreadModel

TINY = Path(__file__).parents[2] / "models" / "tiny"
MODEL_LEN, NEW_TOKENS = 512, 140
# Prompt: where it begins in a source file, and its tokens; the last two begin alike. What its heads may drop.
REQUESTS = [
    (0, 40, KeepSpec(0.8)),
    (100, 130, KeepSpec(0.6)),
    (300, 200, KeepSpec(0.8, 64)),
    (300, 330, KeepSpec(0.7, 64)),
]
ALL = range(len(REQUESTS))
TEXT = source_tokens(700)
# Request -> its new tokens.
Answers = dict[str, list[int]]


class EvictingEngine:
    """One engine of the embedded model with its own pool, raw or in one codec; or on `ranks`, with their pools."""

    def __init__(
        self,
        num_slabs: int = 60,
        swap: int = 0,
        codec: str = "raw",
        ranks: SpreadModel | None = None,
        **limits: Any,
    ) -> None:
        if ranks is None:
            model = Checkpoint.resolve(str(TINY))
            codec_id, calibration = resolve_kv_codec(model, codec)
            pools = [KvPool(model.layout(codec=codec_id), num_slabs)]
            runner = CpuModelRunner.load(model, pools[0], MODEL_LEN, calibration, eviction=SETUP)
        else:
            runner, pools = ranks.runner, [pool for _, pool in ranks.pools]
        self.pool, self.layout = pools[0], pools[0].layout
        self.holdings = KvAllocator(self.pool, PrefixTree())
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 96} | limits
        scheduler = Scheduler(EngineLimits(num_slabs, MODEL_LEN, **settings))
        host = HostTier(pools, swap * sum(pool.layout.chunk_bytes for pool in pools))
        self.engine = Engine(runner, scheduler, self.holdings, Sampler(runner.vocab_size), host)
        self.seen: list[Sequence] = []
        self.held: list[Sequence] = []
        self._ticks = itertools.count()

    def request(self, number: int, output: tuple[int, ...] = (), **rest: Any) -> Sequence:
        start, length, keep = REQUESTS[number]
        sampling = SamplingParams(max_tokens=NEW_TOKENS, seed=0, temperature=0.0)
        settings: dict[str, Any] = {"root": root_key("the model", ""), "keep": keep} | rest
        prompt = TEXT[start : start + length]
        self.seen.append(Sequence(f"r{number}", 1, prompt, sampling, math.inf, list(output), **settings))
        return self.seen[-1]

    def step(self) -> list[SequenceOutput]:
        emitted = self.engine.step(lambda: float(next(self._ticks)))
        self.holdings.check_books()
        return emitted

    def run(self, numbers: range | None = None, **rest: Any) -> list[SequenceOutput]:
        """Serve these requests, all at once (None: those that are here), to the end."""
        for number in numbers or ():
            self.engine.add(self.request(number, **rest), 0.0)
        emitted: list[SequenceOutput] = []
        while len(self.engine.scheduler):
            emitted += self.step()
        self.held += [emission.held for emission in emitted if emission.held]
        return emitted


def answers(emitted: list[SequenceOutput]) -> Answers:
    gathered: Answers = {}
    for emission in emitted:
        assert isinstance(emission.message, Output), emission.message
        gathered.setdefault(emission.message.request, []).extend(emission.message.tokens)
    return gathered
