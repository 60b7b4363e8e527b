"""Who may speak: bearer keys, every route closed unless it is on a short public list, and names of this host only.

Keys are kept as SHA-256 digests; a presented key is compared with every one of them, in constant time, without an early
exit. What lies behind learns the tenant that a key stands for, never the key. Decisions use the path as it arrived in
`scope["path"]`, never a URL put together from headers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.errors import RequestError
from services.gateway.errors import error_response
from services.gateway.origin import tenant_of

Headers = Sequence[tuple[bytes, bytes]]

# Exact paths; they tell no more than a load balancer needs.
PUBLIC = frozenset({"/health", "/ping", "/ready", "/version"})
ADMIN = "/admin/"


class Keys:
    """The accepted keys. Empty means that no key is asked for."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, presented: bytes) -> bool:
        digest = hashlib.sha256(presented).digest()
        found = 0
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return bool(found)

    def tenant(self, headers: Headers) -> str:
        """Whose request this is: a name made from its accepted key; "" when no key is asked for."""
        return tenant_of(presented(headers)) if self else ""


class Auth:
    """ASGI middleware. Without keys on a loopback address it answers only to loopback names (DNS rebinding).

    Where there are `admin` keys, nothing else opens the routes under `ADMIN`, and they open nothing else.
    """

    def __init__(self, app: ASGIApp, keys: Keys, host: str, admin: Keys | None = None) -> None:
        self.app, self.keys, self.admin = app, keys, admin or Keys(())
        self._loopback_only = not keys and is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await _close(send)
        refusal = self.refusal(scope)
        if refusal is not None:
            return await error_response(refusal)(scope, receive, send)
        scope.setdefault("state", {})["tenant"] = self.keys.tenant(scope["headers"])
        await self.app(scope, receive, send)

    def refusal(self, scope: Scope) -> RequestError | None:
        """Why this request may not pass, or None."""
        headers: Headers = scope["headers"]
        if self._loopback_only and not _local(headers):
            return RequestError(
                "this server answers only to the names of its own host; give it an API key to be reached by others",
                status=403,
                kind="permission_error",
                code="host_not_allowed",
            )
        ordered = bool(self.admin) and scope["path"].startswith(ADMIN)
        keys = self.admin if ordered else self.keys
        if not keys or scope["path"] in PUBLIC or keys.accept(presented(headers)):
            return None
        told = (
            "incorrect API key provided"
            if any(name == b"authorization" for name, _ in headers)
            else "no API key provided; send 'Authorization: Bearer <key>'"
        )
        return RequestError(told, status=401, code="invalid_api_key")


def presented(headers: Headers) -> bytes:
    """The bearer key of a request; empty, which no key is, unless there is exactly one."""
    given = [value for name, value in headers if name == b"authorization"]
    scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    return key.strip() if scheme.lower() == b"bearer" else b""


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _local(headers: Headers) -> bool:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    host = hosts[0]
    name = (
        host[1 : host.find("]")] if host.startswith("[") else host.rsplit(":", 1)[0] if ":" in host else host
    )
    return is_loopback(name)


async def _close(send: Send) -> None:
    """WebSockets are not served."""
    await send({"type": "websocket.close", "code": 1008, "reason": ""})
