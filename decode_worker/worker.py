"""The decode role of a worker: pulls the KV that prefill workers offer, verifies it, and gives it to the engine.

    begin_attempt ──▶ waiting ──room──▶ moving ──verified──▶ adopted by the engine
                         ▲                │ └─ pulled by the fetcher's threads, while others decode
                         └── recalled ────┘ a request without a ticket, when another one needs its room

`engine.scheduling.kv_admission.KvAdmission` decides which requests wait, start to fetch or are recalled. This module
applies these decisions to the pool, the fetcher and the gateway. Pulls write directly into reserved slabs. An abort
during a pull only asks the fetcher to stop; the slabs are freed when nothing writes to them any more.

A request without a ticket (its KV is still being computed) pulls the chunks that hints announce until `Fetch` brings
the ticket. If it may drop tokens, it waits for the ticket instead, since what it keeps is decided last. The slabs with
what its heads kept are pulled and verified like chunks, as opaque bytes; the engine then reads the maps in them.
Segments have addresses and are shared like chunks, so only those that are not here are pulled. If the source splits KV
over ranks otherwise, a bag is rewritten before (`kvtransfer.bag_repacking`).
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from decode_worker.kv_fetcher import KvArrival, KvFetcher
from decode_worker.ticket_check import EXPIRED_TEXT, TicketCheck, check_tokens, describe_error, describe_pull
from diptych.chunks import CHUNK_TOKENS
from diptych.errors import CorruptChunk, StaleTicket, TransferError
from diptych.eviction_spec import decision_tokens
from diptych.logs.log_format import about_request
from diptych.logs.request_ids import ids_of_sequence
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
from engine.loop import Engine
from engine.scheduling.kv_admission import (
    DepartureEffect,
    KvAdmission,
    MakeRoom,
    Recall,
    StartFetch,
    perform_departures,
)
from engine.sequence import Sequence, SequenceRefused
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.eviction.kept_segments import segment_keys
from kvcache.layout import KvLayout
from kvtransfer import ticket as tickets
from kvtransfer.bag_repacking import BagRepacker
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffAborted,
    HandoffOutcome,
    PullAhead,
    PullChunks,
    ReserveSlabs,
    hand_off,
    perform_effects,
)
from worker.loop import GatewayLink, WorkOrder

if TYPE_CHECKING:
    # Only workers with a device load it.
    from kvtransfer.transfer_buffer import TransferBuffer

log = logging.getLogger(__name__)


class DecodeWorker:
    """The role of a worker that decodes answers. `key` is the deployment's transfer key, which signs tickets.

    `layout_of` returns the layout of a KV class (`kvtransfer.resharding.ShardedPool.layout_of`). Without `repacker` all
    prefill workers must split KV over ranks as this worker does. `buffer` is that of a worker with a device; the links
    of `fetcher` pull through it.
    """

    def __init__(
        self,
        link: GatewayLink,
        engine: Engine,
        kv: KvAllocator | KvArenas,
        layout_of: Callable[[str], KvLayout],
        fetcher: KvFetcher,
        key: bytes,
        fingerprint: str,
        repacker: BagRepacker | None = None,
        buffer: TransferBuffer | None = None,
    ) -> None:
        self._buffer = buffer
        self.link, self.engine, self.kv, self.fetcher = link, engine, kv, fetcher
        self._repacker = repacker
        self._layout_of = layout_of
        self._key, self._tickets = key, TicketCheck(key, fingerprint, fetcher.links)
        self._admission = KvAdmission[KvArrival](engine.scheduler, kv, _renew_arrival)
        self._corrupt = 0
        self._segment_slabs: Counter[str] = Counter()
        # Number of hints and tickets that came after their request had ended.
        self._late = 0
        # Bytes that were copied before the ticket came and that the source changed afterwards.
        self.wasted_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether the KV of any request is waited for, being pulled, or read from a tier into slabs."""
        return len(self._admission) > 0 or self.engine.restores.is_busy

    def begin_attempt(self, order: WorkOrder, seq: Sequence, now_s: float) -> None:
        """Queue a request: its prompt is prefilled here (`Generate`), or its KV is fetched (`Admit`).

        Raises:
            SequenceRefused: there is no room for it, its ticket is wrong, or the order is not for this role.
        """
        match order:
            case Generate():
                self.engine.add(seq, now_s)
            case Admit():
                self._await_room(order, seq, now_s)
            case _:
                raise SequenceRefused(
                    "internal_error", f"a decode worker cannot serve {type(order).__name__}"
                )

    def _await_room(self, admit: Admit, seq: Sequence, now_s: float) -> None:
        self.engine.decisions.check_runner(seq)
        # With a ticket, the last token is the first decode input and has no KV, unless the first token was deferred.
        # Without a ticket it is not there yet.
        num_tokens, evicts = seq.total - bool(admit.ticket and admit.output), seq.keep.evicts
        if evicts:
            num_tokens = decision_tokens(len(seq.prompt), num_tokens)
        # A recalled request waits for its ticket.
        arrival = KvArrival(seq, num_tokens, now_s, recalled=evicts and not admit.ticket)
        if admit.ticket:
            self._accept_ticket(arrival, admit.ticket, now_s)
        self._admission.enqueue(arrival)
        self._admission.begin_restore(arrival, self.engine.restores, now_s)

    def _accept_ticket(self, arrival: KvArrival, raw: bytes, now_s: float) -> None:
        """Check and store the ticket of an arrival. Raises SequenceRefused, and changes nothing, if it is not right."""
        seq = arrival.seq
        ticket = self._tickets.read_ticket(arrival, raw, self._layout_of(seq.kv_class))
        if seq.keep.evicts:
            self._expect_bag(arrival, ticket)
        self._tickets.store_ticket(arrival, ticket, now_s)

    def _expect_bag(self, arrival: KvArrival, ticket: tickets.Ticket) -> None:
        """The KV of an arrival comes with the bag of `ticket`. Raises SequenceRefused if it can never fit."""
        seq, num_pulled, segments = arrival.seq, ticket.context.num_bag_slabs, ticket.context.segments
        try:
            needed = self._repacker.needs(ticket) if self._repacker is not None else None
            if segments and segments[-1].end > len(seq.prompt) // CHUNK_TOKENS:
                raise StaleTicket(
                    "the segments of a ticket are longer than the prompt", f"{segments[-1].end} chunks"
                )
        except StaleTicket as error:
            raise SequenceRefused("stale_ticket", error.what, error.why) from error
        arrival.num_bag_slabs = num_pulled if needed is None else needed
        # The slabs of the bag as it comes, or as it is here, and one for the tokens since the decision.
        seq.kept_slabs = max(num_pulled, arrival.num_bag_slabs) + 1
        seq.segments = segments
        seq.segment_keys = segment_keys(seq.root, seq.update_keys(), seq.keep, segments)
        if (need := arrival.num_slabs) > (most := self.engine.scheduler.limits.slabs_for(seq)):
            seq.kept_slabs, seq.segments, seq.segment_keys = 0, (), []
            why = f"this worker has {most}"
            raise SequenceRefused("out_of_memory", f"the request needs {need} KV slabs", why)
        if self._repacker is not None and needed is not None:
            arrival.repack = partial(self._repacker.repack, ticket)

    def take_message(self, message: ToWorker, now_s: float) -> None:
        """Link or unlink a prefill worker, or take a hint or a ticket."""
        match message:
            case Peer():
                self.fetcher.link_worker(message)
            case Unpeer(worker, incarnation):
                self.fetcher.unlink_worker(worker, incarnation)
            case Staging():
                self._on_hint(message)
            case Fetch():
                self._on_ticket(message, now_s)

    def _find_expecting(self, request: str, epoch: int) -> KvArrival | None:
        """The arrival that a hint or a ticket is for; counts a late message and returns None if it has ended."""
        arrival = self._admission.find_expecting(request, epoch)
        self._late += arrival is None
        return arrival

    def _on_hint(self, message: Staging) -> None:
        if (arrival := self._find_expecting(message.request, message.epoch)) is None:
            return
        try:
            hint = tickets.decode_hint(message.hint, self._key)
        except TransferError as error:
            # The request goes on, since hints are not needed.
            self._corrupt += 1
            ids = ids_of_sequence(message.request, arrival.seq.tenancy.client_id)
            log.warning("%s (%s)", error.what, error.why, extra=about_request(ids))
            return
        if (hint.request, hint.epoch) == (message.request, message.epoch):
            arrival.hints.append(hint)
            self.fetcher.wake_fetches()
        else:
            self._late += 1

    def _on_ticket(self, message: Fetch, now_s: float) -> None:
        """Take the ticket of a request that was admitted without one."""
        if (arrival := self._find_expecting(message.request, message.epoch)) is None:
            return
        seq = arrival.seq
        try:
            check_tokens(message, seq)
            self._accept_ticket(arrival, message.ticket, now_s)
        except SequenceRefused as refusal:
            self._refuse_arrival(arrival, refusal.code, describe_error(refusal))
            return
        self._admission.update_sequence(arrival, list(message.output), now_s + message.remaining_s)
        self.fetcher.wake_fetches()

    def _refuse_arrival(self, arrival: KvArrival, code: str, message: str) -> None:
        """Fail an arrival. The gateway hears of it when nothing is held for it any more."""
        if self._admission.withdraw(arrival, (code, message)):
            self._report_failed(arrival.seq, code, message)
        else:
            self.fetcher.wake_fetches()

    def take_over(self, seq: Sequence, now_s: float) -> None:
        """Never called: a decode worker holds no sequence after prefill to hand it over."""
        raise AssertionError(f"{seq.key} was held by a decode worker")

    def tend_held(self, now_s: float) -> float | None:
        """Adopt arrivals that were fetched, fail those past their deadline, and start those that have room. Go on with
        prefixes that are read back.

        Returns the earliest deadline of the arrivals and prefixes (clock seconds), None without any.
        """
        restores_end_s = self.engine.restores.tend(now_s)
        if self.fetcher.error is not None:
            raise self.fetcher.error
        while (arrival := self._next_landed()) is not None:
            self._finish_arrival(arrival, now_s)
        for arrival in self._admission.expired(now_s):
            self._refuse_arrival(arrival, "deadline_exceeded", EXPIRED_TEXT)
        self._start_fetches(now_s)
        ends = [restores_end_s, *(arrival.seq.deadline_s for arrival in self._admission.wanted())]
        return min((end_s for end_s in ends if end_s is not None), default=None)

    def _next_landed(self) -> KvArrival | None:
        try:
            return self.fetcher.landed.get_nowait()
        except queue.Empty:
            return None

    def _start_fetches(self, now_s: float) -> None:
        """Start arrivals one after the other, as long as there is room."""
        perform_departures(self._admission.departures(now_s), partial(self._perform_departure, now_s))

    def _perform_departure(self, now_s: float, effect: DepartureEffect[KvArrival]) -> bool | None:
        match effect:
            case StartFetch(arrival, held):
                self._start_fetch(arrival, held, now_s)
            case Recall():
                self.fetcher.wake_fetches()
            case MakeRoom(seq):
                return self.engine.make_room(seq, now_s)
        return None

    def _start_fetch(self, arrival: KvArrival, held: list[int], now_s: float) -> None:
        """Reserve slabs for the chunks that this worker lacks, and let the fetcher pull them."""
        have = dict(enumerate(held))
        arrival.handoff = hand_off(arrival.ticket, arrival.num_slabs, arrival.matches_chunk, have)
        arrival.effect = perform_effects(
            arrival.handoff, {ReserveSlabs: partial(self._reserve_slabs, arrival.seq)}
        )
        if isinstance(arrival.effect, PullAhead | PullChunks):
            layout, ticket = self._layout_of(arrival.seq.kv_class), arrival.ticket
            count = len(ticket.chunks) if ticket else layout.num_chunks(arrival.num_tokens)
            arrival.num_bytes = (count - len(held)) * layout.chunk_bytes
            self.fetcher.start_fetch(arrival)
        else:
            # The prefix tree has all chunks already, so there is nothing to fetch.
            self._finish_arrival(arrival, now_s)

    def _reserve_slabs(self, seq: Sequence, effect: ReserveSlabs) -> list[int]:
        return self.kv.arena_of(seq.kv_class).allocate(seq.key, effect.num_slabs)

    def _finish_arrival(self, arrival: KvArrival, now_s: float) -> None:
        """End a hand-off on the thread that owns the pool: give its slabs to the sequence, or free them."""
        seq = arrival.seq
        assert arrival.handoff is not None, "it has not departed"

        def commit(effect: CommitSlabs) -> None:
            self._admission.commit(arrival, list(effect.slabs))
            self._free_unused(arrival)
            try:
                self.engine.adopt(seq, now_s)
            except CorruptChunk:
                if seq.segments:
                    # Others must not attach segments with wrong maps.
                    self.kv.release(seq.key, keep=False)
                raise

        table = {CommitSlabs: commit, FreeSlabs: lambda effect: self.kv.release(seq.key)}
        aborted = self._admission.must_abort(arrival, isinstance(arrival.effect, CommitSlabs))
        error = HandoffAborted("stopped while its KV was on the way") if aborted else None
        outcome = perform_effects(arrival.handoff, table, arrival.effect, error)
        assert isinstance(outcome, HandoffOutcome)
        self.wasted_bytes += outcome.num_wasted * self._layout_of(seq.kv_class).chunk_bytes
        why = "" if outcome.error is None else describe_error(outcome.error)
        end = self._admission.finish(arrival, outcome.failure_code, why)
        if end.status == "adopted":
            pulled = len(arrival.coming.intersection(seq.segment_keys))
            self._segment_slabs.update(found=len(seq.segment_keys) - pulled, pulled=pulled)
            self._report_pulled(arrival, outcome, now_s)
        elif end.status == "failed":
            self._corrupt += end.code == "kv_corrupt"
            self._report_failed(seq, end.code, end.message)

    def _free_unused(self, arrival: KvArrival) -> None:
        """Free slabs in which a bag came and that it does not need here, where KV is split otherwise."""
        seq = arrival.seq
        if seq.kept_slabs and len(seq.bag_slabs) > arrival.num_bag_slabs:
            unused = seq.bag_slabs[arrival.num_bag_slabs :]
            del seq.slabs[-len(unused) :]
            seq.kept_slabs = arrival.num_bag_slabs + 1
            self.kv.arena_of(seq.kv_class).free_slabs(seq.key, unused)

    def _report_pulled(self, arrival: KvArrival, outcome: HandoffOutcome, now_s: float) -> None:
        num_chunks = outcome.num_pulled + outcome.num_wasted
        pull_s = arrival.pull_s + arrival.verify_s
        self.engine.restores.note_pull(arrival.seq.kv_class, num_chunks, pull_s, now_s)
        num_bytes = num_chunks * self._layout_of(arrival.seq.kv_class).chunk_bytes
        self.link.send(describe_pull(arrival, num_bytes))

    def _report_failed(self, seq: Sequence, code: str, message: str) -> None:
        self.link.send(Failed(seq.id, seq.epoch, code, message))

    def abort_attempts(self, request: str, epoch: int) -> None:
        """Drop the request's arrivals: waiting ones at once, moving ones when their pull has stopped."""
        for arrival in self._admission.find_request(request, epoch):
            self._drop_arrival(arrival)

    def abandon_all(self) -> list[tuple[str, int]]:
        """Drop all arrivals; returns their attempts (request, epoch)."""
        ended = self._admission.wanted()
        for arrival in ended:
            self._drop_arrival(arrival)
        self.engine.restores.stop()
        return [(arrival.seq.id, arrival.seq.epoch) for arrival in ended]

    def _drop_arrival(self, arrival: KvArrival) -> None:
        if not self._admission.withdraw(arrival):
            self.fetcher.wake_fetches()

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` of the engine, with the counts of waiting and moving arrivals, and of the transfer buffer, added."""
        if self._buffer is not None:
            stats = self._buffer.complete_stats(stats)
        on_the_way = sum(arrival.num_bytes for arrival in self._admission.moving.values())
        return msgspec.structs.replace(
            stats,
            waiting=stats.waiting + len(self._admission),
            deferred=len(self._admission),
            staging_bytes=on_the_way,
            late_messages=stats.late_messages + self._late,
            integrity_failures=self._corrupt,
            wasted_bytes=self.wasted_bytes,
            segment_slabs=dict(+self._segment_slabs),
        )


def _renew_arrival(arrival: KvArrival) -> KvArrival:
    """The arrival as it was before its fetch started, without hints: those that were taken do not come again."""
    return KvArrival(
        arrival.seq,
        arrival.num_tokens,
        arrival.arrived_s,
        arrival.ticket,
        recalled=True,
        digester=arrival.digester,
        ticket_s=arrival.ticket_s,
        transport=arrival.transport,
        repack=arrival.repack,
        num_bag_slabs=arrival.num_bag_slabs,
    )
