"""How each sequence ends: it met its SLOs, missed them, or is not counted, and why.

    Generation, ApiRoutes ─▶ RequestOutcomes ─ check_sequence() ─▶ sinks: metrics, history, traffic feed, line window

Every sequence that arrives ends once, and so does every HTTP request that is refused before it became sequences: met,
missed and not counted add up to what was offered. A miss is the service's fault. What a client brought about is not
counted: a bad request, more than its share, a deadline of its own that is too short, reading too slowly, or leaving.
But a client that left, or gave up, after a limit had passed was missed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from diptych.chunks import RAW_CLASS
from diptych.errors import RequestError
from diptych.eviction_report import KeptReport
from diptych.failure_statuses import (
    RULES,
    TOO_MANY_REQUESTS,
    FailureReason,
    RequestFailure,
)
from diptych.slo import Slo
from router.routing.class_choice import DEFAULT

# The failures of requests that a stopping gateway gives up, and of those on which it fails unexpectedly.
GATEWAY_STOPPED = RequestFailure(FailureReason.SERVER_SHUTTING_DOWN, "the server stops")
GATEWAY_FAILED = RequestFailure(FailureReason.INTERNAL_ERROR, "the server failed on this request")
# The name under which both SLOs together are counted, beside "ttft" and "tpot".
BOTH = "all"


@dataclass(slots=True)
class KvClassRecord:
    """The KV class of a sequence, why it has it (`router.routing.class_choice`), and bytes of a token: as it is stored,
    and how many fewer these are than without a codec. The former is 0 if the answer does not tell of its KV.
    """

    kv_class: str = RAW_CLASS
    reason: str = DEFAULT
    saved_bytes_per_token: int = 0
    bytes_per_token: int = 0
    # What eviction kept of the sequence, if it evicts.
    kept: KeptReport | None = None


@dataclass(slots=True)
class SequenceRecord:
    """One sequence as its client saw it. All times are seconds on the monotonic clock."""

    model: str
    prompt_tokens: int
    cached_tokens: int = 0
    tokens: int = 0
    arrived_s: float = 0.0
    # The time at which the first token reached the gateway.
    first_token_s: float | None = None
    # The time at which the last token reached the gateway.
    last_token_s: float | None = None
    # The time at which the first token of a streamed answer was written to the client. For an answer that is not
    # streamed: the time at which its first token reached the gateway.
    first_written_s: float | None = None
    ended_s: float = 0.0
    finish: str = "stop"
    kv: KvClassRecord = field(default_factory=KvClassRecord)
    stages: dict[str, float] = field(default_factory=dict)
    # Whether all of its tokens have reached the gateway.
    is_complete: bool = False
    # The deadline that the client set, if it is earlier than the service's own; else None.
    client_deadline_s: float | None = None
    # Of a prompt that is pooled: "embeddings", "rerank" or "score". It has no tokens; its result counts as the first.
    pooled: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds: from arrival until the token was written. None before that."""
        return None if self.first_written_s is None else self.first_written_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None with fewer than two tokens."""
        return self.decode_s / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last, both as they reached the gateway; 0 before the first."""
        return (
            self.last_token_s - self.first_token_s
            if self.last_token_s is not None and self.first_token_s is not None
            else 0.0
        )

    def ttft_until(self, now_s: float) -> tuple[float, bool]:
        """The time to first token in seconds, and True; before the first token how long it has taken, and False."""
        first_s = self.first_token_s if self.first_written_s is None else self.first_written_s
        return (now_s - self.arrived_s, False) if first_s is None else (first_s - self.arrived_s, True)

    def tpot_until(self, now_s: float) -> float | None:
        """Mean seconds per output token after the first, until now; None before the first token.

        While a token is awaited, it counts as one that comes now, if that makes the mean longer.
        """
        if self.first_token_s is None or self.is_complete:
            return self.tpot_s
        return max(self.tpot_s or 0.0, (now_s - self.first_token_s) / max(1, self.tokens))


class Outcome(StrEnum):
    """What a sequence counts as."""

    MET = "met"
    MISSED = "missed"
    NOT_COUNTED = "not_counted"


class Ending(StrEnum):
    """How a sequence ended. A slow reader is a client that read its answer too slowly and was cut off."""

    ANSWERED = "answered"
    LEFT = "left"
    SLOW_READER = "slow_reader"
    FAILED = "failed"


# Reasons of outcomes, beside the codes of failures.
ANSWERED, ANSWERED_LATE = "answered", "answered_late"
LEFT_EARLY, LEFT_LATE = "left_early", "left_late"
SLOW_READER, SHORT_DEADLINE = "slow_reader", "short_deadline"


@dataclass(frozen=True, slots=True)
class CheckedSequence:
    """What a sequence counts as, why, and by SLO (`ttft`, `tpot`, `BOTH`) whether it was met.

    `slos` has only SLOs that are set and known to be met or missed; it is empty for a sequence that is not counted.
    """

    outcome: Outcome
    reason: str
    slos: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndedSequence:
    """A sequence that has ended at `now_s`. `record` is None for a request that was refused before it was sequences."""

    checked: CheckedSequence
    ending: Ending
    now_s: float
    record: SequenceRecord | None = None
    failure: RequestFailure | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the service did not take the request because of load, before a worker was chosen."""
        failure = self.failure
        if failure is None or not failure.is_overload:
            return False
        return self.record is None or failure.status == TOO_MANY_REQUESTS

    @property
    def is_counted(self) -> bool:
        """Whether the sequence met or missed an SLO that is set."""
        return bool(self.checked.slos)


class OutcomeSink:
    """Is told of sequences. Each method may be left out."""

    def on_arrived(self, record: SequenceRecord, now_s: float) -> None:
        """A sequence was handed to the backend."""

    def on_ended(self, ended: EndedSequence) -> None:
        """A sequence has ended, or a request was refused before it became sequences."""


class RequestOutcomes:
    """Tells each of `sinks` when a sequence arrives, and once how it ended. Without sinks nothing is counted."""

    def __init__(
        self,
        slo: Slo | None = None,
        sinks: Sequence[OutcomeSink] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slo, self._sinks, self._clock = slo or Slo(), list(sinks), clock

    def add_sink(self, sink: OutcomeSink) -> None:
        """Tell `sink` too, from now on."""
        self._sinks.append(sink)

    def add_arrival(self, record: SequenceRecord) -> None:
        """A sequence was handed to the backend. It must end exactly once, with `end_sequence`."""
        now_s = self._clock()
        for sink in self._sinks:
            sink.on_arrived(record, now_s)

    def end_sequence(
        self, record: SequenceRecord | None, ending: Ending, failure: RequestFailure | None = None
    ) -> None:
        """A sequence has ended; `failure` if it failed. Without `record`: a request that never became sequences."""
        if not self._sinks:
            return
        now_s = self._clock()
        checked = check_sequence(record, ending, failure, self.slo, now_s)
        ended = EndedSequence(checked, ending, now_s, record, failure)
        for sink in self._sinks:
            sink.on_ended(ended)

    @contextmanager
    def count_refusals(self) -> Iterator[None]:
        """Count a request that is refused, or on which the gateway fails, before it becomes sequences."""
        try:
            yield
        except RequestError as error:
            self.end_sequence(None, Ending.FAILED, error.failure)
            raise
        except asyncio.CancelledError:
            self.end_sequence(None, Ending.FAILED, GATEWAY_STOPPED)
            raise
        except Exception:
            self.end_sequence(None, Ending.FAILED, GATEWAY_FAILED)
            raise


def check_sequence(
    record: SequenceRecord | None, ending: Ending, failure: RequestFailure | None, slo: Slo, now_s: float
) -> CheckedSequence:
    """What a sequence that ended so, at `now_s`, counts as.

    `failure` is why it failed, with ending FAILED. Only a request that never became sequences has no `record`.
    """
    if failure is not None and (record is None or not _is_own_deadline(record, failure)):
        if failure.is_clients_fault:
            return CheckedSequence(Outcome.NOT_COUNTED, failure.code)
        return CheckedSequence(Outcome.MISSED, failure.code, _with_both(_set_slos(slo, False)))
    assert record is not None, "a request that never became sequences has failed"
    if failure is not None:
        # The client's deadline is when it gives up, even if that is noticed later.
        until_s = min(now_s, record.client_deadline_s or now_s)
        return _check_unfinished(record, slo, until_s, SHORT_DEADLINE, failure.code)
    if ending is Ending.LEFT:
        return _check_unfinished(record, slo, now_s, LEFT_EARLY, LEFT_LATE)
    if ending is Ending.SLOW_READER:
        return _check_unfinished(record, slo, now_s, SLOW_READER, SLOW_READER)
    met = {"ttft": slo.is_met(record.ttft_s, None), "tpot": slo.is_met(None, record.tpot_s)}
    if all(met.values()):
        return CheckedSequence(Outcome.MET, ANSWERED, _with_both(_set_slos(slo, True)))
    slos = {name: met[name] for name in _set_slos(slo, False)}
    return CheckedSequence(Outcome.MISSED, ANSWERED_LATE, _with_both(slos))


def known_outcomes() -> set[tuple[Outcome, str]]:
    """Every outcome with every reason that it may have."""
    failed = {
        (Outcome.NOT_COUNTED if rule.is_clients_fault else Outcome.MISSED, rule.code or reason.value)
        for reason, rule in RULES.items()
    }
    given_up = {
        (Outcome.NOT_COUNTED, LEFT_EARLY),
        (Outcome.MISSED, LEFT_LATE),
        (Outcome.NOT_COUNTED, SHORT_DEADLINE),
        (Outcome.NOT_COUNTED, SLOW_READER),
        (Outcome.MISSED, SLOW_READER),
    }
    return {(Outcome.MET, ANSWERED), (Outcome.MISSED, ANSWERED_LATE)} | given_up | failed


def _is_own_deadline(record: SequenceRecord, failure: RequestFailure) -> bool:
    """Whether a sequence failed because of a deadline that its client set."""
    return failure.reason is FailureReason.DEADLINE_EXCEEDED and record.client_deadline_s is not None


def _check_unfinished(
    record: SequenceRecord, slo: Slo, until_s: float, early: str, late: str
) -> CheckedSequence:
    """A sequence whose client waited until `until_s`: missed, for the reason `late`, if a limit had passed by then."""
    (ttft_s, has_begun), tpot_s = record.ttft_until(until_s), record.tpot_until(until_s)
    met = {"ttft": slo.is_met(ttft_s, None), "tpot": slo.is_met(None, tpot_s)}
    if all(met.values()):
        return CheckedSequence(Outcome.NOT_COUNTED, early)
    # Without a token nobody knows how fast tokens would have come.
    known = [name for name in _set_slos(slo, False) if name == "ttft" or has_begun]
    return CheckedSequence(Outcome.MISSED, late, _with_both({name: met[name] for name in known}))


def _set_slos(slo: Slo, met: bool) -> dict[str, bool]:
    """`met` for each SLO that is set."""
    limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s}
    return {name: met for name, limit_s in limits.items() if math.isfinite(limit_s)}


def _with_both(slos: dict[str, bool]) -> dict[str, bool]:
    """These SLOs and, if any is set, whether all of them were met."""
    return {**slos, BOTH: all(slos.values())} if slos else slos
