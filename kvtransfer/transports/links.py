"""Chooses the transport between two workers: tries transports in order of preference, and measures them before use."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.errors import ConfigError, StaleTicket, TransferError
from kvcache.layout import Shard
from kvtransfer.cooperative import CoopPuller, CoopTask, run_to_end
from kvtransfer.copy_hash import CopyHasher, load_kernels
from kvtransfer.digests import PayloadHasher
from kvtransfer.pipelined_pull import SourceConnection
from kvtransfer.resharding import ArenaSpan, ShardedPool
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.ticket import Ticket
from kvtransfer.transports import nixl, shm

log = logging.getLogger(__name__)


class KvSource(Protocol):
    """The prefill side of a transport: makes a pool's memory readable for decode workers."""

    def endpoint(self) -> bytes:
        """What a puller needs to reach this source, encoded for the puller of the same transport."""

    def close(self) -> None:
        """Stop offering the memory."""


class KvPuller(CoopPuller, Protocol):
    """The decode side of a transport."""

    def connection_to(self, worker: str, incarnation: str) -> SourceConnection:
        """The open connection to this life of `worker`. Raises StaleTicket if there is no link to it."""

    def unlink(self, worker: str) -> None:
        """Forget the link to `worker`, if there is one. Idempotent."""

    def close(self) -> None:
        """Drop all links."""


@dataclass(frozen=True, slots=True)
class MeasuredRoute:
    """A working link: its transport, with the speed and latency that were measured when it was made."""

    transport: str
    incarnation: str
    gb_per_s: float
    latency_us: float


def open_sources(
    transports: Sequence[str],
    shards: Sequence[tuple[Shard, SharedMemory]],
    name: str,
    progress_memory: SharedMemory | None = None,
    spans: Sequence[ArenaSpan] = (),
) -> dict[str, KvSource]:
    """Offer a worker's pool over each of `transports`; a transport that does not start is logged and left out.

    `shards` are the memory and the shard of every rank, in order; `progress_memory` is the memory of the worker's
    `kvtransfer.layer_progress.LayerProgress`, if KV may be pulled while it is computed; `spans` say where the slabs of
    each KV class are, if there are several.

    Raises:
        ConfigError: there is no transport of that name.
        TransferError: none of them starts.
    """
    opened: dict[str, KvSource] = {}
    why = []
    for transport in _check_transports(transports):
        try:
            opened[transport] = SOURCES[transport](shards, name, progress_memory, spans)
        except TransferError as error:
            log.warning("transport %s is not offered: %s (%s)", transport, error.what, error.why)
            why.append(f"{transport}: {error.what} ({error.why})")
    if not opened:
        raise TransferError("no transport can offer this worker's KV", "\n".join(why))
    return opened


class OfferedTransports:
    """The transports over which a prefill worker offers its KV. Those in `OPENED_ON_DEMAND` are opened when needed.

    NIXL listens on a port, and everybody who reaches it can read the process's memory. So it is open only if a decode
    worker has asked for it, or if no other transport works.
    """

    def __init__(
        self,
        transports: Sequence[str],
        shards: Sequence[tuple[Shard, SharedMemory]],
        name: str,
        progress_memory: SharedMemory | None = None,
        spans: Sequence[ArenaSpan] = (),
    ) -> None:
        """Open the transports that are not opened on demand; the arguments are those of `open_sources`.

        Threads of a transport, even if it is opened later, may use the cores that the calling thread may use now.

        Raises:
            ConfigError: there is no transport of that name.
            TransferError: none of them starts.
        """
        self._what = (shards, name, progress_memory, spans)
        self._lock, self._closed = threading.Lock(), False
        # Serialises opening, which takes long. `_lock` is only held briefly.
        self._opening = threading.Lock()
        self._cores = os.sched_getaffinity(0)
        at_once = [
            transport for transport in _check_transports(transports) if transport not in OPENED_ON_DEMAND
        ]
        try:
            self._open = open_sources(at_once, *self._what) if at_once else {}
        except TransferError:
            self._open = {}
        waiting = [transport for transport in transports if transport in OPENED_ON_DEMAND]
        if not self._open:
            self._open, waiting = open_sources(transports, *self._what), []
        self._waiting = [transport for transport in waiting if transport not in self._open]

    def endpoints(self) -> dict[str, bytes]:
        """The endpoint of each transport; empty for those that are not open yet."""
        with self._lock:
            endpoints = {transport: source.endpoint() for transport, source in self._open.items()}
            return endpoints | dict.fromkeys(self._waiting, b"")

    def open_transport(self, transport: str) -> bytes:
        """Open a transport that is opened on demand, and return its endpoint. Idempotent. Any thread may call it.

        Raises:
            TransferError: it does not start, or this worker does not offer it (any more).
        """
        with self._opening:
            with self._lock:
                begins = transport in self._waiting and not self._closed
            opened = self._start_source(transport) if begins else None
            with self._lock:
                if opened is not None and self._closed:
                    opened.close()
                elif opened is not None:
                    self._open[transport] = opened
                    self._waiting.remove(transport)
                if transport not in self._open or self._closed:
                    raise TransferError(f"transport {transport!r} is not offered here")
                return self._open[transport].endpoint()

    def _start_source(self, transport: str) -> KvSource:
        """Start a transport. Its threads inherit this thread's cores, so these are widened while it starts."""
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            return SOURCES[transport](*self._what)
        finally:
            os.sched_setaffinity(0, own)

    def close(self) -> None:
        """Close all transports; none is opened afterwards. Does not wait for a transport that is just being opened."""
        with self._lock:
            self._closed = True
            for source in self._open.values():
                source.close()


class TransportNotOpen(TransferError):
    """No open transport reaches a prefill worker; `transport` is one that the worker could open."""

    def __init__(self, worker: str, why: str, transport: str) -> None:
        super().__init__(f"no transport reaches {worker} yet", why)
        self.transport = transport


class KvLinks(Protocol):
    """The links of one decode worker, as its fetcher uses them. `TransportLinks` documents each method."""

    @property
    def hasher(self) -> Callable[[], PayloadHasher]:
        """Makes the payload hash of a chunk."""

    def link_task(
        self, worker: str, incarnation: str, endpoints: Mapping[str, bytes]
    ) -> CoopTask[MeasuredRoute]:
        """Link to a life of a worker, over the first transport that works. Raises TransferError."""

    def route_to(self, worker: str) -> MeasuredRoute | None:
        """The transport that reaches `worker`; None if there is no link."""

    def connection_to(self, worker: str, incarnation: str) -> SourceConnection:
        """The connection to this life of a worker. Raises StaleTicket without a link."""

    def pull_task(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool] | None = None
    ) -> CoopTask[list[bytes]]:
        """Pull slabs that `ticket` offers; returns the payload hash of each copy. Raises TransferError."""

    def unlink_worker(self, worker: str, incarnation: str | None = None) -> None:
        """Drop the link to a worker. Idempotent."""

    def close(self) -> None:
        """Drop all links and close all transports."""


class TransportLinks:
    """All links of one decode worker to prefill workers, over `transports` in order of preference.

    `own_pool` is the own pool, `algorithm` the payload hash. Only one thread may pull; another may link.
    """

    def __init__(self, transports: Sequence[str], own_pool: ShardedPool, algorithm: str = "xxh3") -> None:
        self._pullers = {name: PULLERS[name](own_pool, algorithm) for name in _check_transports(transports)}
        self._routes: dict[str, MeasuredRoute] = {}
        self._lock = threading.Lock()
        self.hasher = shm.COPY_HASHERS[algorithm]

    def link_task(
        self, worker: str, incarnation: str, endpoints: Mapping[str, bytes]
    ) -> CoopTask[MeasuredRoute]:
        """Link over the first transport that both sides have and that works, and measure it.

        Raises:
            TransportNotOpen: no transport works, but the other side could open another one.
            TransferError: no transport works; `why` gives the reason for each.
        """
        self.unlink_worker(worker)
        if self.hasher is CopyHasher:
            load_kernels()
        why, closed = [], ""
        for name, puller in self._pullers.items():
            if name not in endpoints:
                why.append(f"{name}: {worker} does not offer it")
                continue
            if not endpoints[name]:
                why.append(f"{name}: {worker} has not opened it")
                closed = closed or name
                continue
            try:
                yield from puller.link_task(worker, incarnation, endpoints[name])
                route = MeasuredRoute(name, incarnation, *(yield from puller.measure_task(worker)))
            except TransferError as error:
                why.append(f"{name}: {error.what} ({error.why}){_loopback_hint(name)}")
                continue
            with self._lock:
                self._routes[worker] = route
            return route
        if closed:
            raise TransportNotOpen(worker, "\n".join(why), closed)
        raise TransferError(f"no transport reaches {worker}", "\n".join(why))

    def link_worker(self, worker: str, incarnation: str, endpoints: Mapping[str, bytes]) -> MeasuredRoute:
        """As `link_task`, but blocks the calling thread until it is done."""
        return run_to_end(self.link_task(worker, incarnation, endpoints))

    def route_to(self, worker: str) -> MeasuredRoute | None:
        """The transport that reaches `worker` with its measured speed; None if there is no link."""
        with self._lock:
            return self._routes.get(worker)

    def connection_to(self, worker: str, incarnation: str) -> SourceConnection:
        """The connection to this life of a worker, for pulling ahead of the ticket.

        Raises StaleTicket without a link.
        """
        return self._puller_for(worker, incarnation).connection_to(worker, incarnation)

    def pull_task(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool] | None = None
    ) -> CoopTask[list[bytes]]:
        """Pull slabs that `ticket` offers; see `transports.shm.ShmPuller.pull_task`.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            TransferError: the transfer failed.
        """
        puller = self._puller_for(ticket.worker, ticket.incarnation)
        return (yield from puller.pull_task(ticket.worker, ticket.incarnation, pairs, stop))

    def pull_slabs(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool] | None = None
    ) -> list[bytes]:
        """As `pull_task`, but blocks the calling thread until it is done. `pairs` are (source slab, own slab)."""
        return run_to_end(self.pull_task(ticket, pairs, stop))

    def _puller_for(self, worker: str, incarnation: str) -> KvPuller:
        """The puller of the transport that reaches `worker`. Raises StaleTicket without a link."""
        route = self.route_to(worker)
        if route is None:
            raise StaleTicket(f"no link to {worker}", f"offered: {incarnation}\nlinked:  none")
        return self._pullers[route.transport]

    def unlink_worker(self, worker: str, incarnation: str | None = None) -> None:
        """Drop the link to a worker (only to this `incarnation`, if given). Idempotent."""
        with self._lock:
            route = self._routes.get(worker)
            if route is None or incarnation not in (None, route.incarnation):
                return
            del self._routes[worker]
        self._pullers[route.transport].unlink(worker)

    def close(self) -> None:
        """Drop all links and close all transports."""
        with self._lock:
            self._routes.clear()
        for puller in self._pullers.values():
            puller.close()


def _loopback_hint(transport: str) -> str:
    """Why a failed transport may never reach another host from here, for the error text; else empty."""
    if transport != "nixl" or os.environ.get("UCX_NET_DEVICES") != "lo":
        return ""
    return ", on loopback only: to reach another host this worker needs --advertise-host"


def _check_transports(transports: Sequence[str]) -> Sequence[str]:
    """The transports themselves. Raises ConfigError if one is unknown."""
    for name in transports:
        if name not in PULLERS:
            raise ConfigError(f"there is no transport {name!r}", fix=f"use some of: {', '.join(PULLERS)}")
    return transports


OpenSource = Callable[
    [Sequence[tuple[Shard, SharedMemory]], str, SharedMemory | None, Sequence[ArenaSpan]], KvSource
]
SOURCES: dict[str, OpenSource] = {
    "shm": shm.ShmSource,
    "nixl": nixl.NixlSource,
}
# Transports that are opened only when a decode worker asks for them.
OPENED_ON_DEMAND = frozenset({"nixl"})
PULLERS: dict[str, Callable[[ShardedPool, str], KvPuller]] = {"shm": shm.ShmPuller, "nixl": nixl.NixlPuller}
