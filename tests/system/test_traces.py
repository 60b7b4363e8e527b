"""Against a collector in the test: one trace per request, whose spans sum to its TTFT, whatever happened to it.

A gateway process with puppets as workers. Timings that the client asks for are the yardstick.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_workers import HALF, HALF_TOKENS, MUTE, Puppet
from tests.support.gateway_process import Gateway, serving, until
from tests.system.otlp_collector import Collector, Span, attributes, collecting, seconds, ttft_ms

REQUESTS = 200
MAX_ERROR_MS = 1.0
ASKED = {"X-Diptych-Timings": "1"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


@pytest.fixture(scope="module")
def gateway(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("traces")
    with serving(
        folder,
        otlp_traces_endpoint=collector.url,
        recovery_s=60.0,
        local_prefill="never",
        request_log=str(folder / "requests.jsonl"),
    ) as running:
        yield running


@pytest.fixture
def workers(gateway: Gateway) -> Iterator[dict[str, Puppet]]:
    """A prefill and a decode worker, ready; those that a test adds are ended too."""
    found = {"prefill-0": gateway.puppet("prefill"), "decode-0": gateway.puppet("decode")}
    try:
        until(lambda: gateway.ready()["ready"])
        yield found
    finally:
        for worker in found.values():
            worker.kill()
        until(lambda: not gateway.status()["workers"])


def ask(gateway: Gateway, prompt: int, **fields: Any) -> httpx.Response:
    headers = {**ASKED, **fields.pop("headers", {})}
    body = {"model": "toy", "prompt": [prompt], "max_tokens": 12, **fields}
    with httpx.Client(trust_env=False, timeout=gateway.http.timeout) as client:
        return client.post(f"{gateway.url}/v1/completions", json=body, headers=headers)


def timings(answer: httpx.Response) -> dict[str, Any]:
    text = (
        answer.text.split("data: ")[-2] if "event-stream" in answer.headers["content-type"] else answer.text
    )
    (found,) = json.loads(text)["diptych"]["timings"]
    return dict(found)


def trace(collector: Collector, answer: httpx.Response) -> list[Span]:
    request_id = answer.headers["x-request-id"]
    until(lambda: request_id in collector.traces())
    return collector.traces()[request_id]


def logged(gateway: Gateway) -> list[dict[str, Any]]:
    """The request log so far."""
    text = Path(gateway.spec.request_log or "").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def test_the_spans_of_many_requests_sum_to_their_ttft(
    gateway: Gateway, collector: Collector, workers: dict[str, Puppet]
) -> None:
    def one(number: int) -> httpx.Response:
        return ask(gateway, 9, stream=number % 2 == 0, headers={"x-request-id": f"mine-{number}"})

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(one, range(REQUESTS)))
    until(lambda: len(collector.traces()) >= REQUESTS)
    traces = collector.traces()
    for number, answer in enumerate(answers):
        spans, stated_ms = traces[answer.headers["x-request-id"]], timings(answer)
        assert abs(ttft_ms(spans) - stated_ms["ttft_ms"]) <= MAX_ERROR_MS
        (root,), (attempt,) = named(spans, "POST /v1/completions"), named(spans, "attempt")
        assert root.parent_span_id == b"" and attempt.parent_span_id == root.span_id
        handoff_ms = sum(1e3 * seconds(span) for span in spans if span.name in stated_ms["handoff_stages_ms"])
        assert abs(handoff_ms - stated_ms["handoff_ms"]) <= MAX_ERROR_MS
        (hidden,), (exposed,) = named(spans, "transfer.hidden"), named(spans, "transfer.exposed")
        assert 1e3 * seconds(hidden) == pytest.approx(stated_ms["transfer"]["hidden_ms"], abs=0.01)
        assert 1e3 * seconds(exposed) == pytest.approx(stated_ms["transfer"]["exposed_ms"], abs=0.01)
        about = attributes(root)
        assert about["diptych.client_request_id"] == f"mine-{number}"
        assert about["http.response.status_code"] == 200 and about["gen_ai.usage.output_tokens"] == 12
        assert attributes(attempt)["diptych.prefill_worker"] == "prefill-0"
    assert 'diptych:traces_total{outcome="sent"}' in gateway.http.get("/metrics").text


def test_a_request_that_lost_two_workers_is_one_trace(
    gateway: Gateway, collector: Collector, workers: dict[str, Puppet]
) -> None:
    """Its prefill worker before the first token, and its decode worker after some."""
    answers: list[httpx.Response] = []
    workers["prefill-0"].deaf = True
    named_so = {"x-request-id": "lost-two"}
    client = threading.Thread(
        target=lambda: answers.append(ask(gateway, HALF, stream=True, headers=named_so))
    )
    client.start()
    until(lambda: any(getattr(one, "prompt", [0])[0] == HALF for one in list(workers["prefill-0"].seen)))
    workers["prefill-1"] = gateway.puppet("prefill", 1)
    workers["prefill-0"].kill()
    # With these tokens it is cleared of the first loss; before them the second one would be held against it.
    own = {"event": "tokens", "total": HALF_TOKENS, "client_request_id": "lost-two"}
    until(lambda: any(line == line | own for line in logged(gateway)))
    workers["decode-1"] = gateway.puppet("decode", 1)
    until(lambda: "decode-1" in {link["target"] for link in gateway.status()["links"]})
    workers["decode-0"].kill()
    client.join()
    (answer,) = answers
    stated_ms, spans = timings(answer), trace(collector, answer)
    assert stated_ms["attempts"] == 3 and stated_ms["ttft_stages_ms"]["retry"] > 0
    attempts = sorted(named(spans, "attempt"), key=lambda span: int(attributes(span)["diptych.epoch"]))
    assert [attributes(span).get("error.type") for span in attempts] == ["worker_lost", "worker_lost", None]
    assert [span.status.code for span in attempts] == [2, 2, 0]
    assert [attributes(span)["diptych.decode_worker"] for span in attempts] == [
        "decode-0",
        "decode-0",
        "decode-1",
    ]
    assert len(named(spans, "reprefill")) == 1
    assert abs(ttft_ms(spans) - stated_ms["ttft_ms"]) <= MAX_ERROR_MS
    assert len({span.trace_id for span in spans}) == len(named(spans, "POST /v1/completions")) == 1


@pytest.mark.parametrize("flags", ["01", "00"])
def test_the_span_of_a_client_is_the_parent(
    gateway: Gateway, collector: Collector, workers: dict[str, Puppet], flags: str
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=1"}
    answer = ask(gateway, 9, headers=headers)
    if flags == "00":  # the client does not want it traced
        assert "traceresponse" not in answer.headers
        trace(collector, ask(gateway, 9))
        assert answer.headers["x-request-id"] not in collector.traces()
        return
    spans = trace(collector, answer)
    (root,) = named(spans, "POST /v1/completions")
    assert {span.trace_id.hex() for span in spans} == {TRACE} and root.parent_span_id.hex() == PARENT
    assert {span.trace_state for span in spans} == {"vendor=1"}
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{root.span_id.hex()}-01"


def test_requests_without_an_answer_are_traced_too(
    gateway: Gateway, collector: Collector, workers: dict[str, Puppet]
) -> None:
    (root,) = trace(collector, ask(gateway, 9, colour="red"))
    assert (root.status.code, root.status.message) == (2, "unrecognized_request_argument")
    # So long that its attempt has begun by then, however busy the machine is.
    late = trace(collector, ask(gateway, MUTE, headers={"x-request-timeout": "3"}))
    (root,) = named(late, "POST /v1/completions")
    assert attributes(root)["error.type"] == "deadline_exceeded" and len(named(late, "attempt")) == 1
    body = {"model": "toy", "prompt": [MUTE], "max_tokens": 50, "stream": True}
    with gateway.http.stream("POST", "/v1/completions", json=body) as left:
        pieces = left.iter_bytes()  # kept: a generator that is dropped closes the connection
        next(pieces)
    (root,) = named(trace(collector, left), "POST /v1/completions")
    assert attributes(root)["diptych.client_left"] is True


def test_several_sequences_are_one_trace(
    gateway: Gateway, collector: Collector, workers: dict[str, Puppet]
) -> None:
    answer = ask(gateway, 9, n=3)
    spans = trace(collector, answer)
    assert len(named(spans, "attempt")) == 3 and len(named(spans, "POST /v1/completions")) == 1
    for stated_ms in answer.json()["diptych"]["timings"]:
        own = [
            s for s in spans if attributes(s).get("diptych.sequence", "").endswith(f".{stated_ms['index']}")
        ]
        assert abs(ttft_ms(own) - stated_ms["ttft_ms"]) <= MAX_ERROR_MS


@pytest.mark.parametrize("mode", ["hang", "refuse"])
def test_serving_does_not_notice_a_collector_that_does_not_work(
    gateway: Gateway, collector: Collector, workers: dict[str, Puppet], mode: str
) -> None:
    asked, collector.mode = collector.asked, mode
    try:
        for _ in range(20):
            assert ask(gateway, 9).status_code == 200
        until(lambda: collector.asked > asked)
        assert gateway.ready()["ready"]
    finally:
        collector.mode = "take"
