"""Chooses between two KV classes of a pair of workers for a request that leaves the choice to the router (pure).

    nothing binds                    the better class, which loses less
    the link or the pool binds       the lighter class, whose KV is smaller

The link binds if the KV of the prompt, as the better class has it, and all KV that moves before it, would arrive later
than the prompt is prefilled, by more than the SLO spares. The pool binds if the better class would fill most of its
pool. The choice changes slowly: it becomes the lighter class at once, and the better one again when nothing came near
binding for `RETURN_S`.

A prefix that workers have cached counts as what it saves: tokens that need not be prefilled, moved or kept. So even
while something binds, a request takes the better class if it fits there and its KV is predicted to be in place sooner.
"""

from __future__ import annotations

from typing import NamedTuple

# Why a request has its class: it named it, it is the workers' first one, or the router chose it: since nothing binds
# (QUALITY), since the pool or the link binds, or since a prefix is cached in it.
ASKED, DEFAULT, QUALITY, POOL, LINK, PREFIX = "asked", "default", "quality", "pool", "link", "prefix"
# The pool of the better class binds above this share of it, and is far from it below the second one.
POOL_BINDS, POOL_IS_FREE = 0.9, 0.6
# The same for the link: predicted time of the move over the time that it may take.
LINK_BINDS, LINK_IS_FREE = 1.0, 0.5
# Seconds without anything near binding after which the better class is chosen again.
RETURN_S = 30.0


class ClassDecision(NamedTuple):
    """A KV class (None: the first one that the chosen workers have), and why a request gets it."""

    kv_class: str | None
    reason: str


class BesideNeed(NamedTuple):
    """What all other sequences of an HTTP request need beside the first one.

    Tokens of KV at prefill workers until it is offered, and at decode workers at the end, in whole chunks. None of it
    is shared yet. `alike` is how many of them have the first one's prompt, so that a worker which holds chunks of that
    one holds theirs too.
    """

    prefill_tokens: int = 0
    room_tokens: int = 0
    alike: int = 0


class ClassEstimate(NamedTuple):
    """What a class would cost a request on a pair of workers.

    `pool_share` is the booked share of the fuller one of its two pools, this sequence included; infinite if the request
    may not use one of them now. `group_share` is the same with all sequences of its HTTP request.
    `prefill_s` are the seconds until the prompt is prefilled, behind those before it. `move_s` are the seconds in which
    its KV is moved in this class, `queue_s` those in which all that is moved before it would be, if it had this class
    as well; 0 if nothing is moved.
    """

    kv_class: str
    pool_share: float
    prefill_s: float
    move_s: float
    queue_s: float = 0.0
    group_share: float = 0.0

    @property
    def full_for_group(self) -> bool:
        """Whether the sequences of this HTTP request would fill most of a pool."""
        return max(self.pool_share, self.group_share) > POOL_BINDS

    @property
    def arrival_s(self) -> float:
        """Predicted seconds until the KV is where it is decoded, without those of moves before it. It is moved while
        it is computed.
        """
        return max(self.prefill_s, self.move_s)


class ClassMode(NamedTuple):
    """What the choice on a pair of workers is at present.

    `reason` is POOL or LINK while the lighter class is chosen; None: the better one. `since_s` is when it began,
    `near_s` when something last came near binding.
    """

    reason: str | None = None
    since_s: float = 0.0
    near_s: float = 0.0


def choose_class(
    better_class: ClassEstimate, lighter_class: ClassEstimate, spare_s: float, mode: ClassMode, now_s: float
) -> tuple[list[ClassDecision], ClassMode]:
    """The classes that a request may take, preferred first, and the mode from now on.

    Room for other sequences of the same HTTP request counts for this request only: the mode, which decides for all
    requests on the pair, follows from what is booked.

    Args:
        better_class: the class that loses less, for this request on this pair of workers.
        lighter_class: the class with fewer bytes per token.
        spare_s: seconds by which KV may arrive after its prompt is prefilled.
        mode: the mode until now.
        now_s: the router's time.
    """
    mode = next_mode(better_class, spare_s, mode, now_s)
    heavy, full = better_class.kv_class, better_class.full_for_group
    if mode.reason is None and not full:
        return [ClassDecision(heavy, QUALITY), ClassDecision(lighter_class.kv_class, POOL)], mode
    light = ClassDecision(lighter_class.kv_class, mode.reason or POOL)
    if not full and better_class.arrival_s < lighter_class.arrival_s:
        return [ClassDecision(heavy, PREFIX), light], mode
    # Over a link that binds, the better class would slow down all others.
    return [light] if mode.reason == LINK else [light, ClassDecision(heavy, QUALITY)], mode


def next_mode(better_class: ClassEstimate, spare_s: float, mode: ClassMode, now_s: float) -> ClassMode:
    """The mode after a request was estimated in the better class; arguments as for `choose_class`."""
    allowed_s, move_s = better_class.prefill_s + spare_s, better_class.queue_s + better_class.move_s
    link = move_s / allowed_s if allowed_s > 0 else float(move_s > 0) * 2 * LINK_BINDS
    binding = LINK if link > LINK_BINDS else POOL if better_class.pool_share > POOL_BINDS else None
    if binding is not None:
        since_s = mode.since_s if mode.reason == binding else now_s
        return ClassMode(binding, since_s, now_s)
    if mode.reason is None:
        return mode
    if link > LINK_IS_FREE or better_class.pool_share > POOL_IS_FREE:
        return mode._replace(near_s=now_s)
    return ClassMode(None, now_s, now_s) if now_s - mode.near_s >= RETURN_S else mode
