"""Acts on the requests of a worker when the worker joins or is lost (pure).

    WorkerUp   ─▶ orders given to it before are repeated; how its last life ended goes to the quarantine
    WorkerDown ─▶ its prefixes are forgotten; its requests get another worker, another attempt, or end

`router.workers.fleet` detects these changes; the relay passes them to this module.
"""

from __future__ import annotations

from diptych.request import RequestStage
from router.effects import FleetChange, RequestQuarantined, WorkerDown, WorkerUp
from router.requests.attempts import Attempts
from router.requests.draining import DrainOrders
from router.requests.failure_policy import QUARANTINED, WORKER_LOST
from router.requests.pair_selector import PairSelector
from router.requests.quarantine import QuarantineFindings
from router.requests.request_state import RequestState
from router.routing.tier_savings import forget_lost_tiers

QUARANTINE_TEXT = "workers crashed whenever they worked on this request"


class FleetChanges:
    """Applies changes in the fleet of `pairs` to the requests of `attempts`."""

    def __init__(self, pairs: PairSelector, attempts: Attempts, drain_orders: DrainOrders) -> None:
        self.pairs, self.attempts, self.drain_orders = pairs, attempts, drain_orders

    def apply_changes(self, changes: list[FleetChange], now_s: float) -> None:
        """Append the changes to the effects, and act on every worker that joined or was lost."""
        self.attempts.effects += changes
        self.attempts.may_start = self.attempts.may_start or bool(changes)
        for change in changes:
            if isinstance(change, WorkerDown):
                self.pairs.index.forget_worker(change.worker)
                forget_lost_tiers(self.pairs.index, self.pairs.fleet)
                self.pairs.auto.forget_worker(change.worker)
                self._on_worker_lost(change, now_s)
            elif isinstance(change, WorkerUp):
                self.drain_orders.on_worker_up(change.worker)
                ended = self.pairs.fleet.workers[change.worker].ended
                self.apply_findings(self.attempts.quarantine.record_cause(change.worker, ended), now_s)

    def _on_worker_lost(self, down: WorkerDown, now_s: float) -> None:
        """A worker was lost: each of its requests gets another decode worker, another attempt, or an error."""
        states = [self.attempts.live[name] for name in self.pairs.ledger.requests_at(down.worker)]
        held_there = [state for state in states if down.worker in state.holders]
        for state in held_there:
            state.holders.discard(down.worker)
        delivered = {state.request.id: len(state.request.output) for state in held_there if not state.pinned}
        self.apply_findings(self.attempts.quarantine.record_crash(down.worker, delivered, now_s), now_s)
        message = f"{down.worker} was lost: {down.reason}"
        for state in states:
            if state.request.id not in self.attempts.live:
                # The findings about this crash have just quarantined the request.
                continue
            if state.source not in (None, down.worker) and state.request.stage is not RequestStage.DECODING:
                self.attempts.retarget_decode(state, WORKER_LOST, message, now_s)
            else:
                self.attempts.retry_request(state, WORKER_LOST, message, now_s)

    def apply_findings(self, findings: QuarantineFindings, now_s: float) -> None:
        """Fail the requests that the quarantine blames for crashes, and refuse equal questions from now on."""
        quarantine = self.attempts.quarantine
        self.attempts.may_start = self.attempts.may_start or bool(findings.released)
        for name in findings.quarantined:
            if (state := self.attempts.live.get(name)) is not None:
                quarantine.ban_question(quarantine.fingerprint_question(state.request), now_s)
                self.quarantine_request(state, now_s)

    def quarantine_request(self, state: RequestState, now_s: float) -> None:
        """Fail a request that crashes workers, and report it as an effect."""
        self.attempts.effects.append(RequestQuarantined(state.request.id))
        self.attempts.fail_request(state, QUARANTINED.failure(QUARANTINE_TEXT), now_s)
