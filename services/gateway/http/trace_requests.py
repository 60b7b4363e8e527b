"""Traces the requests of the generation routes (as ASGI middleware)."""

from __future__ import annotations

import time
from collections.abc import Set

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.request_scope import failure_of, request_ids_of
from services.gateway.tracing.trace_context import RESPONSE_HEADER
from services.gateway.tracing.tracer import RequestTracer


class TraceMiddleware:
    """ASGI middleware that puts the trace of a request into `scope["state"]["trace"]`, if it is traced.

    The answer to a traced request names its trace in `traceresponse`.
    """

    def __init__(self, app: ASGIApp, tracer: RequestTracer, paths: Set[str]) -> None:
        """`paths` are those of the routes that are traced."""
        self.app, self._tracer, self._paths = app, tracer, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            return await self.app(scope, receive, send)
        state = scope["state"]
        trace = self._tracer.begin_trace(scope["headers"], scope["path"], state["arrived_s"])
        if trace is None:
            return await self.app(scope, receive, send)
        state["trace"] = trace

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                header = (RESPONSE_HEADER, trace.context.header)
                message = {**message, "headers": [*message.get("headers", []), header]}
            await send(message)

        try:
            await self.app(scope, receive, stamped)
        finally:
            trace.ids, trace.failure = request_ids_of(scope), failure_of(scope)
            self._tracer.end_trace(trace, time.monotonic())
