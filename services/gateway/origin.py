"""On whose behalf a request runs: what fairness counts by, and within which circle its prefixes may be shared.

Both are digests, of different domains: a salt that reads like somebody's key gives another scope than that key. Workers
see digests only; equal ones mean equal keys, or equal salts.
"""

from __future__ import annotations

from diptych.hashing import digest
from diptych.request import Origin
from services.gateway.schema import Shared

TENANT_HEX = 16  # names a handful of keys
SCOPE_HEX = 32  # stands between strangers' prompts: 128 bits, so that none can be searched for


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
