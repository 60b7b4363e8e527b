"""A collector for traces in the test's own process: a small HTTP server that parses OTLP.

`mode` says what it does with a message: "take" it, "hang" until the collector is closed, or answer 503 ("refuse").
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from services.gateway.metrics.prometheus import TTFT_STAGES

Span = Any


class Collector:
    """What was received: `bodies` as bytes, and their spans."""

    def __init__(self, url: str) -> None:
        self.url, self.mode = url, "take"
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.asked = 0
        self.closing = threading.Event()

    def requests(self) -> list[Any]:
        return [trace_service_pb2.ExportTraceServiceRequest.FromString(body) for body in list(self.bodies)]

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests()
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def traces(self) -> dict[str, list[Span]]:
        """The spans of each request, by the answer's `x-request-id`."""
        by_trace = defaultdict[bytes, list[Span]](list)
        for span in self.spans():
            by_trace[span.trace_id].append(span)
        found = {}
        for spans in by_trace.values():
            for root in spans:
                if request_id := attributes(root).get("diptych.request_id"):
                    found[request_id] = spans
        return found


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def seconds(span: Span) -> float:
    duration: float = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    return duration


def ttft_ms(spans: list[Span]) -> float:
    """The sum of the stages up to the first token, of a request with one sequence."""
    return 1e3 * sum(seconds(span) for span in spans if span.name in TTFT_STAGES)


@contextmanager
def collecting() -> Iterator[Collector]:
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.asked += 1
            if collector.mode == "hang":
                collector.closing.wait()
                return
            if collector.mode == "take":
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.bodies.append(body)
            self.send_response(200 if collector.mode == "take" else 503)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    try:
        yield collector
    finally:
        collector.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
