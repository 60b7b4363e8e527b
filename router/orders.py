"""Orders to drain or to change pools, and when their workers are told (pure).

    give ──nobody is on the way there any more──▶ told ──the same life over a new link──▶ told again
                                                    └──another life──▶ forgotten

A worker that was told takes nothing new. So the relay leads: from `give` on no request begins there, but those whose
prompts are being read were promised room there, and may have nowhere else to go, as an answer stays with the version
that it began with. The worker is told when all requests on its books have come, which their deadlines bound.
"""

from __future__ import annotations

from collections.abc import Mapping

from diptych.messages import Drain, Turn
from router.fleet import Fleet
from router.live import Live
from router.policy import Ledger


class Orders:
    """The latest order for each worker: to which life of it, and whether that is still to be told."""

    def __init__(self, fleet: Fleet, ledger: Ledger) -> None:
        self._fleet, self._ledger = fleet, ledger
        self._given: dict[str, tuple[str, Drain | Turn]] = {}
        self._untold: set[str] = set()

    def give(self, worker: str, order: Drain | Turn) -> None:
        """The worker gets no new requests. Nothing happens if it is not there; who is to end is not turned any more."""
        member = self._fleet.members.get(worker)
        if member is None:
            return
        life, before = self._given.get(worker, ("", order))
        kept = life == member.hello.incarnation and isinstance(before, Drain)
        self._given[worker] = member.hello.incarnation, before if kept else order
        self._untold.add(worker)
        if not member.draining:  # else it may refuse already, or has been told
            member.draining = member.expecting = True

    def met(self, worker: str) -> None:
        """It has come. If that is the life that had an order, the link on which it was told may have broken before."""
        member = self._fleet.members[worker]
        life, _ = self._given.get(worker, ("", None))
        if life == member.hello.incarnation:
            member.draining = True
            self._untold.add(worker)
        else:
            self._given.pop(worker, None)
            self._untold.discard(worker)

    def due(self, live: Mapping[str, Live]) -> list[tuple[str, Drain | Turn]]:
        """Who is to be told what now; from then on they refuse whatever comes."""
        if not self._untold:
            return []
        told = []
        for worker in sorted(self._untold & self._fleet.members.keys()):
            member = self._fleet.members[worker]
            if not member.expecting or all(
                worker in live[name].open for name in self._ledger.requests(worker)
            ):
                self._untold.discard(worker)
                member.expecting = False
                told.append((worker, self._given[worker][1]))
        return told
