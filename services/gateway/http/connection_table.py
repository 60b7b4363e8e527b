"""Tracks all open client connections, and limits their number by the process's file descriptors.

When the table is full, a new connection replaces an old one that waits for its client: the longest idle one, or else
the one whose body has been arriving for longest. So a client with a request is served however many other clients hold
idle connections open.
"""

from __future__ import annotations

import logging
from enum import Enum, auto
from typing import Protocol

from services.gateway.http.log_rate_limit import LogRateLimit

# Share of the descriptor limit that connections may use. The rest is for workers, files and connections in the
# backlog.
DESCRIPTOR_SHARE = 0.75

log = logging.getLogger(__name__)
log.addFilter(LogRateLimit())


class ConnectionPhase(Enum):
    """The party that a connection waits for: its client (IDLE, SENDING) or the gateway (ANSWERING)."""

    # The connection waits for the head of a request.
    IDLE = auto()
    # It waits for the rest of a body.
    SENDING = auto()
    # It waits for the gateway's answer.
    ANSWERING = auto()


class EvictableConnection(Protocol):
    """A connection, as the table sees it."""

    def evict(self) -> None:
        """Close the connection, so that its descriptor becomes free soon."""


class ConnectionTable:
    """The connections by phase, each phase in the order in which connections entered it."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._by_phase: dict[ConnectionPhase, dict[EvictableConnection, None]] = {
            phase: {} for phase in ConnectionPhase
        }
        self._phases: dict[EvictableConnection, ConnectionPhase] = {}

    def __len__(self) -> int:
        return len(self._phases)

    def add_connection(self, connection: EvictableConnection) -> bool:
        """Add a new, idle connection; if the table is full, evict another. Returns False if none can be evicted."""
        if len(self) >= self.max_connections and not self._evict_oldest():
            log.warning("a connection is refused: all %d have requests open", self.max_connections)
            return False
        self._add_to_phase(connection, ConnectionPhase.IDLE)
        return True

    def set_phase(self, connection: EvictableConnection, phase: ConnectionPhase) -> None:
        """Record a connection's phase. Ignored if the connection is no longer in the table."""
        if self._phases.get(connection, phase) is not phase:
            self.remove_connection(connection)
            self._add_to_phase(connection, phase)

    def remove_connection(self, connection: EvictableConnection) -> None:
        """Remove a connection; idempotent."""
        phase = self._phases.pop(connection, None)
        if phase is not None:
            del self._by_phase[phase][connection]

    def _add_to_phase(self, connection: EvictableConnection, phase: ConnectionPhase) -> None:
        """Put a connection that is not in the table last into a phase."""
        self._phases[connection] = phase
        self._by_phase[phase][connection] = None

    def _evict_oldest(self) -> bool:
        """Evict the connection that has waited longest for its client; False if none waits."""
        for phase in (ConnectionPhase.IDLE, ConnectionPhase.SENDING):
            oldest = next(iter(self._by_phase[phase]), None)
            if oldest is not None:
                log.warning(
                    "the connection that waited longest for its client is closed: %d were open", len(self)
                )
                self.remove_connection(oldest)
                oldest.evict()
                return True
        return False


def max_open_connections(wanted: int, descriptors: int) -> int:
    """How many connections a process with `descriptors` file descriptors may have, at most `wanted`."""
    return max(1, min(wanted, int(descriptors * DESCRIPTOR_SHARE)))
