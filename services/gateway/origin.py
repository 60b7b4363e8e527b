"""Who asks, and on whose behalf: what fairness counts by, and within which circle prefixes may be shared.

Tenant and scope are digests, of different domains: a salt that reads like somebody's key gives another scope than that
key. Workers see digests only; equal ones mean equal keys, or equal salts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.errors import RequestError
from diptych.hashing import digest
from diptych.request import Origin
from services.gateway.schema import Shared

TENANT_HEX = 16  # names a handful of keys
SCOPE_HEX = 32  # stands between strangers' prompts: 128 bits, so that none can be searched for
TIMEOUT_HEADER = b"x-request-timeout"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent an HTTP request: the tenant, when it arrived, and how long its client will wait for the answer, if it
    said so (seconds).
    """

    arrived_s: float
    tenant: str = ""
    timeout_s: float | None = None


def timeout_of(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """The seconds in `X-Request-Timeout`, None without one.

    Raises:
        RequestError: it is not one positive number.
    """
    given = [value for name, value in headers if name == TIMEOUT_HEADER]
    if not given:
        return None
    try:
        seconds = float(given[0]) if len(given) == 1 and len(given[0]) <= 32 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        field = TIMEOUT_HEADER.decode()
        raise RequestError(f"'{field}' must be one positive number of seconds", param=field)
    return seconds


def tenant_of(key: bytes) -> str:
    """The tenant that an API key stands for."""
    return digest(["tenant", key]).hex()[:TENANT_HEX]


def origin_of(body: Shared, tenant: str) -> Origin:
    """The origin of a request by `tenant` ("" where no key is asked for).

    Its scope is `cache_salt` when there is one, for all who know it; else the tenant alone.
    """
    named = ["salt", body.cache_salt] if body.cache_salt is not None else ["tenant", tenant]
    scope = digest(named).hex()[:SCOPE_HEX] if body.cache_salt is not None or tenant else ""
    return Origin(tenant, scope, body.priority or 0)
