"""The attempts of requests: how an attempt begins, is given up for another, and how a request ends (pure).

    queue ──begin──▶ attempt ──retry──▶ queue          end: from anywhere, once
                        └──retarget: another decode worker, same attempt

An attempt is one try to serve a request on chosen workers; its number is the epoch. The functions append what the
gateway has to do to `effects`. The relay decides which messages count and calls these functions.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from diptych.failure_statuses import RequestFailure
from diptych.messages import Abort, Admit, Generate, Output, Prefill, ToWorker
from diptych.request import RequestStage
from router.effects import (
    AttemptBegan,
    AttemptRetried,
    ChosenPair,
    DeliverTokens,
    FailRequest,
    FinishRequest,
    PrefilledLocally,
    RelayEffect,
    RequestCancelled,
    RequestQueued,
    SendMessage,
    StageDurations,
    StageEntered,
)
from router.requests.admission import Admission
from router.requests.failure_policy import DEADLINE_EXCEEDED, NOT_CONTINUABLE, FailurePolicy
from router.requests.grace import WorkerGrace
from router.requests.pair_selector import PairSelector
from router.requests.quarantine import CrashQuarantine
from router.requests.queue import RequestQueue
from router.requests.request_state import RequestKind, RequestState, sum_beside
from router.routing.class_choice import LINK, ClassDecision
from router.routing.handoff_cost import HandoffCost
from router.routing.pairs import PairList, workers_of_pair
from router.routing.policy import NO_LINK, NO_PREFILL, SOONER
from router.routing.prefix_index import ChunkNames, name_kept

# A request fails after more than this many attempts that ended because a worker was lost or had to end.
MAX_LOSSES = 8
# A request also fails after more than this many other failures that another attempt may avoid.
MAX_FAILURES = 2
# Number of ended requests that are remembered, so that their late messages are known from unknown ones.
MAX_REMEMBERED = 8192


class Attempts:
    """All requests that have not ended. `may_start`: something changed, so that queued requests may find workers."""

    def __init__(
        self,
        pairs: PairSelector,
        grace: WorkerGrace,
        quarantine: CrashQuarantine,
        admission: Admission,
        pipelined: bool,
    ) -> None:
        self.pairs, self.grace, self.quarantine = pairs, grace, quarantine
        self.admission, self.pipelined = admission, pipelined
        self.capabilities = pairs.capabilities
        self.live = pairs.live
        self.ended: OrderedDict[str, None] = OrderedDict()
        self.queue, self.handoff_cost = RequestQueue(), HandoffCost()
        self.effects: list[RelayEffect] = []
        self.may_start = False
        # Whether a queued request waits for room that an answer's next token may make it expect.
        self.waits_for_answers = False
        # Requests that were queued since the last `take_effects`.
        self._newly_queued: list[str] = []

    def take_effects(self, now_s: float) -> list[RelayEffect]:
        """Begin attempts for queued requests that can start now; returns all effects since the last call."""
        if self.may_start and len(self.queue):
            self.start_queued(now_s)
        effects, self.effects = self.effects, []
        effects += [RequestQueued(name) for name in self._newly_queued if name in self.queue]
        self._newly_queued, self.may_start = [], False
        return effects

    def prepare_routing(self, states: list[RequestState]) -> None:
        """Set what routing needs to know of new sequences: their chunks, and the expected lengths of their answers.

        The chunks of a prompt that comes without their names are named once, for all of its sequences.
        """
        pairs, named = self.pairs, dict[int, ChunkNames]()
        for state in states:
            request, answers = state.request, pairs.bulk_answers if state.bulk else pairs.answers
            chunks = named.get(id(request.prompt), request.chunks)
            if chunks is None:
                chunks = named[id(request.prompt)] = pairs.index.name_chunks(
                    request.prompt, request.tenancy.scope
                )
            state.chunks, state.kept_chunks = chunks, name_kept(chunks, len(request.prompt), request.keep)
            state.expected_tokens = answers.expected_tokens(request.sampling.max_tokens)
        states[0].wish.beside = sum_beside(states)

    def enqueue_request(self, state: RequestState, now_s: float) -> None:
        """Put the request into the queue; fails it if no workers for it exist or are expected back."""
        if not self.grace.should_wait(state.kind, now_s):
            return self.fail_unserved(state, now_s)
        self.queue.enqueue_request(state)
        if not state.bulk:
            self._newly_queued.append(state.request.id)
        self.may_start = True

    def start_queued(self, now_s: float) -> None:
        """Begin queued requests, in queue order.

        A request without free workers blocks these workers for later requests.
        """
        # The free pairs by what a request needs.
        everywhere = self.capabilities.find_pairs()
        found: dict[RequestKind, PairList] = {RequestKind(): everywhere}
        everyone, closed = self.pairs.all_uses(everywhere, self.queue.has_pooled), set[tuple[str, str]]()
        self.waits_for_answers = False
        for state in self.queue.in_order():
            if self.expire_request(state, now_s):
                continue
            kind = state.kind
            if kind not in found:
                found[kind] = self.capabilities.find_pairs(state.need)
            picked = self.pairs.pick_pair(
                state, found[kind], self.quarantine, closed, now_s, self.queue.is_underserved(state)
            )
            if picked is not None:
                self.begin_attempt(state, picked.pair, now_s, picked.decision, picked.overdrawn)
                continue
            self.waits_for_answers = self.pairs.overdraft
            if everyone <= closed:
                return

    def begin_attempt(
        self,
        state: RequestState,
        pair: ChosenPair,
        now_s: float,
        decision: ClassDecision | None = None,
        overdrawn: bool = False,
    ) -> None:
        """Begin an attempt on the chosen workers: send the order and count the request as their load.

        `decision` is the KV class that was chosen with them; None: the first one that the request may have.
        `overdrawn`: its decode worker has no room for it yet.
        """
        request, first = state.request, pair.prefill or pair.decode
        self.admission.mark_begun(request.id)
        version = self.pairs.version_of(pair, state, None if decision is None else decision.kv_class)
        reason = state.kv_reason if decision is None else decision.reason
        state.begin_attempt(pair, version, reason, self.pairs.traits_of(pair))
        state.overdrawn = overdrawn
        state.staged = self._worth_staging(state, pair, version.kv_class, reason)
        if state.first_queued_s is None:
            state.first_queued_s = now_s
        self.enter_stage(state, RequestStage.QUEUED, now_s)
        self.send_message(first, _build_order(state, version.kv_class, request.deadline_s - now_s))
        state.holders = {first}
        self.effects.append(
            AttemptBegan(
                request.id,
                request.epoch,
                pair,
                state.staged,
                *(version.kv_class, reason, request.keep.threshold),
            )
        )
        if self.pairs.split and pair.prefill is None and not (state.pinned or state.bulk or state.pools):
            self.effects.append(PrefilledLocally(request.id, self._explain_local_prefill()))
        self.pairs.begin_attempt(state, pair)
        self.book_load(state)
        self.queue.start_request(state)

    def _explain_local_prefill(self) -> str:
        """Why a decode worker prefills a prompt in a deployment with prefill workers."""
        pairs = self.pairs
        if pairs.auto_local_prefill and pairs.fleet.linked_pairs():
            return SOONER
        up = [worker_state for worker_state in pairs.fleet.workers_of("prefill") if not worker_state.draining]
        return NO_LINK if up else NO_PREFILL

    def _worth_staging(self, state: RequestState, pair: ChosenPair, kv_class: str, reason: str) -> bool:
        """Whether the attempt's KV should be pulled while it is computed.

        Where the class was chosen since the link binds, it should: recent moves were slower than the link was at first.
        """
        request = state.request
        if state.pinned or not self.pipelined or not state.decodes or pair.prefill is None or state.deferred:
            return False
        if request.keep.evicts:
            # What is kept of its KV is decided when the prompt has all of it.
            return False
        if reason == LINK:
            return True
        need = replace(state.need, kv_class=kv_class)
        return self.pairs.transfer_s(pair, need) >= self.handoff_cost.seconds

    def enter_stage(self, state: RequestState, stage: RequestStage, now_s: float) -> None:
        """Move the request to `stage`, and report it as an effect."""
        state.request.enter_stage(stage, now_s)
        if stage is RequestStage.DECODING:
            state.tokens_before_decode = len(state.request.output)
        self.effects.append(StageEntered(state.request.id, stage))

    def fail_request(self, state: RequestState, failure: RequestFailure, now_s: float) -> None:
        """End the request with an error for its client."""
        self.end_request(state, RequestStage.FAILED, FailRequest(state.request.id, failure), now_s)

    def fail_unserved(self, state: RequestState, now_s: float) -> None:
        """End a queued request for which no workers exist or are expected back."""
        self.fail_request(state, self.grace.unserved_failure(state), now_s)

    def end_request(
        self,
        state: RequestState,
        stage: RequestStage,
        effect: FinishRequest | FailRequest | RequestCancelled,
        now_s: float,
    ) -> None:
        """End a request, for every reason: abort its workers, free what it counted for, report one terminal effect."""
        request = state.request
        self.abort_workers(state)
        if stage is RequestStage.DONE and not state.pinned:
            self.pairs.remember_answer(state)
        request.enter_stage(stage, now_s)
        state.release_class()
        del self.live[request.id]
        self.book_load(state)
        self.queue.remove_request(request.id)
        self.quarantine.forget_request(request.id)
        self.admission.mark_ended(request.id, now_s)
        self.ended[request.id] = None
        if len(self.ended) > MAX_REMEMBERED:
            self.ended.popitem(last=False)
        self.effects.append(effect)

    def abort_workers(self, state: RequestState) -> None:
        """Send an abort to every worker that holds something for the attempt."""
        for worker in sorted(state.holders):
            self.send_message(worker, Abort(state.request.id, state.request.epoch))
        state.holders.clear()

    def retry_request(
        self,
        state: RequestState,
        policy: FailurePolicy,
        message: str,
        now_s: float,
        avoid: frozenset[str] = frozenset(),
    ) -> None:
        """Give up this attempt and queue the request for another, if `policy` allows; workers in `avoid` come last."""
        if self.expire_request(state, now_s) or not self._may_retry(state, policy, message, now_s):
            return
        found = self.capabilities.find_pairs(state.need)
        if policy.other_worker_only and found and all(avoid & workers_of_pair(pair) for pair in found):
            return self.fail_request(state, policy.failure(message), now_s)
        self._requeue_request(state, policy, message, now_s, avoid)

    def _may_retry(self, state: RequestState, policy: FailurePolicy, message: str, now_s: float) -> bool:
        """Count the failed attempt; returns whether another may follow, and fails the request otherwise."""
        state.losses += policy.worker_was_lost
        state.failures += not policy.worker_was_lost
        few = state.losses <= MAX_LOSSES and state.failures <= MAX_FAILURES
        if not policy.may_retry or not few or state.pinned:
            self.fail_request(state, policy.failure(message), now_s)
        elif state.request.output and not state.continuable:
            text = f"no other worker can continue the answer exactly; send the request again ({message})"
            self.fail_request(state, NOT_CONTINUABLE.failure(text), now_s)
        else:
            return True
        return False

    def _requeue_request(
        self,
        state: RequestState,
        policy: FailurePolicy,
        message: str,
        now_s: float,
        avoid: frozenset[str] = frozenset(),
    ) -> None:
        """End the attempt, abort its workers, and put the request into the queue for another attempt."""
        request = state.request
        # Workers that failed earlier attempts are still chosen last.
        failed = state.failed_workers | avoid
        self.abort_workers(state)
        state.end_attempt()
        state.last_failure, state.failed_workers = policy, failed
        self.effects.append(
            AttemptRetried(request.id, policy.reason.value, request.epoch, len(request.output), message)
        )
        self.enter_stage(state, RequestStage.ADMITTED, now_s)
        self.book_load(state)
        self.enqueue_request(state, now_s)

    def retarget_decode(self, state: RequestState, policy: FailurePolicy, message: str, now_s: float) -> None:
        """Replace the decode worker of an attempt whose prefill worker still computes or holds the KV."""
        if self.expire_request(state, now_s):
            return
        if state.target is not None and not self._may_retry(state, policy, message, now_s):
            return
        state.target = None
        decode = self.pairs.rebind_decode(state, self.quarantine)
        if decode is None:
            if state.pinned:
                return self.fail_request(state, policy.failure(message), now_s)
            return self._requeue_request(state, policy, message, now_s)
        state.pair = ChosenPair(state.source, decode)
        if state.request.stage is RequestStage.TRANSFERRING:
            self.admit_to_decode(state, decode, now_s)
        self.book_load(state)

    def admit_to_decode(self, state: RequestState, decode: str, now_s: float) -> None:
        """Send the request to a decode worker, with the ticket if there is one already."""
        request = state.request
        what = list(request.prompt), list(request.output), request.sampling, state.ticket
        remaining_s = request.deadline_s - now_s
        kv = "" if state.attempt_version is None else state.attempt_version.kv_class, request.keep
        self.send_message(decode, Admit(request.id, request.epoch, *what, remaining_s, request.tenancy, *kv))
        state.target, state.offered_s = decode, now_s
        state.holders.add(decode)
        state.contacted_lives.add(self.pairs.fleet.workers[decode].hello.incarnation)
        self.pairs.admit_to_decode(state, decode)

    def expire_request(self, state: RequestState, now_s: float) -> bool:
        """Fail the request if its deadline has passed. Also called before work begins, since clock ticks are coarse."""
        over = state.request.deadline_s <= now_s
        if over:
            text = (
                f"the request did not finish before its deadline; its stage was {state.request.stage.value}"
            )
            self.fail_request(state, DEADLINE_EXCEEDED.failure(text), now_s)
        return over

    def deliver_output(self, state: RequestState, output: Output) -> None:
        """Add an output to the answer, record what it says of the request's load, and deliver it to the client."""
        state.request.output.extend(output.tokens)
        if output.kept is not None:
            state.record_kept(output.kept)
            self.book_load(state)
        elif state.room_tokens > state.booked_tokens:
            self.pairs.book_load(state)
        self.effects.append(DeliverTokens(state.request.id, output))

    def send_message(self, worker: str, message: ToWorker) -> None:
        """Append the effect that sends `message` to `worker`."""
        self.effects.append(SendMessage(worker, message))

    def book_load(self, state: RequestState) -> None:
        """Record the load that the request puts on its workers now. Queued requests may start if it has become less."""
        self.pairs.book_load(state)
        self.may_start = True

    def report_durations(self, state: RequestState, moment: str, seconds: dict[str, float]) -> None:
        """Report the request's phases until `moment` ("first", "second" token), once; never for canaries and bulk
        work.
        """
        state.reported_moments.add(moment)
        if not (state.pinned or state.bulk):
            self.effects.append(StageDurations(state.request.id, seconds))


def _build_order(state: RequestState, kv_class: str, remaining_s: float) -> Prefill | Generate:
    """The order with which an attempt begins, at the worker that prefills."""
    request = state.request
    what = request.id, request.epoch, list(request.prompt), list(request.output), request.sampling
    if state.source is None:
        return Generate(*what, remaining_s, request.tenancy, kv_class, request.keep)
    kv = state.staged, kv_class, request.keep
    return Prefill(*what, remaining_s, request.tenancy, *kv, state.deferred, state.cuts_kept)
