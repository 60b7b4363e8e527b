"""A source slab that is given to another request while it is pulled: forced, at a step of the pull that is chosen.

A pull is work in turns (`kvtransfer.turns`), or reads that are posted one after the other. Between two of them the
source, another process, ends the lease and writes another request's KV into the same slabs; it has answered before the
pull goes on. So the race is not waited for.
"""

from __future__ import annotations

import random

from kvtransfer.early import Early
from tests.engine.transport_source import Remote
from tests.faults.corrupt import LAYERS, SLABS, Offered, Target, compute, hinted, offer, promised

WAYS = ("late", "early", "staging")


class Reassigned:
    """Gives the slabs to another request after step `at` of a pull, which is not its last."""

    def __init__(self, source: Remote, number: int, at: int) -> None:
        self._source, self._number, self._at = source, number, at
        self.happened = False

    def __call__(self, turn: int) -> None:
        if turn == self._at:
            self.now()

    def now(self) -> None:
        self._source("stage", slabs=list(SLABS))  # as the prefill worker does when a slab is taken anew
        offer(self._source, self._number)
        self.happened = True


def race(target: Target, way: str, number: int, rng: random.Random) -> tuple[str, bool]:
    """One hand-off and one reassignment; the verdict, and whether the slabs were reassigned before the last byte.

    "late": while a ticket is being fetched. "early": in the fetch of what was begun ahead. "staging": between two looks
    at the board, and the ticket is written for what lies there then.
    """
    source, other = target.source, 100_000 + number
    if way == "late":
        offered = offer(source, number)
        fault = Reassigned(source, other, rng.randrange(len(SLABS) - 1))
        return target.late(offered, fault), fault.happened
    fault = Reassigned(source, other, 0)

    def early(early: Early) -> Offered:
        early.hint(hinted(source, number))
        compute(source, number, 0, 1)
        target.advance(early)
        compute(source, number, 1, LAYERS)
        return promised(source, number)

    def staging(early: Early) -> Offered:
        early.hint(hinted(source, number))
        compute(source, number, 0, 1)
        target.advance(early, fault)
        early.hint(hinted(source, number))
        compute(source, number, 0, LAYERS)
        if rng.random() < 0.5:
            target.advance(early)
        return promised(source, number)

    if way == "early":
        return target.early(early, fault)[0], fault.happened
    return target.early(staging)[0], fault.happened
