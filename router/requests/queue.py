"""The gateway's queue: requests that have not been sent to any worker (pure).

The order is: priority, then requests whose answer has begun, then the tenant with the fewest tokens in flight, then
arrival. The queue is bounded by `router.requests.admission`, which every online request in it has passed.

Bulk work comes last. Its tokens in flight are counted apart, and of one tenant's bulk work that with the nearest
deadline starts first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from router.requests.request_state import RequestKind, RequestState

# (priority, whether no token was delivered yet, tenant).
QueueGroup = tuple[int, bool, str]


class _Waiting(NamedTuple):
    """A waiting request, its group, and its kind; None if the kind may change while it waits."""

    group: QueueGroup
    state: RequestState
    kind: RequestKind | None


class RequestQueue:
    """The waiting requests, and the number of tokens that each tenant has in flight."""

    def __init__(self) -> None:
        self._groups: dict[QueueGroup, list[RequestState]] = {}  # the requests of a group in order of arrival
        self._waiting: dict[str, _Waiting] = {}
        # How many of them are of each kind, and those whose kind may change: the class of another sequence of their
        # HTTP request becomes theirs.
        self._kinds: Counter[RequestKind] = Counter()
        self._siblings: dict[str, RequestState] = {}
        # How many of them are pooled.
        self._num_pooled = 0
        # Whether each request in flight is bulk work, its tenant, and its number of tokens.
        self._in_flight: dict[str, tuple[bool, str, int]] = {}
        self._tokens: Counter[str] = Counter()
        self._total = 0
        # The same for bulk work.
        self._bulk_tokens: Counter[str] = Counter()

    def enqueue_request(self, state: RequestState) -> None:
        """Add a waiting request, ordered by its arrival. Its tokens are not in flight any more."""
        self.remove_request(state.request.id)
        origin = state.request.tenancy
        group = origin.priority, not state.request.output, origin.tenant
        kind = None if state.wish.shared else state.kind
        self._waiting[state.request.id] = _Waiting(group, state, kind)
        self._num_pooled += state.pools
        if kind is None:
            self._siblings[state.request.id] = state
        else:
            self._kinds[kind] += 1
        insort(self._groups.setdefault(group, []), state, key=_place_in_group)

    def start_request(self, state: RequestState) -> None:
        """The request leaves the queue and starts: its tokens are in flight now."""
        self.remove_request(state.request.id)
        tenant, tokens = state.request.tenancy.tenant, state.room_tokens
        self._in_flight[state.request.id] = state.bulk, tenant, tokens
        if state.bulk:
            self._bulk_tokens[tenant] += tokens
        else:
            self._tokens[tenant] += tokens
            self._total += tokens

    def remove_request(self, request: str) -> None:
        """Remove the request, whether it waits or is in flight. Idempotent."""
        if (waiting := self._waiting.pop(request, None)) is not None:
            group, state, kind = waiting
            self._num_pooled -= state.pools
            if kind is None:
                del self._siblings[request]
            else:
                self._kinds[kind] -= 1
            states = self._groups[group]
            del states[bisect_left(states, _place_in_group(state), key=_place_in_group)]
            if not states:
                del self._groups[group]
        if (flight := self._in_flight.pop(request, None)) is not None:
            bulk, tenant, tokens = flight
            counts = self._bulk_tokens if bulk else self._tokens
            counts[tenant] -= tokens
            self._total -= 0 if bulk else tokens
            if not counts[tenant]:
                del counts[tenant]

    @property
    def kinds(self) -> set[RequestKind]:
        """The kinds of the waiting requests."""
        self._kinds = +self._kinds
        return {*self._kinds, *(state.kind for state in self._siblings.values())}

    @property
    def has_pooled(self) -> bool:
        """Whether any of the waiting requests is pooled."""
        return self._num_pooled > 0

    def is_underserved(self, state: RequestState) -> bool:
        """Whether its tenant has fewer tokens in flight than an equal share. Always False without API keys, and for
        bulk work.
        """
        tenant = "" if state.bulk else state.request.tenancy.tenant
        tenants = len(self._tokens) + (tenant not in self._tokens)
        return bool(tenant) and self._tokens[tenant] * tenants < self._total

    def in_order(self) -> Iterator[RequestState]:
        """All waiting requests, in the order in which they should start.

        Only the request that was yielded last may be removed while iterating.
        """
        heap = [(self._sort_key(group, states[0]), group) for group, states in self._groups.items()]
        heapq.heapify(heap)
        passed: Counter[QueueGroup] = Counter()
        while heap:
            _, group = heapq.heappop(heap)
            state = self._groups[group][passed[group]]
            yield state
            passed[group] += state.request.id in self._waiting
            states = self._groups.get(group, [])
            if passed[group] < len(states):
                heapq.heappush(heap, (self._sort_key(group, states[passed[group]]), group))

    def _sort_key(self, group: QueueGroup, state: RequestState) -> tuple[int, bool, int, tuple[float, int]]:
        """The order in which requests start; see the module's description."""
        priority, fresh, tenant = group
        tokens = self._bulk_tokens[tenant] if state.bulk else self._tokens[tenant]
        return priority, fresh, tokens, _place_in_group(state)

    def __contains__(self, request: str) -> bool:
        return request in self._waiting

    def __iter__(self) -> Iterator[RequestState]:
        """All waiting requests, in no particular order (see `in_order`)."""
        return (waiting.state for waiting in self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)


def _place_in_group(state: RequestState) -> tuple[float, int]:
    """The order within a group: by arrival; of bulk work, the nearest deadline first."""
    return (state.request.deadline_s if state.bulk else 0.0), state.number
