"""Selects the workers for each request among the pairs that can serve it, and accounts for the loads (pure).

A pair is a linked prefill and decode worker, or one worker that does both. Credits say whether the pair has room,
quarantine says whether this request may use it, and the predicted wait says which pair is best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, takewhile
from operator import attrgetter, eq
from typing import NamedTuple

from diptych.chunks import AUTO_CLASS, CHUNK_TOKENS
from diptych.request import RequestStage
from router.effects import ChosenPair
from router.requests.quarantine import CrashQuarantine
from router.requests.request_state import RequestState
from router.routing.answer_lengths import AnswerLengths
from router.routing.auto_class import AutoClasses, WorkerPaces
from router.routing.capabilities import FleetCapabilities
from router.routing.class_choice import ClassDecision
from router.routing.credits import missing_room, pairs_with_credit, pairs_with_overdraft
from router.routing.eviction_estimate import KeptShares, segment_tokens
from router.routing.load_ledger import LoadLedger
from router.routing.overdraft import AnswerEnds, OverdraftPatience, RunningAnswer
from router.routing.pairs import Pair, PairList, pair_list, workers_of_pair
from router.routing.policy import (
    ANY_POOLED,
    RankedPair,
    RoutingNeed,
    RoutingView,
    choose_decode,
    choose_pair,
    transfer_s,
)
from router.routing.prefix_index import ChunkNames, PrefixIndex
from router.routing.tier_savings import tier_bytes
from router.workers.fleet import Fleet
from router.workers.kv_classes import (
    AnswerVersion,
    classes_of,
    decided_class,
    holds_class,
    pool_size,
)

# What the names of KV classes begin with in the uses of workers by requests that are pooled.
POOLED_USE = "pooled/"


class PickedPair(NamedTuple):
    """The workers for an attempt, and the KV class that it has there. `overdrawn`: its decode room is not free yet."""

    pair: ChosenPair
    decision: ClassDecision
    overdrawn: bool = False


@dataclass(slots=True)
class PairSelector:
    """Selects pairs of workers.

    `split`: the deployment has prefill workers. `allow_local_prefill`: decode workers may prefill while no prefill
    worker can. `auto_local_prefill`: decode workers may also prefill whenever that is predicted to be better, as long
    as their steps stay within `tpot_s` seconds. `overdraft`: prompts may begin before their decode room is free, if it
    is predicted to be.
    """

    fleet: Fleet
    index: PrefixIndex
    split: bool
    allow_local_prefill: bool
    auto_local_prefill: bool = False
    tpot_s: float | None = None
    only_pools: bool = False
    overdraft: bool = False
    # All requests that have not ended, by name.
    live: dict[str, RequestState] = field(default_factory=dict)
    ends: AnswerEnds = field(default_factory=AnswerEnds)
    patience: OverdraftPatience = field(default_factory=OverdraftPatience)
    ledger: LoadLedger = field(default_factory=LoadLedger)
    answers: AnswerLengths = field(default_factory=AnswerLengths)
    bulk_answers: AnswerLengths = field(default_factory=AnswerLengths)
    auto: AutoClasses = field(default_factory=AutoClasses)
    kept_shares: KeptShares = field(default_factory=KeptShares)
    view: RoutingView = field(init=False)
    capabilities: FleetCapabilities = field(init=False)

    def __post_init__(self) -> None:
        self.view = RoutingView(
            self.fleet,
            self.ledger,
            self.split,
            self.index,
            self.allow_local_prefill,
            self.auto_local_prefill,
            self.tpot_s,
            self.only_pools,
        )
        self.capabilities = FleetCapabilities(self.view, self.auto)

    def version_of(self, pair: ChosenPair, state: RequestState, kv_class: str | None = None) -> AnswerVersion:
        """The version of an attempt on the chosen workers: that of its answer, that of `kv_class`, or else that of the
        first class which the request may have.
        """
        found = self.capabilities.versions_of((pair.prefill, pair.decode), kv_class or state.kv_class)
        return state.version or found[0]

    def traits_of(self, pair: ChosenPair) -> frozenset[str]:
        """The traits that all workers of a pair have, which must be members."""
        workers, traits = self.fleet.workers, frozenset(self.fleet.workers[pair.decode].hello.traits)
        return traits if pair.prefill is None else traits & frozenset(workers[pair.prefill].hello.traits)

    def pick_pair(
        self,
        state: RequestState,
        found: PairList,
        quarantine: CrashQuarantine,
        closed: set[tuple[str, str]],
        now_s: float,
        behind: bool = False,
    ) -> PickedPair | None:
        """The best pair of `found` with room for a queued request, and its KV class there, or None.

        `behind`: its tenant is underserved.

        If no pair has room, the workers that the request could use are added to `closed`, each with the KV class that
        it would use there, so that later requests in the queue do not take the room it waits for. Requests of other
        classes may. A quiet worker (silent lately) counts as having no room.
        """
        name, need = state.request.id, replace(state.need, underserved=True) if behind else state.need
        allowed = found = found.with_local if self.auto_local_prefill else found
        if state.failed_workers:
            least = min((len(state.failed_workers & workers_of_pair(pair)) for pair in found), default=0)
            allowed = PairList(
                pair for pair in found if len(state.failed_workers & workers_of_pair(pair)) == least
            )
        if len(quarantine):
            allowed = allowed.without({one for one in allowed.workers if not quarantine.may_run(name, one)})
        tried: list[tuple[RoutingNeed, PairList]] = []
        for groups in self._rank_classes(state, need, allowed, closed, now_s):
            ranked_pairs: list[tuple[RankedPair, ClassDecision]] = []
            for decision, pairs in groups.items():
                exact = need if decision.kv_class is None else replace(need, kv_class=decision.kv_class)
                tried.append((exact, pair_list(pairs)))
                if (ranked := self._pick_with_room(*tried[-1], closed, now_s)) is not None:
                    ranked_pairs.append((ranked, decision))
            if ranked_pairs:
                ranked, decision = min(ranked_pairs)
                return PickedPair(ranked.pair, decision, ranked.overdrawn)
        closed.update(self._use(worker, exact) for exact, pairs in tried for worker in pairs.workers)
        return None

    def _rank_classes(
        self,
        state: RequestState,
        need: RoutingNeed,
        found: PairList,
        closed: set[tuple[str, str]],
        now_s: float,
    ) -> Sequence[Mapping[ClassDecision, list[Pair]]]:
        """Which class a request would have on which pairs: first as it is preferred, then where there is no room.

        A request that names a class, or may have any, has the first one that both workers of a pair have. Where a
        worker has several, that need not be its own first class, so room has to be counted pair by pair. Workers of
        different pairs may have different classes of one name, as during an upgrade.
        """
        if state.version is not None or (
            need.kv_class is None
            and all(len(worker_state.hello.kv_classes) < 2 for worker_state in self.fleet.workers.values())
        ):
            return [{ClassDecision(need.kv_class, state.kv_reason): found}]
        rounds: list[dict[ClassDecision, list[Pair]]] = [{}, {}]
        paces: WorkerPaces | None = None
        for pair in found:
            decisions = list[ClassDecision]()
            if self._leaves_choice(need, pair):
                paces = paces or WorkerPaces.of(self.view)
                decisions = self.auto.rank_classes(pair, need, self.view, paces, now_s, closed)
            if not decisions and need.kv_class != AUTO_CLASS:
                first = self.capabilities.versions_of(pair, need.kv_class)[0]
                decisions = [ClassDecision(first.kv_class, state.kv_reason)]
            for groups, decision in zip(rounds, decisions, strict=False):
                groups.setdefault(decision, []).append(pair)
        return rounds

    def _leaves_choice(self, need: RoutingNeed, pair: Pair) -> bool:
        """Whether the router chooses the class on this pair: the request asks for that, or its workers do.

        No KV of a prompt that is pooled is moved, so its worker's first class is as good as another.
        """
        if need.pools:
            return False
        asks_none = need.kv_class is None and self.fleet.workers[pair[1]].hello.kv_auto
        return asks_none or need.kv_class == AUTO_CLASS

    def _pick_with_room(
        self, need: RoutingNeed, allowed: PairList, closed: set[tuple[str, str]], now_s: float
    ) -> RankedPair | None:
        """As `pick_pair`, among pairs that `need` may use, all with the same KV class of it."""
        unavailable = set(self.fleet.quiet)
        if closed:
            unavailable |= {worker for worker in allowed.workers if self._use(worker, need) in closed}
        free = allowed.without(unavailable)
        ranked = choose_pair(need, self.view, pairs_with_credit(free, need, self.view))
        if ranked is not None or not self.overdraft or need.bulk or need.pools:
            return ranked
        early = pairs_with_overdraft(
            free,
            need,
            self.view,
            partial(self._running_answers, need, now_s),
            self.ends,
            self.patience.share,
        )
        ranked = choose_pair(need, self.view, early)
        return None if ranked is None else ranked._replace(overdrawn=True)

    def _counted_at(self, worker: str, need: RoutingNeed) -> list[RequestState]:
        """The requests whose room at a worker counts for `need`: it is in the same pool, and not preempted for it."""
        kv_class = decided_class(self.fleet.workers[worker].hello, need.kv_class)
        return [
            state
            for name in self.ledger.requests_at(worker)
            if (state := self.live[name]).request.tenancy.priority <= need.priority
            and (state.attempt_version is None or state.attempt_version.kv_class == kv_class)
        ]

    def _running_answers(self, need: RoutingNeed, now_s: float, worker: str) -> list[RunningAnswer]:
        """What decodes at a worker, of the requests that count there.

        Chunks and segments of a prompt that others there have as well are not freed by its end.
        """
        states = self._counted_at(worker, need)
        # The longest prefix that is shared with any other is shared with a neighbour in this order.
        shared = dict.fromkeys((state.request.id for state in states), 0)
        for one, two in pairwise(sorted(states, key=attrgetter("decoded_chunks"))):
            same = sum(1 for _ in takewhile(bool, map(eq, one.decoded_chunks, two.decoded_chunks)))
            shared[one.request.id], shared[two.request.id] = max(shared[one.request.id], same), same
        return [
            state.running_answer(_room_of_chunks(state, shared[state.request.id]), now_s)
            for state in states
            if state.request.stage is RequestStage.DECODING
        ]

    @property
    def num_overdrawn(self) -> int:
        """The requests whose attempt began before their decode room was free, and that still have none."""
        return sum(state.overdrawn for state in self.live.values())

    def settle_overdraft(self, state: RequestState) -> bool:
        """The KV of an overdrawn request is complete; returns whether its decode worker has room for it now.

        It need not have room for those that were overdrawn later.
        """
        assert state.pair is not None, "it has an attempt"
        worker, need = state.pair.decode, state.attempt_need
        later = [
            one.shares[worker].room_tokens
            for one in self._counted_at(worker, need)
            if one.overdrawn and _place_of_start(one) > _place_of_start(state)
        ]
        in_time = missing_room(worker, need, self.view, 0) <= sum(later)
        self.patience.record_outcome(in_time)
        return in_time

    def _use(self, worker: str, need: RoutingNeed) -> tuple[str, str]:
        """A worker, and the KV class that a request would use there.

        What is pooled need not wait behind requests without room at a decode worker: it has a use of its own.
        """
        kv_class = decided_class(self.fleet.workers[worker].hello, need.kv_class)
        return worker, f"{POOLED_USE}{kv_class}" if need.pools else kv_class

    def all_uses(self, found: PairList, pooled: bool = False) -> set[tuple[str, str]]:
        """All that `pick_pair` could add to `closed`: the workers of these pairs, with each of their classes. `pooled`:
        also for requests that are pooled.
        """
        workers = self.fleet.workers
        uses = {(name, one) for name in found.workers for one in classes_of(workers[name].hello)}
        if not pooled:
            return uses
        names = self.capabilities.find_pairs(ANY_POOLED).workers
        return uses | {
            (name, f"{POOLED_USE}{one}") for name in names for one in classes_of(workers[name].hello)
        }

    def can_pin(self, pinned_pair: ChosenPair, kv_class: str | None) -> bool:
        """Whether a canary can use the pair that it is pinned to, with KV of `kv_class` (None: of any)."""
        if (
            pinned_pair.prefill is not None
            and (pinned_pair.prefill, pinned_pair.decode) not in self.fleet.linked_pairs()
        ):
            return False
        there = any(
            worker_state.name == pinned_pair.decode
            and (pinned_pair.prefill is not None or not worker_state.draining)
            for worker_state in self.fleet.workers_of("prefill" if self.only_pools else "decode")
        )
        # Only of a worker that is there is known which classes it has.
        return there and kv_class in (
            None,
            *self.capabilities.classes_of_pair((pinned_pair.prefill, pinned_pair.decode)),
        )

    def rebind_decode(self, state: RequestState, quarantine: CrashQuarantine) -> str | None:
        """The best decode worker for the KV that `state.source` computes or holds; loads change during prefill.

        Workers that failed the request before, or are quiet, come last, so that the nearest worker does not fail it
        again and again. A worker that already got this attempt is excluded, since it would drop a second order as late.
        Afterwards the request counts as load of no worker.
        """
        workers = self.fleet.workers
        # The request's own planned load must not count against a worker.
        self.ledger.book_shares(state.request.id, {})
        if state.source is None:
            return None
        barred = {
            name
            for name, worker_state in workers.items()
            if worker_state.hello.incarnation in state.contacted_lives
        }
        if state.pinned_pair is not None:
            decode = workers.get(state.pinned_pair.decode)
            if decode is None or state.source not in decode.links or decode.name in barred:
                return None
            return None if decode.draining and not decode.accepts_pending else decode.name
        barred |= {name for name in workers if not quarantine.may_run(state.request.id, name)} - {
            state.source
        }
        others = choose_decode(
            state.source, state.attempt_need, self.view, barred | state.failed_workers | self.fleet.quiet
        )
        return others or choose_decode(state.source, state.attempt_need, self.view, barred)

    def transfer_s(self, pair: ChosenPair, need: RoutingNeed) -> float:
        """Predicted seconds of the transfer of its KV to the decode worker; 0 if one worker does both."""
        return transfer_s(pair.prefill, pair.decode, need, self.view) if pair.prefill is not None else 0.0

    def begin_attempt(self, state: RequestState, pair: ChosenPair) -> None:
        """Record the estimates for an attempt on these workers: tokens to compute, and tokens that are shared."""
        first, need = pair.prefill or pair.decode, state.attempt_need
        state.unprefilled_tokens = need.prompt_tokens - self.view.spared_tokens(first, need)
        state.shared_tokens = self.view.shared_room(pair.decode, need)
        if not state.bulk:
            self.expect_chunks(first, state.chunks, need.kv_class)

    def admit_to_decode(self, state: RequestState, decode: str) -> None:
        """Record the estimate for the decode worker that the request is sent to now: the tokens that are shared."""
        need = state.attempt_need
        state.shared_tokens = self.view.shared_room(decode, need)
        self.expect_chunks(decode, state.handed_chunks, need.kv_class, need.kept_chunks)

    def expect_chunks(
        self, worker: str, chunks: ChunkNames, kv_class: str | None, kept_chunks: ChunkNames = ()
    ) -> None:
        """Assume from now on that the worker has these chunks cached, in its pool of `kv_class`; and, in no tier, what
        is kept of `kept_chunks` behind them.
        """
        if (worker_state := self.fleet.workers.get(worker)) is not None and holds_class(
            worker_state.hello, kv_class
        ):
            size, name = pool_size(worker_state.hello, kv_class), decided_class(worker_state.hello, kv_class)
            self.index.record_sent(worker, (*chunks, *kept_chunks), size.num_slabs, name)
            for tier, num_bytes in tier_bytes(worker_state).items():
                self.index.record_sent(tier, chunks, num_bytes // size.chunk_bytes, name)

    def remember_answer(self, state: RequestState) -> None:
        """Record the answer's length, and that its decode worker has prompt and answer cached, for follow-up
        requests.
        """
        request, pair = state.request, state.pair
        if state.pools:
            return None
        if state.bulk:
            return self.bulk_answers.record_length(len(request.output))
        self.answers.record_length(len(request.output))
        self.ends.record_answer(len(request.output), request.sampling.max_tokens)
        if request.stage is RequestStage.DECODING and pair is not None and not request.keep.evicts:
            # The last token has no KV.
            text = request.prompt, request.output[:-1]
            names = self.index.extend_names(state.chunks, *text, request.tenancy.scope)
            self.expect_chunks(pair.decode, names, state.attempt_need.kv_class)

    def book_load(self, state: RequestState) -> None:
        """Record the load that the request puts on each of its workers now, in place of the earlier entries."""
        state.booked_tokens = state.room_tokens
        kv_class = None if state.attempt_version is None else state.attempt_version.kv_class
        self.ledger.book_shares(state.request.id, state.shares, state.request.tenancy.priority, kv_class)


def _room_of_chunks(state: RequestState, count: int) -> int:
    """Tokens of room of the first so many of `decoded_chunks`: whole ones, and what segments keep of others."""
    whole = min(count, len(state.handed_chunks))
    return CHUNK_TOKENS * whole + segment_tokens(count - whole, state.kept_share)


def _place_of_start(state: RequestState) -> tuple[float, int]:
    """The order in which attempts began; those that began together did so in order of arrival."""
    return state.request.entered_s[RequestStage.QUEUED], state.number
