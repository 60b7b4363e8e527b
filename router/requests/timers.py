"""What is due at a time: deadlines of requests, and the renewal of their KV leases (pure)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping

from diptych.messages import Renew
from diptych.request import RequestStage
from router.requests.request_state import RequestState

# The heap is rebuilt when it has more stale entries than this, and than live requests.
MAX_STALE_ENTRIES = 1024
# The stages in which a request's KV is under lease at its prefill worker.
LEASED_STAGES = frozenset({RequestStage.PREFILLED, RequestStage.TRANSFERRING})


class DeadlineHeap:
    """The deadlines of live requests, the earliest first, in a heap: none is looked for among all requests.

    Entries of ended requests are dropped when they come up.
    """

    def __init__(self, live: Mapping[str, RequestState]) -> None:
        """`live` is the relay's table of requests that have not ended, by name."""
        self._live = live
        # A heap of (deadline, number of the request, its name).
        self._heap: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        """Number of entries, including those of ended requests."""
        return len(self._heap)

    def add_request(self, state: RequestState) -> None:
        """Watch the deadline of a live request."""
        if len(self._heap) > 2 * len(self._live) + MAX_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapq.heapify(self._heap)
        if state.request.deadline_s < math.inf:
            heapq.heappush(self._heap, (state.request.deadline_s, state.number, state.request.id))

    def pop_expired(self, now_s: float) -> list[RequestState]:
        """The live requests whose deadline has passed, in order of arrival. Each is returned once."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            _, number, name = heapq.heappop(self._heap)
            state = self._live.get(name)
            if state is not None and state.number == number:
                found.append(state)
        return sorted(found, key=lambda state: state.number)


class LeaseRenewal:
    """Renews the leases of KV that waits at a prefill worker until a decode worker has fetched it.

    All are renewed together, every third of their length `lease_s`.
    """

    def __init__(self, lease_s: float) -> None:
        self._interval_s = lease_s / 3
        self._renewed_s = float("-inf")

    def take_due(self, states: Iterable[RequestState], now_s: float) -> list[tuple[str, Renew]]:
        """The messages to send now: (prefill worker, renewal of all its leases). Empty while none is due."""
        if now_s - self._renewed_s < self._interval_s:
            return []
        self._renewed_s = now_s
        leases: dict[str, list[tuple[str, int]]] = {}
        for state in states:
            if state.request.stage in LEASED_STAGES and state.source is not None:
                leases.setdefault(state.source, []).append((state.request.id, state.request.epoch))
        return [(worker, Renew(leases[worker])) for worker in sorted(leases)]
