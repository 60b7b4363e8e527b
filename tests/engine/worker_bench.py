"""Both workers' roles in one process, on a byte model: real pools, tickets, digests and loops; no sockets, no weights.

The "KV" of a token is 8 bytes in its slab: a hash of all tokens up to it. The next token is a function of that, so
KV that is missing, foreign or torn changes every token after it. Time and pulling stand still until a test moves them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decode_worker.courier import Arrival, Courier
from decode_worker.worker import Decoder
from diptych.messages import Failed, Offer, Output, Pulled, Stats, Step, ToGateway, ToWorker
from diptych.request import Sampling
from engine.loop import Engine, Picked
from engine.scheduler import Limits, Scheduler
from engine.seams import LayersDone
from engine.work import Work
from kvcache.holdings import Holdings
from kvcache.layout import CHUNK_TOKENS, KVLayout
from kvcache.pool import Pool
from kvcache.prefix_tree import PrefixTree
from kvtransfer.board import ENTRY_BYTES, Board, Entries, entries
from kvtransfer.digests import HASHERS, HASHES
from kvtransfer.early import Copy
from kvtransfer.handoff import Aborted
from kvtransfer.leases import LeaseLedger
from kvtransfer.links import Route
from kvtransfer.parts import whole
from kvtransfer.ticket import Ticket
from kvtransfer.turns import AT_ONCE, Turns, finish
from prefill_worker.worker import Issuer, Prefiller
from worker.shell import Books, Role, Shell

KEY = bytes(range(32))
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32")  # 16 bytes for each token
VOCAB = 50
LEASE_S = 10.0


def following(tokens: Sequence[int]) -> int:
    """The token that the byte model writes after `tokens`."""
    return _chain(tokens)[-1][0] % VOCAB


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    """What it writes after a prompt, undisturbed."""
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(following(prompt + output))
    return output


def _chain(tokens: Sequence[int], before: bytes = bytes(8)) -> list[bytes]:
    links = []
    for token in tokens:
        before = hashlib.blake2b(before + token.to_bytes(4, "big"), digest_size=8).digest()
        links.append(before)
    return links


class ByteRunner:
    """Reads and writes its KV in the pool's own bytes; raises if a token's KV does not follow from the one before."""

    def __init__(self, pool: Pool) -> None:
        self._rows = np.frombuffer(pool.memory, np.uint8).reshape(pool.num_slabs, CHUNK_TOKENS, -1)

    def run(self, batch: list[Work], done: LayersDone | None = None) -> list[list[bytes]]:
        logits = [self._one(work) for work in batch]
        for layers in range(1, LAYOUT.layers + 1 if done is not None else 0):
            assert done is not None
            done(layers)
        return logits

    def _one(self, work: Work) -> list[bytes]:
        before = self._at(work, work.start - 1).tobytes() if work.start else bytes(8)
        links = _chain(work.tokens, before)
        for position, link in enumerate(links, work.start):
            self._at(work, position)[:] = np.frombuffer(link, np.uint8)
        return links[-1:]

    def _at(self, work: Work, position: int) -> Any:
        return self._rows[work.slabs[position // CHUNK_TOKENS], position % CHUNK_TOKENS, :8]


class ByteRow:
    done = False

    def push(self, token: int) -> None:
        """Nothing to remember."""


class ByteSampler:
    def open(self, seq: object) -> ByteRow:
        return ByteRow()

    def sample(self, logits: list[list[bytes]], rows: list[ByteRow]) -> list[Picked | Exception]:
        return [Picked(part[-1][0] % VOCAB) for part in logits]

    def score(self, logits: object, tokens: list[int], top: int) -> list[Any]:
        return []


class FakeLine:
    """The way to the gateway: what is in `inbox` arrives, what was said stays in `said`."""

    def __init__(self) -> None:
        self.gateway_lost = False
        self.inbox: deque[ToWorker] = deque()
        self.said: list[ToGateway] = []
        self.patience_s = -1.0  # how long the last poll would have waited

    def send(self, message: ToGateway) -> None:
        self.said.append(message)

    def poll(self, timeout_s: float) -> list[ToWorker]:
        self.patience_s = timeout_s
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def wake(self) -> None:
        """Nobody sleeps here."""


class FakeLane:
    """The way from one pool of a bench to the other (`kvtransfer.early.Lane`)."""

    layers = LAYOUT.layers

    def __init__(self, links: FakeLinks) -> None:
        self._links = links
        self.num_slabs = links.source.num_slabs

    def look(self, slabs: Sequence[int]) -> Turns[Entries | None]:
        yield from ()
        return entries(self._links.board)[list(slabs)]

    def copy(self, copies: Sequence[Copy], stop: Callable[[], bool]) -> Turns[None]:
        for one in copies:
            self._links.early.append((one.far, one.own))
            self._links.copy(one.far, one.own, stop)
            one.payload.update(self._links.target.slab_bytes(one.own))
            yield AT_ONCE


class FakeLinks:
    """Copies between the two pools of a bench; `fault` is called after every slab and may raise or corrupt."""

    def __init__(self, source: Pool, target: Pool, board: memoryview) -> None:
        self.source, self.target, self.board = source, target, board
        self.fault: Callable[[int, int], None] | None = None
        self.incarnation = "life"
        self.hasher = HASHERS["xxh3"]
        self.early: list[tuple[int, int]] = []  # what was copied before its ticket came

    def route(self, worker: str) -> Route | None:
        return Route("fake", self.incarnation, 1.0, 1.0)

    def unlink(self, worker: str, incarnation: str | None = None) -> None:
        """Always linked."""

    def close(self) -> None:
        """Nothing is open."""

    def lane(self, worker: str, incarnation: str) -> FakeLane:
        return FakeLane(self)

    def pulling(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool]
    ) -> Turns[list[bytes]]:
        for source, target in pairs:
            self.copy(source, target, stop)
            yield AT_ONCE
        return [HASHES["xxh3"](self.target.slab_bytes(target)) for _, target in pairs]

    def copy(self, source: int, target: int, stop: Callable[[], bool]) -> None:
        if stop():
            raise Aborted("the pull was stopped")
        self.target.slab_bytes(target)[:] = self.source.slab_bytes(source)
        if self.fault is not None:
            self.fault(source, target)


class StillCourier(Courier):
    """Pulls only when told to: a pull takes as long as a test wants."""

    def __init__(self, links: Any, clock: Callable[[], float]) -> None:
        super().__init__(links, lambda message: None, lambda: None, clock)
        self.under_way: list[Arrival] = []
        self._hauls: dict[str, Turns[None]] = {}

    def fetch(self, arrival: Arrival) -> None:
        self.under_way.append(arrival)
        self._hauls[arrival.seq.key] = self.haul(arrival)

    def stir(self) -> None:
        """Whoever waits here is moved by the test."""

    def creep(self) -> None:
        """Let every pull go as far as it can go now."""
        for arrival in list(self.under_way):
            while (pause_s := next(self._hauls[arrival.seq.key], None)) == AT_ONCE:
                pass
            if pause_s is None:
                self._gone(arrival)

    def land(self) -> None:
        """Let the oldest pull run to its end."""
        arrival = self.under_way[0]
        assert arrival.ticket is not None or arrival.stop.is_set(), "it would wait for its ticket for ever"
        finish(self._hauls[arrival.seq.key])
        self._gone(arrival)

    def _gone(self, arrival: Arrival) -> None:
        self.under_way.remove(arrival)
        del self._hauls[arrival.seq.key]


class Half:
    """One worker: its loop, line, engine and pool, and who holds what of that."""

    def __init__(self, bench: Bench, num_slabs: int, make: Callable[[Half], Role], caching: bool) -> None:
        self.line, self.pool, self.books = FakeLine(), Pool(LAYOUT, num_slabs), Books()
        self.holdings = Holdings(self.pool, PrefixTree() if caching else None)
        limits = Limits(num_slabs, max_model_len=1000, max_num_seqs=8, max_num_batched_tokens=128)
        self.engine = Engine(ByteRunner(self.pool), Scheduler(limits), self.holdings, ByteSampler())
        self.role = make(self)
        self.shell = Shell(
            self.line,
            self.engine,
            self.role,
            self.holdings,
            self.books,
            fingerprint="model" if caching else "",
            clock=bench.clock,
        )

    def tell(self, *messages: ToWorker) -> None:
        """Messages arrive, and are taken in one turn of the loop."""
        self.line.inbox.extend(messages)
        self.shell.turn()

    def work(self) -> None:
        """Turn until nothing can progress."""
        self.shell.turn()
        while self.engine.has_work:
            self.shell.turn()

    def tokens(self, request: str, epoch: int = 0) -> list[int]:
        steps = [message for message in self.line.said if isinstance(message, Step)]
        outputs = [output for step in steps for output in step.outputs]
        return [
            token
            for output in outputs
            if (output.request, output.epoch) == (request, epoch)
            for token in output.tokens
        ]

    def ended(self, request: str) -> list[str]:
        """How the request's attempts ended here: a finish reason or a failure code each."""
        ends = [
            message.code
            for message in self.line.said
            if isinstance(message, Failed) and message.request == request
        ]
        steps = [message for message in self.line.said if isinstance(message, Step)]
        outputs: list[Output] = [output for step in steps for output in step.outputs]
        return ends + [output.finish for output in outputs if output.request == request and output.finish]

    def offers(self, request: str) -> list[Offer]:
        return [
            message for message in self.line.said if isinstance(message, Offer) and message.request == request
        ]

    def pulled(self, request: str) -> list[Pulled]:
        return [
            message
            for message in self.line.said
            if isinstance(message, Pulled) and message.request == request
        ]

    @property
    def stats(self) -> Stats:
        return self.books.stats


class Bench:
    """A prefill and a decode worker, and a clock that a test moves. `caching`: do they keep and share prefixes?"""

    def __init__(self, prefill_slabs: int = 40, decode_slabs: int = 40, caching: bool = True) -> None:
        self.now_s = 100.0
        self.board = memoryview(bytearray(prefill_slabs * ENTRY_BYTES))
        self.prefill = Half(self, prefill_slabs, self._prefiller, caching)
        self.decode = Half(self, decode_slabs, self._decoder, caching)

    def clock(self) -> float:
        return self.now_s

    def _prefiller(self, half: Half) -> Role:
        issuer, parts = Issuer(KEY, "prefill-0", "life", "model", "xxh3"), whole(LAYOUT, half.pool.memory)
        ledger, board = LeaseLedger(LEASE_S), Board(half.pool.num_slabs, self.board)
        return Prefiller(half.line, half.engine, half.holdings, parts, ledger, issuer, board)

    def _decoder(self, half: Half) -> Role:
        self.links = FakeLinks(self.prefill.pool, half.pool, self.board)
        self.courier = StillCourier(self.links, self.clock)
        return Decoder(half.line, half.engine, half.holdings, LAYOUT, self.courier, KEY, "model")


def sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, seed=0, temperature=0.0)
