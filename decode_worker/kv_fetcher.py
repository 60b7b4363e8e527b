"""Two threads beside the engine's thread: one links to prefill workers, the other one pulls KV from them.

Each thread runs many cooperative tasks (`worker.task_thread`). So a stalled source does not delay the KV of
other sources, and a source that still computes is checked from time to time. Both threads release the GIL while they
copy, hash or wait, so decoding continues. Finished fetches are returned through `landed` and `wake`. This module never
changes the owners of slabs and never calls the engine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.errors import DiptychError, TransferError
from diptych.messages import Linked, Peer, ToGateway
from engine.scheduling.kv_admission import RemoteKv
from kvtransfer.cooperative import RUN_NOW, UNTIL_WOKEN, CoopTask, run_to_end
from kvtransfer.digests import ChunkDigester
from kvtransfer.handoff import (
    CommitSlabs,
    HandoffAborted,
    HandoffEffect,
    HandoffOutcome,
    HandoffSteps,
    PullAhead,
    PullChunks,
    TicketArrived,
    perform_effects,
)
from kvtransfer.pipelined_pull import PipelinedPull
from kvtransfer.ticket import StagingHint, Ticket
from kvtransfer.transports.links import KvLinks, TransportNotOpen
from worker.task_thread import TaskThread

# Hints of one request that are not processed yet; the oldest are dropped.
MAX_HINTS = 4096


@dataclass(slots=True, eq=False)
class KvArrival(RemoteKv):
    """A request's KV that is fetched; `handoff` and `effect` are the hand-off's generator and its pending effect.

    The engine's thread sets `hints`, `ticket` and `stopped`, and the pulling thread uses them. The pulling thread sets
    the times and the effect, and the engine's thread uses them after the arrival has come back through `landed`.
    """

    ticket: Ticket | None = None
    # Digests the chunks of the ticket. It is set before `ticket`, which the fetcher's thread waits for.
    digester: ChunkDigester | None = None
    # Time at which the ticket came, in seconds on the worker's clock.
    ticket_s: float = 0.0
    # Rewrites a verified bag in these slabs for the ranks here, if its source splits KV otherwise. Set before `ticket`.
    repack: Callable[[list[int]], None] | None = None
    # The slabs that its bag takes here.
    num_bag_slabs: int = 0
    hints: deque[StagingHint] = field(default_factory=lambda: deque(maxlen=MAX_HINTS))
    # The steps of the handoff. They exist once the fetch has started.
    handoff: HandoffSteps | None = None
    # Bytes that this fetch copies; chunks that are cached here do not count.
    num_bytes: int = 0
    effect: HandoffEffect | HandoffOutcome | None = None
    transport: str = ""
    pull_s: float = 0.0
    hidden_s: float = 0.0
    verify_s: float = 0.0
    # Time at which the last byte was copied, in seconds on the worker's clock; 0 if none was.
    copied_s: float = 0.0

    def matches_chunk(self, index: int, payload: bytes, promised: bytes) -> bool:
        """`ChunkDigester.matches_chunk` for the arrival's ticket, which must have come."""
        assert self.digester is not None, "there is no ticket yet"
        return self.digester.matches_chunk(index, payload, promised)

    def repack_bag(self, slabs: tuple[int, ...]) -> None:
        """Rewrite the bag in `slabs`, those of all its verified KV in token order, if that is needed.

        Raises CorruptChunk if it is not what the ticket says.
        """
        if self.repack is not None:
            first = self.seq.keep.boundary_chunks
            self.repack(list(slabs[first : first + self.seq.kept_slabs - 1]))

    @property
    def exposed_s(self) -> float:
        """Seconds from the ticket, or from the reservation of slabs if that was later, to the last byte."""
        return max(0.0, self.copied_s - max(self.ticket_s, self.reserved_s))


class KvFetcher:
    """Links to prefill workers and pulls KV from them. `send` and `wake` are called from its two threads."""

    def __init__(
        self,
        links: KvLinks,
        send: Callable[[ToGateway], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links, self._send, self._wake, self._clock = links, send, wake, clock
        self.landed: queue.SimpleQueue[KvArrival] = queue.SimpleQueue()
        self.error: BaseException | None = None  # the exception that ended one of the threads
        self._closing = threading.Event()
        self._linking, self._pulling = (
            TaskThread(f"kv-{name}", self._on_thread_died) for name in ("link", "pull")
        )

    def open(self) -> None:
        """Start the two threads."""
        self._linking.open()
        self._pulling.open()

    def close(self) -> None:
        """Stop all pulls, end both threads, and drop all links."""
        self._closing.set()
        self._pulling.close()
        self._linking.close()
        self.links.close()

    def link_worker(self, peer: Peer) -> None:
        """Link to a prefill worker and measure the link. The result, or the error, is sent as `Linked`."""
        self._linking.add_task(self._link_peer(peer))

    def unlink_worker(self, worker: str, incarnation: str) -> None:
        """Drop the link to the life `incarnation` of a worker. Pulls that run continue."""
        self.links.unlink_worker(worker, incarnation)

    def start_fetch(self, arrival: KvArrival) -> None:
        """Pull and verify the KV of `arrival`, which then comes back through `landed`."""
        self._pulling.add_task(self.fetch(arrival))

    def wake_fetches(self) -> None:
        """Continue fetches that wait: a hint, a ticket or a stop has come for one of them."""
        self._pulling.wake_tasks()

    def fetch(self, arrival: KvArrival) -> CoopTask[None]:
        """The task that does the pulling thread's part of a hand-off."""
        steps = arrival.handoff
        assert steps is not None, "it has not departed"
        while isinstance(effect := arrival.effect, PullAhead | PullChunks):
            try:
                if isinstance(effect, PullAhead):
                    answer: object = yield from self._pull_ahead(arrival, effect)
                else:
                    answer = yield from self._pull_chunks(arrival, effect)
            except BaseException as error:
                arrival.effect = perform_effects(steps, {}, effect, error)
            else:
                arrival.effect = self._verify_answer(arrival, steps, effect, answer)
                if isinstance(arrival.effect, CommitSlabs):
                    self._repack_bag(arrival, steps, arrival.effect)
        self.landed.put(arrival)
        self._wake()

    def fetch_now(self, arrival: KvArrival) -> None:
        """Run `fetch` on the calling thread."""
        run_to_end(self.fetch(arrival))

    def _on_thread_died(self, error: BaseException) -> None:
        self.error = error
        self._wake()

    def _link_peer(self, peer: Peer) -> CoopTask[None]:
        route, why, wants = self.links.route_to(peer.worker), "", ""
        if route is None or route.incarnation != peer.incarnation:
            try:
                route = yield from self.links.link_task(peer.worker, peer.incarnation, peer.endpoints)
            except DiptychError as error:
                route, why = None, "\n".join(part for part in (error.what, error.why) if part)
                wants = error.transport if isinstance(error, TransportNotOpen) else ""
        transport, speed, latency = (
            (route.transport, route.gb_per_s, route.latency_us) if route else ("", 0.0, 0.0)
        )
        self._send(Linked(peer.worker, peer.incarnation, transport, speed, latency, why, wants))

    def _stop_check(self, arrival: KvArrival) -> Callable[[], bool]:
        return lambda: arrival.stopped or self._closing.is_set()

    def _pull_ahead(self, arrival: KvArrival, effect: PullAhead) -> CoopTask[TicketArrived]:
        """Copy announced chunks until the ticket comes, then the rest of the chunks that were begun."""
        early, stopped = PipelinedPull(effect.slabs, self.links.hasher), self._stop_check(arrival)
        while (ticket := arrival.ticket) is None:
            if stopped():
                raise HandoffAborted("the pull was stopped")
            pause_s = yield from self._copy_ready(arrival, early, stopped)
            # A wake-up that came during the copy does not come again: look at the state before waiting.
            if arrival.ticket is None and not arrival.hints and not stopped():
                yield pause_s
        began_s = self._clock()
        try:
            lane = self.links.connection_to(ticket.worker, ticket.incarnation)
            payloads = yield from early.finish_with_ticket(lane, ticket, stopped)
        except HandoffAborted:
            raise
        except TransferError:  # the pull of the whole KV decides whether the transfer fails
            return TicketArrived(ticket, {})
        self._record_copied(arrival, began_s)
        return TicketArrived(ticket, payloads)

    def _copy_ready(
        self, arrival: KvArrival, pull: PipelinedPull, stopped: Callable[[], bool]
    ) -> CoopTask[float]:
        while arrival.hints:
            pull.add_hint(arrival.hints.popleft())
        if not pull.worker:
            return UNTIL_WOKEN
        began_s = self._clock()
        try:
            lane = self.links.connection_to(pull.worker, pull.incarnation)
            pause_s = yield from pull.copy_ready(lane, stopped)
        except HandoffAborted:
            raise
        except TransferError:  # copies before the ticket are optional
            pull.drop_chunks()
            return UNTIL_WOKEN
        if pause_s == RUN_NOW:
            self._record_copied(arrival, began_s)
        return pause_s

    def _pull_chunks(self, arrival: KvArrival, effect: PullChunks) -> CoopTask[list[bytes]]:
        began_s = self._clock()
        payloads = yield from self.links.pull_task(effect.ticket, effect.pairs, self._stop_check(arrival))
        self._record_copied(arrival, began_s)
        return payloads

    def _record_copied(self, arrival: KvArrival, began_s: float) -> None:
        now_s = self._clock()
        arrival.pull_s += now_s - began_s
        if arrival.ticket is None or arrival.ticket_s > began_s:
            until_s = now_s if arrival.ticket is None else min(now_s, arrival.ticket_s)
            arrival.hidden_s += until_s - began_s
        arrival.copied_s = now_s

    def _repack_bag(self, arrival: KvArrival, steps: HandoffSteps, effect: CommitSlabs) -> None:
        """Bring the bag of an arrival, which is here and verified, into the form of the ranks here."""
        try:
            arrival.repack_bag(effect.slabs)
        except Exception as error:
            arrival.effect = perform_effects(steps, {}, effect, error)

    def _verify_answer(
        self, arrival: KvArrival, steps: HandoffSteps, effect: HandoffEffect, answer: object
    ) -> HandoffEffect | HandoffOutcome:
        began_s = self._clock()
        step = perform_effects(steps, {type(effect): lambda effect: answer}, effect)
        arrival.verify_s += self._clock() - began_s
        return step
