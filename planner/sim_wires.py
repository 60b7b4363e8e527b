"""KV on its way in virtual time: transfers share what a link gives, each its fair part.

Every instance has one port, of the link's speed. A transfer gets the smaller of its parts of both ports, where a port
is divided evenly among those that use it. Source: max-min sharing in its simplest form, without handing on what a
transfer that is slowed elsewhere leaves over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from planner.sim_agenda import Agenda
from planner.terms import Link

ROUNDING = 1e-9  # of a transfer: less than that is nothing


@dataclass(slots=True, eq=False)
class Transfer:
    """`left` bytes of `num_bytes` are still at `source`."""

    source: str
    target: str
    num_bytes: float
    left: float
    done: Callable[[], None]
    rate: float = 0.0


class Wires:
    """All transfers of a deployment. `moved` counts bytes, `busy_s` the seconds in which any were on their way."""

    def __init__(self, agenda: Agenda, link: Link) -> None:
        if link.bytes_per_s <= 0 or link.latency_s < 0:
            raise ValueError(f"a link has some speed, and a latency of 0 or more: {link}")
        self.agenda, self.link = agenda, link
        self.moved = self.busy_s = 0.0
        self._active: dict[Transfer, None] = {}
        self._settled_s = 0.0
        self._version = 0

    def start(self, source: str, target: str, num_bytes: float, done: Callable[[], None]) -> Transfer:
        """Move so many bytes, and call `done` when they are there."""
        transfer = Transfer(source, target, num_bytes, num_bytes, done)
        self.moved += num_bytes
        if math.isinf(self.link.bytes_per_s) or not num_bytes:
            self._arrive(transfer)
        else:
            self._settle()
            self._active[transfer] = None
            self._share()
        return transfer

    def stop(self, transfer: Transfer) -> bool:
        """Move it no further; False if all of it was sent already, and `done` is called or will be."""
        if transfer not in self._active:
            return False
        self._settle()
        del self._active[transfer]
        self._share()
        return True

    def _settle(self) -> None:
        """Note what was moved since the last time."""
        since_s = self.agenda.now_s - self._settled_s
        self._settled_s = self.agenda.now_s
        if self._active:
            self.busy_s += since_s
        for transfer in self._active:
            transfer.left -= transfer.rate * since_s

    def _share(self) -> None:
        """Divide the ports among those that are on their way now, and look again when the first of them is there."""
        self._version += 1
        if not self._active:
            return
        out = Counter(transfer.source for transfer in self._active)
        into = Counter(transfer.target for transfer in self._active)
        soonest_s = math.inf
        for transfer in self._active:
            transfer.rate = self.link.bytes_per_s / max(out[transfer.source], into[transfer.target])
            soonest_s = min(soonest_s, transfer.left / transfer.rate)
        self.agenda.at(self.agenda.now_s + max(0.0, soonest_s), self._look, self._version)

    def _look(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        soonest = min(transfer.left / transfer.rate for transfer in self._active)
        there = [
            transfer
            for transfer in self._active
            if transfer.left <= ROUNDING * transfer.num_bytes or transfer.left / transfer.rate <= soonest
        ]
        for transfer in there:
            del self._active[transfer]
            self._arrive(transfer)
        self._share()

    def _arrive(self, transfer: Transfer) -> None:
        self.agenda.at(self.agenda.now_s + self.link.latency_s, transfer.done)
