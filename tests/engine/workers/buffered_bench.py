"""A prefill and a decode worker with devices and transfer buffers, on the byte model of `worker_bench`.

KV moves as it does between GPUs: device, buffer, shared memory, buffer, device. Copies are those that a test gives. The
"KV" of a token has its hash and the token itself, so the runner checks every chunk that it reads, not only the last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from decode_worker.kv_fetcher import KvFetcher
from decode_worker.worker import DecodeWorker
from diptych.chunks import CHUNK_TOKENS
from diptych.messages import (
    Abort,
    Admit,
    Failed,
    Fetch,
    Offer,
    Prefill,
    Pulled,
    Release,
    Staged,
    Staging,
    Step,
    ToGateway,
)
from diptych.request import Tenancy
from engine.loop import Engine
from engine.protocols import OnLayersDone
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits
from engine.step_work import StepWork
from kvcache.allocator import KvAllocator
from kvcache.device.copies import DirectCopies, SlabCopies
from kvcache.device.pool import DevicePool
from kvcache.layout import Shard
from kvcache.prefix_tree import PrefixTree
from kvtransfer.buffered_links import BufferedLinks
from kvtransfer.cooperative import CoopTask
from kvtransfer.leases import LeaseLedger
from kvtransfer.transfer_buffer import BufferedBooks, TransferBuffer
from kvtransfer.transports.links import TransportLinks
from kvtransfer.transports.shm import ShmSource
from prefill_worker.buffered_offers import BufferedOffers
from prefill_worker.worker import PrefillWorker, TicketIssuer
from tests.engine.workers.role_steps import ANYBODY
from tests.engine.workers.worker_bench import (
    KEY,
    LAYOUT,
    LEASE_S,
    VOCAB,
    BenchWorker,
    ByteSampler,
    FakeLine,
    StillCourier,
    alone,
    chain_links,
    sampling,
)
from tests.support.late_copies import LateCopies, Lateness
from worker.loop import LatestStats, WorkerLoop

SLAB = LAYOUT.chunk_bytes

# pytest's fixture `record_property`: what a test reports of itself, which `benchmarks.device_pools` sums up.
RecordProperty = Callable[[str, object], None]


class StillThread:
    """Runs tasks only when a test lets it (`worker.task_thread.TaskThread`)."""

    def __init__(self, name: str, died: Callable[[BaseException], None]) -> None:
        self.tasks: list[CoopTask[None]] = []

    def open(self) -> None:
        """Nothing runs by itself."""

    def add_task(self, work: CoopTask[None]) -> None:
        self.tasks.append(work)

    def creep(self, rng: random.Random) -> None:
        """One step of one task."""
        if self.tasks:
            task = rng.choice(self.tasks)
            if next(task, None) is None:
                self.tasks.remove(task)

    def close(self) -> None:
        while self.tasks:
            self.creep(random.Random(0))


class DeviceRunner:
    """`ByteRunner` on a device's pool. `wrong` has a line for every chunk that is not what was computed."""

    def __init__(self, pool: DevicePool, wrong: list[str]) -> None:
        self._rows = pool.slab_bytes.numpy().reshape(pool.num_slabs, CHUNK_TOKENS, -1)
        self._known: dict[int, tuple[bytes, bytes]] = {}
        self._wrong = wrong

    def run(self, batch: list[StepWork], done: OnLayersDone | None = None) -> list[list[bytes]]:
        assert done is None, "chunks leave whole"
        return [self._one(work) for work in batch]

    def _one(self, work: StepWork) -> list[bytes]:
        before = self._check_before(work)
        links = chain_links(work.tokens, before)
        for position, (link, token) in enumerate(zip(links, work.tokens, strict=True), work.start):
            row = self._rows[work.slabs[position // CHUNK_TOKENS], position % CHUNK_TOKENS]
            row[:8] = np.frombuffer(link, np.uint8)
            row[8:12] = np.frombuffer(token.to_bytes(4, "little"), np.uint8)
        return links[-1:]

    def _check_before(self, work: StepWork) -> bytes:
        """The link of the token before the work; every chunk up to there must follow from the one before."""
        before = bytes(8)
        for place in range(-(-work.start // CHUNK_TOKENS)):
            count = min(CHUNK_TOKENS, work.start - place * CHUNK_TOKENS)
            slab = work.slabs[place]
            rows = self._rows[slab, :count]
            content = rows.tobytes()
            if self._known.get(slab) != (before, content):
                tokens = [int.from_bytes(row[8:12].tobytes(), "little") for row in rows]
                links = chain_links(tokens, before)
                if [row[:8].tobytes() for row in rows] != links:
                    self._wrong.append(f"chunk {place} in slab {slab}")
                    raise ValueError(self._wrong[-1])
                self._known[slab] = before, content
            before = rows[count - 1][:8].tobytes()
        return before


class BufferedWorker(BenchWorker):
    """A worker with a device of `slabs[0]` slabs and a buffer of `slabs[1]`."""

    def __init__(self, bench: BufferedBench, slabs: tuple[int, int]) -> None:
        self.line, self.latest = FakeLine(), LatestStats()
        self.device = DevicePool(LAYOUT, slabs[0], torch.device("cpu"))
        self.buffer = TransferBuffer(LAYOUT, slabs[1] * SLAB)
        memory, lateness = self.buffer.memory.view, bench.lateness
        self.late = (
            LateCopies(self.device, memory, lateness, self.buffer._ledger) if lateness is not None else None
        )
        self.copies: SlabCopies = self.late or DirectCopies(self.device, memory)
        self.holdings = KvAllocator(self.device, PrefixTree() if bench.caching else None)
        limits = EngineLimits(slabs[0], max_model_len=1000, max_num_seqs=16, max_num_batched_tokens=128)
        self.engine = Engine(
            DeviceRunner(self.device, bench.wrong), Scheduler(limits), self.holdings, ByteSampler()
        )

    def serve(self, role: PrefillWorker | DecodeWorker, bench: BufferedBench) -> None:
        """Begin a role."""
        self.role: Any = role
        self.books = self.latest
        self.shell = WorkerLoop(
            self.line,
            self.engine,
            role,
            BufferedBooks(self.holdings, self.buffer),
            self.latest,
            fingerprint="model" if bench.caching else "",
            clock=bench.clock,
        )


@dataclass
class Exchange:
    """A request as the gateway sees it."""

    name: str
    prompt: list[int]
    tokens: int
    stage: bool
    tenancy: Tenancy = ANYBODY
    epoch: int = 0
    first: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)
    admitted: bool = False
    ended: str = ""

    @property
    def defers(self) -> bool:
        """Whether the decode worker draws its first token: about one in two that are not staged."""
        return not self.stage and self.tokens > 1 and len(self.prompt) % 2 == 1

    @property
    def written(self) -> list[int]:
        return self.first + self.rest


class BufferedBench:
    """Both workers, the link between their buffers, and a gateway that relays their messages."""

    def __init__(
        self,
        *,
        prefill: tuple[int, int] = (40, 16),
        decode: tuple[int, int] = (60, 16),
        caching: bool = True,
        lateness: Lateness | None = None,
        threads: bool = False,
    ) -> None:
        self.now_s, self.caching, self.lateness = 100.0, caching, lateness
        self.wrong: list[str] = []
        self.retries = 0
        self.exchanges: dict[str, Exchange] = {}
        self._taken = {"prefill": 0, "decode": 0}
        self.prefill, self.decode = BufferedWorker(self, prefill), BufferedWorker(self, decode)
        self._open_prefill()
        self._open_decode(threads)

    def clock(self) -> float:
        return self.now_s

    def _open_prefill(self) -> None:
        half = self.prefill
        self.offers = BufferedOffers(half.holdings, half.buffer, half.copies, "xxh3", half.line.wake_poll)
        issuer = TicketIssuer(KEY, "prefill-0", "life", "model", "xxh3")
        ledger = LeaseLedger(LEASE_S)
        role = PrefillWorker(
            half.line, half.engine, half.holdings, half.buffer.pool, ledger, issuer, offers=self.offers
        )
        half.serve(role, self)

    def _open_decode(self, threads: bool) -> None:
        half = self.decode
        whole = Shard((0, LAYOUT.layers), (0, LAYOUT.kv_heads))
        endpoint = ShmSource([(whole, self.prefill.buffer.memory)], "prefill-0").endpoint()
        self.links = TransportLinks(["shm"], half.buffer.pool)
        self.links.link_worker("prefill-0", "life", {"shm": endpoint})
        buffered = BufferedLinks(self.links, half.buffer, half.copies)
        self.courier: Any = (
            KvFetcher(buffered, half.line.send, half.line.wake_poll, self.clock)
            if threads
            else StillCourier(buffered, self.clock)
        )
        if threads:
            self.courier.open()
        half.serve(
            DecodeWorker(
                half.line,
                half.engine,
                half.holdings,
                lambda kv_class: LAYOUT,
                self.courier,
                KEY,
                "model",
                buffer=half.buffer,
            ),
            self,
        )

    # ---- the gateway

    def ask(
        self, name: str, prompt: list[int], tokens: int, stage: bool = True, tenancy: Tenancy = ANYBODY
    ) -> None:
        self.exchanges[name] = Exchange(name, prompt, tokens, stage, tenancy)
        self._begin(self.exchanges[name])

    def _begin(self, one: Exchange) -> None:
        order = Prefill(
            one.name,
            one.epoch,
            one.prompt,
            [],
            sampling(one.tokens),
            1e6,
            one.tenancy,
            one.stage,
            defer_first=one.defers,
        )
        self.prefill.line.inbox.append(order)

    def abort(self, name: str) -> None:
        one = self.exchanges[name]
        one.ended = one.ended or "aborted"
        self._tell_both(Abort(name, one.epoch))

    def _tell_both(self, message: Any) -> None:
        self.prefill.line.inbox.append(message)
        self.decode.line.inbox.append(message)

    def relay(self) -> None:
        """Act on what the workers said since."""
        for side, half in (("prefill", self.prefill), ("decode", self.decode)):
            fresh = half.line.said[self._taken[side] :]
            self._taken[side] += len(fresh)
            for message in fresh:
                self._on_message(side, message)

    def _on_message(self, side: str, message: ToGateway) -> None:
        if isinstance(message, Step):
            for output in message.outputs:
                one = self.exchanges[output.request]
                if output.epoch == one.epoch and not one.ended:
                    (one.first if side == "prefill" else one.rest).extend(output.tokens)
                    if output.finish:
                        self._end(one, output.finish)
            return
        assert isinstance(message, Staged | Offer | Pulled | Failed), message
        one = self.exchanges[message.request]
        if message.epoch != one.epoch or one.ended:
            return
        match message:
            case Staged():
                self._on_hint(one, message)
            case Offer():
                given = (one.first, message.ticket, 1e6)
                admit = Admit(one.name, one.epoch, one.prompt, one.first, sampling(one.tokens), given[1], 1e6)
                fetch = Fetch(one.name, one.epoch, *given)
                self.decode.line.inbox.append(fetch if one.admitted else admit)
            case Pulled():
                self.prefill.line.inbox.append(Release(one.name, one.epoch))
            case Failed():
                self._retry(one, message.code)

    def _on_hint(self, one: Exchange, message: Staged) -> None:
        if not one.admitted and not one.first:
            one.admitted = True
            order = Admit(one.name, one.epoch, one.prompt, [], sampling(one.tokens), b"", 1e6)
            self.decode.line.inbox.append(order)
        if one.admitted:
            self.decode.line.inbox.append(Staging(one.name, one.epoch, message.hint))

    def _retry(self, one: Exchange, code: str) -> None:
        self._tell_both(Abort(one.name, one.epoch))
        if code != "kv_corrupt":
            one.ended = code
            return
        self.retries += 1
        one.epoch, one.first, one.rest, one.admitted = one.epoch + 1, [], [], False
        self._begin(one)

    def _end(self, one: Exchange, finish: str) -> None:
        one.ended = finish
        self._tell_both(Release(one.name, one.epoch))

    # ---- time passes

    def step(self, rng: random.Random) -> None:
        """Something happens, chosen at random: a round of a worker, a step of a thread, messages."""
        what = rng.randrange(6)
        if what == 0:
            self.prefill.shell.run_once()
        elif what == 1:
            self.decode.shell.run_once()
        elif what == 2:
            self.relay()
        elif what < 5 and isinstance(self.courier, StillCourier):
            if arrivals := self.courier.under_way:
                arrival = rng.choice(arrivals)
                if next(self.courier._hauls[arrival.seq.key], None) is None:
                    self.courier._gone(arrival)
        else:
            self.offer_thread.creep(rng)

    @property
    def offer_thread(self) -> Any:
        return self.offers._chunks._thread

    @property
    def open_names(self) -> list[str]:
        return [one.name for one in self.exchanges.values() if not one.ended]

    @property
    def is_resting(self) -> bool:
        """Whether nothing is open and nobody holds anything."""
        busy = any(half.shell.is_busy or half.line.inbox for half in (self.prefill, self.decode))
        return not self.open_names and not busy

    def settle(self, rng: random.Random, max_steps: int = 300_000) -> None:
        """Until everything has ended."""
        for _ in range(max_steps):
            if self.is_resting:
                return
            self.step(rng)
        raise AssertionError(f"{self.open_names} did not end; buffer: {self.prefill.buffer.owners()}")

    def check_rest(self) -> None:
        """Nothing is held on a device, in a buffer, or by a copy; nothing was wrong."""
        self.relay()
        for half in (self.prefill, self.decode):
            half.shell.run_once()
            half.shell.books.check_books()
            assert (half.shell.books.used, half.buffer.copying) == (0, 0), half.shell.books.owners()
            stats = half.latest.stats
            used = (stats.slabs_used, stats.leases, stats.staging_bytes, stats.running, stats.waiting)
            assert used == (0,) * 5
            assert (stats.buffer_used, stats.buffer_leased, stats.copies_in_flight) == (0, 0, 0)
            assert stats.offers_waiting == 0 and stats.buffer_slabs == half.buffer.num_slabs
        assert self.faults == []

    @property
    def faults(self) -> list[str]:
        """What was wrong: tokens, chunks, and slabs that changed owner or content during a copy."""
        found = [*self.wrong]
        for one in self.exchanges.values():
            if one.ended == "length" and one.written != alone(one.prompt, one.tokens):
                found.append(f"{one.name} wrote {one.written}")
        for half in (self.prefill, self.decode):
            found += half.late.faults if half.late is not None else []
        return found


def report_hand_offs(bench: BufferedBench, record_property: RecordProperty) -> None:
    """Report how many hand-offs there were, how many requests were aborted, and what was wrong."""
    ends = [one.ended for one in bench.exchanges.values()]
    record_property("late_handoffs", ends.count("length"))
    record_property("late_aborted", ends.count("aborted"))
    record_property("late_wrong", len(bench.faults))


def random_prompt(rng: random.Random, most: int = 330) -> list[int]:
    """A prompt that may begin as others do."""
    family = rng.randrange(3)
    shared = [(7 * place + family) % VOCAB for place in range(rng.choice([0, 64, 128, 200]))]
    own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, most - len(shared)))]
    return shared + own


def ask_many(bench: BufferedBench, rng: random.Random, count: int) -> Sequence[str]:
    """Ask for so many answers; returns their names."""
    first = len(bench.exchanges)
    names = [f"r{number}" for number in range(first, first + count)]
    for name in names:
        bench.ask(name, random_prompt(rng), rng.randint(2, 5), stage=rng.random() < 0.7)
    return names
