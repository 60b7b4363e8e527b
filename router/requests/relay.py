"""The relay, which owns every request: moves it through its stages, and decides which messages count (pure).

    Arrive ─▶ queue ─▶ Prefill ─▶ [Staged ─▶ Admit, Staging] ─▶ Step(first token) ─▶ Offer ─▶ Admit or Fetch
    ADMITTED           QUEUED                                   PREFILLED                    TRANSFERRING

    ─▶ Pulled, Release ─▶ Step … Step(finish)
       DECODING            DONE

Each attempt of a request has a number, the epoch. Messages of an earlier attempt are late: counted and dropped. An
attempt that fails may be followed by another, at any stage: it prefills the prompt and the delivered tokens again.
Since sampling noise depends only on (seed, position), and grammars and penalties are replayed, the answer continues as
if nothing had happened. `RequestState.holders` lists every worker that holds something for an attempt, until the worker
reports that it is done or is sent an abort.

A request is in the queue while no worker holds anything for it: until it has credit (`router.routing.credits`), and
while its workers are away but expected back (`router.requests.grace`).

Elsewhere: how attempts begin and fail (router.requests.attempts), how their KV is handed over
(router.requests.handoff_steps), what follows when workers join or are lost (router.requests.fleet_changes), which
workers are chosen (router.requests.pair_selector), the KV transfer (kvtransfer), text, HTTP and metrics
(services/gateway).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable

from diptych.chunks import DEFAULT_KV_BUDGET_PCT
from diptych.messages import (
    Failed,
    Heartbeat,
    Hello,
    Linked,
    Offer,
    Opened,
    Output,
    Pulled,
    Staged,
    Step,
)
from diptych.request import Request, RequestStage
from router.effects import (
    ChosenPair,
    ClientGone,
    ClockTick,
    FinishRequest,
    RelayEffect,
    RelayEvent,
    RequestArrived,
    RequestCancelled,
    StopFound,
    WorkerCommand,
    WorkerLost,
    WorkerSaid,
)
from router.requests.admission import Admission
from router.requests.attempts import Attempts
from router.requests.draining import DrainOrders
from router.requests.failure_policy import (
    INTERNAL_ERROR,
    NO_WORKERS,
    POLICY_BY_CODE,
    QUARANTINED,
    TRANSFER_FAILED,
)
from router.requests.fleet_changes import QUARANTINE_TEXT, FleetChanges
from router.requests.grace import WorkerGrace
from router.requests.handoff_steps import HandoffSteps
from router.requests.pair_selector import PairSelector
from router.requests.quarantine import CrashQuarantine
from router.requests.request_state import (
    ClassWish,
    RequestState,
    decode_token_breakdown,
    first_token_breakdown,
    total_demand,
)
from router.requests.timers import DeadlineHeap, LeaseRenewal
from router.routing.pairs import PairList
from router.routing.prefix_index import PrefixIndex
from router.workers.fleet import Fleet

# Messages of a worker that do not concern a request.
FLEET_MESSAGES = Hello | Heartbeat | Linked | Opened
# Messages of a worker that concern an attempt of a request; a Step has several.
ATTEMPT_MESSAGES = (Output, Staged, Offer, Pulled, Failed)


class Relay:
    """All live requests of a gateway. Every event goes through `handle_event`; carry out its effects in order."""

    def __init__(
        self,
        fleet: Fleet | None = None,
        admission: Admission | None = None,
        *,
        split: bool = True,
        only_pools: bool = False,
        lease_s: float = 30.0,
        index: PrefixIndex | None = None,
        pipelined: bool = True,
        recovery_s: float = 15.0,
        local_prefill: str = "fallback",
        tpot_s: float | None = None,
        kv_budget_pct: float = DEFAULT_KV_BUDGET_PCT,
        overdraft: bool = False,
    ) -> None:
        """`split`: the deployment has prefill workers; `only_pools`: it has no others. `pipelined`: KV may
        be pulled while it is computed.

        Without `index` no worker is assumed to have cached prefixes. `local_prefill` says when decode workers may
        prefill: "never", as a "fallback" while no prefill worker can, or "auto": whenever it is predicted to be better
        and their steps stay within `tpot_s`. `lease_s` is the length of KV leases; `recovery_s` is how long requests
        wait for lost workers. `kv_budget_pct` is that of `AutoClasses`. `overdraft`: prompts may begin before their
        decode room is free, if it is predicted to be when they are computed.
        """
        self.fleet, self.admission = fleet or Fleet(), admission or Admission()
        self.index = PrefixIndex(0) if index is None else index
        self.split = split
        local, auto = split and local_prefill != "never", split and local_prefill == "auto"
        self.pairs = PairSelector(self.fleet, self.index, split, local, auto, tpot_s, only_pools, overdraft)
        self.pairs.auto.budget_pct = kv_budget_pct
        self.capabilities = self.pairs.capabilities
        self.grace = WorkerGrace(recovery_s, self.capabilities)
        self.ledger = self.pairs.ledger
        self.drain_orders = DrainOrders(self.fleet, self.ledger)
        self.quarantine = CrashQuarantine(
            self.ledger.requests_at, recovery_s=recovery_s, is_bulk=lambda request: self.live[request].bulk
        )
        self.attempts = Attempts(self.pairs, self.grace, self.quarantine, self.admission, pipelined)
        self.fleet_changes = FleetChanges(self.pairs, self.attempts, self.drain_orders)
        self.live, self.queue = self.attempts.live, self.attempts.queue
        self.deadlines = DeadlineHeap(self.live)
        # Number of messages that were dropped, by type.
        self.late_messages: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._lease_renewal = LeaseRenewal(lease_s)
        handoff = HandoffSteps(self.attempts, self.late_messages)
        self._handlers: dict[type, Callable[..., None]] = {
            Output: self._on_output,
            Staged: handoff.on_staged,
            Offer: handoff.on_offer,
            Pulled: handoff.on_pulled,
            Failed: self._on_failed,
        }

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        """Handle `event` at `now_s` (monotonic seconds); returns the effects, to be carried out in order."""
        EVENT_HANDLERS[type(event)](self, event, now_s)
        for worker, order in self.drain_orders.take_due(self.live):
            self.attempts.send_message(worker, order)
        return self.attempts.take_effects(now_s)

    def find_pairs(self) -> PairList:
        """The (prefill, decode) pairs that can serve now; prefill is None if the decode worker also prefills."""
        return self.capabilities.find_pairs()

    def count_stages(self, bulk: bool = False) -> Counter[str]:
        """How many live online requests, or those of bulk work, are in each stage."""
        return Counter(state.request.stage.value for state in self.live.values() if state.bulk is bulk)

    # ---- requests arrive and end

    def _on_arrived(self, event: RequestArrived, now_s: float) -> None:
        """Admit and queue the sequences of an HTTP request, or fail all of them; a canary starts at once."""
        first = event.requests[0]
        wish = ClassWish(first.kv_class, first.default_class, shared=bool(event.others))
        states = [self._open_request(request, event.pinned_pair, wish, now_s) for request in event.requests]
        states = [state for state in states if not self.attempts.expire_request(state, now_s)]
        if not states:
            return
        if event.pinned_pair is not None:
            return self._begin_canary(states[0], event.pinned_pair, now_s)
        if self._fail_refused(states, now_s) or self._fail_banned(states, now_s):
            return
        self._admit_requests(states, now_s)
        self.attempts.prepare_routing(states)
        self.grace.note_available(now_s)
        for state in states:
            self.attempts.enqueue_request(state, now_s)

    def _open_request(
        self, request: Request, pinned_pair: ChosenPair | None, wish: ClassWish, now_s: float
    ) -> RequestState:
        if request.id in self.live or request.id in self.attempts.ended:
            raise ValueError(f"request {request.id} has arrived before")
        state = self.live[request.id] = RequestState(
            request, next(self._numbers), pinned_pair, wish=wish, kept_shares=self.pairs.kept_shares
        )
        request.entered_s.setdefault(RequestStage.ADMITTED, now_s)
        self.deadlines.add_request(state)
        return state

    def _begin_canary(self, state: RequestState, pinned_pair: ChosenPair, now_s: float) -> None:
        if self.pairs.can_pin(pinned_pair, state.kv_class):
            return self.attempts.begin_attempt(state, pinned_pair, now_s)
        self.attempts.fail_request(state, NO_WORKERS.failure(self.grace.explain_missing()), now_s)

    def _fail_banned(self, states: list[RequestState], now_s: float) -> bool:
        """If one of the sequences is banned, fail all of them and return True."""
        if not self.quarantine.has_bans:
            return False
        questions = self.quarantine.fingerprint_questions([state.request for state in states])
        banned = [
            state
            for state, question in zip(states, questions, strict=True)
            if self.quarantine.is_banned(question, now_s)
        ]
        for state in states if banned else []:
            if state in banned:
                self.fleet_changes.quarantine_request(state, now_s)
            else:
                self.attempts.fail_request(state, QUARANTINED.failure(QUARANTINE_TEXT), now_s)
        return bool(banned)

    def _fail_refused(self, states: list[RequestState], now_s: float) -> bool:
        """If admission refuses the sequences, fail all of them and return True. It does not apply to bulk work."""
        if states[0].bulk:
            return False
        refusal = self.admission.find_refusal(*total_demand(states), now_s, states[0].request.tenancy.tenant)
        if refusal is None:
            return False
        for state in states:
            self.attempts.fail_request(state, refusal, now_s)
        return True

    def _admit_requests(self, states: list[RequestState], now_s: float) -> None:
        """Admit all sequences. Requests of other tenants are failed if they must make room."""
        if states[0].bulk:
            return
        first, tenant = states[0].request, states[0].request.tenancy.tenant
        for name in self.admission.requests_to_displace(*total_demand(states), tenant):
            self.attempts.fail_request(self.live[name], self.admission.displacement_refusal(now_s), now_s)
        for state in states:
            request = state.request
            self.admission.admit_request(request.id, len(request.prompt), now_s, tenant, first.id)

    def _on_client_gone(self, event: ClientGone, now_s: float) -> None:
        for name in (event.request, *event.others):
            if (state := self.live.get(name)) is not None:
                self.attempts.end_request(state, RequestStage.CANCELLED, RequestCancelled(name), now_s)

    def _on_stop_found(self, event: StopFound, now_s: float) -> None:
        if (state := self.live.get(event.request)) is not None:
            self.attempts.end_request(state, RequestStage.DONE, FinishRequest(event.request, "stop"), now_s)

    # ---- messages of workers

    def _on_message(self, event: WorkerSaid, now_s: float) -> None:
        """Check that a worker's message belongs to a running attempt, and pass it to its handler."""
        worker, message = event.worker, event.message
        if isinstance(message, FLEET_MESSAGES):
            self.fleet_changes.apply_changes(self.fleet.on_message(worker, message, now_s), now_s)
            if not isinstance(message, Heartbeat):
                self.attempts.may_start = True
                self.grace.note_available(now_s)
            return
        if not self.fleet.mark_seen(worker, now_s):
            self.late_messages[type(message).__name__] += (
                len(message.outputs) if isinstance(message, Step) else 1
            )
            return
        parts: Iterable[Output | Staged | Offer | Pulled | Failed] = (
            message.outputs if isinstance(message, Step) else (message,)
        )
        self.attempts.may_start |= self.attempts.waits_for_answers and isinstance(message, Step)
        for part in parts:
            state = self.live.get(part.request)
            if state is None or part.epoch != state.request.epoch or worker not in state.holders:
                self.late_messages[type(part).__name__] += 1
            else:
                self._handlers[type(part)](state, worker, part, now_s)

    def _on_output(self, state: RequestState, worker: str, output: Output, now_s: float) -> None:
        """Deliver new tokens to the client, move the request to its next stage, or finish it."""
        request, prefills = state.request, worker == state.source
        if prefills and request.stage is not RequestStage.QUEUED:
            self.late_messages["Output"] += 1
            return
        if state.source is not None and not prefills and request.stage is not RequestStage.DECODING:
            return self.attempts.fail_request(
                state, INTERNAL_ERROR.failure(f"{worker} sent tokens before it had the KV"), now_s
            )
        if prefills and state.deferred:
            return self._on_prefilled(state, worker, output, now_s)
        if output.tokens or output.finish:
            self._enter_token_stage(
                state, RequestStage.PREFILLED if prefills else RequestStage.DECODING, output, now_s
            )
        self.attempts.deliver_output(state, state.complete_first(output))
        if output.finish is not None:
            # With the last token the worker has freed everything that it held.
            state.holders.discard(worker)
            self.attempts.end_request(
                state, RequestStage.DONE, FinishRequest(request.id, output.finish), now_s
            )
        elif len(self.quarantine) and self.quarantine.record_progress(request.id, len(request.output)):
            self.attempts.may_start = True

    def _on_prefilled(self, state: RequestState, worker: str, output: Output, now_s: float) -> None:
        """The prompt of a deferred attempt is computed: another worker draws its first token."""
        if output.tokens or output.finish:
            return self.attempts.fail_request(
                state, INTERNAL_ERROR.failure(f"{worker} drew a token that it was to leave to another"), now_s
            )
        state.prefilled = output
        state.prefill_seconds = first_token_breakdown(state, output.seconds, now_s)
        self._enter_prefilled(state, RequestStage.PREFILLED, now_s)

    def _enter_prefilled(self, state: RequestState, stage: RequestStage, now_s: float) -> None:
        """The prompt is computed: the request enters `stage`, and its load changes."""
        self.attempts.enter_stage(state, stage, now_s)
        self.attempts.book_load(state)
        self.admission.mark_prefilled(state.request.id, now_s)

    def _enter_token_stage(
        self, state: RequestState, stage: RequestStage, output: Output, now_s: float
    ) -> None:
        """Enter `stage` with its first tokens, and report how long the phases before took."""
        if state.request.stage is RequestStage.QUEUED:
            if "first" not in state.reported_moments:
                self.attempts.report_durations(
                    state, "first", first_token_breakdown(state, output.seconds, now_s)
                )
            if state.source is None:
                # Without a hand-off its phases are not reported.
                state.reported_moments.add("second")
            self._enter_prefilled(state, stage, now_s)
        elif "second" not in state.reported_moments:
            seconds = decode_token_breakdown(state, now_s)
            if state.deferred:
                # It is the first token, too.
                state.reported_moments.add("first")
                seconds = state.prefill_seconds | seconds
            self.attempts.report_durations(state, "second", seconds)

    def _on_failed(self, state: RequestState, worker: str, failed: Failed, now_s: float) -> None:
        """A worker failed the attempt: choose another decode worker, another attempt, or an error."""
        # A worker frees everything before it reports a failure.
        state.holders.discard(worker)
        policy, source = POLICY_BY_CODE.get(failed.code, INTERNAL_ERROR), state.source
        if failed.code == "draining":
            self.fleet.stop_accepting(worker)
        if failed.code == "kv_corrupt" and source is not None:
            self.fleet.record_corruption(source, worker, now_s)
        prefilling = state.request.stage in (RequestStage.QUEUED, RequestStage.PREFILLED)
        held = state.request.stage is RequestStage.TRANSFERRING and (
            policy.worker_was_lost or policy.other_worker_only
        )
        if source is not None and worker != source and (prefilling or held) and policy.may_retry:
            return self.attempts.retarget_decode(state, policy, failed.message, now_s)
        # Either worker of a failed transfer may be at fault.
        ends = {name for name in (source, worker) if name is not None}
        self.attempts.retry_request(
            state, policy, failed.message, now_s, frozenset(ends if policy is TRANSFER_FAILED else {worker})
        )

    # ---- lost workers and operator commands

    def _lose_worker(self, event: WorkerLost, now_s: float) -> None:
        self.fleet_changes.apply_changes(
            self.fleet.remove_worker(event.worker, event.reason, event.incarnation), now_s
        )

    def _on_command(self, event: WorkerCommand, _now_s: float) -> None:
        self.drain_orders.give_order(event.worker, event.message)

    # ---- clock

    def _on_tick(self, _event: ClockTick, now_s: float) -> None:
        """Check deadlines, heartbeats, quarantine and hopeless waits, and renew leases when due."""
        self.attempts.may_start = True
        for state in self.deadlines.pop_expired(now_s):
            self.attempts.expire_request(state, now_s)
        self.fleet_changes.apply_changes(self.fleet.check_silence(now_s), now_s)
        self.fleet_changes.apply_findings(self.quarantine.expire_waits(now_s), now_s)
        self.grace.note_available(now_s)
        hopeless = {kind for kind in self.queue.kinds if not self.grace.should_wait(kind, now_s)}
        for state in list(self.queue.in_order()) if hopeless else ():
            if state.kind in hopeless:
                self.attempts.fail_unserved(state, now_s)
        for worker, renewal in self._lease_renewal.take_due(self.live.values(), now_s):
            self.attempts.send_message(worker, renewal)


EVENT_HANDLERS: dict[type, Callable[..., None]] = {
    RequestArrived: Relay._on_arrived,
    WorkerSaid: Relay._on_message,
    WorkerLost: Relay._lose_worker,
    ClientGone: Relay._on_client_gone,
    StopFound: Relay._on_stop_found,
    WorkerCommand: Relay._on_command,
    ClockTick: Relay._on_tick,
}
