"""Spans follow from what the relay reports: the stages of the first token sum to the TTFT, whatever was lost before."""

from __future__ import annotations

import pytest

from diptych.eviction_report import KeptReport
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.request_ids import RequestIds
from diptych.request import RequestStage
from router.effects import (
    AttemptBegan,
    AttemptRetried,
    ChosenPair,
    KvMoved,
    PrefilledLocally,
    RequestQueued,
    StageDurations,
    StageEntered,
    TelemetryEffect,
)
from services.gateway.metrics.prometheus import HANDOFF_STAGES, TTFT_STAGES
from services.gateway.metrics.timeline import SequenceTimeline
from services.gateway.outcomes import SequenceRecord
from services.gateway.tracing.spans import RequestTrace, TracedSequence, TraceSpan, build_spans
from services.gateway.tracing.trace_context import TraceContext

FIRST = {"admission": 1.0, "retry": 4.0, "prefill_queue": 0.5, "prefill": 1.0, "deliver": 0.5}
SECOND = {"decode_admission": 1.0, "transfer": 2.0, "first_decode": 1.0}
# A prefill worker is lost at 14, a decode worker at 22.
STORY: list[tuple[float, TelemetryEffect]] = [
    (10.5, RequestQueued("a")),
    (11.0, AttemptBegan("a", 0, ChosenPair("p0", "d0"), True)),
    (14.0, AttemptRetried("a", "worker_lost", 1, 0, "p0 is lost")),
    (15.0, AttemptBegan("a", 1, ChosenPair("p1", "d0"), True)),
    (17.0, StageDurations("a", FIRST)),
    (17.0, StageEntered("a", RequestStage.PREFILLED)),
    (20.0, StageEntered("a", RequestStage.DECODING)),
    (20.0, KvMoved("a", "p1", "d1", "shm", 4096, 2.0, 1.5, 0.5)),
    (21.0, StageDurations("a", SECOND)),
    (22.0, AttemptRetried("a", "worker_lost", 2, 3, "d1 is lost")),
    (23.0, AttemptBegan("a", 2, ChosenPair(None, "d2"), False)),
    (23.0, PrefilledLocally("a", "no_prefill_worker")),
    (24.0, StageEntered("a", RequestStage.DECODING)),
]


def trace_of(story: list[tuple[float, TelemetryEffect]], **fields: object) -> RequestTrace:
    timeline, record = SequenceTimeline(), SequenceRecord("toy", 7, tokens=9, arrived_s=10.0)
    for now_s, effect in story:
        timeline.record_effect(effect, now_s)
        if isinstance(effect, StageDurations) and "admission" in effect.seconds:
            record.stages, record.first_written_s = effect.seconds, 17.25
    context = TraceContext(b"t" * 16, b"s" * 8)
    trace = RequestTrace(context, None, "/v1/completions", 10.0, RequestIds("req_1", "mine"), 200)
    trace.sequences, trace.ended_s = [TracedSequence("cmpl-1", record, timeline)], 30.0
    for name, value in fields.items():
        setattr(trace, name, value)
    return trace


def named(spans: list[TraceSpan], name: str) -> list[tuple[float, float]]:
    return [(span.start_s, span.end_s) for span in spans if span.name == name]


def test_a_request_that_lost_two_workers() -> None:
    root, *spans = build_spans(trace_of(STORY))
    assert (root.name, root.parent_id, root.start_s, root.end_s) == ("POST /v1/completions", b"", 10.0, 30.0)
    found = {name: named(spans, name) for name in {span.name for span in spans}}
    assert found == {
        "admission": [(10.0, 11.0)], "retry": [(11.0, 15.0)], "prefill_queue": [(15.0, 15.5)],
        "prefill": [(15.5, 16.5)], "deliver": [(16.5, 17.0)], "write": [(17.0, 17.25)],
        "attempt": [(11.0, 14.0), (15.0, 22.0), (23.0, 30.0)],
        "decode_admission": [(17.0, 18.0)], "transfer": [(18.0, 20.0)], "first_decode": [(20.0, 21.0)],
        "transfer.hidden": [(18.0, 19.5)], "transfer.exposed": [(19.5, 20.0)],
        "reprefill": [(23.0, 24.0)], "decode": [(21.0, 22.0), (24.0, 30.0)],
    }  # fmt: skip
    assert sum(span.end_s - span.start_s for span in spans if span.name in TTFT_STAGES) == 7.25
    attempts = [span for span in spans if span.name == "attempt"]
    assert [span.error for span in attempts] == ["worker_lost", "worker_lost", ""]
    assert [span.attributes["diptych.decode_worker"] for span in attempts] == ["d0", "d1", "d2"]
    parents = {span.name: span.parent_id for span in spans if span.name != "decode"}
    outer = {name for name, parent in parents.items() if parent == root.span_id}
    assert outer == {"admission", "retry", "write", "attempt"}
    assert parents["prefill"] == parents["transfer.hidden"] == attempts[1].span_id
    assert parents["reprefill"] == attempts[2].span_id
    assert all(span.attributes["diptych.sequence"] == "cmpl-1" for span in spans)
    assert len({span.span_id for span in (root, *spans)}) == len(spans) + 1


def test_a_first_token_that_the_decode_worker_drew() -> None:
    """One attempt was lost when its prompt was computed. All stages sum to the TTFT, those of the hand-off too."""
    trace = trace_of(
        [
            (11.0, AttemptBegan("a", 0, ChosenPair("p0", "d0"), False)),
            (13.0, StageEntered("a", RequestStage.PREFILLED)),
            (14.0, AttemptRetried("a", "worker_lost", 1, 0, "p0 is lost")),
            (15.0, AttemptBegan("a", 1, ChosenPair("p1", "d1"), False)),
            (17.0, StageEntered("a", RequestStage.PREFILLED)),
            (20.0, StageEntered("a", RequestStage.DECODING)),
            (20.0, KvMoved("a", "p1", "d1", "shm", 4096, 2.0)),
            (21.0, StageDurations("a", FIRST | SECOND)),
        ]
    )
    traced = trace.sequences[0]
    traced.record.first_written_s = 21.25
    spans = build_spans(trace)
    assert {name: named(spans, name) for name in {span.name for span in spans[1:]}} == {
        "admission": [(10.0, 11.0)], "retry": [(11.0, 15.0)], "prefill_queue": [(15.0, 15.5)],
        "prefill": [(15.5, 16.5)], "deliver": [(16.5, 17.0)], "write": [(21.0, 21.25)],
        "attempt": [(11.0, 14.0), (15.0, 30.0)],
        "decode_admission": [(17.0, 18.0)], "transfer": [(18.0, 20.0)], "first_decode": [(20.0, 21.0)],
        "transfer.hidden": [(20.0, 20.0)], "transfer.exposed": [(20.0, 20.0)],
        "decode": [(21.0, 30.0)],
    }  # fmt: skip
    staged = [span for span in spans if span.name in (*TTFT_STAGES, *HANDOFF_STAGES)]
    assert sum(span.end_s - span.start_s for span in staged) == 11.25
    assert traced.timeline.handoff_stages == {}, "they are no stages between two tokens"


def test_attempts_that_evict_say_so_and_the_last_one_what_it_kept() -> None:
    began = AttemptBegan("a", 0, ChosenPair("p0", "d0"), False, keep=0.95)
    again = AttemptBegan("a", 1, ChosenPair("p1", "d0"), False, keep=0.95)
    trace = trace_of([(11.0, began), (14.0, AttemptRetried("a", "worker_lost", 1, 0, "")), (15.0, again)])
    trace.sequences[0].record.kv.kept = KeptReport(30, 40, {"special": 1})
    first, last = (span.attributes for span in build_spans(trace) if span.name == "attempt")
    assert (first["diptych.keep"], last["diptych.keep"]) == (0.95, 0.95)
    assert "diptych.kept_rows" not in first
    assert (last["diptych.kept_rows"], last["diptych.all_rows"]) == (30, 40)
    plain = build_spans(trace_of(STORY))
    assert not any(
        name.startswith("diptych.kept") or name == "diptych.keep" for one in plain for name in one.attributes
    )


def test_a_request_that_was_refused_has_its_own_span_alone() -> None:
    failure = RequestFailure(FailureReason.QUEUE_FULL, "text")
    (root,) = build_spans(trace_of([], status=429, failure=failure, sequences=()))
    assert root.error == root.attributes["error.type"] == "queue_full"
    assert root.attributes["http.response.status_code"] == 429


@pytest.mark.parametrize("end", range(len(STORY)))
def test_a_client_may_leave_at_any_moment(end: int) -> None:
    root, *spans = build_spans(trace_of(STORY[:end], left=True))
    assert root.attributes["diptych.client_left"] is True
    assert all(span.start_s <= span.end_s <= 30.0 for span in spans)
    assert len(named(spans, "attempt")) == sum(isinstance(effect, AttemptBegan) for _, effect in STORY[:end])
