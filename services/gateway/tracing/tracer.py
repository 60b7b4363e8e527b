"""Decides which requests are traced, and hands their traces on when they have ended."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from services.gateway.tracing.spans import RequestTrace
from services.gateway.tracing.trace_context import (
    Headers,
    TraceContext,
    new_span_id,
    new_trace_id,
    parse_traceparent,
)

# What becomes of a trace.
TRACE_OUTCOMES = ("sent", "dropped", "failed")


class TraceSink(Protocol):
    """Takes the traces of requests that have ended."""

    def export_trace(self, trace: RequestTrace) -> None:
        """Take a trace. Never blocks, and never raises."""


class RequestTracer:
    """Begins and ends the traces of requests. `share` of those that belong to no trace yet are traced."""

    def __init__(self, sink: TraceSink, share: float, draw: Callable[[], float] = random.random) -> None:
        """`draw` returns random numbers from 0 up to 1, without 1."""
        self._sink, self._share, self._draw = sink, share, draw

    def begin_trace(self, headers: Headers, path: str, arrived_s: float) -> RequestTrace | None:
        """The trace of a request that arrived at `arrived_s` (monotonic seconds); None if it is not traced.

        A client that sends a valid `traceparent` has decided already: its sampled flag counts, and its span is the
        parent.
        """
        parent = parse_traceparent(headers)
        if not (parent.sampled if parent is not None else self._draw() < self._share):
            return None
        begun = TraceContext(new_trace_id(), b"") if parent is None else parent
        return RequestTrace(replace(begun, span_id=new_span_id()), parent, path, arrived_s)

    def end_trace(self, trace: RequestTrace, ended_s: float) -> None:
        """The request has ended at `ended_s` (monotonic seconds)."""
        trace.ended_s = ended_s
        self._sink.export_trace(trace)
