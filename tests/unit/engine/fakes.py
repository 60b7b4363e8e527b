"""A runner and a sampler without torch, for the engine's loop: all bookkeeping is real, the model is a hash.

The fake KV of a token is all tokens up to it, written where its slab says. A runner that reads what another sequence
wrote, or nothing, raises; the next token is a hash of all tokens so far, so any mistake in the order or the position of
work shows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import GrammarError
from diptych.eviction_spec import decision_tokens
from diptych.messages import Logprob
from diptych.request import Grammar, Pooling, SamplingParams
from engine.isolation import BadSamplingParams
from engine.loop import Engine
from engine.protocols import EvictionOrder, EvictionReport, OnLayersDone, SampledToken, StepObserver
from engine.scheduling.new_token_ratio import MeasuredRate
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence, num_chunks
from engine.step_work import KeptWork, StepWork
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


def following(tokens: list[int] | bytearray) -> int:
    """The token that the hash model writes after `tokens`."""
    return hashlib.sha256(bytes(tokens)).digest()[0] % VOCAB


def kept_rows(rows: list[tuple[int, int]], queries: list[int], boundary: int) -> list[tuple[int, int]]:
    """The rows (position, token) that the model's one head keeps, as the last 64 tokens `queries` decide it."""
    mass = sum(queries)
    return [row for row in rows if row[0] < boundary or (row[0] + 7 * row[1] + mass) % 3]


def alone(seq: Sequence, max_model_len: int = 10_000) -> list[int]:
    """What the hash model writes after a prompt, undisturbed: what its head dropped, it does not read."""
    output, tokens = list[int](), list(seq.prompt)
    rows, prompt, read = list(enumerate(tokens)), len(tokens), bytearray(tokens)
    while len(output) < seq.sampling.max_tokens and prompt + len(output) < max_model_len:
        output.append(following(read))
        if output[-1] in seq.sampling.stop_token_ids:
            break
        if seq.keep.evicts and len(tokens) == decision_tokens(prompt, len(tokens)):
            rows = kept_rows(rows, tokens[-CHUNK_TOKENS:], seq.keep.boundary)
            read = bytearray(token for _, token in rows)
        rows.append((len(tokens), output[-1]))
        tokens.append(output[-1])
        read.append(output[-1])
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


class EvictingFakeRunner(FakeRunner):
    """`engine.protocols.EvictingRunner`: in a bag the first cell has the positions of the rows that follow."""

    can_evict = True

    def __init__(self, num_slabs: int) -> None:
        super().__init__(num_slabs)
        self.given: set[str] = set()  # sequences that it keeps something for
        self.queries: dict[str, dict[int, int]] = {}  # by sequence and position: the token
        self.maps: dict[str, list[int]] = {}  # positions of the kept rows behind the boundary
        self._plans: dict[str, list[list[int]]] = {}  # the texts of the kept rows
        self.calls: Counter[str] = Counter()

    def run(self, batch: list[StepWork], done: OnLayersDone | None = None) -> list[list[list[int]]]:
        self.given |= {work.kept.key for work in batch if work.kept is not None}
        return super().run(batch, done)

    def one(self, work: StepWork) -> list[list[int]]:
        """As of all, but those that were evicted read what is kept."""
        kept = work.kept
        if kept is not None:
            assert kept.evicted == (work.start >= kept.prompt_tokens) == (kept.key in self.maps)
        rows = self._evicted(work, kept) if kept is not None and kept.evicted else super().one(work)
        if kept is not None:
            asked = self.queries.setdefault(kept.key, {})
            asked.update(enumerate(work.tokens, work.start))
        return rows

    def _evicted(self, work: StepWork, kept: KeptWork) -> list[list[int]]:
        if self.poison & set(work.tokens):
            raise MemoryError("no room for this one")
        decided = decision_tokens(kept.prompt_tokens, work.start)
        assert work.start + len(work.tokens) <= decided + CHUNK_TOKENS, "a step crosses a decision point"
        ring, rows = work.slabs[kept.spec.boundary_chunks], []
        assert len(work.slabs) == kept.spec.boundary_chunks + 1 + num_chunks(1 + len(self.maps[kept.key]))
        for position, token in enumerate(work.tokens, work.start):
            texts = self._texts(work.slabs, kept.spec.boundary, self.maps[kept.key])
            texts += [self.kv[ring, at % CHUNK_TOKENS] for at in range(decided, position)]
            text = [*(text[-1] for text in texts), token]
            self.kv[ring, position % CHUNK_TOKENS] = text
            rows.append(text)
        return rows[{"all": 0, "last": len(rows) - 1, "none": len(rows)}[work.logits] :]

    def _texts(self, slabs: list[int], boundary: int, positions: list[int]) -> list[list[int]]:
        """The texts of the rows before the boundary, and of those in the bag."""
        bag = slabs[boundary // CHUNK_TOKENS + 1 :]
        texts = [self.kv[slabs[at // CHUNK_TOKENS], at % CHUNK_TOKENS] for at in range(boundary)]
        cells = [divmod(at + 1, CHUNK_TOKENS) for at in range(len(positions))]
        return texts + [self.kv[bag[chunk], row] for chunk, row in cells]

    def plan_eviction(self, order: EvictionOrder) -> EvictionReport:
        length, boundary = len(order.tokens), order.spec.boundary
        assert length == decision_tokens(order.prompt_tokens, length), "this is no decision point"
        if length == order.prompt_tokens:
            texts = [
                self.kv[order.slabs[at // CHUNK_TOKENS], at % CHUNK_TOKENS] for at in range(boundary, length)
            ]
            rows = list(zip(range(boundary, length), texts, strict=True))
        else:
            positions, ring = self.maps[order.key], order.slabs[order.spec.boundary_chunks]
            texts = self._texts(order.slabs, boundary, positions)[boundary:]
            rows = list(zip(positions, texts, strict=True))
            rows += [(at, self.kv[ring, at % CHUNK_TOKENS]) for at in range(length - CHUNK_TOKENS, length)]
        assert [text[-1] for _, text in rows] == [order.tokens[at] for at, _ in rows], "foreign KV"
        asked = self.queries[order.key]
        last = [asked[at] for at in range(max(0, length - CHUNK_TOKENS), length)]
        kept = kept_rows([(at, text[-1]) for at, text in rows], last, boundary)
        found = dict(rows)
        self._plans[order.key] = [[at for at, _ in kept], *[found[at] for at, _ in kept]]
        return EvictionReport(num_chunks(1 + len(kept)), len(kept), len(rows), {"some": 1})

    def apply_eviction(self, key: str, bag_slabs: list[int]) -> None:
        cells = self._plans.pop(key)
        assert len(bag_slabs) == num_chunks(len(cells))
        self.calls["answer" if key in self.maps else "prompt"] += 1
        for at, text in enumerate(cells):
            self.kv[bag_slabs[at // CHUNK_TOKENS], at % CHUNK_TOKENS] = text
        self.maps[key] = cells[0]

    def load_kept(self, key: str, boundary: int, length: int, bag_slabs: list[int], *_: object) -> None:
        self.calls["restored" if key in self.given else "adopted"] += 1
        self.given.add(key)
        positions = self.kv[bag_slabs[0], 0]
        if num_chunks(1 + len(positions)) != len(bag_slabs) or positions != sorted(set(positions)):
            raise ValueError("this is no bag")
        assert all(boundary <= position < length for position in positions)
        self.maps[key] = positions

    def forget_kept(self, key: str) -> None:
        assert key in self.given, "it is forgotten once"
        self.given.discard(key)
        for known in (self.queries, self.maps, self._plans):
            known.pop(key, None)


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

    def pool(self, row: list[list[int]], pooling: Pooling, num_tokens: int) -> bytes:
        """The tokens before the last row."""
        return bytes(row[-1])


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
        self.pool, self.sampler = SlabLedger(num_slabs), FakeSampler()
        self.runner = EvictingFakeRunner(num_slabs)
        self.holdings = KvAllocator(self.pool, PrefixTree() if caching else None)
        self.host = HostTier([self.runner.kv], swap * CHUNK_TOKENS * 4)
        self.engine = Engine(self.runner, self.scheduler, self.holdings, self.sampler, self.host, observer)
        self.now_s = 0.0

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s
