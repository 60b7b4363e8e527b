"""Leases: how long a prefill worker keeps the KV that it has offered, and for which attempt.

Pure accounting, without memory: the caller frees the slabs of every lease that is returned. A lease ends by release, by
a newer epoch of the same request, or by time. A message of an older epoch never frees slabs of a newer epoch (fencing).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diptych.errors import OutOfSlabs, StaleTicket

# Number of ended requests whose newest epoch is kept, so that a late offer of an older epoch is recognised.
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of attempt `epoch` of `request` to `slabs`, until clock time `until_s`."""

    request: str
    epoch: int
    slabs: tuple[int, ...]
    until_s: float


class LeaseLedger:
    """All leases of one prefill worker; at most `max_leases`, each for `lease_s` seconds from its last renewal."""

    def __init__(self, lease_s: float, max_leases: int = 65_536) -> None:
        self.lease_s, self.max_leases = lease_s, max_leases
        # Number of messages of an old epoch.
        self.late_messages = 0
        self.num_expired = 0
        self._leases: dict[str, Lease] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    @property
    def slabs(self) -> int:
        """Number of slabs under lease."""
        return sum(len(lease.slabs) for lease in self._leases.values())

    def grant_lease(self, request: str, epoch: int, slabs: Iterable[int], now_s: float) -> Lease | None:
        """Begin a lease; returns the lease of an older attempt that it replaces, which the caller frees.

        Raises:
            StaleTicket: this or a newer epoch was already offered or has ended; the caller frees `slabs`.
            OutOfSlabs: there are `max_leases` leases already; the caller frees `slabs`.
        """
        older = self._leases.get(request)
        newest = max(older.epoch if older else -1, self._ended.get(request, -1))
        if epoch <= newest:
            self.late_messages += 1
            raise StaleTicket(
                f"request {request} has moved on", f"offered epoch {epoch}, known epoch {newest}"
            )
        if older is None and len(self._leases) >= self.max_leases:
            raise OutOfSlabs("too many offers wait to be fetched", f"{len(self._leases)} leases")
        self._leases[request] = Lease(request, epoch, tuple(slabs), now_s + self.lease_s)
        return older

    def renew_leases(self, leases: Iterable[tuple[str, int]], now_s: float) -> int:
        """Prolong leases (request, epoch) to `lease_s` seconds from now; returns how many of them are not held."""
        unknown = 0
        for request, epoch in leases:
            held = self._leases.get(request)
            if held is None or held.epoch != epoch:
                unknown += 1
                self.late_messages += 1
                continue
            self._leases[request] = Lease(request, epoch, held.slabs, now_s + self.lease_s)
        return unknown

    def release_lease(self, request: str, epoch: int) -> Lease | None:
        """End the lease of this epoch or an older one, and return it; the caller frees its slabs. Idempotent.

        A message of an older epoch than the lease's is late: it is counted, and changes nothing.
        """
        held = self._leases.get(request)
        if held is not None and held.epoch > epoch:
            self.late_messages += 1
            return None
        self._remember_ended(request, epoch)
        if held is None:
            return None
        del self._leases[request]
        return held

    def expire_leases(self, now_s: float) -> list[Lease]:
        """End and return every lease whose time is over; the caller frees their slabs."""
        over = [lease for lease in self._leases.values() if lease.until_s <= now_s]
        for lease in over:
            del self._leases[lease.request]
            self._remember_ended(lease.request, lease.epoch)
        self.num_expired += len(over)
        return over

    def next_expiry_s(self) -> float | None:
        """Clock time at which the next lease expires unless renewed; None without leases."""
        return min((lease.until_s for lease in self._leases.values()), default=None)

    def _remember_ended(self, request: str, epoch: int) -> None:
        """Remember the newest ended epoch of a request, to recognise late messages."""
        self._ended[request] = max(epoch, self._ended.pop(request, -1))
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
