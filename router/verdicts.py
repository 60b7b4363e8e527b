"""What a failure of an attempt means for the request: another attempt, or which error the client sees."""

from __future__ import annotations

from dataclasses import dataclass

from router.admission import Refusal

RESTART_S = 5.0  # Retry-After while workers are missing: about what a restart takes


@dataclass(frozen=True, slots=True)
class Verdict:
    """`status` and `code` for the client, who may `retry` (after `retry_after_s`).

    `again`: another attempt of ours makes sense; `elsewhere`: but not on the worker that failed. `loss`: the worker
    ended, or has to, through no fault of the request, which may wait for others.
    """

    status: int
    code: str
    retry: bool = False
    retry_after_s: float | None = None
    again: bool = False
    elsewhere: bool = False
    loss: bool = False


DEADLINE = Verdict(504, "deadline_exceeded")
INTERNAL = Verdict(
    500, "internal_error"
)  # no other attempt: a request that breaks one worker may break them all
NO_WORKERS = Verdict(503, "no_workers", retry=True, retry_after_s=RESTART_S, again=True, loss=True)
LOST = Verdict(503, "worker_lost", retry=True, retry_after_s=RESTART_S, again=True, loss=True)
QUARANTINED = Verdict(500, "request_quarantined")
TRANSFER = Verdict(503, "kv_transfer_failed", retry=True, retry_after_s=1.0, again=True)

# by `Failed.code`; whatever is not here is INTERNAL
VERDICTS: dict[str, Verdict] = {
    "transfer_failed": TRANSFER,
    "kv_corrupt": TRANSFER,
    "stale_ticket": TRANSFER,
    "deadline_exceeded": DEADLINE,
    "out_of_memory": Verdict(503, "out_of_memory", retry=True, retry_after_s=1.0, again=True, elsewhere=True),
    "overloaded": Verdict(503, "overloaded", retry=True, retry_after_s=1.0, again=True, elsewhere=True),
    "draining": NO_WORKERS,
    "invalid_grammar": Verdict(400, "invalid_grammar"),
    "internal_error": INTERNAL,
}


def refused(refusal: Refusal) -> Verdict:
    """A refusal by admission, as a verdict."""
    return Verdict(refusal.status, refusal.code, retry=True, retry_after_s=refusal.retry_after_s)
