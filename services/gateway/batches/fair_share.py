"""Which batch may run its next line: a pure rule, and the queue that follows it in logarithmic time.

Tenants share the lines in flight evenly, and among the batches of a tenant the one that expires first goes first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# The heaps are built anew when they hold so many entries for each one that is current, and this many more.
STALE_FACTOR, STALE_EXTRA = 4, 64


@dataclass(frozen=True, slots=True)
class BatchClaim:
    """An open batch that may have lines to run. `order` grows with its creation, `running` are its lines in flight."""

    batch: str
    tenant: str
    expires_at: int
    order: int
    running: int
    has_lines: bool


def choose_batch(claims: Sequence[BatchClaim], served_tokens: Mapping[str, int]) -> str | None:
    """The batch whose line runs next; None if no batch has lines. It walks all claims: `ShareQueue` does not.

    The tenant with the fewest lines in flight comes first, of equal ones the tenant that was served fewest tokens
    (`served_tokens`, by tenant), and of these the one with the nearest expiry. Within a tenant the nearest expiry comes
    first, then the oldest batch.
    """
    running: Counter[str] = Counter()
    for claim in claims:
        running[claim.tenant] += claim.running
    waiting = [claim for claim in claims if claim.has_lines]
    if not waiting:
        return None

    def rank(claim: BatchClaim) -> tuple[int, int, int, int, str]:
        served = served_tokens.get(claim.tenant, 0)
        return running[claim.tenant], served, claim.expires_at, claim.order, claim.batch

    return min(waiting, key=rank).batch


@dataclass(eq=False, slots=True)
class _TenantShare:
    """What one tenant has. `ready` are its batches with lines; `heap` has these, and others that had lines before."""

    num_open: int = 0
    running: int = 0
    served: int = 0
    ready: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    heap: list[tuple[int, int, str]] = field(default_factory=list)
    # Grows with each change, so that older entries of the queue's heap are known as such.
    version: int = 0

    def find_first(self) -> tuple[int, int, str] | None:
        """The batch with lines that expires first: its expiry, its order and its id."""
        while self.heap and self.ready.get(self.heap[0][2]) != self.heap[0]:
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None

    def add_ready(self, entry: tuple[int, int, str]) -> None:
        """A batch has lines."""
        self.ready[entry[2]] = entry
        heapq.heappush(self.heap, entry)
        if len(self.heap) > STALE_FACTOR * len(self.ready) + STALE_EXTRA:
            self.heap = sorted(self.ready.values())


class ShareQueue:
    """Chooses what `choose_batch` would, from changes instead of from everything.

    Each change and each choice costs a time that is logarithmic in the number of open batches. A tenant is forgotten
    with its last open batch.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantShare] = {}
        # Rank of a tenant, its version and its name. Entries of older versions are skipped.
        self._heap: list[tuple[int, int, int, int, str, int, str]] = []
        self._num_changes = 0

    def open_batch(self, tenant: str) -> None:
        """A tenant has one more open batch, which has no lines yet."""
        self._tenants.setdefault(tenant, _TenantShare()).num_open += 1

    def close_batch(self, tenant: str, batch: str) -> None:
        """A batch has ended; none of its lines runs."""
        share = self._tenants[tenant]
        share.num_open -= 1
        share.ready.pop(batch, None)
        if share.num_open:
            self._rank_tenant(tenant)
        else:
            del self._tenants[tenant]

    def set_ready(self, tenant: str, batch: str, expires_at: int, order: int, has_lines: bool) -> None:
        """An open batch has lines that wait, or has none."""
        share = self._tenants[tenant]
        if (batch in share.ready) == has_lines:
            return
        if has_lines:
            share.add_ready((expires_at, order, batch))
        else:
            del share.ready[batch]
        self._rank_tenant(tenant)

    def count_running(self, tenant: str, change: int) -> None:
        """A line of a tenant starts (+1) or ends (-1)."""
        self._tenants[tenant].running += change
        self._rank_tenant(tenant)

    def count_tokens(self, tenant: str, num_tokens: int) -> None:
        """A tenant was served so many tokens."""
        self._tenants[tenant].served += num_tokens
        self._rank_tenant(tenant)

    def choose(self) -> str | None:
        """The batch whose line runs next; None if no batch has lines."""
        while self._heap:
            *_, batch, version, tenant = self._heap[0]
            share = self._tenants.get(tenant)
            if share is not None and share.version == version:
                return batch
            heapq.heappop(self._heap)
        return None

    def _rank_tenant(self, tenant: str) -> None:
        """Put a tenant in its place, after a change."""
        share = self._tenants[tenant]
        self._num_changes += 1
        share.version = self._num_changes
        first = share.find_first()
        if first is not None:
            heapq.heappush(self._heap, (share.running, share.served, *first, share.version, tenant))
        if len(self._heap) > STALE_FACTOR * len(self._tenants) + STALE_EXTRA:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[int, int, int, int, str, int, str]) -> bool:
        share = self._tenants.get(entry[-1])
        return share is not None and share.version == entry[-2]
