"""Who sends a request: the tenant that fairness counts by, and the scope within which prefixes may be shared.

Both are digests, made with different prefixes: a salt with the text of somebody's key gives another scope than that
key. Workers see only digests. Equal digests mean equal keys, or equal salts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.hashing import hash_fields
from diptych.logs.request_ids import RequestIds
from diptych.request import MIN_PRIORITY, Tenancy
from services.gateway.openai.schemas.pooling_schema import PoolingFields
from services.gateway.openai.schemas.request_schema import GenerationFields

# This many hex digits suffice to tell a deployment's keys apart.
TENANT_HEX = 16
# Number of hex digits of the scope that separates tenants' prompts: 128 bits, so that no collision can be found by
# search.
SCOPE_HEX = 32
TIMEOUT_HEADER = b"x-request-timeout"
TIMINGS_HEADER = b"x-diptych-timings"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent an HTTP request, and when (monotonic seconds).

    `timeout_s` is how long the client will wait for the answer, if it said so. `best_priority` is the best that the
    request may have; lower is better. `request_id` is the id of the HTTP request, `client_id` the one that the client
    gave it. With `timings` the client asks where the time of its request went. `bulk` requests are lines of batches.
    """

    arrived_s: float
    tenant: str = ""
    timeout_s: float | None = None
    best_priority: int = MIN_PRIORITY
    request_id: str = ""
    timings: bool = False
    client_id: str = ""
    bulk: bool = False

    @property
    def request_ids(self) -> RequestIds:
        """What log lines about its request say."""
        return RequestIds(self.request_id, self.client_id)


def parse_timeout_header(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """The seconds in the `X-Request-Timeout` header; None without one.

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
        problem = f"'{field}' must be one positive number of seconds"
        raise RequestError(RequestFailure(FailureReason.INVALID_VALUE, problem, field))
    return seconds


def parse_timings_header(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether the `X-Diptych-Timings` header asks for timings.

    Raises:
        RequestError: it is neither 1 nor 0.
    """
    given = [value for name, value in headers if name == TIMINGS_HEADER]
    if given not in ([], [b"0"], [b"1"]):
        field = TIMINGS_HEADER.decode()
        raise RequestError(RequestFailure(FailureReason.INVALID_VALUE, f"'{field}' must be 1 or 0", field))
    return given == [b"1"]


def check_priority(fields: GenerationFields | PoolingFields, caller: Caller) -> None:
    """Check that the caller may ask for this priority.

    Raises:
        RequestError: 403, the priority is better than this API key may have.
    """
    best = caller.best_priority
    if fields.priority is not None and fields.priority < best:
        problem = (
            f"this API key may not ask for a 'priority' below {best}, and {fields.priority} was asked for; "
            "lower numbers are served before all others, and --priority-keys or --keys names the keys that may use them"
        )
        raise RequestError(RequestFailure(FailureReason.PRIORITY_NOT_ALLOWED, problem, "priority"))


def tenant_of_key(key: bytes) -> str:
    """The name of the tenant that an API key stands for: a digest of the key."""
    return hash_fields(["tenant", key]).hex()[:TENANT_HEX]


def tenants_of_keys(keys: Iterable[str]) -> frozenset[str]:
    """The tenants that these API keys stand for; without keys everybody is the tenant ""."""
    return frozenset(tenant_of_key(key.encode()) for key in keys) or frozenset({""})


def tenancy_of_body(fields: GenerationFields | PoolingFields, tenant: str) -> Tenancy:
    """The origin of a request of `tenant` ("" if no key is required).

    Its scope is shared by all who send the same `cache_salt`. Without a salt the scope is the tenant's own.
    """
    named = ["salt", fields.cache_salt] if fields.cache_salt is not None else ["tenant", tenant]
    scope = hash_fields(named).hex()[:SCOPE_HEX] if fields.cache_salt is not None or tenant else ""
    return Tenancy(tenant, scope, fields.priority or 0)
