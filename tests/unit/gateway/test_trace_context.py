"""`traceparent` is read as the standard says, and decides whether a request is traced."""

from __future__ import annotations

import pytest

from services.gateway.tracing.spans import RequestTrace
from services.gateway.tracing.trace_context import TraceContext, parse_traceparent
from services.gateway.tracing.tracer import RequestTracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def parent(*values: str, state: str | None = None) -> TraceContext | None:
    headers = [(b"traceparent", value.encode()) for value in values]
    return parse_traceparent([*headers, *([(b"tracestate", state.encode())] if state is not None else [])])


def test_a_good_header() -> None:
    found = parent(GOOD, state="vendor=1")
    assert found == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), True, "vendor=1")
    assert found.header.decode() == GOOD
    later = parent(f"01-{TRACE}-{SPAN}-02-more")  # a later version of the standard
    assert later is not None and not later.sampled


@pytest.mark.parametrize(
    "value",
    [
        "", "x", GOOD[:-1], GOOD + "-more", GOOD.upper(), GOOD.replace("-", "_"), f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-0g", GOOD + "\n" + GOOD,
    ],
)  # fmt: skip
def test_a_bad_header_counts_as_none(value: str) -> None:
    assert parent(value) is None


def test_two_headers_count_as_none() -> None:
    assert parent(GOOD, GOOD) is None


@pytest.mark.parametrize("state", ["x" * 513, "a\x00b", "ü=1"])
def test_a_bad_state_is_dropped_alone(state: str) -> None:
    found = parent(GOOD, state=state)
    assert found is not None and found.state == ""


class Kept:
    def __init__(self) -> None:
        self.traces: list[RequestTrace] = []

    def export_trace(self, trace: RequestTrace) -> None:
        self.traces.append(trace)


@pytest.mark.parametrize(
    ("flags", "share", "traced"),
    [("01", 0.0, True), ("00", 1.0, False), (None, 0.5, True), (None, 0.3, False)],
)
def test_the_client_decides_if_it_does_and_else_the_share(
    flags: str | None, share: float, traced: bool
) -> None:
    kept = Kept()
    tracer = RequestTracer(kept, share, draw=lambda: 0.4)
    headers = [] if flags is None else [(b"traceparent", f"00-{TRACE}-{SPAN}-{flags}".encode())]
    trace = tracer.begin_trace(headers, "/v1/completions", 1.0)
    assert (trace is not None) == traced
    if trace is not None:
        tracer.end_trace(trace, 2.0)
        assert kept.traces == [trace] and trace.ended_s == 2.0
        assert (trace.context.trace_id.hex() == TRACE) == (flags is not None)
        assert trace.context.span_id.hex() != SPAN and trace.context.sampled


def test_no_share_traces_nothing_and_all_of_it_everything() -> None:
    always, never = RequestTracer(Kept(), 1.0), RequestTracer(Kept(), 0.0)
    assert all(always.begin_trace([], "/", 0.0) for _ in range(100))
    assert not any(never.begin_trace([], "/", 0.0) for _ in range(100))
