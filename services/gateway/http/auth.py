"""Authenticates requests: bearer keys on all routes except a short public list.

Without keys, only requests that address this host by a loopback name are answered.
The application learns which tenant a key stands for, never the key itself. Decisions use the path in `scope["path"]`,
never a URL that was put together from headers.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.http.access_keys import KEY_HEADERS, AccessKeys, Headers, presented_key
from services.gateway.http.connection import CONNECTION_EXTENSION
from services.gateway.http.error_response import error_response

# Routes that need no key. The paths must match exactly, and reveal no more than a load balancer needs; the page at "/"
# holds no data.
PUBLIC_ROUTES = frozenset({"/", "/health", "/ping", "/ready", "/version"})
# The failure of a tenant that has its share of the connections.
TENANT_FULL = RequestFailure(
    FailureReason.TENANT_CONNECTIONS_FULL,
    "requests of this API key are open on as many connections as the server has left for other keys",
)


class AuthMiddleware:
    """ASGI middleware that refuses requests without an accepted key; `AccessKeys` says which key opens what.

    Without any key on a loopback address, only requests for loopback names are answered (against DNS rebinding).
    """

    def __init__(self, app: ASGIApp, keys: AccessKeys, host: str) -> None:
        self.app, self.keys = app, keys
        self._loopback_only = not keys.api and is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await _close_websocket(send)
        refusal = self.find_refusal(scope)
        if refusal is not None:
            return await error_response(refusal)(scope, receive, send)
        state, key = scope.setdefault("state", {}), presented_key(scope["headers"])
        connection = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
        if connection is not None and not connection.has_share:
            return await error_response(TENANT_FULL)(scope, receive, send)
        state["tenant"] = self.keys.api.tenant_of_headers(scope["headers"])
        state["best_priority"] = self.keys.best_priority(key)
        asked = self.keys.keys_for_route("/status")
        # Whether the client may see worker names.
        state["known"] = not asked or asked.accepts_key(key)
        await self.app(scope, receive, send)

    def find_refusal(self, scope: Scope) -> RequestFailure | None:
        """Why this request is refused; None if it may pass."""
        headers: Headers = scope["headers"]
        if self._loopback_only and not _is_local_host(headers):
            return RequestFailure(
                FailureReason.HOST_NOT_ALLOWED,
                "this server answers only requests for loopback names; give it an API key to be reached by other names",
            )
        keys = self.keys.keys_for_route(scope["path"])
        if not keys or scope["path"] in PUBLIC_ROUTES or keys.accepts_key(presented_key(headers)):
            return None
        message = (
            "incorrect API key provided"
            if any(name in KEY_HEADERS for name, _ in headers)
            else "no API key provided; send 'Authorization: Bearer <key>', or 'x-api-key: <key>'"
        )
        return RequestFailure(FailureReason.INVALID_API_KEY, message)


@lru_cache(maxsize=32)
def is_loopback(host: str) -> bool:
    """Whether a host name or an IP address denotes this machine's loopback interface."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local_host(headers: Headers) -> bool:
    """Whether the request has exactly one `Host` header, and that one is a loopback name."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    host = hosts[0]
    name = (
        host[1 : host.find("]")] if host.startswith("[") else host.rsplit(":", 1)[0] if ":" in host else host
    )
    return is_loopback(name)


async def _close_websocket(send: Send) -> None:
    """Refuse a WebSocket, which this server does not offer."""
    await send({"type": "websocket.close", "code": 1008, "reason": ""})
