"""Shares the gateway's bounds among tenants (API keys), and picks the requests that make room (pure).

A tenant's share of a bound is the bound / (number of tenants with requests in flight + 1).

    within its share     a tenant may use the whole bound; if it is full, others above their share make room
    above its share      a tenant may not use the last eighth of the bound, which is kept for tenants within their share

The tenant that is furthest above its share makes room first: it loses its latest groups that no worker has started on.
A group is the sequences of one HTTP request: they are admitted together, and displaced together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# One part in this many of each bound is kept for tenants within their share.
RESERVED_PART = 8

# (requests, prompt tokens that are not prefilled yet).
RequestsAndTokens = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdmissionDemand:
    """What one HTTP request asks for: `amounts` are its sequences and prompt tokens. Tenant "": no API keys in use."""

    tenant: str
    amounts: RequestsAndTokens


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The sequences of one HTTP request in flight, each with its prompt tokens that are not prefilled yet."""

    name: str
    tenant: str
    unprefilled_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def amounts(self) -> RequestsAndTokens:
        """(requests in flight, their prompt tokens that are not prefilled yet)."""
        return len(self.unprefilled_tokens), sum(self.unprefilled_tokens.values())


@dataclass(slots=True)
class TenantUsage:
    """What one tenant has in flight: requests, and prompt tokens that are not prefilled yet.

    `num_unprefilled` counts its requests that are not prefilled yet; `idle` are its groups that no worker has started
    on, in order of arrival.
    """

    requests: int = 0
    tokens: int = 0
    num_unprefilled: int = 0
    idle: dict[str, RequestGroup] = field(default_factory=dict)

    @property
    def amounts(self) -> RequestsAndTokens:
        """(requests in flight, their prompt tokens that are not prefilled yet)."""
        return self.requests, self.tokens


NO_USAGE = TenantUsage()


class TenantShares:
    """The usage of all tenants with requests in flight.

    `bounds` are the most requests and unprefilled prompt tokens of all tenants together. `shared` says that several
    tenants may send requests; a single tenant may use the bounds whole.
    """

    def __init__(self, bounds: RequestsAndTokens, shared: bool) -> None:
        self.bounds, self.shared = bounds, shared
        self.total = TenantUsage()
        self._groups: dict[str, RequestGroup] = {}  # by request
        self._held: dict[str, TenantUsage] = {}

    def __len__(self) -> int:
        """Number of requests in flight."""
        return len(self._groups)

    def __contains__(self, request: str) -> bool:
        return request in self._groups

    def usage_of(self, tenant: str) -> TenantUsage:
        """What a tenant has in flight. Do not change the result."""
        return self._held.get(tenant, NO_USAGE)

    # ---- requests begin and end

    def add_request(self, request: str, prompt_tokens: int, tenant: str, group: str) -> None:
        """Count a request in flight. `group` names its HTTP request."""
        held = self._held.setdefault(tenant, TenantUsage())
        request_group = held.idle.setdefault(group, RequestGroup(group, tenant))
        request_group.unprefilled_tokens[request] = prompt_tokens
        self._groups[request] = request_group
        for one in (held, self.total):
            one.requests += 1
            one.tokens += prompt_tokens
            one.num_unprefilled += prompt_tokens > 0

    def mark_begun(self, request: str) -> None:
        """A worker has started on the request, so its group cannot be displaced any more. Idempotent."""
        if (group := self._groups.get(request)) is not None:
            self._held[group.tenant].idle.pop(group.name, None)

    def mark_prefilled(self, request: str) -> int:
        """The prompt of the request is prefilled. Returns its tokens; 0 if that was known, or it is not in flight."""
        group = self._groups.get(request)
        tokens = 0 if group is None else group.unprefilled_tokens[request]
        if group is not None and tokens:
            group.unprefilled_tokens[request] = 0
            for one in (self._held[group.tenant], self.total):
                one.tokens -= tokens
                one.num_unprefilled -= 1
        return tokens

    def remove_request(self, request: str) -> int:
        """Stop counting a request. Returns its prompt tokens if it was not prefilled yet, else 0."""
        tokens, group = self.mark_prefilled(request), self._groups.pop(request)
        del group.unprefilled_tokens[request]
        held = self._held[group.tenant]
        for one in (held, self.total):
            one.requests -= 1
        if not group.unprefilled_tokens:
            held.idle.pop(group.name, None)
        if not held.requests:
            del self._held[group.tenant]
        return tokens

    # ---- shares

    def share_of(self, axis: int, tenant: str) -> int:
        """How much of a bound (axis 0: requests, 1: prompt tokens) a tenant may use whatever others need."""
        bound = self.bounds[axis]
        if not tenant or not self.shared:
            return bound
        return bound // (len(self._held) + (tenant not in self._held) + 1)

    def exceeds_share(self, axis: int, demand: AdmissionDemand) -> bool:
        """Whether a demand takes its tenant above its share of a bound (axis 0: requests, 1: prompt tokens).

        A tenant that does not share the bounds has no share to exceed: then the service is full.
        """
        if not demand.tenant or not self.shared:
            return False
        used = self.usage_of(demand.tenant).amounts[axis] + demand.amounts[axis]
        return used > self.share_of(axis, demand.tenant)

    def excess_of(self, demand: AdmissionDemand) -> RequestsAndTokens:
        """By how many requests and prompt tokens a demand exceeds what its tenant may have now; 0 if it does not."""
        requests, tokens = (self._axis_excess(axis, demand) for axis in (0, 1))
        # The first waiting prompt of each tenant is allowed whatever its length. The model's context bounds it.
        return requests, tokens if self.usage_of(demand.tenant).tokens else 0

    def _axis_excess(self, axis: int, demand: AdmissionDemand) -> int:
        """The excess on one axis (0: requests, 1: prompt tokens); see `excess_of`."""
        more, bound = demand.amounts[axis], self.bounds[axis]
        kept = bound // RESERVED_PART if self.exceeds_share(axis, demand) else 0
        return max(0, self.total.amounts[axis] + more - (bound - kept))

    def find_victims(self, demand: AdmissionDemand, excess: RequestsAndTokens) -> list[RequestGroup] | None:
        """The groups of other tenants that must end to free `excess`, the latest group of each tenant first.

        None if they cannot free enough, or if the demand is above its tenant's share.
        """
        own = self.usage_of(demand.tenant).amounts
        shares = self.share_of(0, demand.tenant), self.share_of(1, demand.tenant)
        if any(excess[axis] and own[axis] + demand.amounts[axis] > shares[axis] for axis in (0, 1)):
            return None
        left = {
            name: (list(held.amounts), list(held.idle.values()))
            for name, held in self._held.items()
            if name != demand.tenant
        }
        groups: list[RequestGroup] = []
        missing = list(excess)
        for axis in (0, 1):
            while missing[axis] > 0:
                above = [name for name, (has, idle) in left.items() if idle and has[axis] > shares[axis]]
                if not above:
                    return None
                has, idle = left[max(above, key=lambda name: left[name][0][axis])]
                groups.append(idle.pop())
                for each, amount in enumerate(groups[-1].amounts):
                    has[each] -= amount
                    missing[each] -= amount
        return groups

    def work_ahead(self, tenant: str) -> RequestsAndTokens:
        """The unprefilled prompt tokens and requests that a fair queue serves before the next request of a tenant.

        Each other tenant counts with at most as much as the tenant itself has.
        """
        own = self.usage_of(tenant)
        tokens = sum(min(held.tokens, own.tokens) for held in self._held.values())
        return tokens, sum(min(held.num_unprefilled, own.num_unprefilled) for held in self._held.values())
