"""Decides which keys open a route, and which tenant a key stands for.

Keys are kept as SHA-256 digests. A presented key is compared with all of them in constant time, without an early exit.
A connection asks this as soon as a request's head has arrived, so that a client with a key is never taken for a
stranger; `AuthMiddleware` asks the same before it lets the request pass.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from diptych.request import MIN_PRIORITY
from services.gateway.openai.tenancy import tenant_of_key

Headers = Iterable[tuple[bytes, bytes]]

ADMIN_PREFIX = "/admin/"
# Clients of Anthropic's API send their key in the second.
AUTHORIZATION, X_API_KEY = b"authorization", b"x-api-key"
KEY_HEADERS = frozenset({AUTHORIZATION, X_API_KEY})


class BearerKeys:
    """A set of accepted keys. If it is empty, no key is required."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
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

    def priority_of_key(self, presented: bytes) -> int | None:
        """The best priority that was given to this key itself, if any was."""
        return None

    def tenant_of_headers(self, headers: Headers) -> str:
        """The tenant of a request, derived from its accepted key; "" when no key is required."""
        return tenant_of_key(presented_key(headers)) if self else ""


class AccessKeys:
    """All keys of a server, by what they open.

    `api` keys open all routes that have no keys of their own. `admin` keys open the routes under `ADMIN_PREFIX`;
    `operator` has those of single routes, by path: of those that show the requests of all tenants, and the machines. If
    such keys are given, no other key opens these routes, and they open nothing else. `urgent` keys are the API keys
    that may ask for any priority; without API keys, every client may.
    """

    def __init__(
        self,
        api: BearerKeys | None = None,
        admin: BearerKeys | None = None,
        operator: Mapping[str, BearerKeys] | None = None,
        urgent: BearerKeys | None = None,
    ) -> None:
        self.api, self.admin = api or BearerKeys(), admin or BearerKeys()
        self.operator, self.urgent = operator or {}, urgent or BearerKeys()
        self._num_named = len(self.admin) + sum(map(len, self.operator.values()))

    @property
    def has_tenants(self) -> bool:
        """Whether there may be more than one tenant, among which connections are shared."""
        return bool(self.api) and len(self.api) + self._num_named > 1

    def best_priority(self, presented: bytes) -> int:
        """The best priority, so the lowest, that requests with an accepted key may have."""
        own = self.api.priority_of_key(presented)
        if own is not None:
            return own
        return MIN_PRIORITY if not self.api or self.urgent.accepts_key(presented) else 0

    def keys_for_route(self, path: str) -> BearerKeys:
        """The keys that open a route; empty if no key is required."""
        if self.admin and path.startswith(ADMIN_PREFIX):
            return self.admin
        return self.operator.get(path) or self.api

    def find_tenant(self, path: str, headers: Headers) -> str | None:
        """The tenant of a request, "" if none is told apart; None if no key came that opens its route.

        A request without an accepted key, which only public routes answer, belongs to no tenant.
        """
        keys = self.keys_for_route(path)
        if keys and not keys.accepts_key(presented_key(headers)):
            return None
        return self.api.tenant_of_headers(headers)


def presented_key(headers: Headers) -> bytes:
    """The key of a request: of its one `Authorization: Bearer`, or, without that header, of its one `x-api-key`.

    It is empty, which is never a valid key, if there is none or if a header comes twice.
    """
    found = [(name, value) for name, value in headers if name in KEY_HEADERS]
    bearer = [value for name, value in found if name == AUTHORIZATION]
    if bearer:
        scheme, _, key = bearer[0].partition(b" ") if len(bearer) == 1 else (b"", b"", b"")
        return key.strip() if scheme.lower() == b"bearer" else b""
    return found[0][1].strip() if len(found) == 1 else b""
