"""The steps of a hand-off that the relay takes when workers report: KV is staged, offered, or pulled (pure).

    Staged ─▶ [Admit] Staging          Offer ─▶ Fetch, or Admit with the ticket          Pulled ─▶ Release

The relay has checked that the message belongs to the running attempt. Messages that do not fit its stage are late.
"""

from __future__ import annotations

from collections import Counter

from diptych.chunks import RAW_CLASS
from diptych.messages import Fetch, Offer, Pulled, Release, Staged, Staging
from diptych.request import RequestStage
from router.effects import ChosenPair, KvMoved, OverdraftSettled
from router.requests.attempts import Attempts
from router.requests.failure_policy import INTERNAL_ERROR, NO_WORKERS
from router.requests.request_state import RequestState


class HandoffSteps:
    """Moves the requests of `attempts` from their prefill to their decode workers.

    `late_messages` counts messages that were dropped, by type.
    """

    def __init__(self, attempts: Attempts, late_messages: Counter[str]) -> None:
        self.attempts, self.pairs, self.late_messages = attempts, attempts.pairs, late_messages

    def on_staged(self, state: RequestState, worker: str, staged: Staged, now_s: float) -> None:
        """Forward the hint that KV can be pulled while it is computed. A hint that cannot be used may be dropped."""
        request = state.request
        prefilling = request.stage is RequestStage.QUEUED
        if (
            worker != state.source
            or not state.staged
            or not (prefilling or request.stage is RequestStage.PREFILLED)
        ):
            self.late_messages["Staged"] += 1
            return
        if self.attempts.expire_request(state, now_s):
            return
        if state.target is None and prefilling:
            # It was admitted without a ticket, before the first token.
            decode = self.pairs.rebind_decode(state, self.attempts.quarantine)
            if decode is not None:
                state.pair = ChosenPair(worker, decode)
                self.attempts.admit_to_decode(state, decode, now_s)
            self.attempts.book_load(state)
        if state.target is not None:
            self.attempts.send_message(state.target, Staging(request.id, request.epoch, staged.hint))

    def on_offer(self, state: RequestState, worker: str, offer: Offer, now_s: float) -> None:
        """The KV is complete and leased: send the ticket to the decode worker, choosing one if need be."""
        request = state.request
        if worker != state.source or request.stage is RequestStage.TRANSFERRING:
            self.late_messages["Offer"] += 1
            return
        if request.stage is not RequestStage.PREFILLED:
            return self.attempts.fail_request(
                state, INTERNAL_ERROR.failure(f"{worker} offered KV before its token"), now_s
            )
        if not offer.ticket:
            # An Admit without a ticket would mean that the KV is still being computed.
            return self.attempts.fail_request(
                state, INTERNAL_ERROR.failure(f"{worker} offered KV without a ticket"), now_s
            )
        if self.attempts.expire_request(state, now_s):
            return
        state.take_offer(offer, now_s)
        if state.target is not None:
            remaining_s = request.deadline_s - now_s
            fetch = Fetch(request.id, request.epoch, list(request.output), offer.ticket, remaining_s)
            self.attempts.send_message(state.target, fetch)
        else:
            decode = self.pairs.rebind_decode(state, self.attempts.quarantine)
            if decode is None:
                return self.attempts.retry_request(
                    state, NO_WORKERS, self.attempts.grace.explain_missing(), now_s
                )
            state.pair = ChosenPair(worker, decode)
            self.attempts.admit_to_decode(state, decode, now_s)
        self.attempts.enter_stage(state, RequestStage.TRANSFERRING, now_s)
        self.attempts.book_load(state)
        if state.overdrawn:
            self._settle_overdraft(state)

    def _settle_overdraft(self, state: RequestState) -> None:
        """The KV of an overdrawn request is complete: is there room for it, or does it wait at its prefill worker?"""
        in_time = self.pairs.settle_overdraft(state)
        self.attempts.effects.append(OverdraftSettled(state.request.id, in_time))
        if in_time:
            state.overdrawn = False
            self.attempts.book_load(state)

    def on_pulled(self, state: RequestState, worker: str, pulled: Pulled, now_s: float) -> None:
        """The KV has reached the decode worker: release it at its source, and record the transfer."""
        request, source = state.request, state.source
        if source is None or worker != state.target or request.stage is not RequestStage.TRANSFERRING:
            self.late_messages["Pulled"] += 1
            return
        self.attempts.send_message(source, Release(request.id, request.epoch))
        state.holders.discard(source)
        state.overdrawn = False
        self.attempts.enter_stage(state, RequestStage.DECODING, now_s)
        self.attempts.book_load(state)
        seconds = pulled.seconds
        state.transfer_s = seconds.get("transfer", 0.0) + seconds.get("verify", 0.0)
        if source in self.pairs.fleet.workers:
            self.pairs.auto.record_move(source, worker, pulled.num_bytes, seconds.get("transfer", 0.0))
        if not state.staged:
            self.attempts.handoff_cost.record_handoff(now_s - state.offered_s, seconds)
        moved = KvMoved(
            request.id,
            source,
            worker,
            pulled.transport,
            pulled.num_bytes,
            state.transfer_s,
            seconds.get("hidden", 0.0),
            seconds.get("exposed", 0.0),
            RAW_CLASS if state.attempt_version is None else state.attempt_version.kv_class,
        )
        self.attempts.effects.append(moved)
