"""The decode role of a vLLM worker: KV is pulled into the transfer buffer and verified there before vLLM hears of it.

    begin_attempt ──▶ waiting ──room in the buffer──▶ moving ──verified──▶ vLLM loads it in its first step ─▶ slabs free
                  └─ expecting: an order without a ticket waits for it        └─ pulled by the fetcher's threads

So vLLM never waits for another worker. Requests take slabs of the buffer for all their KV at once, by priority and then
in the order in which their tickets came. A source whose pulls hold half of the buffer is passed over, so that one that
stands still delays no other. KV is not announced while it is computed: hints are counted as late.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from decode_worker.kv_fetcher import KvArrival, KvFetcher
from decode_worker.ticket_check import EXPIRED_TEXT, TicketCheck, check_tokens, describe_error, describe_pull
from diptych.messages import (
    Admit,
    Failed,
    Fetch,
    Generate,
    Peer,
    Staging,
    ToWorker,
    Unpeer,
    WorkerStats,
)
from engine.sequence import Sequence, SequenceRefused
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffAborted,
    HandoffOutcome,
    PullChunks,
    ReserveSlabs,
    hand_off,
    perform_effects,
)
from kvtransfer.transfer_buffer import TransferBuffer
from kvtransfer.transports.shm import ShmPuller
from vllm_worker.engine import VllmEngine
from vllm_worker.port import LoadPlan
from vllm_worker.settling import settle_engine
from worker.loop import GatewayLink, WorkOrder

log = logging.getLogger(__name__)

# The code and the text of a failure that is reported.
FailureReport = tuple[str, str]


class VllmDecodeRole:
    """A `worker.loop.WorkerRole` over `engine`. `key` is the deployment's transfer key, which signs tickets.

    `fetcher` pulls into `buffer`: its links' own pool is the buffer's. At most `small_bytes` bytes in shared memory are
    pulled on the loop's own thread while vLLM has nothing to do.
    """

    def __init__(
        self,
        link: GatewayLink,
        engine: VllmEngine,
        buffer: TransferBuffer,
        fetcher: KvFetcher,
        key: bytes,
        fingerprint: str,
        clock: Callable[[], float] = time.monotonic,
        small_bytes: int = 0,
    ) -> None:
        self._small_bytes = small_bytes
        self.link, self.engine, self.buffer, self.fetcher = link, engine, buffer, fetcher
        self._tickets, self._clock = TicketCheck(key, fingerprint, fetcher.links), clock
        # By key: requests without a ticket, with one but without slabs, and being pulled; and slabs that vLLM reads.
        self._expecting: dict[str, KvArrival] = {}
        self._waiting: dict[str, KvArrival] = {}
        self._moving: dict[str, KvArrival] = {}
        self._loading: dict[str, tuple[int, ...]] = {}
        # Slabs of the pulls from each worker.
        self._pulling: Counter[str] = Counter()
        self._corrupt = self._late = 0

    @property
    def is_busy(self) -> bool:
        """Whether the KV of any request is waited for, pulled, or loaded, or vLLM holds blocks that nobody wants."""
        arriving = self._expecting or self._waiting or self._moving or self._loading
        return bool(arriving) or self.engine.port.has_work

    # ---- orders and messages

    def begin_attempt(self, order: WorkOrder, seq: Sequence, now_s: float) -> None:
        """Queue a request: its prompt is prefilled here (`Generate`), or its KV is pulled (`Admit`).

        Raises:
            SequenceRefused: there is no room for it, its ticket is wrong, or the order is not for this role.
        """
        match order:
            case Generate() if order.sampling.pooling is None:
                self.engine.add(seq, now_s)
            case Admit():
                self._admit(order, seq, now_s)
            case _:
                raise SequenceRefused(
                    "internal_error", f"a decode worker cannot serve {type(order).__name__}"
                )

    def _admit(self, admit: Admit, seq: Sequence, now_s: float) -> None:
        # The last token has no KV, unless the first one was deferred. Without a ticket it is not there yet.
        arrival = KvArrival(seq, seq.total - bool(admit.ticket and admit.output), now_s)
        if self._count_slabs(arrival) > self.buffer.num_slabs:
            why = f"the transfer buffer has {self.buffer.num_slabs}"
            raise SequenceRefused(
                "out_of_memory", f"the request needs {self._count_slabs(arrival)} KV slabs", why
            )
        if admit.ticket:
            self._accept_ticket(arrival, admit.ticket, now_s)
            self._waiting[seq.key] = arrival
        else:
            self._expecting[seq.key] = arrival

    def _count_slabs(self, arrival: KvArrival) -> int:
        return self.buffer.layout.num_chunks(arrival.num_tokens)

    def _accept_ticket(self, arrival: KvArrival, raw: bytes, now_s: float) -> None:
        """Check and store the ticket of an arrival. Raises SequenceRefused, and changes nothing, if it is not right."""
        ticket = self._tickets.read_ticket(arrival, raw, self.buffer.layout)
        self._tickets.store_ticket(arrival, ticket, now_s)

    def take_message(self, message: ToWorker, now_s: float) -> None:
        """Link or unlink a prefill worker, or take a ticket."""
        match message:
            case Peer():
                self.fetcher.link_worker(message)
            case Unpeer(worker, incarnation):
                self.fetcher.unlink_worker(worker, incarnation)
            case Staging():
                self._late += 1
            case Fetch():
                self._on_ticket(message, now_s)

    def _on_ticket(self, message: Fetch, now_s: float) -> None:
        """Take the ticket of a request that was admitted without one."""
        arrival = self._expecting.pop(f"{message.request}#{message.epoch}", None)
        if arrival is None:
            self._late += 1
            return
        seq = arrival.seq
        try:
            check_tokens(message, seq)
            self._accept_ticket(arrival, message.ticket, now_s)
        except SequenceRefused as refusal:
            self._report_failed(seq, refusal.code, describe_error(refusal))
            return
        seq.output, seq.deadline_s = list(message.output), now_s + message.remaining_s
        self._waiting[seq.key] = arrival

    def take_over(self, seq: Sequence, now_s: float) -> None:
        """Never called: a decode worker hands no sequence over."""
        raise AssertionError(f"{seq.key} was held by a decode worker")

    # ---- upkeep

    def tend_held(self, now_s: float) -> float | None:
        """Give verified KV to the engine, free what it has loaded, fail what is too late, and start pulls that fit.

        Returns the earliest deadline of the requests that wait or are pulled (clock seconds), None without any.
        """
        if self.fetcher.error is not None:
            raise self.fetcher.error
        self._free_loaded()
        while (arrival := self._next_landed()) is not None:
            self._finish_arrival(arrival, now_s)
        for arrival in [one for one in self._wanted() if one.seq.deadline_s <= now_s]:
            self._end_arrival(arrival, ("deadline_exceeded", EXPIRED_TEXT))
        self._start_pulls(now_s)
        while (arrival := self._next_landed()) is not None:
            self._finish_arrival(arrival, self._clock())
        return min((one.seq.deadline_s for one in self._wanted()), default=None)

    def _wanted(self) -> list[KvArrival]:
        """The requests that wait or are pulled, and that were not told to end."""
        everyone = (*self._expecting.values(), *self._waiting.values(), *self._moving.values())
        return [arrival for arrival in everyone if not arrival.stopped]

    def _free_loaded(self) -> None:
        """Free the slabs that vLLM has read, or will not read."""
        for key, failed in self.engine.take_loaded():
            if failed:
                log.warning("vLLM could not load the KV of %s, which was verified", key)
            self.buffer.give_back(self._loading.pop(key), key)

    def _next_landed(self) -> KvArrival | None:
        try:
            return self.fetcher.landed.get_nowait()
        except queue.Empty:
            return None

    def _start_pulls(self, now_s: float) -> None:
        """Start the pulls that have room, by priority and then in order.

        A source that has its share of the buffer is passed over, with all that waits for it.
        """
        most, passed = max(1, self.buffer.num_slabs // 2), set[str]()
        for arrival in sorted(self._waiting.values(), key=lambda one: one.seq.tenancy.priority):
            ticket, need = arrival.ticket, self._count_slabs(arrival)
            assert ticket is not None, "it does not wait without one"
            held = self._pulling[ticket.worker]
            if ticket.worker in passed or (held and held + need > most):
                passed.add(ticket.worker)
                continue
            if self.buffer.free < need:
                return
            del self._waiting[arrival.seq.key]
            self._start_pull(arrival, need, now_s)

    def _start_pull(self, arrival: KvArrival, need: int, now_s: float) -> None:
        """Take slabs of the buffer, and let the fetcher pull into them and verify."""
        ticket, key = arrival.ticket, arrival.seq.key
        assert ticket is not None
        self._moving[key], arrival.reserved_s = arrival, now_s
        self._pulling[ticket.worker] += need
        arrival.num_bytes = need * self.buffer.layout.chunk_bytes
        arrival.handoff = hand_off(ticket, need, arrival.matches_chunk)
        arrival.effect = perform_effects(
            arrival.handoff, {ReserveSlabs: lambda effect: self.buffer.take_free(effect.num_slabs, key)}
        )
        if isinstance(arrival.effect, PullChunks):
            # A pull that is shorter than the way to the other thread and back, which nothing waits for.
            small = arrival.transport == ShmPuller.name and arrival.num_bytes <= self._small_bytes
            at_once = small and len(self._moving) == 1 and not self.engine.port.has_work
            (self.fetcher.fetch_now if at_once else self.fetcher.start_fetch)(arrival)
        else:
            self._finish_arrival(arrival, now_s)

    def _finish_arrival(self, arrival: KvArrival, now_s: float) -> None:
        """End a pull on the engine's thread: give verified KV to the engine, or free its slabs."""
        seq, ticket = arrival.seq, arrival.ticket
        assert arrival.handoff is not None and ticket is not None, "it has not departed"

        def commit(effect: CommitSlabs) -> None:
            self.engine.adopt(seq, LoadPlan(effect.slabs, arrival.num_tokens), now_s)
            self._loading[seq.key] = effect.slabs

        table = {CommitSlabs: commit, FreeSlabs: lambda effect: self.buffer.give_back(effect.slabs, seq.key)}
        error = HandoffAborted("stopped while its KV was on the way") if arrival.stopped else None
        outcome = perform_effects(arrival.handoff, table, arrival.effect, error)
        assert isinstance(outcome, HandoffOutcome)
        del self._moving[seq.key]
        self._pulling[ticket.worker] -= self._count_slabs(arrival)
        if not self._pulling[ticket.worker]:
            del self._pulling[ticket.worker]
        if outcome.error is None:
            self.link.send(describe_pull(arrival, arrival.num_bytes))
        elif arrival.stopped:
            if arrival.failure is not None:
                self._report_failed(seq, *arrival.failure)
        else:
            refused = isinstance(outcome.error, SequenceRefused)
            code = outcome.error.code if refused else outcome.failure_code  # type: ignore[attr-defined]
            self._corrupt += code == "kv_corrupt"
            self._report_failed(seq, code, describe_error(outcome.error))

    def _report_failed(self, seq: Sequence, code: str, message: str) -> None:
        self.link.send(Failed(seq.id, seq.epoch, code, message))

    # ---- ends

    def abort_attempts(self, request: str, epoch: int) -> None:
        """Drop the request's arrivals: waiting ones at once, moving ones when their pull has stopped.

        The slabs of one that vLLM loads are freed when it has let go of them.
        """
        for arrival in self._wanted():
            if arrival.seq.id == request and arrival.seq.epoch <= epoch:
                self._end_arrival(arrival, None)
        self._free_loaded()

    def abandon_all(self) -> list[tuple[str, int]]:
        """Drop all arrivals; returns their attempts (request, epoch)."""
        ended = self._wanted()
        for arrival in ended:
            self._end_arrival(arrival, None)
        self._free_loaded()
        return [(arrival.seq.id, arrival.seq.epoch) for arrival in ended]

    def _end_arrival(self, arrival: KvArrival, failure: FailureReport | None) -> None:
        """An arrival is not wanted any more; `failure` (code, message) is reported when nothing is held for it."""
        key = arrival.seq.key
        arrival.stopped, arrival.failure = True, failure
        if key in self._moving:
            self.fetcher.wake_fetches()
            return
        self._expecting.pop(key, None)
        self._waiting.pop(key, None)
        if failure is not None:
            self._report_failed(arrival.seq, *failure)

    def close(self) -> None:
        """Stop all pulls, and let vLLM free what ended requests hold. `tend_held` then frees what has landed."""
        self.fetcher.close()
        settle_engine(self.engine)

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` of the engine, with the counts of requests whose KV is not here yet, and of the buffer, added."""
        coming = len(self._expecting) + len(self._waiting) + len(self._moving)
        return msgspec.structs.replace(
            self.buffer.complete_stats(stats),
            waiting=stats.waiting + coming,
            deferred=coming,
            staging_bytes=sum(arrival.num_bytes for arrival in self._moving.values()),
            late_messages=stats.late_messages + self._late,
            integrity_failures=self._corrupt,
        )
