"""Decides which adopted sequences get a seat in the batch, and which running ones give theirs up (pure).

An adopted sequence came with its KV, so its memory is allocated: it needs only one of the `num_seats` seats. Sequences
that evict also take one of the places for them (`EngineLimits.max_evicting`), for as long as they have KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Protocol

from engine.scheduling.fairness import VirtualTokenCounter
from engine.sequence import EngineLimits, Sequence

# More than there can be sequences.
ANY_NUMBER = 1 << 30


class SequenceQueues(Protocol):
    """The sequences of one engine, by key (`engine.scheduling.scheduler.Scheduler`)."""

    @property
    def limits(self) -> EngineLimits:
        """The limits of the engine."""

    @property
    def waiting(self) -> Mapping[str, Sequence]:
        """Those that hold no slabs; parked ones have KV in the host tier."""

    @property
    def adopted(self) -> Mapping[str, Sequence]:
        """Those with KV that wait for a seat."""

    @property
    def running(self) -> Mapping[str, Sequence]:
        """Those with KV and a seat."""


def choose_startable(
    running: Collection[Sequence],
    adopted: Collection[Sequence],
    token_counter: VirtualTokenCounter,
    num_seats: int,
) -> list[Sequence]:
    """The adopted sequences that take the free seats, in order. They take precedence over the queue.

    Within a priority, sequences of tenants with less than their share of the seats come first.
    """
    free = num_seats - len(running)
    if not adopted or free <= 0:
        return []
    order = _adopted_order(adopted, token_counter)
    if len(order) <= free:
        return order
    seated, share = _count_seats(running, order, num_seats)
    beyond: list[bool] = []
    for seq in order:
        beyond.append(seated[seq.tenancy.tenant] >= share)
        seated[seq.tenancy.tenant] += 1
    ranked = sorted(range(len(order)), key=lambda i: (order[i].tenancy.priority, beyond[i], i))
    return [order[i] for i in ranked[:free]]


def choose_yielding(
    running: Collection[Sequence],
    adopted: Collection[Sequence],
    token_counter: VirtualTokenCounter,
    num_seats: int,
) -> tuple[str, ...]:
    """Keys of the running sequences that give their seats to adopted sequences, when no seat is left.

    An adopted sequence takes the seat of a sequence with a worse priority, or of one whose tenant has more than its
    share of the seats while its own tenant has less. So one tenant's many sequences do not block another tenant's.
    """
    if not adopted or len(running) < num_seats:
        return ()
    order = _adopted_order(adopted, token_counter)
    seated, share = _count_seats(running, order, num_seats)
    seats = {seq.key: seq for seq in running if seq.decoding}
    yielding = []
    for seq in order:
        if (loser := _choose_loser(seq, seats.values(), seated, share)) is None:
            continue
        yielding.append(loser.key)
        del seats[loser.key]
        seated[loser.tenancy.tenant] -= 1
        seated[seq.tenancy.tenant] += 1
    return tuple(yielding)


def _adopted_order(adopted: Collection[Sequence], token_counter: VirtualTokenCounter) -> list[Sequence]:
    """The adopted sequences that are ready: by priority, then the tenant with the least service, then arrival."""
    return sorted(
        [seq for seq in adopted if seq.ready],
        key=lambda seq: (seq.tenancy.priority, token_counter.served_tokens(seq.tenancy.tenant), seq.number),
    )


def _count_seats(
    running: Collection[Sequence], adopted: Iterable[Sequence], num_seats: int
) -> tuple[Counter[str], int]:
    """Number of seats by tenant, and how many each tenant may have while others want one."""
    seated = Counter([seq.tenancy.tenant for seq in running])
    tenants = len(seated.keys() | {seq.tenancy.tenant for seq in adopted})
    return seated, max(1, num_seats // max(1, tenants))


def _choose_loser(
    seq: Sequence, seats: Iterable[Sequence], seated: Counter[str], share: int
) -> Sequence | None:
    """The running sequence whose seat `seq` may take: the one with the least precedence; None if there is none."""
    mine, under = seq.tenancy.priority, seated[seq.tenancy.tenant] < share
    losers = [
        other
        for other in seats
        if other.tenancy.priority > mine
        or (under and other.tenancy.priority == mine and seated[other.tenancy.tenant] > share)
    ]
    return max(losers, key=lambda other: other.precedence, default=None)


def count_evicting_left(queues: SequenceQueues, moving_seqs: Iterable[Sequence] = ()) -> int:
    """How many more sequences that evict may get KV. Parked ones have theirs, and `moving_seqs` ones on its way."""
    if queues.limits.max_evicting is None:
        return ANY_NUMBER
    parked = [seq for seq in queues.waiting.values() if seq.parked]
    holders = chain(queues.running.values(), queues.adopted.values(), parked, moving_seqs)
    return queues.limits.max_evicting - sum(seq.keep.evicts for seq in holders)


def may_evict(seq: Sequence, queues: SequenceQueues, moving_seqs: Iterable[Sequence] = ()) -> bool:
    """Whether a sequence without slabs may get some, as far as `EngineLimits.max_evicting` goes. A parked one may."""
    return not seq.keep.evicts or seq.parked or count_evicting_left(queues, moving_seqs) > 0
