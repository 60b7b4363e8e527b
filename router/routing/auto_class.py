"""The KV class of requests that leave it to the router: which classes come into question, and what each would cost
(pure).

A class comes into question if the loss that the workers' calibration recorded for it is within the budget; `raw` always
does. Of those that a pair of workers shares, the better one loses least, and the lighter one has the fewest bytes per
token; of equal ones it is the one that loses less. `router.routing.class_choice` decides between the two, with a mode
of its own for each pair.

Speeds of links are those of recent moves: what was measured when the link was made may have changed since.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from diptych.chunks import CHUNK_TOKENS, DEFAULT_KV_BUDGET_PCT
from diptych.messages import Hello
from router.routing.class_choice import (
    QUALITY,
    ClassDecision,
    ClassEstimate,
    ClassMode,
    choose_class,
)
from router.routing.credits import prefill_room_tokens, round_up_to_chunks
from router.routing.pairs import Pair
from router.routing.policy import (
    DEFAULT_STEP_S,
    DEFAULT_TOKEN_S,
    RoutingNeed,
    RoutingView,
    seconds_per_unit,
)
from router.workers.fleet import ROLES
from router.workers.kv_classes import classes_of, loss_of, pool_size, shared_classes

# Seconds by which KV may arrive after its prompt is prefilled, if no TPOT SLO says so: what hardly anybody notices.
SPARE_S = 0.05
# Weight of the past in the measured speed of a link, applied at each move.
SPEED_DECAY = 0.8
# Smaller moves tell more about latency than about speed: they count only if they were faster than those before.
MIN_MEASURED_BYTES = 64 << 10

INFINITE = float("inf")


class MoveHistory(NamedTuple):
    """Bytes and seconds of recent moves over a link; older ones count less."""

    num_bytes: float = 0.0
    seconds: float = 0.0


class EligibleClasses(NamedTuple):
    """The two classes between which the router chooses; they may be the same one."""

    better: str
    lighter: str


def eligible_classes(source: Hello | None, target: Hello, budget_pct: float) -> list[str]:
    """The classes of a pair of workers whose recorded loss is within the budget, the one that loses least first.

    `source` is None if `target` also prefills. Of classes with equal losses the one with more bytes comes first.
    """
    names = list(classes_of(target)) if source is None else shared_classes(target, source)
    sizes, losses = classes_of(target), dict[str, float]()
    for name in names:
        found = [loss_of(hello, name) for hello in (source, target) if hello is not None]
        known = [loss for loss in found if loss is not None]
        if len(known) == len(found) and max(known) <= budget_pct:
            losses[name] = max(known)
    return sorted(losses, key=lambda name: (losses[name], -sizes[name][1], name))


class WorkerPaces(NamedTuple):
    """Measured seconds per prefilled token, and per decode step, of each worker that can do either."""

    token_s: Mapping[str, float]
    step_s: Mapping[str, float]

    @classmethod
    def of(cls, view: RoutingView) -> WorkerPaces:
        """The paces of all members; defaults where nothing was measured yet."""
        token_s = dict[str, float]()
        for role in ROLES:
            worker_states = view.fleet.workers_of(role)
            token_s |= seconds_per_unit(
                [(one, one.stats.step_tokens) for one in worker_states], DEFAULT_TOKEN_S
            )
        worker_states = view.fleet.workers_of("decode")
        return cls(
            token_s, seconds_per_unit([(one, one.stats.steps) for one in worker_states], DEFAULT_STEP_S)
        )


@dataclass(slots=True)
class AutoClasses:
    """Chooses the classes of requests, and remembers the mode of each pair of workers and the speed of each link."""

    budget_pct: float = DEFAULT_KV_BUDGET_PCT
    modes: dict[Pair, ClassMode] = field(default_factory=dict)
    _moves: dict[Pair, MoveHistory] = field(default_factory=dict)

    def record_move(self, source: str, target: str, num_bytes: int, seconds: float) -> None:
        """KV of `num_bytes` was moved over a link in `seconds`."""
        before = self._moves.get((source, target), MoveHistory())
        faster = num_bytes * before.seconds > before.num_bytes * seconds
        if seconds <= 0 or (num_bytes < MIN_MEASURED_BYTES and not faster):
            return
        self._moves[source, target] = MoveHistory(
            SPEED_DECAY * before.num_bytes + num_bytes, SPEED_DECAY * before.seconds + seconds
        )

    def forget_worker(self, worker: str) -> None:
        """The worker was lost: its links and what was chosen there do not count any more."""
        for table in (self.modes, self._moves):
            for pair in [pair for pair in table if worker in pair]:
                del table[pair]

    def find_classes(self, pair: Pair, view: RoutingView) -> EligibleClasses | None:
        """The two classes between which requests on this pair of members are divided; None if there is none."""
        workers, (source, target) = view.fleet.workers, pair
        hello = workers[target].hello
        names = eligible_classes(None if source is None else workers[source].hello, hello, self.budget_pct)
        if not names:
            return None
        # `min` takes the first of equals, which loses least.
        return EligibleClasses(names[0], min(names, key=lambda name: pool_size(hello, name).chunk_bytes))

    def rank_classes(
        self,
        pair: Pair,
        need: RoutingNeed,
        view: RoutingView,
        paces: WorkerPaces,
        now_s: float,
        closed: Container[tuple[str, str]] = (),
    ) -> list[ClassDecision]:
        """The classes that a request may take on a pair of members, preferred first; none if none is eligible.

        `paces` are the same for all pairs of a view. `closed` are workers with classes whose room an earlier request
        waits for.
        """
        found = self.find_classes(pair, view)
        if found is None or found.better == found.lighter or need.bulk:
            # Bulk work waits for room, so it has no reason to lose quality.
            return [] if found is None else [ClassDecision(found.better, QUALITY)]
        better, lighter = (self._estimate_class(name, pair, need, view, paces, closed) for name in found)
        spare_s = _spare_s(pair[1], need, view, paces)
        decisions, self.modes[pair] = choose_class(
            better, lighter, spare_s, self.modes.get(pair, ClassMode()), now_s
        )
        return decisions

    def _estimate_class(
        self,
        kv_class: str,
        pair: Pair,
        need: RoutingNeed,
        view: RoutingView,
        paces: WorkerPaces,
        closed: Container[tuple[str, str]],
    ) -> ClassEstimate:
        """What a class would cost the request on this pair of members."""
        (source, target), exact = pair, replace(need, kv_class=kv_class)
        first = source or target
        cached, moved = view.shared_tokens(first, exact), view.shared_tokens(target, exact)
        beside = need.beside
        shares = [
            _pool_shares(
                target, need.room_tokens - moved, beside.room_tokens - beside.alike * moved, exact, view
            )
        ]
        if source is not None:
            shares.append(_pool_shares(source, prefill_room_tokens(need), beside.prefill_tokens, exact, view))
        share, group_share = map(max, zip(*shares, strict=True))
        if any((worker, kv_class) in closed for worker in pair if worker is not None):
            share = INFINITE
        tokens = view.ledger.load_of(first).queued_tokens + need.prompt_tokens - cached
        prefill_s = tokens * paces.token_s[first]
        if source is None:
            return ClassEstimate(kv_class, share, prefill_s, 0.0, group_share=group_share)
        queued = max(view.ledger.load_of(name).moving_tokens for name in (source, target))
        move_s, queue_s = (
            self._move_s(source, target, count, exact, view) for count in (need.prompt_tokens - moved, queued)
        )
        return ClassEstimate(kv_class, share, prefill_s, move_s, queue_s, group_share)

    def _move_s(self, source: str, target: str, tokens: int, need: RoutingNeed, view: RoutingView) -> float:
        """Seconds in which the KV of `tokens` is moved in the class of `need`, at the speed of recent moves."""
        if tokens <= 0:
            return 0.0
        worker_state = view.fleet.workers[target]
        num_bytes = (
            round_up_to_chunks(tokens)
            // CHUNK_TOKENS
            * pool_size(worker_state.hello, need.kv_class).chunk_bytes
        )
        link, moves = worker_state.links[source], self._moves.get((source, target))
        speed = moves.num_bytes / moves.seconds if moves else max(link.gb_per_s, 1e-3) * 1e9
        return link.latency_us * 1e-6 + num_bytes / speed


def _pool_shares(
    worker: str, tokens: int, beside_tokens: int, need: RoutingNeed, view: RoutingView
) -> tuple[float, float]:
    """The share of the pool that is booked if `tokens` more are, and if its part of `beside_tokens` is as well.

    Other sequences of the request spread over all workers of a role that hold its class. Requests of worse priority do
    not count.
    """
    load = view.ledger.load_up_to(worker, need.priority, need.kv_class)
    hello = view.fleet.workers[worker].hello
    capacity = pool_size(hello, need.kv_class).num_slabs * CHUNK_TOKENS
    if not capacity:
        return INFINITE, INFINITE
    part = beside_tokens / max(1, len(view.eligible_workers(hello.role, need))) if beside_tokens else 0.0
    return (load.room_tokens + tokens) / capacity, (load.room_tokens + tokens + part) / capacity


def _spare_s(target: str, need: RoutingNeed, view: RoutingView, paces: WorkerPaces) -> float:
    """Seconds by which KV may arrive after its prompt is prefilled: what decoding leaves of the TPOT SLO."""
    if view.tpot_s is None:
        return SPARE_S
    answer_tokens = max(1, need.room_tokens - need.prompt_tokens)
    return max(0.0, view.tpot_s - paces.step_s[target]) * answer_tokens
