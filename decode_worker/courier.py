"""The two threads that work beside decoding: one links to prefill workers, one pulls KV from them.

Each does all it has to do side by side, in turns: a source that has stalled delays nobody else's KV, and one whose KV
is still being computed is only looked at now and then. Both release the interpreter in what takes long (copying,
hashing, waiting), so tokens keep flowing meanwhile. What they have finished is handed back through `landed` and `wake`;
nothing here touches the pool's books or the engine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from decode_worker.rounds import Rounds
from diptych.errors import DiptychError, TransferError
from diptych.messages import Linked, Peer, ToGateway
from engine.scheduler import Sequence
from kvtransfer.digests import Seal
from kvtransfer.early import Early
from kvtransfer.handoff import Aborted, Ahead, Arrived, Effect, Outcome, Pull, Steps, perform
from kvtransfer.links import Links
from kvtransfer.ticket import Hint, Ticket
from kvtransfer.turns import AT_ONCE, UNTIL_STIRRED, Turns, finish

MAX_HINTS = 4096  # not yet looked at, of one request; the oldest are forgotten


@dataclass(slots=True)
class Arrival:
    """One request's KV on its way here; `steps` and `turn` are the hand-off's conversation.

    `hints`, `ticket` and `stop` are written by the engine's thread and read by the courier's;
    what it took is written by the courier's, and read when the arrival has landed.
    """

    seq: Sequence
    num_tokens: int  # that will have KV when it has arrived
    arrived_s: float
    ticket: Ticket | None = None
    seal: Seal | None = None  # of the ticket, set before it
    ticket_s: float = 0.0  # when it came
    hints: deque[Hint] = field(default_factory=lambda: deque(maxlen=MAX_HINTS))
    steps: Steps | None = None  # from its departure on, as is what follows
    coming: frozenset[bytes] = frozenset()  # the addresses of the full chunks that it fetches
    num_bytes: int = 0  # that it fetches
    reserved_s: float = 0.0
    turn: Effect | Outcome | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    blame: tuple[str, str] | None = None  # failure to tell when it was stopped; None: nobody wants to know
    recalled: bool = False  # it was stopped to make room, and waits again for its ticket
    transport: str = ""
    pull_s: float = 0.0
    hidden_s: float = 0.0
    verify_s: float = 0.0
    copied_s: float = 0.0  # when the last byte was copied; 0: none was

    def matches(self, index: int, payload: bytes, promised: bytes) -> bool:
        """`Seal.matches` of its ticket, which must be there."""
        assert self.seal is not None, "there is no ticket yet"
        return self.seal.matches(index, payload, promised)

    @property
    def live(self) -> bool:
        """Was it not stopped, or will it wait again?"""
        return self.recalled or not self.stop.is_set()

    @property
    def exposed_s(self) -> float:
        """From the ticket, or from when there was room for it, to the last byte."""
        return max(0.0, self.copied_s - max(self.ticket_s, self.reserved_s))


class Courier:
    """Links and pulls. `send` and `wake` are called from its threads."""

    def __init__(
        self,
        links: Links,
        send: Callable[[ToGateway], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links, self._send, self._wake, self._clock = links, send, wake, clock
        self.landed: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.error: BaseException | None = None  # a thread has died of it
        self._closing = threading.Event()
        self._linking, self._pulling = (Rounds(f"courier-{name}", self._died) for name in ("link", "pull"))

    def open(self) -> None:
        self._linking.open()
        self._pulling.open()

    def close(self) -> None:
        """Stop what is pulled, end both threads, and drop all links."""
        self._closing.set()
        self._pulling.close()
        self._linking.close()
        self.links.close()

    def link(self, peer: Peer) -> None:
        """Link to a prefill worker and measure, or tell why not; the answer goes out as `Linked`."""
        self._linking.add(self._link(peer))

    def unlink(self, worker: str, incarnation: str) -> None:
        """Drop the link to that life of a worker; a pull that runs keeps what it needs."""
        self.links.unlink(worker, incarnation)

    def fetch(self, arrival: Arrival) -> None:
        """Pull and verify; it comes back through `landed`."""
        self._pulling.add(self.haul(arrival))

    def stir(self) -> None:
        """A hint, a ticket or a stop has come for something that is being pulled."""
        self._pulling.stir()

    def haul(self, arrival: Arrival) -> Turns[None]:
        """The courier's part of a hand-off."""
        steps = arrival.steps
        assert steps is not None, "it has not departed"
        while isinstance(effect := arrival.turn, Ahead | Pull):
            try:
                if isinstance(effect, Ahead):
                    answer: object = yield from self._pull_ahead(arrival, effect)
                else:
                    answer = yield from self._pull(arrival, effect)
            except BaseException as error:
                arrival.turn = perform(steps, {}, effect, error)
            else:
                arrival.turn = self._verify(arrival, steps, effect, answer)
        self.landed.put(arrival)
        self._wake()

    def pull(self, arrival: Arrival) -> None:
        """The same, on the calling thread."""
        finish(self.haul(arrival))

    def _died(self, error: BaseException) -> None:
        self.error = error
        self._wake()

    def _link(self, peer: Peer) -> Turns[None]:
        route, why = self.links.route(peer.worker), ""
        if route is None or route.incarnation != peer.incarnation:
            try:
                route = yield from self.links.linking(peer.worker, peer.incarnation, peer.endpoints)
            except DiptychError as error:
                route, why = None, "\n".join(part for part in (error.what, error.why) if part)
        transport, speed, latency = (
            (route.transport, route.gb_per_s, route.latency_us) if route else ("", 0.0, 0.0)
        )
        self._send(Linked(peer.worker, peer.incarnation, transport, speed, latency, why))

    def _stopped(self, arrival: Arrival) -> Callable[[], bool]:
        return lambda: arrival.stop.is_set() or self._closing.is_set()

    def _pull_ahead(self, arrival: Arrival, effect: Ahead) -> Turns[Arrived]:
        """Copy what hints tell of until the ticket is there, then the rest of what was begun."""
        early, stopped = Early(effect.slabs, self.links.hasher), self._stopped(arrival)
        while (ticket := arrival.ticket) is None:
            if stopped():
                raise Aborted("the pull was stopped")
            pause_s = yield from self._advance(arrival, early, stopped)
            # who was stirred within `_advance` is not stirred again
            if arrival.ticket is None and not arrival.hints and not stopped():
                yield pause_s
        began_s = self._clock()
        try:
            lane = self.links.lane(ticket.worker, ticket.incarnation)
            payloads = yield from early.finish(lane, ticket, stopped)
        except Aborted:
            raise
        except TransferError:  # whether KV can be had is for the pull to say
            return Arrived(ticket, {})
        self._copied(arrival, began_s)
        return Arrived(ticket, payloads)

    def _advance(self, arrival: Arrival, early: Early, stopped: Callable[[], bool]) -> Turns[float]:
        while arrival.hints:
            early.hint(arrival.hints.popleft())
        if not early.worker:
            return UNTIL_STIRRED
        began_s = self._clock()
        try:
            lane = self.links.lane(early.worker, early.incarnation)
            pause_s = yield from early.advance(lane, stopped)
        except Aborted:
            raise
        except TransferError:  # nothing of this was promised
            early.drop()
            return UNTIL_STIRRED
        if pause_s == AT_ONCE:
            self._copied(arrival, began_s)
        return pause_s

    def _pull(self, arrival: Arrival, effect: Pull) -> Turns[list[bytes]]:
        began_s = self._clock()
        payloads = yield from self.links.pulling(effect.ticket, effect.pairs, self._stopped(arrival))
        self._copied(arrival, began_s)
        return payloads

    def _copied(self, arrival: Arrival, began_s: float) -> None:
        now_s = self._clock()
        arrival.pull_s += now_s - began_s
        if arrival.ticket is None or arrival.ticket_s > began_s:
            until_s = now_s if arrival.ticket is None else min(now_s, arrival.ticket_s)
            arrival.hidden_s += until_s - began_s
        arrival.copied_s = now_s

    def _verify(self, arrival: Arrival, steps: Steps, effect: Effect, answer: object) -> Effect | Outcome:
        began_s = self._clock()
        turn = perform(steps, {type(effect): lambda effect: answer}, effect)
        arrival.verify_s += self._clock() - began_s
        return turn
