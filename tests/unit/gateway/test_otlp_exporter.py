"""Traces reach the collector, and a collector that hangs, refuses or is not there costs traces and nothing else."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from diptych.errors import ConfigError
from diptych.logs.request_ids import RequestIds
from services.gateway.tracing import otlp_exporter
from services.gateway.tracing.otlp_exporter import OtlpExporter
from services.gateway.tracing.spans import RequestTrace
from services.gateway.tracing.trace_context import TraceContext, new_span_id, new_trace_id
from tests.support.waiting import wait_for
from tests.system.otlp_collector import Collector, attributes, collecting

WAIT_S = 60.0
ENVIRON = {"OTEL_SERVICE_NAME": "mine", "OTEL_EXPORTER_OTLP_HEADERS": "x-token=a%20b, x-other=c=d"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


@contextmanager
def exporting(url: str, counts: Counter[str], **options: object) -> Iterator[OtlpExporter]:
    def count(outcome: str, number: int) -> None:
        counts[outcome] += number

    quick = {"timeout_s": WAIT_S, "pauses_s": (0.01,), **options}
    exporter = OtlpExporter(url, "0.1.0", ENVIRON, count, **quick)  # type: ignore[arg-type]
    try:
        yield exporter
    finally:
        exporter.close()
        exporter.close()


def trace(number: int = 0) -> RequestTrace:
    context = TraceContext(new_trace_id(), new_span_id(), True, "vendor=1")
    return RequestTrace(context, None, "/v1/completions", 1.0, RequestIds(f"req_{number}"), 200, ended_s=2.5)


def test_what_is_sent_arrives_with_service_headers_and_state(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_exporter, "CLOSE_TIMEOUT_S", WAIT_S)
    counts = Counter[str]()
    with exporting(collector.url, counts) as exporter:
        for number in range(300):
            exporter.export_trace(trace(number))
    assert counts == {"sent": 300}
    assert list(collector.traces()) == [f"req_{number}" for number in range(300)]
    (first, *_) = collector.spans()
    assert first.end_time_unix_nano - first.start_time_unix_nano == pytest.approx(1.5e9, abs=1000)
    assert (first.name, first.kind, first.trace_state) == ("POST /v1/completions", 2, "vendor=1")
    assert attributes(collector.requests()[0].resource_spans[0].resource)["service.name"] == "mine"
    sent = collector.headers[0]
    assert (sent["x-token"], sent["x-other"], sent["content-type"]) == (
        "a b",
        "c=d",
        "application/x-protobuf",
    )


def test_after_a_refusal_the_same_traces_are_sent_again(collector: Collector) -> None:
    counts, collector.mode = Counter[str](), "refuse"
    with exporting(collector.url, counts, pauses_s=(0.01,) * 1000) as exporter:
        exporter.export_trace(trace())
        wait_for(lambda: collector.asked >= 3, WAIT_S)
        collector.mode = "take"
        wait_for(lambda: counts == {"sent": 1}, WAIT_S)
    assert len(collector.spans()) == 1


@pytest.mark.parametrize("mode", ["hang", "refuse", "gone"])
def test_without_a_working_collector_traces_are_counted_as_lost(collector: Collector, mode: str) -> None:
    counts, collector.mode = Counter[str](), mode
    url = "http://127.0.0.1:9/v1/traces" if mode == "gone" else collector.url
    with exporting(url, counts, max_waiting=10, timeout_s=0.2) as exporter:
        for number in range(1000):
            exporter.export_trace(trace(number))
        wait_for(lambda: counts["failed"] > 0, WAIT_S)
    assert counts["dropped"] >= 900 and counts["failed"] + counts["dropped"] <= 1000
    assert collector.spans() == []


def test_a_missing_package_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto", None)
    with pytest.raises(ConfigError) as caught:
        OtlpExporter("http://127.0.0.1:9", "0.1.0", {}, lambda outcome, number: None)
    assert "diptych[otel]" in caught.value.fix and len(str(caught.value).splitlines()) <= 6


@pytest.mark.parametrize(
    ("endpoint", "headers"),
    [
        ("http://127.0.0.1:99999/v1/traces", ""),
        ("http://[::::]/v1/traces", ""),
        ("http://xn--/v1/traces", ""),
        ("http://?planted", ""),
        ("http://127.0.0.1:9", "x-key=planted%C3%A9"),
        ("http://127.0.0.1:9", "x-key=planted%0Ab"),
        ("http://127.0.0.1:9", "x key=planted"),
        ("http://127.0.0.1:9", "x-key=1,planted"),
    ],
)
def test_what_cannot_be_sent_is_reported_at_the_start_and_keys_are_not_shown(
    endpoint: str, headers: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        OtlpExporter(endpoint, "0.1.0", {"OTEL_EXPORTER_OTLP_HEADERS": headers}, lambda outcome, number: None)
    assert len(caught.value.lines()) <= 6 and "planted" not in str(caught.value)


def test_a_key_in_the_url_is_not_logged(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    counts, collector.mode = Counter[str](), "refuse"
    with (
        caplog.at_level(logging.INFO),
        exporting(f"{collector.url}?key=planted", counts, pauses_s=(0.01,) * 1000) as exporter,
    ):
        exporter.export_trace(trace())
        wait_for(lambda: collector.asked >= 1, WAIT_S)
        collector.mode = "take"
        wait_for(lambda: counts == {"sent": 1}, WAIT_S)
    assert "does not take traces" in caplog.text and "planted" not in caplog.text


def test_an_answer_without_an_end_is_not_read_to_its_end() -> None:
    counts = Counter[str]()

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            with contextlib.suppress(OSError):
                while True:
                    connection.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        with exporting(url, counts) as exporter:
            exporter.export_trace(trace())
            wait_for(lambda: counts == {"sent": 1}, WAIT_S)
        thread.join()
