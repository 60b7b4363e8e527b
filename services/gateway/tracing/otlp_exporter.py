"""Sends traces to a collector, as OTLP over HTTP, from a thread of its own.

Serving never waits for the collector. Traces wait in a bounded queue; those that do not fit are dropped and counted. A
collector that is gone, hangs or refuses costs the traces that come meanwhile, and nothing else.
Protocol: https://opentelemetry.io/docs/specs/otlp/, "OTLP/HTTP".
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import httpx

from diptych.errors import ConfigError
from diptych.extras import require_extra
from services.gateway.tracing.spans import Attribute, RequestTrace, TraceSpan, build_spans

# Most sequences of traces that wait to be sent.
MAX_WAITING_SEQUENCES = 8192
# Most traces in one message to the collector.
MAX_BATCH_TRACES = 128
# Seconds to wait for more traces before a message is sent.
GATHER_S = 0.5
# Seconds that the collector has for one message.
SEND_TIMEOUT_S = 5.0
# Most pieces (64 KiB at most, each within that time) that are read of its answer.
MAX_ANSWER_PIECES = 4
# Seconds to wait before each further try to send the same message.
RETRY_PAUSES_S = (0.5, 1.0, 2.0)
# Answers after which the same message may be sent again (OTLP/HTTP, "Retryable Response Codes").
RETRYABLE_STATUSES = (429, 502, 503, 504)
# Names and values of headers that HTTP can carry (RFC 9110, section 5).
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(r"[!-~](?:[ \t!-~]*[!-~])?")
# Seconds that a gateway which ends gives the last message.
CLOSE_TIMEOUT_S = 2.0
HEADERS_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
NAME_VARIABLE = "OTEL_SERVICE_NAME"
SERVICE_NAME = "diptych"
MAX_PORT = 65535

log = logging.getLogger(__name__)


class OtlpExporter:
    """Sends the traces that it is given to `endpoint`, in the order in which requests ended."""

    def __init__(
        self,
        endpoint: str,
        version: str,
        environ: Mapping[str, str],
        count: Callable[[str, int], None],
        *,
        timeout_s: float = SEND_TIMEOUT_S,
        pauses_s: Sequence[float] = RETRY_PAUSES_S,
        max_waiting: int = MAX_WAITING_SEQUENCES,
    ) -> None:
        """`count` is told how many traces were "sent", "dropped" or "failed"; it is called from two threads.

        `environ` may name the service and headers for the collector, as for other programs with OpenTelemetry.

        Raises:
            ConfigError: the package for OTLP is not installed, or the URL or a header cannot be sent.
        """
        # A URL may have a key in its query: neither we nor the HTTP library write it to the log.
        self._shown = _parse_endpoint(endpoint).copy_with(query=None, fragment=None)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._encoder = _load_encoder(environ.get(NAME_VARIABLE, SERVICE_NAME), version)
        headers = {"content-type": "application/x-protobuf", **_collector_headers(environ)}
        self._client = httpx.Client(headers=headers, timeout=timeout_s, trust_env=False)
        self._endpoint, self._count, self._pauses_s, self._max = endpoint, count, pauses_s, max_waiting
        self._waiting: deque[RequestTrace] = deque()
        self._num_waiting = 0
        self._news, self._closing = threading.Condition(), threading.Event()
        self._reachable = True
        self._thread = threading.Thread(target=self._send_traces, name="otlp", daemon=True)
        self._thread.start()

    def export_trace(self, trace: RequestTrace) -> None:
        """Queue a trace. It is dropped if too many wait already."""
        with self._news:
            fits = self._num_waiting + _weight(trace) <= self._max and not self._closing.is_set()
            if fits:
                self._waiting.append(trace)
                self._num_waiting += _weight(trace)
                self._news.notify()
        if not fits:
            self._count("dropped", 1)

    def close(self) -> None:
        """Send what waits, for up to `CLOSE_TIMEOUT_S`. Idempotent."""
        self._closing.set()
        with self._news:
            self._news.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _send_traces(self) -> None:
        """The thread's main function: send batches until the exporter is closed."""
        with self._client:
            while batch := self._next_batch():
                sent = self._send_batch(self._encoder(batch))
                self._count("sent" if sent else "failed", len(batch))

    def _next_batch(self) -> list[RequestTrace]:
        """The next traces, once there are some; empty when the exporter is closed and none is left."""
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closing.is_set())
        self._closing.wait(GATHER_S)
        with self._news:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH_TRACES))]
            self._num_waiting -= sum(map(_weight, batch))
        return batch

    def _send_batch(self, message: bytes) -> bool:
        """Send a message, several times if need be. Returns whether the collector has taken it."""
        for pause_s in (*self._pauses_s, None):
            problem, again = self._post_message(message)
            if not problem:
                if not self._reachable:
                    log.warning("the collector takes traces again")
                self._reachable = True
                return True
            if self._reachable:
                log.warning("the collector %s does not take traces: %s", self._shown, problem)
            self._reachable = False
            if not again or pause_s is None or self._closing.wait(pause_s):
                break
        return False

    def _post_message(self, message: bytes) -> tuple[str, bool]:
        """Send a message once. Returns the problem, "" if there is none, and whether to try again."""
        try:
            with self._client.stream("POST", self._endpoint, content=message) as answer:
                # A short body is read to its end, so that the connection can be used again; an endless one is not.
                for _ in itertools.islice(answer.iter_raw(), MAX_ANSWER_PIECES):
                    pass
                status = answer.status_code
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}", True
        return ("" if 200 <= status < 300 else f"it answers {status}"), status in RETRYABLE_STATUSES


def _weight(trace: RequestTrace) -> int:
    """How much of the queue a trace takes."""
    return max(1, len(trace.sequences))


def _collector_headers(environ: Mapping[str, str]) -> dict[str, str]:
    """The headers that the environment names for the collector: `name=value` pairs with commas between them.

    Raises:
        ConfigError: HTTP cannot carry one of them. Its value may be a key, and is not shown.
    """
    variable = next((name for name in HEADERS_VARIABLES if environ.get(name)), "")
    pairs = [pair.partition("=") for pair in environ.get(variable, "").split(",") if pair.strip()]
    headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
    for number, (name, value) in enumerate(headers.items(), 1):
        if not HEADER_NAME.fullmatch(name) or not HEADER_VALUE.fullmatch(value):
            raise ConfigError(
                f"header {number} of {variable} cannot be sent",
                "a name has letters, digits and hyphens; a value has printable ASCII characters",
                f"{variable}='name=value,other=value', with %20 for a space",
            )
    return headers


def _parse_endpoint(endpoint: str) -> httpx.URL:
    """The URL of the collector. Raises ConfigError if nothing can be sent to it."""
    try:
        url = httpx.URL(endpoint)
        usable = bool(url.host) and (url.port or 1) <= MAX_PORT
    except (httpx.InvalidURL, ValueError):
        usable = False
    if not usable:
        raise ConfigError(
            "traces cannot be sent to this collector",
            "its URL has no host that could exist, or a port above 65535",
            "--otlp-traces-endpoint http://127.0.0.1:4318/v1/traces",
        )
    return url


def _load_encoder(service: str, version: str) -> Callable[[Sequence[RequestTrace]], bytes]:
    """The function that makes one OTLP message of traces. Raises ConfigError if the package is not installed."""
    require_extra("otel", "--otlp-traces-endpoint", ", or leave out --otlp-traces-endpoint")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
    from opentelemetry.proto.trace.v1 import trace_pb2

    def encode(traces: Sequence[RequestTrace]) -> bytes:
        # Spans have times of day. They follow from the monotonic clock, so a clock that is set back hurts no span.
        offset_s = time.time() - time.monotonic()
        request = trace_service_pb2.ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        _set_attributes(resource.resource, {"service.name": service, "service.version": version})
        scope = resource.scope_spans.add()
        scope.scope.name, scope.scope.version = "diptych.gateway", version
        for trace in traces:
            for index, span in enumerate(build_spans(trace)):
                kind = trace_pb2.Span.SPAN_KIND_SERVER if index == 0 else trace_pb2.Span.SPAN_KIND_INTERNAL
                _fill_span(scope.spans.add(), span, trace, offset_s)
                scope.spans[-1].kind = kind
        message: bytes = request.SerializeToString()
        return message

    return encode


def _fill_span(target: Any, span: TraceSpan, trace: RequestTrace, offset_s: float) -> None:
    """Write a span into its protobuf message."""
    target.trace_id, target.span_id = trace.context.trace_id, span.span_id
    target.parent_span_id, target.name = span.parent_id, span.name
    target.trace_state, target.flags = trace.context.state, 1
    target.start_time_unix_nano = round((span.start_s + offset_s) * 1e9)
    target.end_time_unix_nano = round((max(span.start_s, span.end_s) + offset_s) * 1e9)
    _set_attributes(target, span.attributes)
    if span.error:
        target.status.code, target.status.message = 2, span.error


def _set_attributes(target: Any, attributes: Mapping[str, Attribute]) -> None:
    """Write attributes into a protobuf message that has them."""
    for name, value in attributes.items():
        entry = target.attributes.add(key=name)
        match value:
            case bool():
                entry.value.bool_value = value
            case int():
                entry.value.int_value = value
            case float():
                entry.value.double_value = value
            case _:
                entry.value.string_value = value
