"""The gateway's queue: requests that no worker has been given (pure).

They go by priority; within it, those whose answer has begun come first, then the tenant with the fewest tokens in
flight, then whoever arrived first. It is bounded by `router.admission`, which everybody in it has passed.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator

from router.live import Live

Group = tuple[int, bool, str]  # priority, whether nothing has been delivered, tenant


class Queue:
    """Requests that wait, and the tokens that each tenant has in flight."""

    def __init__(self) -> None:
        self._groups: dict[Group, list[Live]] = {}  # each in order of arrival
        self._group_of: dict[str, Group] = {}
        self._in_flight: dict[str, tuple[str, int]] = {}  # request -> tenant, tokens
        self._tokens: Counter[str] = Counter()

    def put(self, live: Live) -> None:
        """It waits from now on, at the place of its arrival; nothing of it is in flight."""
        self.remove(live.request.id)
        origin = live.request.origin
        group = origin.priority, not live.request.output, origin.tenant
        self._group_of[live.request.id] = group
        insort(self._groups.setdefault(group, []), live, key=lambda one: one.number)

    def take(self, live: Live) -> None:
        """It waits no longer: its tokens are in flight."""
        self.remove(live.request.id)
        tenant, tokens = live.request.origin.tenant, live.room_tokens
        self._in_flight[live.request.id] = tenant, tokens
        self._tokens[tenant] += tokens

    def remove(self, request: str) -> None:
        """It neither waits nor is in flight. Idempotent."""
        if (group := self._group_of.pop(request, None)) is not None:
            rest = [live for live in self._groups.pop(group) if live.request.id != request]
            if rest:
                self._groups[group] = rest
        if (flight := self._in_flight.pop(request, None)) is not None:
            tenant, tokens = flight
            self._tokens[tenant] -= tokens
            if not self._tokens[tenant]:
                del self._tokens[tenant]

    def order(self) -> Iterator[Live]:
        """All that wait, who should go first first. Each may be taken when it is its turn, and only then."""
        heap = [(self._place(group, lives[0]), group) for group, lives in self._groups.items()]
        heapq.heapify(heap)
        passed: Counter[Group] = Counter()
        while heap:
            _, group = heapq.heappop(heap)
            live = self._groups[group][passed[group]]
            yield live
            passed[group] += live.request.id in self._group_of
            lives = self._groups.get(group, [])
            if passed[group] < len(lives):
                heapq.heappush(heap, (self._place(group, lives[passed[group]]), group))

    def _place(self, group: Group, live: Live) -> tuple[int, bool, int, int]:
        priority, fresh, tenant = group
        return priority, fresh, self._tokens[tenant], live.number

    def __contains__(self, request: str) -> bool:
        return request in self._group_of

    def __len__(self) -> int:
        return len(self._group_of)
