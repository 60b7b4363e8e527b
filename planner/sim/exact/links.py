"""Simulates KV transfers in virtual time: concurrent transfers share the bandwidth of the instances' links.

Every instance has one port with the speed of the link. A port is divided evenly among its transfers, and a transfer
gets the smaller of its shares at both ends. This is max-min sharing in its simplest form: bandwidth that a transfer
cannot use, because its other end is slower, is not given to others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from planner.sim.exact.event_queue import EventQueue
from planner.types import LinkSpec

# If less than this share of a transfer is left, the transfer counts as complete.
ROUNDING = 1e-9


@dataclass(slots=True, eq=False)
class SimTransfer:
    """A transfer in progress: `left` of `num_bytes` bytes are still to be moved, at `rate` bytes per second."""

    source: str
    target: str
    num_bytes: float
    left: float
    done: Callable[[], None]
    rate: float = 0.0


class SimLinks:
    """All transfers of a deployment. `moved` counts bytes, `busy_s` the seconds with at least one transfer."""

    def __init__(self, events: EventQueue, link: LinkSpec) -> None:
        if link.bytes_per_s <= 0 or link.latency_s < 0:
            raise ValueError(f"a link needs a speed above 0 and a latency of at least 0: {link}")
        self.events, self.link = events, link
        self.moved = self.busy_s = 0.0
        self._active: dict[SimTransfer, None] = {}
        self._settled_s = 0.0
        self._version = 0

    def start(self, source: str, target: str, num_bytes: float, done: Callable[[], None]) -> SimTransfer:
        """Moves `num_bytes` bytes from `source` to `target`, and calls `done` when they have arrived."""
        transfer = SimTransfer(source, target, num_bytes, num_bytes, done)
        self.moved += num_bytes
        if math.isinf(self.link.bytes_per_s) or not num_bytes:
            self._on_complete(transfer)
        else:
            self._settle_progress()
            self._active[transfer] = None
            self._share_bandwidth()
        return transfer

    def stop(self, transfer: SimTransfer) -> bool:
        """Stops a transfer; False if all bytes have been sent already, so that `done` is called anyway."""
        if transfer not in self._active:
            return False
        self._settle_progress()
        del self._active[transfer]
        self._share_bandwidth()
        return True

    def _settle_progress(self) -> None:
        """Updates what each transfer has moved since the last update."""
        since_s = self.events.now_s - self._settled_s
        self._settled_s = self.events.now_s
        if self._active:
            self.busy_s += since_s
        for transfer in self._active:
            transfer.left -= transfer.rate * since_s

    def _share_bandwidth(self) -> None:
        """Divides each port's bandwidth among its transfers, and schedules the next update when the first one ends."""
        self._version += 1
        if not self._active:
            return
        out = Counter(transfer.source for transfer in self._active)
        into = Counter(transfer.target for transfer in self._active)
        soonest_s = math.inf
        for transfer in self._active:
            transfer.rate = self.link.bytes_per_s / max(out[transfer.source], into[transfer.target])
            soonest_s = min(soonest_s, transfer.left / transfer.rate)
        self.events.at(self.events.now_s + max(0.0, soonest_s), self._schedule_next, self._version)

    def _schedule_next(self, version: int) -> None:
        """Completes the transfers that are done. Ignored if transfers started or stopped since it was scheduled."""
        if version != self._version:
            return
        self._settle_progress()
        soonest = min(transfer.left / transfer.rate for transfer in self._active)
        there = [
            transfer
            for transfer in self._active
            if transfer.left <= ROUNDING * transfer.num_bytes or transfer.left / transfer.rate <= soonest
        ]
        for transfer in there:
            del self._active[transfer]
            self._on_complete(transfer)
        self._share_bandwidth()

    def _on_complete(self, transfer: SimTransfer) -> None:
        """All bytes are sent; they arrive after the link's latency."""
        self.events.at(self.events.now_s + self.link.latency_s, transfer.done)
