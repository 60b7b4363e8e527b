"""Makes the spans of a trace from what the gateway remembers of a request. Pure: nothing is measured here.

    POST /v1/chat/completions                     from the request's arrival to the last byte of its answer
      admission  retry  write                     stages of the time to first token outside of attempts
      attempt                                     one per attempt, each on its own workers
        restore  prefill_queue  prefill  deliver  of the attempt with the first token
        reprefill                                 of a later attempt: prompt and delivered tokens are prefilled again
        decode_admission  transfer  first_decode  the hand-off
        transfer.hidden  transfer.exposed         copying before and after the prompt was computed
        decode                                    the other tokens

`admission`, `retry`, `restore`, `prefill_queue`, `prefill`, `deliver` and `write` of a sequence sum to its TTFT; so do
these and the hand-off if a decode worker drew the first token. What a worker has measured has a duration, but no time
on the gateway's clock: such spans are placed one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from diptych.failure_statuses import RequestFailure
from diptych.logs.request_ids import RequestIds
from services.gateway.metrics.prometheus import HANDOFF_STAGES, ttft_breakdown
from services.gateway.metrics.timeline import AttemptTimes, SequenceTimeline
from services.gateway.outcomes import SequenceRecord
from services.gateway.tracing.trace_context import TraceContext, new_span_id

# Stages of the time to first token that belong to the attempt with the first token; the others belong to the request.
ATTEMPT_STAGES = ("restore", "prefill_queue", "prefill", "deliver")
# Stages that have no span if they took no time.
OPTIONAL_STAGES = ("retry", "restore")

Attribute = str | int | float | bool


@dataclass(slots=True)
class TraceSpan:
    """One span; times are seconds on the monotonic clock. `error` says why it failed, "" if it did not."""

    name: str
    start_s: float
    end_s: float
    parent_id: bytes
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str = ""
    span_id: bytes = field(default_factory=new_span_id)


@dataclass(frozen=True, slots=True)
class TracedSequence:
    """One sequence of a request that has ended."""

    name: str
    record: SequenceRecord
    timeline: SequenceTimeline


@dataclass(slots=True)
class RequestTrace:
    """One HTTP request. `context` names its own span; `parent` is the client's, if the request belongs to a trace.

    `status` is the HTTP status, 0 if no answer was begun. `left` says that the client was gone before the end.
    """

    context: TraceContext
    parent: TraceContext | None
    path: str
    arrived_s: float
    ids: RequestIds = RequestIds()
    status: int = 0
    left: bool = False
    failure: RequestFailure | None = None
    sequences: Sequence[TracedSequence] = ()
    ended_s: float = 0.0


def build_spans(trace: RequestTrace) -> list[TraceSpan]:
    """The spans of a request that has ended; the first one is its own."""
    root = TraceSpan(
        f"POST {trace.path}",
        trace.arrived_s,
        trace.ended_s,
        trace.parent.span_id if trace.parent is not None else b"",
        _request_attributes(trace),
        trace.failure.code if trace.failure is not None else "",
        trace.context.span_id,
    )
    return [root, *(span for one in trace.sequences for span in _sequence_spans(one, root))]


def _request_attributes(trace: RequestTrace) -> dict[str, Attribute]:
    """What is known of the whole request. Names that begin with `http` and `gen_ai` are OpenTelemetry's own."""
    found: dict[str, Attribute] = {"http.request.method": "POST", "url.path": trace.path}
    found |= {f"diptych.{name}": value for name, value in trace.ids.as_fields().items()}
    if trace.status:
        found["http.response.status_code"] = trace.status
    if trace.failure is not None:
        found["error.type"] = trace.failure.code
    if trace.left:
        found["diptych.client_left"] = True
    if trace.sequences:
        records = [one.record for one in trace.sequences]
        found["gen_ai.request.model"] = records[0].model
        found["gen_ai.usage.input_tokens"] = records[0].prompt_tokens
        found["gen_ai.usage.output_tokens"] = sum(record.tokens for record in records)
        found["diptych.sequences"] = len(records)
    return found


def _sequence_spans(traced: TracedSequence, root_span: TraceSpan) -> Iterator[TraceSpan]:
    """The spans of one sequence: stages of its first token, and its attempts."""
    record, named = traced.record, {"diptych.sequence": traced.name}
    stages = ttft_breakdown(record) if record.first_written_s is not None else {}
    placed, now_s = {}, record.arrived_s
    for stage, seconds in stages.items():
        if seconds or stage not in OPTIONAL_STAGES:
            placed[stage] = now_s, now_s + seconds
        now_s += seconds
    for stage, (start_s, end_s) in placed.items():
        if stage not in (*ATTEMPT_STAGES, *HANDOFF_STAGES):
            yield TraceSpan(stage, start_s, end_s, root_span.span_id, dict(named))
    for attempt in traced.timeline.attempts:
        span = _attempt_span(attempt, root_span, named, record)
        if record.kv.kept is not None and attempt is traced.timeline.attempts[-1]:
            span.attributes["diptych.kept_rows"] = record.kv.kept.kept_rows
            span.attributes["diptych.all_rows"] = record.kv.kept.all_rows
        yield span
        for child in _attempt_stages(attempt, placed, span.end_s):
            if record.pooled and child.name == "decode":
                continue
            child.parent_id, child.attributes = span.span_id, {**named, **child.attributes}
            yield child


def _attempt_span(
    attempt: AttemptTimes, root_span: TraceSpan, named: dict[str, str], record: SequenceRecord
) -> TraceSpan:
    began, moved = attempt.began, attempt.moved
    attributes: dict[str, Attribute] = {
        **named,
        "diptych.epoch": began.epoch,
        "diptych.decode_worker": moved.target if moved is not None else began.pair.decode,
        "diptych.kv_class": began.kv_class,
        "diptych.pipelined": began.staged,
    }
    if record.pooled:
        # What is pooled ends where it is prefilled.
        attributes["diptych.prefill_worker"] = attributes.pop("diptych.decode_worker")
    if began.keep < 1:
        attributes["diptych.keep"] = began.keep
    if began.pair.prefill is not None:
        attributes["diptych.prefill_worker"] = began.pair.prefill
    if attempt.local_reason:
        attributes["diptych.local_prefill"] = attempt.local_reason
    end_s = root_span.end_s if attempt.ended_s is None else attempt.ended_s
    span = TraceSpan("attempt", attempt.begun_s, end_s, root_span.span_id, attributes)
    if attempt.retried is not None:
        attributes["diptych.delivered_tokens"] = attempt.retried.delivered
        attributes["error.type"] = span.error = attempt.retried.code
    return span


def _attempt_stages(
    attempt: AttemptTimes, placed: dict[str, tuple[float, float]], end_s: float
) -> Iterator[TraceSpan]:
    """The stages of one attempt that ended at `end_s`, without parents."""
    if attempt.first_stages:
        for stage in ATTEMPT_STAGES:
            if stage in placed:
                yield TraceSpan(stage, *placed[stage], b"")
    elif attempt.token_s is not None and attempt.began.epoch:
        yield TraceSpan("reprefill", attempt.begun_s, attempt.token_s, b"")
    yield from _handoff_spans(attempt)
    decode_s = attempt.second_s or attempt.pulled_s or attempt.token_s
    if decode_s is not None and (attempt.began.pair.prefill is None or attempt.pulled_s is not None):
        yield TraceSpan("decode", decode_s, max(decode_s, end_s), b"")


def _handoff_spans(attempt: AttemptTimes) -> Iterator[TraceSpan]:
    """The stages between the first two tokens, and the transfer as the decode worker measured it."""
    moved, pulled_s, token_s = attempt.moved, attempt.pulled_s, attempt.token_s
    if moved is None or pulled_s is None or token_s is None:
        return
    stages = attempt.handoff_stages or attempt.first_stages
    transfer_s = stages.get("transfer", min(moved.seconds, pulled_s - token_s))
    exposed_s = pulled_s - moved.exposed_s
    attributes: dict[str, Attribute] = {
        "diptych.source": moved.source,
        "diptych.target": moved.target,
        "diptych.transport": moved.transport,
        "diptych.bytes": moved.num_bytes,
    }
    yield TraceSpan("decode_admission", token_s, pulled_s - transfer_s, b"")
    yield TraceSpan("transfer", pulled_s - transfer_s, pulled_s, b"", attributes)
    yield TraceSpan("transfer.hidden", exposed_s - moved.hidden_s, exposed_s, b"", dict(attributes))
    yield TraceSpan("transfer.exposed", exposed_s, pulled_s, b"", dict(attributes))
    if attempt.second_s is not None:
        yield TraceSpan("first_decode", pulled_s, attempt.second_s, b"")
