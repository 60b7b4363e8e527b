"""The two threads that work beside decoding: one links to prefill workers, one pulls KV from them, in order.

Both release the interpreter in what takes long (copying, hashing, waiting), so tokens keep flowing meanwhile.
What they have finished is handed back through `landed` and `wake`; nothing here touches the pool's books or
the engine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from diptych.errors import DiptychError
from diptych.messages import Linked, Peer, ToGateway
from engine.scheduler import Sequence
from kvtransfer.handoff import Effect, Outcome, Pull, Steps, perform
from kvtransfer.links import Links, Route
from kvtransfer.ticket import Ticket


@dataclass(slots=True)
class Arrival:
    """One request's KV on its way here; `steps` and `turn` are the hand-off's conversation."""

    seq: Sequence
    ticket: Ticket
    arrived_s: float
    steps: Steps | None = None  # from its departure on, as is what follows
    coming: frozenset[bytes] = frozenset()  # the addresses of the full chunks that it fetches
    num_bytes: int = 0  # that it fetches
    reserved_s: float = 0.0
    turn: Effect | Outcome | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    blame: str = ""  # code of the failure to tell when it was stopped; empty: nobody wants to know
    transport: str = ""
    pull_s: float = 0.0
    verify_s: float = 0.0


class Courier:
    """Links and pulls. `send` and `wake` are called from its threads."""

    def __init__(self, links: Links, send: Callable[[ToGateway], None], wake: Callable[[], None]) -> None:
        self.links, self._send, self._wake = links, send, wake
        self.landed: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.error: BaseException | None = None  # a thread has died of it
        self._peers: queue.SimpleQueue[Peer | None] = queue.SimpleQueue()
        self._pulls: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("courier-link", self._link_all), ("courier-pull", self._pull_all))
        ]

    def open(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both threads after what they are doing, and drop all links."""
        self._peers.put(None)
        self._pulls.put(None)
        for thread in self._threads:
            thread.join()
        self.links.close()

    def link(self, peer: Peer) -> None:
        """Link to a prefill worker and measure, or tell why not; the answer goes out as `Linked`."""
        self._peers.put(peer)

    def unlink(self, worker: str, incarnation: str) -> None:
        """Drop the link to that life of a worker; a pull that runs keeps what it needs."""
        self.links.unlink(worker, incarnation)

    def fetch(self, arrival: Arrival) -> None:
        """Pull and verify; it comes back through `landed`."""
        self._pulls.put(arrival)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error
            self._wake()

    def _link_all(self) -> None:
        while (peer := self._peers.get()) is not None:
            route = self.links.route(peer.worker)
            why = ""
            if route is None or route.incarnation != peer.incarnation:
                route, why = self._link(peer)
            self._send(
                Linked(
                    peer.worker,
                    peer.incarnation,
                    route.transport if route else "",
                    route.gb_per_s if route else 0.0,
                    route.latency_us if route else 0.0,
                    why,
                )
            )

    def _link(self, peer: Peer) -> tuple[Route | None, str]:
        try:
            return self.links.link(peer.worker, peer.incarnation, peer.endpoints), ""
        except DiptychError as error:
            return None, "\n".join(part for part in (error.what, error.why) if part)

    def _pull_all(self) -> None:
        while (arrival := self._pulls.get()) is not None:
            self.pull(arrival)
            self._wake()

    def pull(self, arrival: Arrival) -> None:
        """The courier's part of a hand-off, on the calling thread."""
        assert arrival.steps is not None, "it has not departed"
        began_s = time.monotonic()
        arrival.turn = perform(arrival.steps, {Pull: partial(self._pull, arrival)}, arrival.turn)
        arrival.verify_s = time.monotonic() - began_s - arrival.pull_s
        self.landed.put(arrival)

    def _pull(self, arrival: Arrival, effect: Pull) -> list[bytes]:
        began_s = time.monotonic()
        try:
            return self.links.pull(effect.ticket, effect.pairs, arrival.stop.is_set)
        finally:
            arrival.pull_s = time.monotonic() - began_s
