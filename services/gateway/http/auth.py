"""Authenticates requests: bearer keys on all routes except a short public list.

Without keys, only requests that address this host by a loopback name are answered. Keys are kept as SHA-256 digests. A
presented key is compared with all of them in constant time, without an early exit.
The application learns which tenant a key stands for, never the key itself. Decisions use the path in `scope["path"]`,
never a URL that was put together from headers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.http.connection import CONNECTION_EXTENSION
from services.gateway.http.error_response import error_response
from services.gateway.openai.tenancy import tenant_of_key

Headers = Sequence[tuple[bytes, bytes]]

# Routes that need no key. The paths must match exactly, and reveal no more than a load balancer needs; the page at "/"
# holds no data.
PUBLIC_ROUTES = frozenset({"/", "/health", "/ping", "/ready", "/version"})
ADMIN_PREFIX = "/admin/"
# The failure of a tenant that has its share of the connections.
TENANT_FULL = RequestFailure(
    FailureReason.TENANT_CONNECTIONS_FULL,
    "requests of this API key are open on as many connections as the server has left for other keys",
)


class BearerKeys:
    """A set of accepted keys. If it is empty, no key is required."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def accepts_key(self, presented: bytes) -> bool:
        """Whether `presented` is one of the keys. The time that it takes does not depend on which one."""
        digest = hashlib.sha256(presented).digest()
        found = 0
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return bool(found)

    def tenant_of_headers(self, headers: Headers) -> str:
        """The tenant of a request, derived from its accepted key; "" when no key is required."""
        return tenant_of_key(bearer_token(headers)) if self else ""


class AuthMiddleware:
    """ASGI middleware that refuses requests without an accepted key.

    `admin_keys` open the routes under `ADMIN_PREFIX`; `operator_keys` has those of single routes, by path: of those
    that show the requests of all tenants, and the machines. If such keys are given, no other key opens these routes,
    and they open nothing else. `urgent_keys` are the API keys that may ask for a better priority than the default;
    without API keys, every client may.

    Without any key on a loopback address, only requests for loopback names are answered (against DNS rebinding).
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: BearerKeys,
        host: str,
        admin_keys: BearerKeys | None = None,
        operator_keys: Mapping[str, BearerKeys] | None = None,
        urgent_keys: BearerKeys | None = None,
    ) -> None:
        self.app, self.keys, self.admin_keys = app, keys, admin_keys or BearerKeys(())
        self.operator_keys, self.urgent_keys = operator_keys or {}, urgent_keys or BearerKeys(())
        self._loopback_only = not keys and is_loopback(host)
        named = [self.admin_keys, *self.operator_keys.values()]
        # Whether there may be more than one tenant, among which connections are shared.
        self._has_tenants = len(keys) + sum(map(len, named)) > 1 if keys else False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await _close_websocket(send)
        refusal = self.find_refusal(scope)
        if refusal is not None:
            return await error_response(refusal)(scope, receive, send)
        state, key = scope.setdefault("state", {}), bearer_token(scope["headers"])
        state["tenant"] = tenant = self.keys.tenant_of_headers(scope["headers"])
        if not self._begin_request(scope, tenant, key):
            return await error_response(TENANT_FULL)(scope, receive, send)
        state["urgent"] = not self.keys or self.urgent_keys.accepts_key(key)
        asked = self._keys_for_route("/status")
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
        keys = self._keys_for_route(scope["path"])
        if not keys or scope["path"] in PUBLIC_ROUTES or keys.accepts_key(bearer_token(headers)):
            return None
        message = (
            "incorrect API key provided"
            if any(name == b"authorization" for name, _ in headers)
            else "no API key provided; send 'Authorization: Bearer <key>'"
        )
        return RequestFailure(FailureReason.INVALID_API_KEY, message)

    def _begin_request(self, scope: Scope, tenant: str, key: bytes) -> bool:
        """Tell the connection whose request it answers. False if this tenant has its share of the connections.

        A request without an accepted key, which only public routes answer, belongs to no tenant.
        """
        connection = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
        if connection is None:
            return True
        keys = self._keys_for_route(scope["path"])
        if keys and scope["path"] in PUBLIC_ROUTES and not (key and keys.accepts_key(key)):
            return True
        begun: bool = connection.begin_request(tenant, self._has_tenants)
        return begun

    def _keys_for_route(self, path: str) -> BearerKeys:
        """The keys that open a route; empty if no key is required."""
        if self.admin_keys and path.startswith(ADMIN_PREFIX):
            return self.admin_keys
        return self.operator_keys.get(path) or self.keys


def bearer_token(headers: Headers) -> bytes:
    """The bearer key of a request; empty (never a valid key) unless it has exactly one `Authorization` header."""
    given = [value for name, value in headers if name == b"authorization"]
    scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    return key.strip() if scheme.lower() == b"bearer" else b""


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
