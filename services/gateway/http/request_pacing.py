"""Begins a bounded number of requests between two looks of the event loop at its sockets.

Handling a request takes half a millisecond at least. Requests that arrive together, from hundreds of connections, would
otherwise all begin before a token of any stream is written.

Requests without an accepted key wait in a line of their own, so that clients with a key never wait for strangers; and
strangers take only a part of the event loop's time, however many they are and however often they come again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.connection import CONNECTION_EXTENSION

# Requests that begin in one iteration of the event loop.
REQUESTS_PER_ITERATION = 8
# Seconds between the begins of two requests without an accepted key.
STRANGER_INTERVAL_S = 0.005


class PacedConnection(Protocol):
    """A connection, as pacing sees it. `start` is what its request waits for; it is done when the connection ends."""

    is_known: bool
    aborted: bool
    start: asyncio.Future[None] | None


class RequestPacingMiddleware:
    """ASGI middleware: `REQUESTS_PER_ITERATION` requests begin per iteration of the event loop, in order of arrival.

    Requests without an accepted key begin one at a time, `STRANGER_INTERVAL_S` apart. A request whose connection has
    ended before its turn does not begin.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        # Requests that have begun in this iteration. Those that wait begin in the next ones.
        self._num_begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._strangers = StrangerLine()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            connection: PacedConnection | None = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
            if connection is None or connection.is_known:
                await self._await_start()
            else:
                await self._strangers.await_start(connection, (scope.get("client") or ("",))[0])
            if connection is not None and connection.aborted:
                return
        await self.app(scope, receive, send)

    async def _await_start(self) -> None:
        """Wait until this request may begin."""
        loop = asyncio.get_running_loop()
        if not self._num_begun and not self._waiting:
            loop.call_soon(self._begin_next)
        if self._num_begun < REQUESTS_PER_ITERATION and not self._waiting:
            self._num_begun += 1
            return
        start = loop.create_future()
        self._waiting.append(start)
        await start

    def _begin_next(self) -> None:
        """Begin the requests of the next iteration."""
        self._num_begun = 0
        while self._waiting and self._num_begun < REQUESTS_PER_ITERATION:
            start = self._waiting.popleft()
            # A request whose task was cancelled meanwhile takes no place.
            if not start.done():
                start.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._begin_next)


class StrangerLine:
    """Requests without an accepted key, which begin `STRANGER_INTERVAL_S` apart. Addresses take turns.

    Of one address the newest begins first: if there are more than can be answered, the oldest are not waited for.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        # Lets the next request begin. There is none if nobody waits and the last one began long enough ago.
        self._timer: asyncio.TimerHandle | None = None

    async def await_start(self, connection: PacedConnection, address: str) -> None:
        """Wait until this request from `address` may begin, or its connection has ended."""
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(STRANGER_INTERVAL_S, self._begin_next)
            return
        connection.start = start = loop.create_future()
        starts = self._waiting.setdefault(address, {})
        starts[start] = None
        try:
            await start
        finally:
            starts.pop(start, None)
            if not starts and self._waiting.get(address) is starts:
                del self._waiting[address]

    def _begin_next(self) -> None:
        """Begin the next request. Those whose connections have ended leave by themselves."""
        self._timer = None
        while self._waiting:
            address, starts = next(iter(self._waiting.items()))
            del self._waiting[address]
            start, _ = starts.popitem()
            if starts:
                # The next one of this address comes after those of all others.
                self._waiting[address] = starts
            if not start.done():
                start.set_result(None)
                self._timer = asyncio.get_running_loop().call_later(STRANGER_INTERVAL_S, self._begin_next)
                return
