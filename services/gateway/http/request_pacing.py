"""Begins a bounded number of requests between two looks of the event loop at its sockets.

Handling a request takes half a millisecond at least. Requests that arrive together, from hundreds of connections, would
otherwise all begin before a token of any stream is written.
Those without an accepted key come one at a time (`services.gateway.http.stranger_pacing`).
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.connection import CONNECTION_EXTENSION
from services.gateway.http.stranger_pacing import PacedConnection

# Requests that begin in one iteration of the event loop.
REQUESTS_PER_ITERATION = 8


class RequestPacingMiddleware:
    """ASGI middleware: `REQUESTS_PER_ITERATION` requests begin per iteration of the event loop, in order of arrival.

    A request whose connection has ended before its turn does not begin.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        # Requests that have begun in this iteration. Those that wait begin in the next ones.
        self._num_begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            connection: PacedConnection | None = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
            await self._await_start()
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
