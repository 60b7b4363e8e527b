"""A runner and a sampler without torch, for the engine's loop: all bookkeeping is real, the model is a hash.

The fake KV of a token is all tokens up to it, written where its slab says. A runner that reads what another sequence
wrote, or nothing, raises; the next token is a hash of all tokens so far, so any mistake in the order or the position of
work shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import GrammarError
from diptych.messages import Logprob
from diptych.request import Grammar, SamplingParams
from engine.isolation import BadSamplingParams
from engine.loop import Engine
from engine.new_token_ratio import MeasuredRate
from engine.protocols import OnLayersDone, SampledToken, StepObserver
from engine.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from engine.step_work import StepWork
from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixTree
from kvcache.slab_ledger import SlabLedger
from kvcache.tiers.host import HostTier

VOCAB = 50
LAYERS = 2
ROOT = b"the root of all fakes"


def sampling(max_tokens: int = 8, **rest: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, **rest)  # type: ignore[arg-type]


def sequence(
    name: str, prompt: int | list[int], asked: SamplingParams | None = None, **rest: object
) -> Sequence:
    """A sequence of `prompt` tokens (their ids depend on the name), without a deadline."""
    tokens = (
        [(sum(name.encode()) + 7 * i) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    )
    settings: dict[str, object] = {"epoch": 1, "deadline_s": float("inf"), "root": ROOT} | rest
    return Sequence(id=name, prompt=tokens, sampling=asked or sampling(), **settings)  # type: ignore[arg-type]


def following(tokens: list[int]) -> int:
    """The token that the hash model writes after `tokens`."""
    return hashlib.sha256(bytes(tokens)).digest()[0] % VOCAB


def alone(seq: Sequence, max_model_len: int = 10_000) -> list[int]:
    """What the hash model writes after a prompt, undisturbed."""
    output: list[int] = []
    while len(output) < seq.sampling.max_tokens and len(seq.prompt) + len(output) < max_model_len:
        output.append(following(seq.prompt + output))
        if output[-1] in seq.sampling.stop_token_ids:
            break
    return output


class FakeCells:
    """The memory of a pool: one cell per slab and row, each of them the number of a text that was written there."""

    def __init__(self, num_slabs: int) -> None:
        self.memory = memoryview(bytearray(num_slabs * CHUNK_TOKENS * 4)).cast("B")
        self._numbers = self.memory.cast("I")
        self._texts: list[list[int]] = [[]]

    def __getitem__(self, place: tuple[int, int]) -> list[int]:
        return self._texts[self._numbers[place[0] * CHUNK_TOKENS + place[1]]]

    def __setitem__(self, place: tuple[int, int], text: list[int]) -> None:
        self._numbers[place[0] * CHUNK_TOKENS + place[1]] = len(self._texts)
        self._texts.append(text)

    def slab_bytes(self, slab: int) -> memoryview:
        """A window on one slab, as `kvcache.pool.KvPool` has it."""
        return self.memory[slab * CHUNK_TOKENS * 4 : (slab + 1) * CHUNK_TOKENS * 4]

    def fetch(self, other: FakeCells, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole slabs of `other` here: (its slab, ours)."""
        for source, target in pairs:
            for row in range(CHUNK_TOKENS):
                self[target, row] = other[source, row]


class FakeRunner:
    """`kv` is what was written: (slab, row) -> the tokens up to there."""

    def __init__(self, num_slabs: int) -> None:
        self.kv = FakeCells(num_slabs)
        self.batches: list[list[StepWork]] = []
        self.poison: set[int] = set()  # running one of these tokens raises

    def run(self, batch: list[StepWork], done: OnLayersDone | None = None) -> list[list[list[int]]]:
        self.batches.append(batch)
        logits = [self.one(work) for work in batch]
        for layer in range(LAYERS if done is not None else 0):
            assert done is not None
            done(layer + 1)
        return logits

    def one(self, work: StepWork) -> list[list[int]]:
        """Its "logits": for each wanted row, all tokens up to there."""
        if self.poison & set(work.tokens):
            raise MemoryError("no room for this one")
        known = self.kv[place(work, work.start - 1)] if work.start else []
        for position in range(work.start):
            assert self.kv[place(work, position)] == known[: position + 1], "another sequence's KV"
        rows = []
        for position, token in enumerate(work.tokens, work.start):
            known = [*known, token]
            self.kv[place(work, position)] = known
            rows.append(known)
        return rows[{"all": 0, "last": len(rows) - 1, "none": len(rows)}[work.logits] :]


def place(work: StepWork, position: int) -> tuple[int, int]:
    return work.slabs[position // CHUNK_TOKENS], position % CHUNK_TOKENS


class FakeRow:
    """Its grammar, if any, is a text: "bad" does not compile, "5" is complete after 5 tokens, "push" refuses any.

    "slow" is not ready before the test says so.
    """

    def __init__(self, seq: Sequence) -> None:
        self.grammar, self.index = seq.sampling.grammar, len(seq.output)
        self.asked, self.cost_s = seq.sampling, 0.0
        if self.grammar == Grammar("lark", "bad"):
            raise GrammarError("does not compile")

    @property
    def done(self) -> bool:
        return self.grammar is not None and self.grammar.text == str(self.index)

    def push(self, token: int) -> None:
        self.index += 1
        if self.grammar == Grammar("lark", "push"):
            raise GrammarError(f"token {token} does not fit")


class FakeSampler:
    def __init__(self) -> None:
        self.poison: set[int] = set()  # choosing one of these fails that row
        self.unsound: set[int] = set()  # the same, for a reason that is the request's own
        self.rows: dict[str, FakeRow] = {}
        self.wake: Callable[[], None] = lambda: None

    def expect(self, seq: Sequence) -> None:
        """A grammar "slow" is compiled when somebody says so."""
        if seq.matcher is None and seq.sampling.grammar == Grammar("lark", "slow"):
            seq.matcher = SimpleNamespace(ready=False)

    def notify(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def open(self, seq: Sequence) -> FakeRow:
        assert seq.ready
        row = self.rows[seq.key] = FakeRow(seq)
        return row

    def sample(self, logits: list[list[list[int]]], rows: list[FakeRow]) -> list[SampledToken | Exception]:
        picks: list[SampledToken | Exception] = []
        for part, row in zip(logits, rows, strict=True):
            token = following(part[0])
            scored = None if row.asked.logprobs is None else Logprob(token, -1.0, [])
            if token in self.unsound:
                picks.append(BadSamplingParams("nothing is left"))
                continue
            picks.append(ValueError("not finite") if token in self.poison else SampledToken(token, scored))
        return picks

    def score(self, logits: list[list[int]], tokens: list[int], top: int) -> list[Logprob]:
        """The score of a token is minus the number of tokens before it."""
        return [Logprob(token, -float(len(known)), []) for known, token in zip(logits, tokens, strict=True)]


class FixedRate(MeasuredRate):
    """A rate that is what it is."""

    def add_sample(self, amount: float, seconds: float) -> None:
        """Measurements change nothing."""


class EngineBench:
    """An engine on fakes, with a clock that a test moves. `swap` is the host tier's room, in slabs."""

    def __init__(
        self,
        num_slabs: int = 64,
        caching: bool = True,
        swap: int = 0,
        observer: StepObserver | None = None,
        **limits: object,
    ) -> None:
        settings: dict[str, object] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "max_model_len": 1000,
        } | limits
        self.scheduler = Scheduler(EngineLimits(num_slabs=num_slabs, **settings))  # type: ignore[arg-type]
        self.pool, self.runner, self.sampler = SlabLedger(num_slabs), FakeRunner(num_slabs), FakeSampler()
        self.holdings = KvAllocator(self.pool, PrefixTree() if caching else None)
        self.host = HostTier([self.runner.kv], swap * CHUNK_TOKENS * 4)
        self.engine = Engine(self.runner, self.scheduler, self.holdings, self.sampler, self.host, observer)
        self.now_s = 0.0

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s
