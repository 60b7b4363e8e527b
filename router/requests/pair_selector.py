"""Selects the workers for each request among the pairs that can serve it, and accounts for the loads (pure).

A pair is a linked prefill and decode worker, or one worker that does both. Credits say whether the pair has room,
quarantine says whether this request may use it, and the predicted wait says which pair is best.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from diptych.chunks import AUTO_CLASS
from diptych.failure_statuses import RequestFailure
from diptych.messages import Hello
from diptych.request import RequestStage
from router.effects import ChosenPair
from router.requests.failure_policy import NO_WORKERS
from router.requests.grace import WorkerGrace
from router.requests.quarantine import CrashQuarantine
from router.requests.request_state import RequestKind, RequestState
from router.routing.auto_class import AutoClasses, WorkerPaces, eligible_classes
from router.routing.class_choice import ClassDecision
from router.routing.credits import pairs_with_credit
from router.routing.eviction_estimate import KeptShares
from router.routing.fleet import ROLES, Fleet
from router.routing.kv_classes import (
    AnswerVersion,
    ServedClasses,
    can_evict,
    class_is_gone,
    classes_of,
    decided_class,
    describe_classes,
    have_shared_class,
    holds_class,
    keep_classes_of_pair,
    pool_size,
    versions_of_pair,
)
from router.routing.load_ledger import LoadLedger
from router.routing.policy import (
    ANY_REQUEST,
    AnswerLengths,
    Pair,
    RankedPair,
    RoutingNeed,
    RoutingView,
    choose_decode,
    choose_pair,
    find_pairs,
    local_prefill_pairs,
    transfer_s,
    workers_of_pair,
)
from router.routing.prefix_index import ChunkNames, PrefixIndex


class PickedPair(NamedTuple):
    """The workers for an attempt, and the KV class that it has there."""

    pair: ChosenPair
    decision: ClassDecision


@dataclass(slots=True)
class PairSelector:
    """Selects pairs of workers.

    `split`: the deployment has prefill workers. `allow_local_prefill`: decode workers may prefill while no prefill
    worker can. `auto_local_prefill`: decode workers may also prefill whenever that is predicted to be better, as long
    as their steps stay within `tpot_s` seconds.
    """

    fleet: Fleet
    index: PrefixIndex
    grace: WorkerGrace
    split: bool
    allow_local_prefill: bool
    auto_local_prefill: bool = False
    tpot_s: float | None = None
    ledger: LoadLedger = field(default_factory=LoadLedger)
    answers: AnswerLengths = field(default_factory=AnswerLengths)
    bulk_answers: AnswerLengths = field(default_factory=AnswerLengths)
    auto: AutoClasses = field(default_factory=AutoClasses)
    kept_shares: KeptShares = field(default_factory=KeptShares)
    view: RoutingView = field(init=False)

    def __post_init__(self) -> None:
        self.view = RoutingView(
            self.fleet,
            self.ledger,
            self.split,
            self.index,
            self.allow_local_prefill,
            self.auto_local_prefill,
            self.tpot_s,
        )

    def find_pairs(self, need: RoutingNeed = ANY_REQUEST) -> list[Pair]:
        """All pairs that could serve `need` now, whether or not they have room."""
        return find_pairs(need, self.view)

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt plus answer, in tokens, that every serving worker can take.

        A worker that cannot serve yet (no link) does not lower the limit. While no worker serves, the longest that any
        fitting worker can take; None if there is none.
        """
        workers = self.fleet.workers
        serving = {name for pair in self.find_pairs() for name in workers_of_pair(pair)}
        lengths = {name: worker_state.hello.max_model_len for name, worker_state in workers.items()}
        serving = serving or lengths.keys() - self.fleet.find_mismatches().keys()
        return min((lengths[name] for name in serving), default=max(lengths.values(), default=None))

    def note_available(self, now_s: float) -> None:
        """Record which versions of answers can be served now, for `grace`."""
        self.grace.note_served(
            {version for pair in self.find_pairs() for version in self._versions_of(pair)}, now_s
        )

    def _versions_of(self, pair: Pair, kv_class: str | None = None) -> list[AnswerVersion]:
        """The versions of answers that a pair of members can generate; with a `kv_class`, in a class it names."""
        workers, (source, target) = self.fleet.workers, pair
        first = None if source is None else workers[source].hello
        return versions_of_pair(first, workers[target].hello, kv_class)

    def classes_of_pair(self, pair: Pair) -> list[str]:
        """The KV classes of answers that a pair can generate; a request that asks for none gets the first one."""
        return [version.kv_class for version in self._versions_of(pair)]

    @property
    def kv_classes(self) -> list[str]:
        """The KV classes that requests can be served with; while no pair can serve, those of all known workers."""
        served = {version.kv_class for pair in self.find_pairs() for version in self._versions_of(pair)}
        known = {name for hello in self.fleet.known_hellos() for name in classes_of(hello)}
        return sorted(served or known)

    @property
    def served_classes(self) -> ServedClasses:
        """The KV classes that requests may ask for, those among which the router may choose, and those in which KV can
        be evicted.
        """
        return ServedClasses(self.kv_classes, self.auto_classes, self.keep_classes, self._default_class)

    @property
    def keep_classes(self) -> list[str]:
        """The KV classes in which pairs that can serve can evict; while no pair can serve, those of all known
        workers.
        """
        found = (keep_classes_of_pair(*pair) for pair in self._hellos_of_pairs())
        return sorted(set[str]().union(*found))

    @property
    def _default_class(self) -> str | None:
        """The class of a request that asks for none: an id, or `AUTO_CLASS`; None if workers differ."""
        found = {
            AUTO_CLASS if target.kv_auto else version.kv_class
            for source, target in self._hellos_of_pairs()
            for version in versions_of_pair(source, target)[:1]
        }
        return next(iter(found)) if len(found) == 1 else None

    def _hellos_of_pairs(self) -> list[tuple[Hello | None, Hello]]:
        """The hellos of all pairs that can serve; while none can, of all known workers, each by itself."""
        workers = self.fleet.workers
        return [
            (None if source is None else workers[source].hello, workers[target].hello)
            for source, target in self.find_pairs()
        ] or [(None, hello) for hello in self.fleet.known_hellos()]

    @property
    def auto_classes(self) -> list[str]:
        """The KV classes that the router may choose: those within the budget on a pair that can serve; while no pair
        can, those of all known workers.
        """
        found = (
            eligible_classes(source, target, self.auto.budget_pct)
            for source, target in self._hellos_of_pairs()
        )
        return sorted(set[str]().union(*found))

    def version_of(self, pair: ChosenPair, state: RequestState, kv_class: str | None = None) -> AnswerVersion:
        """The version of an attempt on the chosen workers: that of its answer, that of `kv_class`, or else that of the
        first class which the request may have.
        """
        found = self._versions_of((pair.prefill, pair.decode), kv_class or state.kv_class)
        return state.version or found[0]

    def should_wait(self, kind: RequestKind, now_s: float) -> bool:
        """Whether a request of this kind should wait for workers: they are there, or were there lately and may come
        back.

        The workers of an answer's KV class cannot come back if each of them has restarted with another class. Bulk work
        waits for workers until its deadline.
        """
        version, kv_class = kind.version, kind.kv_class
        if kind.bulk and not self.fleet.known_hellos():
            return True
        if version is None and kv_class is not None and not self._is_known(kv_class):
            return False
        if kind.evicts and not self._is_evicted_somewhere(kv_class):
            return False
        patient = kind.bulk or self.grace.should_wait(version, now_s, kv_class)
        return patient and not self._class_is_gone(version)

    def _is_known(self, kv_class: str) -> bool:
        """Whether any worker has the class, or had it when it was lost."""
        if kv_class == AUTO_CLASS:
            return bool(self.auto_classes)
        return any(holds_class(hello, kv_class) for hello in self.fleet.known_hellos())

    def _is_evicted_somewhere(self, kv_class: str | None) -> bool:
        """Whether workers of all roles that are needed can evict in the class, or could when they were lost."""
        able = {hello.role for hello in self.fleet.known_hellos() if can_evict(hello, kv_class)}
        return able.issuperset(self._needed_roles)

    @property
    def _needed_roles(self) -> tuple[str, ...]:
        """The roles without which no request can be served."""
        return ROLES if self.split and not self.allow_local_prefill else ("decode",)

    def _class_is_gone(self, version: AnswerVersion | None) -> bool:
        """Whether no worker can come back that continues an answer of `version`, since its KV class was replaced."""
        return version is not None and class_is_gone(version, self.fleet.known_hellos(), self._needed_roles)

    def unserved_failure(self, state: RequestState) -> RequestFailure:
        """Why a queued request, which should not wait any longer, fails."""
        version = state.version
        if state.kind.evicts and not self._is_evicted_somewhere(state.kv_class):
            able = sorted(
                name for name, worker_state in self.fleet.workers.items() if worker_state.hello.keep_classes
            )
            problem = f"no pair of workers can evict KV of the class {state.kv_class}, as the request asks"
            return NO_WORKERS.failure(f"{problem}: {' and '.join(able) or 'none'} can")
        listed = describe_classes([worker_state.hello for worker_state in self.fleet.workers.values()])
        if version is None and state.kv_class is not None and not self._is_known(state.kv_class):
            return NO_WORKERS.failure(f"no worker has KV of the class {state.kv_class}: {listed}")
        if version is None or not self._class_is_gone(version):
            return state.last_failure.failure(self.explain_missing())
        return NO_WORKERS.failure(
            f"the answer began with KV of the class {version.kv_class}, and the workers for it have been replaced:"
            f" {listed}; send the request again"
        )

    def pick_pair(
        self,
        state: RequestState,
        found: list[Pair],
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
        name, need = state.request.id, replace(state.need, underserved=behind)
        allowed = found = found + local_prefill_pairs(found) if self.auto_local_prefill else found
        if state.failed_workers:
            least = min((len(state.failed_workers & workers_of_pair(pair)) for pair in found), default=0)
            allowed = [pair for pair in found if len(state.failed_workers & workers_of_pair(pair)) == least]
        if len(quarantine):
            allowed = [
                pair
                for pair in allowed
                if all(quarantine.may_run(name, worker) for worker in workers_of_pair(pair))
            ]
        uses = set[tuple[str, str]]()
        for groups in self._rank_classes(state, need, allowed, closed, now_s):
            ranked_pairs: list[tuple[RankedPair, ClassDecision]] = []
            for decision, pairs in groups.items():
                exact = need if decision.kv_class is None else replace(need, kv_class=decision.kv_class)
                uses.update(self._use(worker, exact) for worker in self._workers_of(pairs))
                if (ranked := self._pick_with_room(exact, pairs, closed)) is not None:
                    ranked_pairs.append((ranked, decision))
            if ranked_pairs:
                ranked, decision = min(ranked_pairs)
                return PickedPair(ranked.pair, decision)
        closed |= uses
        return None

    def _rank_classes(
        self,
        state: RequestState,
        need: RoutingNeed,
        found: list[Pair],
        closed: set[tuple[str, str]],
        now_s: float,
    ) -> list[dict[ClassDecision, list[Pair]]]:
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
                first = self._versions_of(pair, need.kv_class)[0]
                decisions = [ClassDecision(first.kv_class, state.kv_reason)]
            for groups, decision in zip(rounds, decisions, strict=False):
                groups.setdefault(decision, []).append(pair)
        return rounds

    def _leaves_choice(self, need: RoutingNeed, pair: Pair) -> bool:
        """Whether the router chooses the class on this pair: the request asks for that, or its workers do."""
        asks_none = need.kv_class is None and self.fleet.workers[pair[1]].hello.kv_auto
        return asks_none or need.kv_class == AUTO_CLASS

    def _pick_with_room(
        self, need: RoutingNeed, allowed: list[Pair], closed: set[tuple[str, str]]
    ) -> RankedPair | None:
        """As `pick_pair`, among pairs that `need` may use, all with the same KV class of it."""
        unavailable = set(self.fleet.quiet)
        if closed:
            unavailable |= {
                worker for worker in self._workers_of(allowed) if self._use(worker, need) in closed
            }
        free = (
            [pair for pair in allowed if not unavailable & workers_of_pair(pair)] if unavailable else allowed
        )
        return choose_pair(need, self.view, pairs_with_credit(free, need, self.view))

    def _workers_of(self, found: list[Pair]) -> set[str]:
        return set[str]().union(*map(workers_of_pair, found))

    def _use(self, worker: str, need: RoutingNeed) -> tuple[str, str]:
        """A worker, and the KV class that a request would use there."""
        return worker, decided_class(self.fleet.workers[worker].hello, need.kv_class)

    def all_uses(self, found: list[Pair]) -> set[tuple[str, str]]:
        """All that `pick_pair` could add to `closed`: the workers of these pairs, with each of their classes."""
        workers = self.fleet.workers
        return {(name, one) for name in self._workers_of(found) for one in classes_of(workers[name].hello)}

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
            for worker_state in self.fleet.workers_of("decode")
        )
        return there and kv_class in (None, *self.classes_of_pair((pinned_pair.prefill, pinned_pair.decode)))

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
        state.unprefilled_tokens = need.prompt_tokens - self.view.shared_tokens(first, need)
        state.shared_tokens = self.view.shared_tokens(pair.decode, need)
        if not state.bulk:
            self.expect_chunks(first, state.chunks, need.kv_class)

    def admit_to_decode(self, state: RequestState, decode: str) -> None:
        """Record the estimate for the decode worker that the request is sent to now: the tokens that are shared."""
        state.shared_tokens = self.view.shared_tokens(decode, state.attempt_need)
        self.expect_chunks(decode, state.handed_chunks, state.attempt_need.kv_class)

    def expect_chunks(self, worker: str, chunks: ChunkNames, kv_class: str | None) -> None:
        """Assume from now on that the worker has these chunks cached, in its pool of `kv_class`."""
        if (worker_state := self.fleet.workers.get(worker)) is not None and holds_class(
            worker_state.hello, kv_class
        ):
            size, name = pool_size(worker_state.hello, kv_class), decided_class(worker_state.hello, kv_class)
            self.index.record_sent(worker, chunks, size.num_slabs, name)

    def remember_answer(self, state: RequestState) -> None:
        """Record the answer's length, and that its decode worker has prompt and answer cached, for follow-up
        requests.
        """
        request, pair = state.request, state.pair
        if state.bulk:
            return self.bulk_answers.record_length(len(request.output))
        self.answers.record_length(len(request.output))
        if request.stage is RequestStage.DECODING and pair is not None and not request.keep.evicts:
            # The last token has no KV.
            text = request.prompt, request.output[:-1]
            names = self.index.extend_names(state.chunks, *text, request.origin.scope)
            self.expect_chunks(pair.decode, names, state.attempt_need.kv_class)

    def book_load(self, state: RequestState) -> None:
        """Record the load that the request puts on each of its workers now, in place of the earlier entries."""
        state.booked_tokens = state.room_tokens
        kv_class = None if state.attempt_version is None else state.attempt_version.kv_class
        self.ledger.book_shares(state.request.id, state.shares, state.request.origin.priority, kv_class)

    def explain_missing(self) -> str:
        """Why no pair can serve requests now, for an error message."""
        roles = ("prefill", "decode") if self.split else ("decode",)
        absent = [role for role in roles if not self.fleet.workers_of(role)]
        if absent:
            return f"no {' and no '.join(absent)} worker is up"
        hellos = [worker_state.hello for worker_state in self.fleet.workers.values()]
        if self.split and not have_shared_class(hellos):
            return f"no two workers have the same KV class: {describe_classes(hellos)}"
        return "no two workers are linked" if self.split else "no decode worker takes requests"
