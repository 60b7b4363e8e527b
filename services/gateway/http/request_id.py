"""Gives every request an id (as ASGI middleware), counts responses, and answers unexpected exceptions with a 500."""

from __future__ import annotations

import asyncio
import logging
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.logs.log_format import about_request
from diptych.logs.request_ids import new_request_id
from services.gateway.http.connection import CONNECTION_EXTENSION
from services.gateway.http.error_response import error_response, internal_failure
from services.gateway.http.error_shapes import is_messages_path
from services.gateway.http.request_scope import request_ids_of
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.recent_events import RecentErrors

ROUTE_PREFIXES = {
    "/v1/models/": "/v1/models/{id}",
    "/v1/files/": "/v1/files/{id}",
    "/v1/batches/": "/v1/batches/{id}",
    "/admin/workers/": "/admin/workers/{name}",
}
CLIENT_ID_PATTERN = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

log = logging.getLogger(__name__)


class RequestIdMiddleware:
    """ASGI middleware that puts `request_id`, `client_id` and `arrived_s` (monotonic seconds) into `scope["state"]`.

    A client's own request id (`x-request-id`) is logged and sent back, and not used for anything else.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: GatewayMetrics,
        routes: frozenset[str],
        errors: RecentErrors | None = None,
    ) -> None:
        self.app, self.metrics, self.routes, self.errors = app, metrics, routes, errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id, arrived_s = new_request_id(), time.monotonic()
        route = self._route_label(scope["path"])
        theirs = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        client_id = theirs.decode() if CLIENT_ID_PATTERN.fullmatch(theirs) else ""
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, client_id=client_id, arrived_s=arrived_s)
        state.update(route=route, recent_errors=self.errors)
        about = about_request(request_ids_of(scope))
        extra = [(b"x-request-id", request_id.encode())]
        if is_messages_path(scope["path"]):
            # Anthropic's clients know it by this name.
            extra.append((b"request-id", request_id.encode()))
        if client_id:
            extra.append((b"x-client-request-id", theirs))
        started = False

        async def stamped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", []), *extra]}
                self.metrics.http.labels(route, str(message["status"])).inc()
            await send(message)

        log.info("%s %r", scope["method"], scope["path"], extra=about)
        try:
            await self.app(scope, receive, stamped)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the gateway failed on this request", extra=about)
            if not started:
                await error_response(internal_failure(request_id))(scope, receive, stamped)
            elif (connection := scope.get("extensions", {}).get(CONNECTION_EXTENSION)) is not None:
                connection.abort()

    def _route_label(self, path: str) -> str:
        """The metric label of a path: its route, so that clients cannot create new labels."""
        if path in self.routes:
            return path
        for prefix, route in ROUTE_PREFIXES.items():
            if path.startswith(prefix):
                return route
        return "other"
