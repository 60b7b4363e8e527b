"""Begins the requests of strangers, clients without an accepted key, one at a time.

A socket that comes again as soon as it is cut costs its client nothing. However many there are, and however often they
come again, they take only a part of the event loop's time, and no client with a key waits for them. A stranger that
waits is no task yet: most of a crowd have left, or were cut, before their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

# Seconds between the begins of two requests without an accepted key, and of two TLS handshakes: each takes up to a
# millisecond of the event loop, with a key of RSA.
STRANGER_INTERVAL_S = 0.005
HANDSHAKE_INTERVAL_S = 0.002


class PacedConnection(Protocol):
    """A connection, as pacing sees it. No request begins of one that is aborted."""

    aborted: bool


class StrangerPacing:
    """Requests without an accepted key, which begin `interval_s` apart; or handshakes. Addresses take turns."""

    def __init__(self, interval_s: float = STRANGER_INTERVAL_S) -> None:
        self._interval_s = interval_s
        # What begins a request, by address and connection.
        self._waiting: dict[str, dict[PacedConnection, Callable[[], None]]] = {}
        # Lets the next request begin. There is none if nobody waits and the last one began long enough ago.
        self._timer: asyncio.TimerHandle | None = None

    def begin_request(self, connection: PacedConnection, address: str, begin: Callable[[], None]) -> None:
        """Call `begin` when the next request from `address` may begin.

        Of one address the newest begins first: if there are more than can be answered, the oldest are not waited for.
        """
        self._waiting.setdefault(address, {})[connection] = begin
        if self._timer is None:
            self._begin_next()

    def forget_connection(self, connection: PacedConnection, address: str) -> None:
        """The connection has ended: its request does not begin."""
        requests = self._waiting.get(address, {})
        if requests.pop(connection, None) is not None and not requests:
            del self._waiting[address]

    def _begin_next(self) -> None:
        """Begin the next request whose connection is open."""
        self._timer = None
        while self._waiting:
            address, requests = next(iter(self._waiting.items()))
            del self._waiting[address]
            connection, begin = requests.popitem()
            if requests:
                # The next one of this address comes after those of all others.
                self._waiting[address] = requests
            if not connection.aborted:
                self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._begin_next)
                begin()
                return
