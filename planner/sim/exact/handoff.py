"""The decode worker's side of KV hand-offs in virtual time: wait for room, reserve, pull, commit.

Who departs and who is called back is decided by the decode worker's own `engine.scheduling.kv_admission.KvAdmission`,
and the protocol itself is `kvtransfer.handoff.hand_off`. Here are their effects: transfers take time, to stop one
takes none. KV that is announced during prefill is sent at once, but arrives at the earliest when prefill has
completed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from typing import Any

import msgspec

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KEEP_ALL, KeepSpec, decision_tokens
from diptych.messages import Admit, Failed, Fetch, Pulled, Staging
from engine.scheduling.kv_admission import (
    DepartureEffect,
    KvAdmission,
    MakeRoom,
    Recall,
    RemoteKv,
    StartFetch,
    perform_departures,
)
from kvtransfer.digests import DigestContext
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffAborted,
    HandoffEffect,
    HandoffOutcome,
    HandoffSteps,
    PullAhead,
    PullChunks,
    ReserveSlabs,
    TicketArrived,
    hand_off,
    perform_effects,
)
from kvtransfer.ticket import OfferedChunk, Ticket
from planner.sim.exact.engine import SimEngine, SimSequence
from planner.sim.exact.event_queue import EventQueue
from planner.sim.exact.links import SimLinks, SimTransfer
from planner.sim.exact.segments import Segments, describe_segments, name_segments, read_segments

EXPIRED_TEXT = "the request's time was up before its KV had arrived"
# Shape and size of the chunks in simulated tickets. The chunks have no content.
CHUNK_SHAPE = (1, 1, 2, CHUNK_TOKENS, 1)
CHUNK_BYTES = 2 * prod(CHUNK_SHAPE)


class SimHint(msgspec.Struct, frozen=True, array_like=True):
    """Chunks from `start` on: `there` are complete at `source`, `coming` more will be at `ready_s`."""

    source: str
    start: int
    there: int
    coming: int
    ready_s: float


@dataclass(slots=True, eq=False)
class SimArrival(RemoteKv):
    """One request whose KV is fetched, with the steps of its hand-off once the fetch has started.

    `early` are the chunks that were copied before the ticket came, `sent` the transfers that are in progress.
    """

    ticket: Ticket | None = None
    ticket_s: float = 0.0
    hints: deque[SimHint] = field(default_factory=deque)
    steps: HandoffSteps | None = None
    pending: HandoffEffect | HandoffOutcome | None = None
    early: set[int] = field(default_factory=set)
    sent: dict[int, SimTransfer] = field(default_factory=dict)
    # Number of parts whose transfer has started, and the seconds that the transfers took.
    parts: int = 0
    pull_s: float = 0.0


@cache
def _placeholder_chunks(count: int) -> tuple[OfferedChunk, ...]:
    return tuple(OfferedChunk(slab, bytes(16)) for slab in range(count))


def offer_ticket(worker: str, num_bag_slabs: int = 0, segments: Segments = ()) -> bytes:
    """What an offer of KV at `worker` says in simulations: its name, and its segments and the slabs of its bag if it
    was evicted.
    """
    kept = f" {num_bag_slabs} {describe_segments(segments)}" if num_bag_slabs else ""
    return (worker + kept).encode()


def make_ticket(command: Admit | Fetch, num_tokens: int, keep: KeepSpec = KEEP_ALL) -> Ticket:
    """The ticket of an order to fetch, whose `command.ticket` is one of `offer_ticket`."""
    worker, bag, segments = [*command.ticket.decode().split(" "), "0", ""][:3]
    terms = DigestContext(
        command.request, command.epoch, num_tokens, (0, 1), "float16", CHUNK_SHAPE, "simulated", CHUNK_BYTES,
        keep=keep, num_bag_slabs=int(bag), segments=read_segments(segments),
    )  # fmt: skip
    return Ticket(terms, worker, "1", _placeholder_chunks(terms.num_chunks))


class SimFetcher:
    """The requests whose KV one engine fetches: those that wait for room, and those whose transfer runs.

    `chunk_bytes` are by the name of the KV class's arena (`engine.sequence.EngineLimits.kv_classes`).
    """

    def __init__(
        self,
        name: str,
        engine: SimEngine,
        links: SimLinks,
        chunk_bytes: Mapping[str, int],
        send: Callable[[Any], None],
        landed: Callable[[SimArrival], None],
    ) -> None:
        self.name, self.engine, self.links, self.chunk_bytes = name, engine, links, chunk_bytes
        self._send, self._landed = send, landed
        self._events: EventQueue = links.events
        self.admission = KvAdmission[SimArrival](engine.scheduler, engine.kv, _renew_arrival)
        self._has_recalled = False

    # ---- messages

    def admit(self, command: Admit, seq: SimSequence, now_s: float) -> None:
        """Queues a request whose KV is offered, or (without a ticket) still being computed. Raises SequenceRefused."""
        # The last token is the first decode input and has no KV yet, unless the first token was deferred. Without a
        # ticket that token is still to come.
        num_tokens = seq.total - bool(command.ticket and command.output)
        if seq.keep.evicts:
            num_tokens = decision_tokens(len(seq.prompt), num_tokens)
        ticket = make_ticket(command, num_tokens, seq.keep) if command.ticket else None
        if ticket is not None and seq.keep.evicts:
            # The bag, and a slab for the tokens since the decision.
            seq.kept_slabs, seq.segments = ticket.context.num_bag_slabs + 1, ticket.context.segments
            seq.segment_keys = name_segments(seq.keys, seq.keep, seq.segments)
        arrival = SimArrival(seq, num_tokens, now_s, ticket, ticket_s=now_s)
        self.admission.enqueue(arrival)
        self.admission.begin_restore(arrival, self.engine.restores, now_s)

    def hint(self, message: Staging) -> None:
        """Handles the announcement of chunks that are being computed."""
        arrival = self.admission.find_expecting(message.request, message.epoch)
        if arrival is not None:
            arrival.hints.append(msgspec.msgpack.decode(message.hint, type=SimHint))
            if arrival.steps is not None:
                self._pull_early(arrival)

    def fetch(self, command: Fetch, now_s: float) -> None:
        """Handles the ticket of a request that was admitted without one."""
        arrival = self.admission.find_expecting(command.request, command.epoch)
        if arrival is None:
            return
        self.admission.update_sequence(arrival, list(command.output), now_s + command.remaining_s)
        arrival.ticket, arrival.ticket_s = make_ticket(command, arrival.num_tokens), now_s
        if arrival.steps is not None:
            self._on_ticket(arrival)

    # ---- the start of a fetch

    def start_transfers(self, now_s: float) -> bool:
        """Fails requests past their deadline, and starts fetches that have room. Returns whether any was recalled."""
        self._has_recalled = False
        if not len(self.admission):
            return False
        for arrival in self.admission.expired(now_s):
            self._refuse_arrival(arrival, "deadline_exceeded", EXPIRED_TEXT, now_s)
        perform_departures(self.admission.departures(now_s), partial(self._perform_departure, now_s))
        return self._has_recalled

    def _perform_departure(self, now_s: float, effect: DepartureEffect[SimArrival]) -> bool | None:
        match effect:
            case StartFetch(arrival, held):
                self._start_transfer(arrival, held, now_s)
            case Recall(arrival):
                self._has_recalled = True
                self._stop_transfer(arrival, now_s)
            case MakeRoom(seq):
                return self.engine.make_room(seq)
        return None

    def _start_transfer(self, arrival: SimArrival, held: list[int], now_s: float) -> None:
        """Reserves slabs for the chunks that are not cached here, and pulls these chunks."""
        key, arena = arrival.seq.key, self.engine.table.arena_of(arrival.seq)
        arrival.steps = hand_off(arrival.ticket, arrival.num_slabs, _always_matches, dict(enumerate(held)))
        reserve = {ReserveSlabs: lambda effect: arena.allocate(key, effect.num_slabs)}
        arrival.pending = perform_effects(arrival.steps, reserve)
        if isinstance(arrival.pending, PullAhead):
            self._pull_early(arrival)
        elif isinstance(arrival.pending, PullChunks):
            self._pull_rest(arrival, arrival.pending)
        else:
            # All chunks are cached here already.
            self.finish(arrival, now_s)

    # ---- transfers

    def _pull_early(self, arrival: SimArrival) -> None:
        """Transfers announced chunks: those that are complete, and those that the source's current step completes."""
        pending = arrival.pending
        assert isinstance(pending, PullAhead), "it does not wait for its ticket"
        while arrival.hints:
            hint = arrival.hints.popleft()
            middle = hint.start + hint.there
            for first, end, ready_s in (
                (hint.start, middle, 0.0),
                (middle, middle + hint.coming, hint.ready_s),
            ):
                wanted = [
                    index
                    for index in range(first, end)
                    if index in pending.slabs and index not in arrival.early
                ]
                if wanted:
                    arrival.early.update(wanted)
                    self._start_part(arrival, hint.source, len(wanted), ready_s)

    def _start_part(self, arrival: SimArrival, source: str, count: int, ready_s: float) -> None:
        """Starts the transfer of `count` chunks. It ends at `ready_s` at the earliest, when the chunks are computed."""
        arrival.parts += 1
        there = partial(self._on_part_copied, arrival, arrival.parts, ready_s, self._events.now_s)
        num_bytes = count * self._chunk_bytes(arrival)
        arrival.sent[arrival.parts] = self.links.start(source, self.name, num_bytes, there)

    def _chunk_bytes(self, arrival: SimArrival) -> int:
        return self.chunk_bytes[self.engine.limits.arena_name(arrival.seq)]

    def _on_part_copied(
        self, arrival: SimArrival, part: int, ready_s: float, began_s: float | None = None
    ) -> None:
        if arrival.stopped:
            return
        if began_s is not None:
            arrival.pull_s += self._events.now_s - began_s
        if self._events.now_s < ready_s:
            self._events.at(ready_s, self._on_part_copied, arrival, part, ready_s)
            return
        del arrival.sent[part]
        if isinstance(arrival.pending, PullAhead):
            self._on_ticket(arrival)
        else:
            self._landed(arrival)

    def _on_ticket(self, arrival: SimArrival) -> None:
        """Once the ticket and all announced chunks have come, pulls the missing chunks."""
        ticket, steps = arrival.ticket, arrival.steps
        if ticket is None or steps is None or arrival.sent:
            return
        came = TicketArrived(ticket, dict.fromkeys(arrival.early, b""))
        arrival.pending = perform_effects(steps, {PullAhead: lambda effect: came}, arrival.pending)
        if isinstance(arrival.pending, PullChunks):
            self._pull_rest(arrival, arrival.pending)
        else:
            self._landed(arrival)

    def _pull_rest(self, arrival: SimArrival, pull: PullChunks) -> None:
        self._start_part(arrival, pull.ticket.worker, len(pull.pairs), 0.0)

    # ---- the end of a fetch

    def finish(self, arrival: SimArrival, now_s: float) -> None:
        """The transfers have ended or were stopped: commits the KV, or frees its slabs."""
        seq, kv, steps = arrival.seq, self.engine.kv, arrival.steps
        assert steps is not None, "it has not departed"
        if not arrival.stopped:
            pull = {PullChunks: lambda effect: [b""] * len(effect.pairs)}
            arrival.pending = perform_effects(steps, pull, arrival.pending)

        def commit(effect: CommitSlabs) -> None:
            self.admission.commit(arrival, list(effect.slabs))
            self.engine.scheduler.adopt(seq, now_s)

        table = {CommitSlabs: commit, FreeSlabs: lambda effect: kv.release(seq.key)}
        aborted = self.admission.must_abort(arrival, isinstance(arrival.pending, CommitSlabs))
        error = HandoffAborted("stopped while its KV was on the way") if aborted else None
        outcome = perform_effects(steps, table, arrival.pending, error)
        assert isinstance(outcome, HandoffOutcome)
        end = self.admission.finish(arrival, outcome.failure_code, str(outcome.error))
        if end.status == "adopted":
            self._report_pulled(arrival, outcome, now_s)
        elif end.status == "failed":
            self._send(Failed(seq.id, seq.epoch, end.code, end.message))

    def _report_pulled(self, arrival: SimArrival, outcome: HandoffOutcome, now_s: float) -> None:
        self.engine.restores.note_pull(arrival.seq.kv_class, outcome.num_pulled, arrival.pull_s, now_s)
        began_s = max(arrival.reserved_s, arrival.ticket_s)
        seconds = {
            "reserve": max(0.0, arrival.reserved_s - arrival.ticket_s),
            "transfer": now_s - began_s,
            "verify": 0.0,
            "hidden": max(0.0, began_s - arrival.reserved_s),
            "exposed": now_s - began_s,
        }
        num_bytes = outcome.num_pulled * self._chunk_bytes(arrival)
        self._send(Pulled(arrival.seq.id, arrival.seq.epoch, "simulated", num_bytes, seconds))

    def _stop_transfer(self, arrival: SimArrival, now_s: float) -> None:
        for transfer in arrival.sent.values():
            self.links.stop(transfer)
        arrival.sent.clear()
        self.finish(arrival, now_s)

    def _refuse_arrival(self, arrival: SimArrival, code: str, message: str, now_s: float) -> None:
        if self.admission.withdraw(arrival, (code, message)):
            self._send(Failed(arrival.seq.id, arrival.seq.epoch, code, message))
        else:
            self._stop_transfer(arrival, now_s)

    def abort(self, request: str, epoch: int, now_s: float) -> None:
        """Drops a request's arrivals: waiting ones at once, moving ones by stopping their transfers."""
        for arrival in self.admission.find_request(request, epoch):
            if not self.admission.withdraw(arrival):
                self._stop_transfer(arrival, now_s)


def _renew_arrival(arrival: SimArrival) -> SimArrival:
    """The same request as it was before it departed; what was announced so far is announced no more."""
    return SimArrival(
        arrival.seq,
        arrival.num_tokens,
        arrival.arrived_s,
        arrival.ticket,
        recalled=True,
        ticket_s=arrival.ticket_s,
    )


def _always_matches(_index: int, _payload: bytes, _promised: bytes) -> bool:
    return True
