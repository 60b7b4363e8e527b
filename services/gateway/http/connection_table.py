"""Tracks all open client connections, and limits their number by the process's file descriptors.

When the table is full, a new connection replaces an old one, in this order:

    1. the one that has been idle for longest, if that is `FRESH_S` or more. No request is lost
    2. of strangers, whose request came without a key: the one that has made no progress for longest, even if it waits
       for the gateway
    3. the one that has been idle for longest, if more than half of all connections are idle
    4. of the tenant with the most open requests (where no keys are needed, of the address): the one whose client has
       made no progress for longest. So nobody loses a connection to a tenant that has more
    5. the one that has been idle for longest. Its request may be on its way, so it comes last

A client makes progress when it sends or reads `PROGRESS_BYTES`. Reading and sending count alike: so neither a crowd
that sends slowly nor one that reads slowly can displace a client that does the other.

Whether a key came is known as soon as the head of a request has arrived. Until then a connection is idle: so strangers
that come again as soon as they are replaced displace each other, and no client that has just come. No other connection
that waits for the gateway is replaced. Tenants share these: `begin_request`.

Answers that clients have not read share `MAX_UNSENT_BYTES`. Beyond, clients without a key lose theirs first, then those
of the tenant with the most bytes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from services.gateway.http.log_rate_limit import LogRateLimit

# Share of the descriptor limit that connections may use. The rest is for workers, files and connections in the
# backlog.
DESCRIPTOR_SHARE = 0.75
# A client that has sent or read this many bytes has made progress.
PROGRESS_BYTES = 16 << 10
# Most bytes of answers that wait in this process until their clients read them.
MAX_UNSENT_BYTES = 128 << 20
# Seconds after which no request is expected any more on a connection that has become idle.
FRESH_S = 2.0

log = logging.getLogger(__name__)
log.addFilter(LogRateLimit())


class ConnectionPhase(Enum):
    """The party that a connection waits for: its client (IDLE, SENDING, BLOCKED) or the gateway (ANSWERING)."""

    # The connection waits for the head of a request.
    IDLE = auto()
    # It waits for the rest of a body.
    SENDING = auto()
    # It waits until the client reads what is buffered for it.
    BLOCKED = auto()
    # It waits for the gateway's answer.
    ANSWERING = auto()


# Phases of open requests in which the client has to act.
WAITING_PHASES = frozenset({ConnectionPhase.SENDING, ConnectionPhase.BLOCKED})


class EvictableConnection(Protocol):
    """A connection, as the table sees it."""

    def evict(self) -> None:
        """Close the connection, so that its descriptor becomes free soon."""


@dataclass(slots=True)
class _Entry:
    """What the table knows of a connection. `tenant` is None if no accepted key came with its request, or none is open.

    `unsent_bytes` wait until the client reads them.
    """

    phase: ConnectionPhase = ConnectionPhase.IDLE
    tenant: str | None = None
    unsent_bytes: int = 0

    @property
    def is_evictable(self) -> bool:
        """Whether its open request may make room for a new connection."""
        is_stranger = self.phase is ConnectionPhase.ANSWERING and self.tenant is None
        return is_stranger or self.phase in WAITING_PHASES


class ConnectionTable:
    """The connections, in the order in which each began to wait for its client."""

    def __init__(self, max_connections: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        self.max_connections, self._clock = max_connections, clock
        self._entries: dict[EvictableConnection, _Entry] = {}
        # Idle connections, with the time at which each became idle.
        self._idle: dict[EvictableConnection, float] = {}
        # Connections with an open request that are evictable, by tenant; those without a tenant are strangers.
        self._evictable: defaultdict[str | None, dict[EvictableConnection, None]] = defaultdict(dict)
        # Number of each tenant's connections with an open request, and their sum.
        self.open_by_tenant: Counter[str] = Counter()
        self.num_open = 0
        # Number of bytes that each tenant's clients have not read.
        self.unsent_by_tenant: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def add_connection(self, connection: EvictableConnection) -> bool:
        """Add a new, idle connection; if the table is full, evict another. Returns False if none can be evicted."""
        if len(self) >= self.max_connections and not self._make_room():
            log.warning("a connection is refused: all %d have requests open", self.max_connections)
            return False
        self._entries[connection] = _Entry()
        self._idle[connection] = self._clock()
        return True

    def set_phase(self, connection: EvictableConnection, phase: ConnectionPhase) -> None:
        """Record a connection's phase; an idle one has no tenant. Ignored if it is no longer in the table."""
        entry = self._entries.get(connection)
        if entry is not None and entry.phase is not phase:
            self._replace_entry(
                connection, entry, phase, None if phase is ConnectionPhase.IDLE else entry.tenant
            )

    def note_progress(self, connection: EvictableConnection) -> None:
        """The client has sent or read `PROGRESS_BYTES`. Ignored if the connection is no longer in the table."""
        entry = self._entries.get(connection)
        if entry is not None:
            self._replace_entry(connection, entry, entry.phase, entry.tenant)

    def set_unsent(self, connection: EvictableConnection, num_bytes: int) -> None:
        """A blocked client has so many bytes to read; 0 when it has read them.

        While these are too many of all clients, evict the client of the tenant with the most that has made no progress
        for longest. Ignored if the connection is no longer in the table.
        """
        entry = self._entries.get(connection)
        if entry is None:
            return
        self._count_unsent(entry, num_bytes - entry.unsent_bytes)
        entry.unsent_bytes = num_bytes
        while self.unsent_by_tenant.total() > MAX_UNSENT_BYTES:
            unsent = self.unsent_by_tenant
            heaviest = None if None in unsent else max(unsent, key=unsent.__getitem__)
            readers = (one for one in self._evictable.get(heaviest, ()) if self._entries[one].unsent_bytes)
            oldest = next(readers, None)
            # One large answer alone may be written.
            if oldest is None or unsent.total() == self._entries[oldest].unsent_bytes:
                return
            self._evict(oldest)

    def begin_request(self, connection: EvictableConnection, tenant: str | None, has_others: bool) -> bool:
        """Record whose request the gateway is about to answer; `tenant` is None if it came without an accepted key.

        False: the tenant has too many open requests.

        With `has_others` there are other tenants, and this one may have as many connections with open requests as are
        left for all. So one tenant alone can take half of the table, and there is always room for another. Beyond that
        the tenant loses its own connection whose client has made no progress for longest, if there is one.
        """
        entry = self._entries.get(connection)
        if entry is None or entry.tenant == tenant:
            return True
        self._replace_entry(connection, entry, entry.phase, tenant)
        if tenant is None:
            return True
        # This connection is counted, so it is added to those that are left.
        if not has_others or self.open_by_tenant[tenant] <= self.max_connections - self.num_open + 1:
            return True
        waiting = (one for one in self._evictable.get(tenant, ()) if one is not connection)
        if (oldest := next(waiting, None)) is not None:
            self._evict(oldest)
            return True
        self._replace_entry(connection, self._entries[connection], entry.phase, None)
        return False

    def remove_connection(self, connection: EvictableConnection) -> None:
        """Remove a connection; idempotent."""
        entry = self._entries.pop(connection, None)
        if entry is not None:
            self._unlist(connection, entry)

    def _replace_entry(
        self, connection: EvictableConnection, entry: _Entry, phase: ConnectionPhase, tenant: str | None
    ) -> None:
        """Change the entry of a connection, which then is the last to have made progress."""
        self._unlist(connection, entry)
        entry.phase, entry.tenant = phase, tenant
        self._count_unsent(entry, entry.unsent_bytes)
        if phase is ConnectionPhase.IDLE:
            self._idle[connection] = self._clock()
        elif entry.is_evictable:
            self._evictable[tenant][connection] = None
        if tenant is not None:
            self.open_by_tenant[tenant] += 1
            self.num_open += 1

    def _unlist(self, connection: EvictableConnection, entry: _Entry) -> None:
        """Remove a connection from all lists and counts."""
        self._idle.pop(connection, None)
        self._count_unsent(entry, -entry.unsent_bytes)
        if entry.is_evictable:
            del self._evictable[entry.tenant][connection]
            if not self._evictable[entry.tenant]:
                del self._evictable[entry.tenant]
        if entry.tenant is not None:
            self.num_open -= 1
            self.open_by_tenant[entry.tenant] -= 1
            if not self.open_by_tenant[entry.tenant]:
                del self.open_by_tenant[entry.tenant]

    def _count_unsent(self, entry: _Entry, more: int) -> None:
        self.unsent_by_tenant[entry.tenant] += more
        if not self.unsent_by_tenant[entry.tenant]:
            del self.unsent_by_tenant[entry.tenant]

    def _make_room(self) -> bool:
        """Evict a connection, in the order above; False if there is none."""
        oldest = next(iter(self._idle), None)
        if oldest is None or self._clock() < self._idle[oldest] + FRESH_S:
            # A request may be on its way on an idle connection. Strangers go before it, and before every tenant.
            # A crowd of idle connections goes before tenants: it would displace clients that send or read.
            crowded = 2 * len(self._idle) > self.max_connections
            if None in self._evictable:
                oldest = next(iter(self._evictable[None]))
            elif self._evictable and not crowded:
                tenants = (tenant for tenant in self._evictable if tenant is not None)
                heaviest = max(tenants, key=self.open_by_tenant.__getitem__)
                oldest = next(iter(self._evictable[heaviest]))
        if oldest is None:
            return False
        self._evict(oldest)
        return True

    def _evict(self, connection: EvictableConnection) -> None:
        log.warning("the connection that waited longest for its client is closed: %d were open", len(self))
        self.remove_connection(connection)
        connection.evict()


def max_open_connections(wanted: int, descriptors: int) -> int:
    """How many connections a process with `descriptors` file descriptors may have, at most `wanted`."""
    return max(1, min(wanted, int(descriptors * DESCRIPTOR_SHARE)))
