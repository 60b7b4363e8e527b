"""A source slab that is given to another request while it is pulled: forced, at a step of the pull that is chosen.

A pull is work in turns (`kvtransfer.cooperative`), or reads that are posted one after the other. Between two
of them the source, another process, ends the lease and writes another request's KV into the same slabs; it
has answered before the pull goes on. So the race is not waited for.
"""

from __future__ import annotations

import random

from kvtransfer.pipelined_pull import PipelinedPull
from tests.engine.transport.transport_source import RemoteSource
from tests.faults.corruption import (
    LAYERS,
    SLABS,
    OfferedKv,
    PullTarget,
    compute_layers,
    make_hint,
    make_ticket,
    offer_kv,
)

PULL_WAYS = ("late", "early", "staging")


class SlabReassignment:
    """Gives the slabs to another request after step `at` of a pull, which is not its last."""

    def __init__(self, source: RemoteSource, number: int, at: int) -> None:
        self._source, self._number, self._at = source, number, at
        self.happened = False

    def __call__(self, step: int) -> None:
        if step == self._at:
            self.now()

    def now(self) -> None:
        self._source("stage", slabs=list(SLABS))  # as the prefill worker does when a slab is taken anew
        offer_kv(self._source, self._number)
        self.happened = True


def run_race(target: PullTarget, way: str, number: int, rng: random.Random) -> tuple[str, bool]:
    """One hand-off and one reassignment; how it ended, and whether the slabs were reassigned before the last byte.

    "late": while a ticket is being fetched. "early": in the fetch of what was begun ahead. "staging": between two looks
    at the board, and the ticket is written for what lies there then.
    """
    source, other = target.source, 100_000 + number
    if way == "late":
        offered = offer_kv(source, number)
        fault = SlabReassignment(source, other, rng.randrange(len(SLABS) - 1))
        return target.pull_late(offered, fault), fault.happened
    fault = SlabReassignment(source, other, 0)

    def early(early: PipelinedPull) -> OfferedKv:
        early.add_hint(make_hint(source, number))
        compute_layers(source, number, 0, 1)
        target.advance(early)
        compute_layers(source, number, 1, LAYERS)
        return make_ticket(source, number)

    def staging(early: PipelinedPull) -> OfferedKv:
        early.add_hint(make_hint(source, number))
        compute_layers(source, number, 0, 1)
        target.advance(early, fault)
        early.add_hint(make_hint(source, number))
        compute_layers(source, number, 0, LAYERS)
        if rng.random() < 0.5:
            target.advance(early)
        return make_ticket(source, number)

    if way == "early":
        return target.pull_early(early, fault)[0], fault.happened
    return target.pull_early(staging)[0], fault.happened
