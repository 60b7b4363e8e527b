"""Remembers what happened to one sequence and when, for the timings that clients ask for and for traces.

All times are seconds on the monotonic clock. The stages are those of the metrics (`prometheus.TTFT_STAGES`,
`prometheus.HANDOFF_STAGES`), as the relay reports them; nothing is measured again here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.request import RequestStage
from router.effects import (
    AttemptBegan,
    AttemptRetried,
    KvMoved,
    PrefilledLocally,
    StageDurations,
    StageEntered,
    TelemetryEffect,
)
from services.gateway.metrics.prometheus import TTFT_STAGES

FIRST_TOKEN_STAGES = (RequestStage.PREFILLED, RequestStage.DECODING)


@dataclass(slots=True)
class AttemptTimes:
    """One attempt of a sequence. `stages` are durations in seconds by name; `first_stages` end with the first token,
    and `handoff_stages` with the second token at `second_s`.

    The prompt was computed at `token_s`, with which the first token came; or else a decode worker drew it, at
    `second_s`, and `first_stages` are all.
    """

    began: AttemptBegan
    begun_s: float
    token_s: float | None = None
    second_s: float | None = None
    # When the decode worker had the KV.
    pulled_s: float | None = None
    moved: KvMoved | None = None
    first_stages: dict[str, float] = field(default_factory=dict)
    handoff_stages: dict[str, float] = field(default_factory=dict)
    # Why a decode worker prefilled the prompt; empty if none did.
    local_reason: str = ""
    # When and why the attempt was given up for another one; None if it was not.
    ended_s: float | None = None
    retried: AttemptRetried | None = None


class SequenceTimeline:
    """The attempts of one sequence, in order."""

    def __init__(self) -> None:
        self.attempts: list[AttemptTimes] = []

    @property
    def moved(self) -> KvMoved | None:
        """The last transfer of its KV between two workers; None without one."""
        return next((one.moved for one in reversed(self.attempts) if one.moved is not None), None)

    @property
    def handoff_stages(self) -> dict[str, float]:
        """The stages between its first two tokens in seconds, by name; empty without a hand-off."""
        return next((one.handoff_stages for one in self.attempts if one.handoff_stages), {})

    def record_effect(self, effect: TelemetryEffect, now_s: float) -> None:
        """Take what the relay reports about the sequence at `now_s`."""
        if isinstance(effect, AttemptBegan):
            self.attempts.append(AttemptTimes(effect, now_s))
        elif self.attempts:
            _update_attempt(self.attempts[-1], effect, now_s)


def _update_attempt(attempt: AttemptTimes, effect: TelemetryEffect, now_s: float) -> None:
    match effect:
        case StageEntered(_, stage) if stage in FIRST_TOKEN_STAGES and attempt.token_s is None:
            attempt.token_s = now_s
        case StageDurations(_, seconds) if attempt.token_s is None:
            attempt.first_stages = seconds
        case StageDurations(_, seconds) if TTFT_STAGES[0] in seconds:
            attempt.second_s, attempt.first_stages = now_s, seconds
        case StageDurations(_, seconds):
            attempt.second_s, attempt.handoff_stages = now_s, seconds
        case KvMoved():
            attempt.pulled_s, attempt.moved = now_s, effect
        case PrefilledLocally(_, reason):
            attempt.local_reason = reason
        case AttemptRetried():
            attempt.ended_s, attempt.retried = now_s, effect
        case _:
            pass
