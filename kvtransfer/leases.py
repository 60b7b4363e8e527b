"""Leases: until when a prefill worker keeps the KV it has offered, and for which attempt.

Pure bookkeeping. It owns no memory: whatever it returns is the caller's to free. A lease ends by release, by a newer
epoch of the same request, or by time; a message of an older epoch never frees what a newer one holds (fencing).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diptych.errors import OutOfBlocks, StaleTicket

REMEMBERED = (
    4096  # ended requests whose newest epoch is kept, so that a late offer of an older one is recognised
)


@dataclass(frozen=True, slots=True)
class Lease:
    """`slabs` are kept for attempt `epoch` of `request` until `until_s`."""

    request: str
    epoch: int
    slabs: tuple[int, ...]
    until_s: float


class LeaseLedger:
    """All leases of one prefill worker; at most `max_leases`, each for `lease_s` seconds from its last renewal."""

    def __init__(self, lease_s: float, max_leases: int = 65_536) -> None:
        self.lease_s, self.max_leases = lease_s, max_leases
        self.late = 0  # messages of an epoch that is over
        self.expired = 0
        self._leases: dict[str, Lease] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    @property
    def slabs(self) -> int:
        """Slabs under lease."""
        return sum(len(lease.slabs) for lease in self._leases.values())

    def offer(self, request: str, epoch: int, slabs: Iterable[int], now_s: float) -> Lease | None:
        """Begin a lease; returns the lease of an older attempt that it replaces, to be freed.

        Raises:
            StaleTicket: this or a newer epoch was already offered or ended; the caller frees `slabs`.
            OutOfBlocks: the ledger is full; the caller frees `slabs`.
        """
        older = self._leases.get(request)
        newest = max(older.epoch if older else -1, self._ended.get(request, -1))
        if epoch <= newest:
            self.late += 1
            raise StaleTicket(
                f"request {request} has moved on", f"offered epoch {epoch}, known epoch {newest}"
            )
        if older is None and len(self._leases) >= self.max_leases:
            raise OutOfBlocks("too many offers wait to be fetched", f"{len(self._leases)} leases")
        self._leases[request] = Lease(request, epoch, tuple(slabs), now_s + self.lease_s)
        return older

    def renew(self, leases: Iterable[tuple[str, int]], now_s: float) -> int:
        """Prolong leases; returns how many of them are not held (any more)."""
        unknown = 0
        for request, epoch in leases:
            held = self._leases.get(request)
            if held is None or held.epoch != epoch:
                unknown += 1
                self.late += 1
                continue
            self._leases[request] = Lease(request, epoch, held.slabs, now_s + self.lease_s)
        return unknown

    def release(self, request: str, epoch: int) -> Lease | None:
        """End the lease of this epoch or an older one; the caller frees what is returned. Idempotent.

        A message of an older epoch than the one held is late: it is counted, and changes nothing.
        """
        held = self._leases.get(request)
        if held is not None and held.epoch > epoch:
            self.late += 1
            return None
        self._end(request, epoch)
        if held is None:
            return None
        del self._leases[request]
        return held

    def expire(self, now_s: float) -> list[Lease]:
        """End every lease whose time is over; the caller frees them."""
        over = [lease for lease in self._leases.values() if lease.until_s <= now_s]
        for lease in over:
            del self._leases[lease.request]
            self._end(lease.request, lease.epoch)
        self.expired += len(over)
        return over

    def next_s(self) -> float | None:
        """When the next lease runs out, if none is renewed before."""
        return min((lease.until_s for lease in self._leases.values()), default=None)

    def _end(self, request: str, epoch: int) -> None:
        self._ended[request] = max(epoch, self._ended.pop(request, -1))
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
