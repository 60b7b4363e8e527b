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

from decode_worker.kv_fetcher import KvArrival, KvFetcher
from decode_worker.worker import DecodeWorker
from diptych.chunks import CHUNK_TOKENS
from diptych.messages import Failed, Offer, Output, Pulled, Step, ToGateway, ToWorker, WorkerStats
from diptych.request import Pooling, SamplingParams
from engine.loop import Engine
from engine.protocols import OnLayersDone, SampledToken
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits
from engine.step_work import StepWork
from kvcache.allocator import KvAllocator
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree
from kvtransfer.cooperative import RUN_NOW, CoopTask, run_to_end
from kvtransfer.digests import HASH_FUNCTIONS, STREAM_HASHERS
from kvtransfer.handoff import HandoffAborted
from kvtransfer.layer_progress import ENTRY_BYTES, LayerProgress, ProgressEntries, view_entries
from kvtransfer.leases import LeaseLedger
from kvtransfer.pipelined_pull import LayerCopy
from kvtransfer.resharding import unsharded_pool
from kvtransfer.ticket import Ticket
from kvtransfer.transports.links import MeasuredRoute
from prefill_worker.worker import PrefillWorker, TicketIssuer
from worker.loop import LatestStats, WorkerLoop, WorkerRole

KEY = bytes(range(32))
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32")  # 16 bytes for each token
VOCAB = 50
LEASE_S = 10.0


def following(tokens: Sequence[int]) -> int:
    """The token that the byte model writes after `tokens`."""
    return chain_links(tokens)[-1][0] % VOCAB


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    """What it writes after a prompt, undisturbed."""
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(following(prompt + output))
    return output


def chain_links(tokens: Sequence[int], before: bytes = bytes(8)) -> list[bytes]:
    links = []
    for token in tokens:
        before = hashlib.blake2b(before + token.to_bytes(4, "big"), digest_size=8).digest()
        links.append(before)
    return links


class ByteRunner:
    """Reads and writes its KV in the pool's own bytes; raises if a token's KV does not follow from the one before."""

    def __init__(self, pool: KvPool) -> None:
        self._rows = np.frombuffer(pool.memory, np.uint8).reshape(pool.num_slabs, CHUNK_TOKENS, -1)

    def run(self, batch: list[StepWork], done: OnLayersDone | None = None) -> list[list[bytes]]:
        logits = [self._one(work) for work in batch]
        for layers in range(1, LAYOUT.layers + 1 if done is not None else 0):
            assert done is not None
            done(layers)
        return logits

    def _one(self, work: StepWork) -> list[bytes]:
        before = self._at(work, work.start - 1).tobytes() if work.start else bytes(8)
        links = chain_links(work.tokens, before)
        for position, link in enumerate(links, work.start):
            self._at(work, position)[:] = np.frombuffer(link, np.uint8)
        return links[-1:]

    def _at(self, work: StepWork, position: int) -> Any:
        return self._rows[work.slabs[position // CHUNK_TOKENS], position % CHUNK_TOKENS, :8]


class ByteRow:
    done, cost_s = False, 0.0

    def push(self, token: int) -> None:
        """Nothing to remember."""


class ByteSampler:
    def expect(self, seq: object) -> None:
        """Nothing here takes long."""

    def notify(self, wake: Callable[[], None]) -> None:
        """Nobody waits."""

    def open(self, seq: object) -> ByteRow:
        return ByteRow()

    def sample(self, logits: list[list[bytes]], rows: list[ByteRow]) -> list[SampledToken | Exception]:
        return [SampledToken(part[-1][0] % VOCAB) for part in logits]

    def score(self, logits: object, tokens: list[int], top: int) -> list[Any]:
        return []

    def pool(self, row: list[bytes], pooling: Pooling, num_tokens: int) -> bytes:
        return row[-1]


class FakeLine:
    """The way to the gateway: what is in `inbox` arrives, what was said stays in `said`."""

    def __init__(self) -> None:
        self.gateway_lost = self.is_congested = False
        self.inbox: deque[ToWorker] = deque()
        self.said: list[ToGateway] = []
        self.patience_s = -1.0  # how long the last poll would have waited

    def send(self, message: ToGateway) -> None:
        self.said.append(message)

    def poll_messages(self, timeout_s: float) -> list[ToWorker]:
        self.patience_s = timeout_s
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def wake_poll(self) -> None:
        """Nobody sleeps here."""


class FakeLane:
    """The way from one pool of a bench to the other (`kvtransfer.pipelined_pull.SourceConnection`)."""

    layers = LAYOUT.layers

    def __init__(self, links: FakeLinks) -> None:
        self._links = links
        self.num_slabs = links.source.num_slabs

    def read_progress(self, slabs: Sequence[int]) -> CoopTask[ProgressEntries | None]:
        yield from ()
        return view_entries(self._links.board)[list(slabs)]

    def copy_layers(self, copies: Sequence[LayerCopy], stop: Callable[[], bool]) -> CoopTask[None]:
        for one in copies:
            self._links.early.append((one.far, one.own))
            self._links.copy(one.far, one.own, stop)
            one.payload.update(self._links.target.slab_bytes(one.own))
            yield RUN_NOW


class FakeLinks:
    """Copies between the two pools of a bench; `fault` is called after every slab and may raise or corrupt."""

    def __init__(self, source: KvPool, target: KvPool, board: memoryview) -> None:
        self.source, self.target, self.board = source, target, board
        self.fault: Callable[[int, int], None] | None = None
        self.incarnation = "life"
        self.hasher = STREAM_HASHERS["xxh3"]
        self.early: list[tuple[int, int]] = []  # what was copied before its ticket came

    def route_to(self, worker: str) -> MeasuredRoute | None:
        return MeasuredRoute("fake", self.incarnation, 1.0, 1.0)

    def unlink_worker(self, worker: str, incarnation: str | None = None) -> None:
        """Always linked."""

    def close(self) -> None:
        """Nothing is open."""

    def connection_to(self, worker: str, incarnation: str) -> FakeLane:
        return FakeLane(self)

    def pull_task(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool]
    ) -> CoopTask[list[bytes]]:
        for source, target in pairs:
            self.copy(source, target, stop)
            yield RUN_NOW
        return [HASH_FUNCTIONS["xxh3"](self.target.slab_bytes(target)) for _, target in pairs]

    def copy(self, source: int, target: int, stop: Callable[[], bool]) -> None:
        if stop():
            raise HandoffAborted("the pull was stopped")
        self.target.slab_bytes(target)[:] = self.source.slab_bytes(source)
        if self.fault is not None:
            self.fault(source, target)


class StillCourier(KvFetcher):
    """Pulls only when asked to: a pull takes as long as a test wants."""

    def __init__(self, links: Any, clock: Callable[[], float]) -> None:
        super().__init__(links, lambda message: None, lambda: None, clock)
        self.under_way: list[KvArrival] = []
        self._hauls: dict[str, CoopTask[None]] = {}

    def start_fetch(self, arrival: KvArrival) -> None:
        self.under_way.append(arrival)
        self._hauls[arrival.seq.key] = self.fetch(arrival)

    def wake_fetches(self) -> None:
        """Whoever waits here is moved by the test."""

    def creep(self) -> None:
        """Let every pull go as far as it can go now."""
        for arrival in list(self.under_way):
            while (pause_s := next(self._hauls[arrival.seq.key], None)) == RUN_NOW:
                pass
            if pause_s is None:
                self._gone(arrival)

    def land(self) -> None:
        """Let the oldest pull run to its end."""
        arrival = self.under_way[0]
        assert arrival.ticket is not None or arrival.stopped, "it would wait for its ticket for ever"
        run_to_end(self._hauls[arrival.seq.key])
        self._gone(arrival)

    def _gone(self, arrival: KvArrival) -> None:
        self.under_way.remove(arrival)
        del self._hauls[arrival.seq.key]


class BenchWorker:
    """One worker: its loop, line, engine and pool, and who holds what of that."""

    def __init__(
        self,
        bench: WorkerBench,
        num_slabs: int,
        make: Callable[[BenchWorker], WorkerRole],
        caching: bool,
    ) -> None:
        self.line, self.pool, self.books = FakeLine(), KvPool(LAYOUT, num_slabs), LatestStats()
        self.holdings = KvAllocator(self.pool, PrefixTree() if caching else None)
        limits = EngineLimits(num_slabs, max_model_len=1000, max_num_seqs=8, max_num_batched_tokens=128)
        self.runner = bench.runner(self.pool)
        self.engine = Engine(self.runner, Scheduler(limits), self.holdings, ByteSampler())
        self.role = make(self)
        self.shell = WorkerLoop(
            self.line,
            self.engine,
            self.role,
            self.holdings,
            self.books,
            fingerprint="model" if caching else "",
            clock=bench.clock,
        )

    def tell(self, *messages: ToWorker) -> None:
        """Messages arrive, and are taken in one round of the loop."""
        self.line.inbox.extend(messages)
        self.shell.run_once()

    def work(self) -> None:
        """Turn until nothing can progress."""
        self.shell.run_once()
        while self.engine.has_work:
            self.shell.run_once()

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
    def stats(self) -> WorkerStats:
        return self.books.stats


class WorkerBench:
    """A prefill and a decode worker, and a clock that a test moves. `caching`: do they keep and share prefixes?"""

    runner: Callable[[KvPool], ByteRunner] = ByteRunner

    def __init__(self, prefill_slabs: int = 40, decode_slabs: int = 40, caching: bool = True) -> None:
        self.now_s = 100.0
        self.board = memoryview(bytearray(prefill_slabs * ENTRY_BYTES))
        self.prefill = BenchWorker(self, prefill_slabs, self._prefiller, caching)
        self.decode = BenchWorker(self, decode_slabs, self._decoder, caching)

    def clock(self) -> float:
        return self.now_s

    def _prefiller(self, half: BenchWorker) -> WorkerRole:
        issuer, parts = (
            TicketIssuer(KEY, "prefill-0", "life", "model", "xxh3"),
            unsharded_pool(LAYOUT, half.pool.memory),
        )
        ledger, board = LeaseLedger(LEASE_S), LayerProgress(half.pool.num_slabs, self.board)
        return PrefillWorker(half.line, half.engine, half.holdings, parts, ledger, issuer, board)

    def _decoder(self, half: BenchWorker) -> WorkerRole:
        self.links = FakeLinks(self.prefill.pool, half.pool, self.board)
        self.courier = StillCourier(self.links, self.clock)
        return DecodeWorker(
            half.line, half.engine, half.holdings, lambda kv_class: LAYOUT, self.courier, KEY, "model"
        )


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
