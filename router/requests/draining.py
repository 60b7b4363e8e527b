"""Orders to drain a worker or to change its role, and when the order is sent to the worker (pure).

    give_order ──no request is on its way to the worker──▶ sent ──the same life over a new link──▶ sent again
                                                             └──another life──▶ forgotten

A worker that has received the order accepts no new request. So the relay acts first: from `give_order` on it starts no
request there. Requests that are being prefilled elsewhere for this decode worker may still arrive: their room there is
reserved, and they may fit no other worker, since an answer stays with the model version that it began with. The order
is sent when all requests that count as load of the worker have arrived, and answers that no other worker can continue
exactly (`router.requests.continuable`) have ended there. Their deadlines bound that time.
"""

from __future__ import annotations

from collections.abc import Mapping

from diptych.messages import Drain, SwitchRole
from router.requests.request_state import RequestState
from router.routing.load_ledger import LoadLedger
from router.workers.fleet import Fleet


class DrainOrders:
    """The latest order for each worker: for which life of the worker it is, and whether it has been sent."""

    def __init__(self, fleet: Fleet, ledger: LoadLedger) -> None:
        self._fleet, self._ledger = fleet, ledger
        self._given: dict[str, tuple[str, Drain | SwitchRole]] = {}
        self._unsent: set[str] = set()

    def give_order(self, worker: str, order: Drain | SwitchRole) -> None:
        """Order a worker to drain or to change its role; it gets no new requests from now on.

        Nothing happens if there is no such worker. A worker that is to end keeps that order.
        """
        worker_state = self._fleet.workers.get(worker)
        if worker_state is None:
            return
        for name in [name for name in self._given if not self._fleet.remembers_worker(name)]:
            del self._given[name]
            self._unsent.discard(name)
        life, before = self._given.get(worker, ("", order))
        kept = life == worker_state.hello.incarnation and isinstance(before, Drain)
        self._given[worker] = worker_state.hello.incarnation, before if kept else order
        self._unsent.add(worker)
        # A worker that drains already may refuse requests by now, or it has received the order.
        if not worker_state.draining:
            self._fleet.start_draining(worker, accepts_pending=True)

    def on_worker_up(self, worker: str) -> None:
        """A worker has joined. If this life of it had an order, the order is sent again: its link may have broken."""
        worker_state = self._fleet.workers[worker]
        life, _ = self._given.get(worker, ("", None))
        if life == worker_state.hello.incarnation:
            self._fleet.start_draining(worker, worker_state.accepts_pending)
            self._unsent.add(worker)
        else:
            self._given.pop(worker, None)
            self._unsent.discard(worker)

    def take_due(self, live: Mapping[str, RequestState]) -> list[tuple[str, Drain | SwitchRole]]:
        """The orders to send now, by worker. From then on these workers refuse new requests."""
        if not self._unsent:
            return []
        due = []
        for worker in sorted(self._unsent & self._fleet.workers.keys()):
            worker_state = self._fleet.workers[worker]
            if not worker_state.accepts_pending or all(
                worker in live[name].holders and not live[name].stays_at(worker)
                for name in self._ledger.requests_at(worker)
            ):
                self._unsent.discard(worker)
                worker_state.accepts_pending = False
                due.append((worker, self._given[worker][1]))
        return due
