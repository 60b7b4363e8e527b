"""The loop with heads that drop KV, on the embedded model: slabs go back to the pool, and tokens are those of requests
that ran alone, whether they hit the cache or not, in pieces, preempted, parked or handed over.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from diptych.eviction_spec import KEEP_ALL, KeepSpec, decision_tokens
from diptych.messages import Output
from diptych.request import SamplingParams
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine, SequenceOutput
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.sampling.sampler import Sampler
from engine.scheduling.new_token_ratio import NewTokenRatio
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree, root_key
from kvcache.tiers.host import HostTier
from tests.engine.cpu.eviction.evicted_runs import SETUP, source_tokens
from tests.engine.cpu.test_tensor_parallel import SpreadModel
from tests.unit.engine.fakes import FixedRate

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


@pytest.fixture(scope="module")
def alone() -> Answers:
    """Every request by itself, prompts whole."""
    worker = EvictingEngine(max_num_batched_tokens=MODEL_LEN, chunked_prefill=False)
    found: Answers = {}
    for number in ALL:
        worker.holdings.evict_cached()
        found |= answers(worker.run(range(number, number + 1)))
    assert worker.holdings.used == 0
    return found


def test_eviction_is_not_lossless(alone: Answers) -> None:
    """What the others compare differs from answers that keep everything."""
    whole = answers(EvictingEngine().run(ALL, keep=KEEP_ALL))
    assert whole.keys() == alone.keys() and whole != alone


def test_in_pieces_beside_others_and_from_the_cache(alone: Answers) -> None:
    worker = EvictingEngine()
    assert answers(worker.run(ALL)) == alone
    again = answers(worker.run(ALL))
    assert again == alone and [seq.cached for seq in worker.seen[4:]] == [0, 64, 128, 256]
    assert worker.holdings.used == 0


def test_an_answer_that_goes_on_elsewhere(alone: Answers) -> None:
    """The prompt and the delivered tokens are read by another worker, in blocks that end at decision points."""
    worker = EvictingEngine()
    for number, done in zip(ALL, (1, 63, 64, 100), strict=True):
        worker.engine.add(worker.request(number, tuple(alone[f"r{number}"][:done])), 0.0)
    found = answers(worker.run())
    assert found == {name: alone[name][done:] for name, done in zip(alone, (1, 63, 64, 100), strict=True)}


@pytest.mark.parametrize("done", [0, 70])
def test_prefilled_here_and_decoded_there(alone: Answers, done: int) -> None:
    """Whole chunks before the boundary and the bag move; tokens since the last decision are read again."""
    prefill, decode = EvictingEngine(), EvictingEngine()
    for number in ALL:
        prefill.engine.add(prefill.request(number, tuple(alone[f"r{number}"][:done]), hold_kv=True), 0.0)
    emitted = prefill.run()
    for held in prefill.held:
        decided = decision_tokens(len(held.prompt), held.computed)
        seq = decode.request(
            int(held.id[1:]), tuple(held.output), computed=decided, kept_slabs=held.kept_slabs
        )
        seq.slabs = decode.holdings.allocate(seq.key, len(held.slabs))
        ring = held.keep.boundary_chunks
        for place, (source, target) in enumerate(zip(held.slabs, seq.slabs, strict=True)):
            if place != ring:
                decode.pool.slab_bytes(target)[:] = prefill.pool.slab_bytes(source)
        decode.engine.adopt(seq, 0.0)
        prefill.holdings.release(held.key)
    assert answers(emitted + decode.run()) == {name: tokens[done:] for name, tokens in alone.items()}
    assert prefill.holdings.used == decode.holdings.used == 0


@pytest.mark.parametrize("parks", [True, False], ids=["park", "recompute"])
def test_preempted_requests_go_on_where_they_were(alone: Answers, parks: bool) -> None:
    """Each is preempted in the middle of blocks, before and after its first decision in the answer."""
    worker = EvictingEngine(swap=60)
    worker.engine.copy_rate = FixedRate(1e15 if parks else 1e-15)
    for number in ALL:
        worker.engine.add(worker.request(number), 0.0)
    emitted, engine = list[SequenceOutput](), worker.engine
    for step in itertools.count():
        emitted += worker.step()
        if not len(engine.scheduler):
            break
        if step in (40, 100):
            for key in list(engine.scheduler.running):
                engine._preempt_sequence(key, lambda: 0.0)
    assert answers(emitted) == alone
    assert engine.stats.preemptions == {"park" if parks else "recompute": 2 * len(REQUESTS)}
    assert worker.holdings.used == 0 and len(engine.host or ()) == 0


def test_a_small_pool_changes_no_token(alone: Answers) -> None:
    """Slabs for a bag, or for a prompt, are missing: others give up theirs."""
    worker = EvictingEngine(num_slabs=11)
    worker.engine.scheduler.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now
    assert answers(worker.run(ALL)) == alone
    assert worker.engine.stats.preemptions and worker.holdings.used == 0


def test_slabs_go_back_to_the_pool() -> None:
    """After its prompt, a sequence holds whole chunks, one ring, and a bag that is smaller than what it replaces."""
    worker = EvictingEngine(max_num_batched_tokens=MODEL_LEN)
    worker.engine.add(seq := worker.request(3), 0.0)
    worker.step()
    held = worker.holdings.used
    assert held == len(seq.slabs) == 1 + 1 + len(seq.bag_slabs) and held <= worker.layout.num_chunks(331)
    worker.engine.abort(seq.id, 1)
    assert worker.holdings.used == 0
