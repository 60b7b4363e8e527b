"""Which transport reaches which worker: chosen by trying, in order of preference, and measured before it is used."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.errors import ConfigError, StaleTicket, TransferError
from kvcache.layout import Shard
from kvtransfer.digests import HASHERS
from kvtransfer.early import Lane
from kvtransfer.memory import SharedMemory
from kvtransfer.parts import Parts
from kvtransfer.ticket import Ticket
from kvtransfer.transports import nixl, shm
from kvtransfer.turns import Pulling, Turns, finish

log = logging.getLogger(__name__)


class Source(Protocol):
    """The prefill side of a transport: makes a pool's memory readable, and says how."""

    def endpoint(self) -> bytes: ...
    def close(self) -> None: ...


class Puller(Pulling, Protocol):
    """The decode side of a transport."""

    def lane(self, worker: str, incarnation: str) -> Lane: ...
    def unlink(self, worker: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Route:
    """A link that works: its transport, and what was measured over it when it was made."""

    transport: str
    incarnation: str
    gb_per_s: float
    latency_us: float


def open_sources(
    transports: Sequence[str],
    parts: Sequence[tuple[Shard, SharedMemory]],
    name: str,
    board: SharedMemory | None = None,
) -> dict[str, Source]:
    """Offer a worker's pool over each of `transports`; one that does not start here is logged and left out.

    `parts` is the memory of every rank, in order, with what it holds of the model; `board` that of its
    `kvtransfer.board.Board`, if KV is to be pulled while it is computed.

    Raises:
        ConfigError: there is no transport of that name.
        TransferError: not one of them starts.
    """
    opened: dict[str, Source] = {}
    why = []
    for transport in _known(transports):
        try:
            opened[transport] = SOURCES[transport](parts, name, board)
        except TransferError as error:
            log.warning("transport %s is not offered: %s (%s)", transport, error.what, error.why)
            why.append(f"{transport}: {error.what} ({error.why})")
    if not opened:
        raise TransferError("no transport can offer this worker's KV", "\n".join(why))
    return opened


class Links:
    """All links of one decode worker to prefill workers, over `transports` in order of preference.

    `own` is the own pool, `algorithm` the payload hash. Pulling belongs to one thread; linking may happen on another.
    """

    def __init__(self, transports: Sequence[str], own: Parts, algorithm: str = "xxh3") -> None:
        self._pullers = {name: PULLERS[name](own, algorithm) for name in _known(transports)}
        self._routes: dict[str, Route] = {}
        self._lock = threading.Lock()
        self.hasher = HASHERS[algorithm]

    def linking(self, worker: str, incarnation: str, endpoints: Mapping[str, bytes]) -> Turns[Route]:
        """Take the first transport that both sides have and that works, and measure it.

        Raises:
            TransferError: none does; `why` tells for each.
        """
        self.unlink(worker)
        why = []
        for name, puller in self._pullers.items():
            if name not in endpoints:
                why.append(f"{name}: {worker} does not offer it")
                continue
            try:
                yield from puller.linking(worker, incarnation, endpoints[name])
                route = Route(name, incarnation, *(yield from puller.measuring(worker)))
            except TransferError as error:
                why.append(f"{name}: {error.what} ({error.why})")
                continue
            with self._lock:
                self._routes[worker] = route
            return route
        raise TransferError(f"no transport reaches {worker}", "\n".join(why))

    def link(self, worker: str, incarnation: str, endpoints: Mapping[str, bytes]) -> Route:
        """The same, on the calling thread."""
        return finish(self.linking(worker, incarnation, endpoints))

    def route(self, worker: str) -> Route | None:
        with self._lock:
            return self._routes.get(worker)

    def lane(self, worker: str, incarnation: str) -> Lane:
        """The way to that life of a worker, to pull from it ahead. Raises StaleTicket if it is not linked."""
        return self._puller(worker, incarnation).lane(worker, incarnation)

    def pulling(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool] | None = None
    ) -> Turns[list[bytes]]:
        """Fetch slabs that `ticket` offers; see `transports.shm.Puller.pulling`.

        Raises:
            StaleTicket: this life of the worker is not linked.
            TransferError: KV did not arrive.
        """
        puller = self._puller(ticket.worker, ticket.incarnation)
        return (yield from puller.pulling(ticket.worker, ticket.incarnation, pairs, stop))

    def pull(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool] | None = None
    ) -> list[bytes]:
        """The same, on the calling thread."""
        return finish(self.pulling(ticket, pairs, stop))

    def _puller(self, worker: str, incarnation: str) -> Puller:
        route = self.route(worker)
        if route is None:
            raise StaleTicket(f"no link to {worker}", f"offered: {incarnation}\nlinked:  none")
        return self._pullers[route.transport]

    def unlink(self, worker: str, incarnation: str | None = None) -> None:
        """Drop the link to a worker, or only to one life of it. Idempotent."""
        with self._lock:
            route = self._routes.get(worker)
            if route is None or incarnation not in (None, route.incarnation):
                return
            del self._routes[worker]
        self._pullers[route.transport].unlink(worker)

    def close(self) -> None:
        with self._lock:
            self._routes.clear()
        for puller in self._pullers.values():
            puller.close()


def _known(transports: Sequence[str]) -> Sequence[str]:
    for name in transports:
        if name not in PULLERS:
            raise ConfigError(f"there is no transport {name!r}", fix=f"use some of: {', '.join(PULLERS)}")
    return transports


SOURCES: dict[str, Callable[[Sequence[tuple[Shard, SharedMemory]], str, SharedMemory | None], Source]] = {
    "shm": shm.Source,
    "nixl": nixl.Source,
}
PULLERS: dict[str, Callable[[Parts, str], Puller]] = {"shm": shm.Puller, "nixl": nixl.Puller}
