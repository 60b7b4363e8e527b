"""The loop over the real runner and sampler: a request's tokens are its own, wherever and beside whom it runs."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import Failed, Logprob, Output
from diptych.request import Grammar, SamplingParams
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.outputs import SequenceOutput
from engine.sampling import grammar
from engine.sampling.sampler import Sampler
from engine.scheduling.new_token_ratio import NewTokenRatio
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree, root_key
from kvcache.tiers.host import HostTier
from tests.support.factories import make_folder, make_tokenizer
from tests.unit.engine.fakes import FixedRate

MODEL_LEN = 512
ROOT = root_key("the model", "")
END = 2
SCHEMA = Grammar(
    "json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 9})
)

# One of each kind that samples differently; prompts around the edges of a chunk, short and long mixed.
KINDS: list[tuple[int, dict[str, Any]]] = [
    (1, {"temperature": 0.0}),
    (63, {"temperature": 0.0, "logprobs": 3}),
    (64, {}),
    (65, {"temperature": 0.7, "top_p": 0.9}),
    (300, {"temperature": 0.0, "frequency_penalty": 0.6, "presence_penalty": 0.3}),
    (127, {"top_k": 20, "logprobs": 0}),
    (128, {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2}),
    (129, {"grammar": SCHEMA, "temperature": 0.8}),
    (17, {"grammar": Grammar("regex", "[a-f]{5,40}"), "min_tokens": 6}),
    (40, {"prompt_logprobs": 2, "logprobs": 2, "logit_bias": {7: 4.0, 9: -100.0}}),
    (200, {"temperature": 0.0, "prompt_logprobs": 0}),
    (5, {"stop_token_ids": tuple(range(100, 140))}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = make_folder(tmp_path_factory.mktemp("model"))
    return Checkpoint.resolve(str(folder))


class RealEngine:
    """One engine with its own pool. `swap` is the host tier's room, in slabs."""

    def __init__(
        self, model: Checkpoint, num_slabs: int = 60, caching: bool = True, swap: int = 0, **limits: Any
    ) -> None:
        self.pool = KvPool(model.layout(), num_slabs)
        self.holdings = KvAllocator(self.pool, PrefixTree() if caching else None)
        runner = CpuModelRunner.load(model, self.pool, MODEL_LEN)
        settings = {"max_num_seqs": 12, "max_num_batched_tokens": 96} | limits
        sampler = Sampler(runner.vocab_size, grammar.build_tokenizer(make_tokenizer(), [END]))
        scheduler = Scheduler(EngineLimits(num_slabs, MODEL_LEN, **settings))
        host = HostTier([self.pool], swap * self.pool.layout.chunk_bytes)
        self.engine = Engine(runner, scheduler, self.holdings, sampler, host)
        self.held: list[Sequence] = []
        self._ticks = itertools.count()

    def run(self) -> list[SequenceOutput]:
        emitted: list[SequenceOutput] = []
        while len(self.engine.scheduler):
            emitted += self.engine.step(lambda: float(next(self._ticks)))
        self.held += [emission.held for emission in emitted if emission.held]
        return emitted


def request(number: int, hold_kv: bool = False, defer: bool = False) -> Sequence:
    length, asked = KINDS[number]
    random = torch.Generator().manual_seed(number)
    prompt = torch.randint(3, 259, (length,), generator=random).tolist()
    fields: dict[str, Any] = {"max_tokens": 24, "seed": 100 + number, "stop_token_ids": (END,)} | asked
    sampling = SamplingParams(**fields)
    defer = defer and sampling.max_tokens > 1
    return Sequence(
        f"r{number}", 1, prompt, sampling, math.inf, hold_kv=hold_kv, defer_first=defer, root=ROOT
    )


Answer = dict[str, tuple[list[int], list[Logprob], list[Logprob | None] | None, str | None]]


def answers(emitted: list[SequenceOutput]) -> Answer:
    """Tokens, their scores, the prompt's scores and the finish of each request."""
    gathered: Answer = {}
    for emission in emitted:
        output = emission.message
        assert isinstance(output, Output), output
        tokens, scores, prompt, _ = gathered.get(output.request, ([], [], None, None))
        prompt = output.prompt_logprobs or prompt
        gathered[output.request] = (
            tokens + output.tokens,
            scores + (output.logprobs or []),
            prompt,
            output.finish,
        )
    return gathered


@pytest.fixture(scope="module")
def alone(model: Checkpoint) -> Answer:
    """Every request by itself, prompts whole."""
    worker = RealEngine(model, max_num_batched_tokens=MODEL_LEN, chunked_prefill=False)
    gathered: Answer = {}
    for number in range(len(KINDS)):
        worker.engine.add(request(number), 0.0)
        gathered |= answers(worker.run())
    assert worker.holdings.used == 0
    return gathered


def check_same(got: Answer, expected: Answer) -> None:
    """Tokens alike; scores too, but for the rounding of a product of another shape."""
    assert set(got) == set(expected)
    for name, (tokens, scores, prompt, finish) in expected.items():
        assert (got[name][0], got[name][3]) == (tokens, finish), name
        check_close(got[name][1], scores)
        assert (got[name][2] is None) == (prompt is None)
        check_close((got[name][2] or [])[1:], (prompt or [])[1:])


def check_close(got: Any, expected: Any) -> None:
    assert [score.token for score in got] == [score.token for score in expected]
    assert [score.logprob for score in got] == pytest.approx([score.logprob for score in expected], abs=1e-4)
    for mine, its in zip(got, expected, strict=True):
        assert [logprob for _, logprob in mine.top] == pytest.approx(
            [logprob for _, logprob in its.top], abs=1e-4
        )


def test_requests_are_of_all_kinds(alone: Answer) -> None:
    assert {finish for *_, finish in alone.values()} == {"stop", "length"}
    assert len({tuple(tokens) for tokens, *_ in alone.values()}) == len(KINDS)
    assert all(
        prompt is None or len(prompt) == KINDS[int(name[1:])][0] for name, (_, _, prompt, _) in alone.items()
    )
    assert make_tokenizer().decode(alone["r7"][0]).startswith("[")


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_num_seqs": 5, "max_num_batched_tokens": 33}, {"chunked_prefill": False}, {"caching": False}],
)
def test_a_batch_gives_each_request_the_tokens_it_gets_alone(
    model: Checkpoint, alone: Answer, limits: dict[str, Any]
) -> None:
    worker = RealEngine(model, **limits)
    for number in range(len(KINDS)):
        worker.engine.add(request(number), 0.0)
    check_same(answers(worker.run()), alone)
    assert worker.holdings.used == 0
    worker.holdings.check_books()


def test_arriving_in_the_midst_of_others_changes_nothing(model: Checkpoint, alone: Answer) -> None:
    worker, emitted = RealEngine(model), []
    for number in reversed(range(len(KINDS))):
        worker.engine.add(request(number), 0.0)
        for _ in range(3):
            emitted += worker.engine.step(lambda: 0.0)
    check_same(answers(emitted + worker.run()), alone)


@pytest.mark.parametrize("defer", [False, True], ids=["", "the decode worker draws the first token"])
def test_prefilled_here_and_decoded_there_is_the_same(model: Checkpoint, alone: Answer, defer: bool) -> None:
    prefill, decode = RealEngine(model), RealEngine(model)
    for number in range(len(KINDS)):
        prefill.engine.add(request(number, hold_kv=True, defer=defer), 0.0)
    emitted = prefill.run()
    assert len(prefill.held) >= len(KINDS) - 1
    for held in prefill.held:
        fields: dict[str, Any] = {"computed": held.computed - defer, "root": ROOT}
        seq = Sequence(held.id, 1, held.prompt, held.sampling, math.inf, list(held.output), **fields)
        seq.slabs = decode.holdings.allocate(seq.key, -(-seq.total // CHUNK_TOKENS))
        for source, target in zip(held.slabs, seq.slabs, strict=False):
            decode.pool.slab_bytes(target)[:] = prefill.pool.slab_bytes(source)
        decode.engine.adopt(seq, 0.0)
        prefill.holdings.release(held.key)
        for _ in range(2):  # some arrive while others already decode
            emitted += decode.engine.step(lambda: 0.0)
    check_same(answers(emitted + decode.run()), alone)
    assert prefill.holdings.used == decode.holdings.used == 0


@pytest.mark.parametrize("cut", [1, 5, 23])
def test_a_second_attempt_goes_on_where_the_first_was(model: Checkpoint, alone: Answer, cut: int) -> None:
    worker = RealEngine(model)
    expected: dict[str, list[int]] = {}
    for number in range(len(KINDS)):
        seq = request(number)
        tokens = alone[seq.id][0]
        if len(tokens) > cut:
            seq.output, expected[seq.id] = tokens[:cut], tokens[cut:]
            worker.engine.add(seq, 0.0)
    got = answers(worker.run())
    assert len(expected) >= 6 and {name: tokens for name, (tokens, *_) in got.items()} == expected
    assert all(prompt is None for _, _, prompt, _ in got.values())  # the first attempt has sent that


def test_aborted_companions_change_nothing(model: Checkpoint, alone: Answer) -> None:
    worker, emitted = RealEngine(model), []
    for number in range(len(KINDS)):
        worker.engine.add(request(number), 0.0)
    for step in range(9):
        emitted += worker.engine.step(lambda: 0.0)
        worker.engine.abort(f"r{step}", 1)
    got = answers(emitted + worker.run())
    kept = {"r9", "r10", "r11"}
    check_same({name: got[name] for name in kept}, {name: alone[name] for name in kept})
    assert worker.holdings.used == 0


def test_a_request_that_cannot_run_fails_alone(model: Checkpoint, alone: Answer) -> None:
    worker = RealEngine(model)
    good, bad = request(2), request(3)
    bad.prompt = [*bad.prompt, 300]  # not in the vocabulary
    worse, grim = request(4), request(5)
    worse.sampling = SamplingParams(max_tokens=5, seed=0, grammar=Grammar("regex", "[a-"))
    grim.sampling = SamplingParams(max_tokens=5, seed=0, logit_bias={300: 1.0})
    for seq in (good, bad, worse, grim):
        worker.engine.add(seq, 0.0)
    emitted = worker.run()
    failed = {e.message.request: e.message.code for e in emitted if isinstance(e.message, Failed)}
    assert failed == {"r3": "internal_error", "r4": "invalid_grammar", "r5": "internal_error"}
    check_same(answers([e for e in emitted if isinstance(e.message, Output)]), {"r2": alone["r2"]})
    assert worker.holdings.used == 0


@pytest.mark.parametrize("parks", [True, False], ids=["park", "recompute"])
def test_preempted_requests_go_on_exactly_where_they_were(
    model: Checkpoint, alone: Answer, parks: bool
) -> None:
    worker = RealEngine(model, num_slabs=6, swap=40)
    worker.engine.scheduler.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now
    worker.engine.copy_rate = FixedRate(1e15 if parks else 1e-15)
    emitted = []
    for number in range(len(KINDS)):
        worker.engine.add(request(number), 0.0)
    while len(worker.engine.scheduler):
        emitted += worker.engine.step(lambda: 0.0)
    check_same(answers(emitted), alone)
    ways = worker.engine.stats.preemptions
    assert ways.get("park" if parks else "recompute", 0) >= 2 and len(ways) == 1
    assert worker.holdings.used == 0 and len(worker.engine.host or ()) == 0


def test_known_prefixes_are_not_computed_again_and_change_nothing(model: Checkpoint, alone: Answer) -> None:
    worker = RealEngine(model)
    ran = []
    for _ in range(2):
        before = worker.engine.stats.step_tokens
        emitted = []
        for number in range(len(KINDS)):
            worker.engine.add(request(number), 0.0)
        emitted = worker.run()
        check_same(answers(emitted), alone)
        first = {e.message.request: e.message for e in reversed(emitted) if isinstance(e.message, Output)}
        cached = {name: output.cached_tokens for name, output in first.items()}
        ran.append((worker.engine.stats.step_tokens - before, sum(cached.values())))
        worker.holdings.check_books()
    lengths = {name: (length - 1) // CHUNK_TOKENS * CHUNK_TOKENS for name, (length, _) in enumerate_kinds()}
    assert cached == {name: 0 if name in SCORED else length for name, length in lengths.items()}
    assert ran[0][1] == 0 and ran[1] == (ran[0][0] - ran[1][1], sum(cached.values()))


def enumerate_kinds() -> list[tuple[str, tuple[int, dict[str, Any]]]]:
    return [(f"r{number}", kind) for number, kind in enumerate(KINDS)]


SCORED = {name for name, (_, asked) in enumerate_kinds() if "prompt_logprobs" in asked}
