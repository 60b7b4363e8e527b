"""The outermost layer: a request id of our own on every answer, a count of it, and no exception left untold."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.metrics import Metrics
from services.gateway.errors import error_response, internal_error
from services.gateway.wire import EXTENSION

PREFIXES = {"/v1/models/": "/v1/models/{id}", "/admin/workers/": "/admin/workers/{name}"}
CLIENT_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

log = logging.getLogger(__name__)


class Envelope:
    """`scope["state"]` gets `request_id` and `arrived_s`. The client's own id is logged and echoed, never used."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self.app, self.metrics, self.routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id = f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {}).update(request_id=request_id, arrived_s=time.monotonic())
        extra = [(b"x-request-id", request_id.encode())]
        theirs = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        told = theirs.decode() if CLIENT_ID.fullmatch(theirs) else ""
        if told:
            extra.append((b"x-client-request-id", theirs))
        started = False

        async def stamped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", []), *extra]}
                self.metrics.http.labels(self._route(scope["path"]), str(message["status"])).inc()
            await send(message)

        log.info("%s %s %r (client id %s)", request_id, scope["method"], scope["path"], told or "-")
        try:
            await self.app(scope, receive, stamped)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s failed", request_id)
            if not started:
                await error_response(internal_error(request_id))(scope, receive, stamped)
            elif (connection := scope.get("extensions", {}).get(EXTENSION)) is not None:
                connection.abort()

    def _route(self, path: str) -> str:
        """A label with few values: the route, not what somebody wrote in the address bar."""
        if path in self.routes:
            return path
        for prefix, route in PREFIXES.items():
            if path.startswith(prefix):
                return route
        return "other"
