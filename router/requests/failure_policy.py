"""Decides what the failure of an attempt means for its request: another attempt, or an error (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.failure_statuses import FailureReason, RequestFailure


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What the relay does when an attempt fails. Without another attempt the client gets `reason`.

    `may_retry`: another attempt makes sense; `other_worker_only`: but not on the worker that failed.
    `worker_was_lost`: the worker ended, or has to, through no fault of the request, which may wait for another worker.
    """

    reason: FailureReason
    may_retry: bool = False
    other_worker_only: bool = False
    worker_was_lost: bool = False

    def failure(self, message: str) -> RequestFailure:
        """The failure of a request that gets no other attempt."""
        return RequestFailure(self.reason, message)


DEADLINE_EXCEEDED = FailurePolicy(FailureReason.DEADLINE_EXCEEDED)
# Such a failure allows no other attempt, since a request that breaks one worker may break them all.
INTERNAL_ERROR = FailurePolicy(FailureReason.INTERNAL_ERROR)
NO_WORKERS = FailurePolicy(FailureReason.NO_WORKERS, may_retry=True, worker_was_lost=True)
WORKER_LOST = FailurePolicy(FailureReason.WORKER_LOST, may_retry=True, worker_was_lost=True)
# Tokens were delivered, and no other worker can continue the answer exactly.
NOT_CONTINUABLE = FailurePolicy(FailureReason.NOT_CONTINUABLE)
QUARANTINED = FailurePolicy(FailureReason.REQUEST_QUARANTINED)
TRANSFER_FAILED = FailurePolicy(FailureReason.KV_TRANSFER_FAILED, may_retry=True)

# The policy for each `diptych.messages.Failed.code`. Other codes count as INTERNAL_ERROR.
POLICY_BY_CODE: dict[str, FailurePolicy] = {
    "transfer_failed": TRANSFER_FAILED,
    "kv_corrupt": TRANSFER_FAILED,
    "stale_ticket": TRANSFER_FAILED,
    "deadline_exceeded": DEADLINE_EXCEEDED,
    "out_of_memory": FailurePolicy(FailureReason.OUT_OF_MEMORY, may_retry=True, other_worker_only=True),
    "overloaded": FailurePolicy(FailureReason.OVERLOADED, may_retry=True, other_worker_only=True),
    "draining": NO_WORKERS,
    "invalid_grammar": FailurePolicy(FailureReason.INVALID_GRAMMAR),
    "no_token_left": FailurePolicy(FailureReason.NO_TOKEN_LEFT),
    "unsupported_parameter": FailurePolicy(FailureReason.UNSUPPORTED_PARAMETER),
    "internal_error": INTERNAL_ERROR,
}
