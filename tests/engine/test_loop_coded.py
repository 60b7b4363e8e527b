"""The loop over pools with a codec: hit or miss, in pieces, handed over, dropped or parked, the tokens are the same.

Everything is compared with a request that is prefilled at once and decoded alone. Pages travel as the bytes they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.chunks import CHUNK_TOKENS
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
from tests.unit.engine.fakes import FixedRate

TINY = Path(__file__).parents[2] / "models" / "tiny"
MODEL_LEN, NEW_TOKENS = 256, 8
LENGTHS = (1, 60, 63, 64, 65, 120, 129, 180)
CODECS = ("nuq4-1%", "tq4", "int8")
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

    def run(self, numbers: range | None = None, hold: bool = False) -> list[SequenceOutput]:
        """Serve these requests, all at once (None: those that are here), to the end."""
        for number in numbers or ():
            self.engine.add(self.request(number, hold=hold), 0.0)
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


@pytest.fixture(scope="module", params=CODECS)
def alone(request: pytest.FixtureRequest) -> Iterator[tuple[str, Answers]]:
    """The codec, and every request by itself, prompts whole."""
    worker = CodedEngine(request.param, max_num_batched_tokens=MODEL_LEN, chunked_prefill=False)
    found: Answers = {}
    for number in ALL:
        found |= answers(worker.run(range(number, number + 1)))
    assert worker.holdings.used == 0
    yield request.param, found


def test_codes_are_not_lossless(alone: tuple[str, Answers]) -> None:
    """What the others compare is lossy: the log-probabilities are not those of raw KV."""
    raw, (_, coded) = CodedEngine("raw"), alone
    scores = answers(raw.run(ALL))["r7"][1]
    assert scores != pytest.approx(coded["r7"][1], abs=SAME)


def test_in_pieces_beside_others_and_from_the_cache(alone: tuple[str, Answers]) -> None:
    codec, expected = alone
    worker = CodedEngine(codec)
    check_same(answers(worker.run(ALL)), expected)
    steps = worker.engine.stats.step_tokens
    check_same(answers(worker.run(ALL)), expected)
    cached = sum((length - 1) // CHUNK_TOKENS * CHUNK_TOKENS for length in LENGTHS)
    assert worker.engine.stats.prefix_hits == cached and worker.engine.stats.step_tokens == 2 * steps - cached
    assert worker.holdings.used == 0
    worker.holdings.check_books()


def test_prefilled_here_and_decoded_there(alone: tuple[str, Answers]) -> None:
    """The pages' bytes are all that moves."""
    codec, expected = alone
    prefill, decode = CodedEngine(codec), CodedEngine(codec)
    emitted = prefill.run(ALL, hold=True)
    for held in prefill.held:
        seq = decode.request(int(held.id[1:]), tuple(held.output))
        seq.computed = held.computed
        seq.slabs = decode.holdings.allocate(seq.key, -(-seq.total // CHUNK_TOKENS))
        for source, target in zip(held.slabs, seq.slabs, strict=False):
            decode.pool.slab_bytes(target)[:] = prefill.pool.slab_bytes(source)
        decode.engine.adopt(seq, 0.0)
        prefill.holdings.release(held.key)
    check_same(answers(emitted + decode.run()), expected)
    assert prefill.holdings.used == decode.holdings.used == 0


def test_an_answer_that_goes_on_elsewhere(alone: tuple[str, Answers]) -> None:
    """Its worker died: the prompt and the tokens so far are prefilled by another one."""
    codec, expected = alone
    worker, done = CodedEngine(codec), 3
    for number in ALL:
        worker.engine.add(worker.request(number, tuple(expected[f"r{number}"][0][:done])), 0.0)
    found = answers(worker.run())
    rest = {name: (tokens[done:], scores[done:]) for name, (tokens, scores) in expected.items()}
    check_same(found, rest)


@pytest.mark.parametrize("parks", [True, False], ids=["park", "recompute"])
def test_preempted_requests_go_on_where_they_were(alone: tuple[str, Answers], parks: bool) -> None:
    codec, expected = alone
    worker = CodedEngine(codec, num_slabs=6, swap=40)
    worker.engine.scheduler.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now
    worker.engine.copy_rate = FixedRate(1e15 if parks else 1e-15)
    check_same(answers(worker.run(ALL)), expected)
    ways = worker.engine.stats.preemptions
    assert ways.get("park" if parks else "recompute", 0) >= 1 and len(ways) == 1
    assert worker.holdings.used == 0 and len(worker.engine.host or ()) == 0
