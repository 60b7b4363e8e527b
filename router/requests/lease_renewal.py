"""Renews the KV leases of requests whose KV still waits at a prefill worker, until a decode worker has fetched it."""

from __future__ import annotations

from collections.abc import Iterable

from diptych.messages import Renew
from diptych.request import RequestStage
from router.requests.request_state import RequestState

# The stages in which a request's KV is under lease at its prefill worker.
LEASED_STAGES = frozenset({RequestStage.PREFILLED, RequestStage.TRANSFERRING})


class LeaseRenewal:
    """Renews all leases together, every third of their length `lease_s`."""

    def __init__(self, lease_s: float) -> None:
        self._interval_s = lease_s / 3
        self._renewed_s = float("-inf")

    def take_due(self, live: Iterable[RequestState], now_s: float) -> list[tuple[str, Renew]]:
        """The messages to send now: (prefill worker, renewal of all its leases). Empty while none is due."""
        if now_s - self._renewed_s < self._interval_s:
            return []
        self._renewed_s = now_s
        leases: dict[str, list[tuple[str, int]]] = {}
        for state in live:
            if state.request.stage in LEASED_STAGES and state.source is not None:
                leases.setdefault(state.source, []).append((state.request.id, state.request.epoch))
        return [(worker, Renew(leases[worker])) for worker in sorted(leases)]
