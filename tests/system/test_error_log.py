"""At the default log level, the id that a client sees with an error leads to its cause in the gateway's log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from diptych.config.options import Config
from diptych.failure_statuses import MAX_MESSAGE_CHARS, FailureReason, RequestFailure
from diptych.logs.log_format import TextFormatter
from services.gateway.generation.relay_backend import hide_worker_text
from services.gateway.http.error_response import client_log
from services.gateway.http.log_rate_limit import LogRateLimit
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.service import RequestTimeouts
from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for
from tests.system.scripted_gateway import Running, scripted

WAIT_S = 90.0
KEY = "sk-" + "k" * 40
LEVEL = Config().log_level.upper()
FULL = RequestFailure(FailureReason.TOO_MANY_REQUESTS, "no room")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_folder(tmp_path_factory.mktemp("toy"), context=1 << 20)
    with scripted(folder, keys=(KEY,), patience=RequestTimeouts(stall_s=1.0)) as running:
        yield running


@pytest.fixture
def http(gateway: Running, caplog: pytest.LogCaptureFixture) -> Iterator[httpx.Client]:
    caplog.set_level(LEVEL)
    caplog.handler.setFormatter(TextFormatter("gateway"))
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=WAIT_S, headers=headers) as opened:
        yield opened


def logged_lines(caplog: pytest.LogCaptureFixture, answer: httpx.Response) -> str:
    """The lines with the request id of an answer."""
    request_id = answer.headers["x-request-id"]
    return "\n".join(line for line in caplog.text.splitlines() if request_id in line)


def ask(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": prompt, "max_tokens": 5, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "status", "words"),
    [
        ("FAIL-EARLY", 503, ["no_workers", "as the script says", "cmpl-"]),
        ("CRASH", 500, ["internal_error", "ZeroDivisionError: in a worker", "cmpl-"]),
    ],
)
def test_a_failure_before_the_first_token(
    http: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    prompt: str,
    status: int,
    words: list[str],
) -> None:
    answer = http.post("/v1/completions", json=ask(prompt, stream=stream))
    assert answer.status_code == status and "ZeroDivisionError" not in answer.text
    line = logged_lines(caplog, answer)
    assert all(word in line for word in words), line


def test_a_failure_within_a_stream(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    answer = http.post("/v1/completions", json=ask("FAIL-LATE", stream=True, max_tokens=50))
    assert answer.status_code == 200 and "worker_lost" in answer.text
    wait_for(lambda: "worker_lost" in logged_lines(caplog, answer), WAIT_S)


def test_refusals(http: httpx.Client, gateway: Running, caplog: pytest.LogCaptureFixture) -> None:
    unknown = http.post("/v1/completions", json=ask("x", colour="red"))
    assert unknown.status_code == 400 and "colour" in logged_lines(caplog, unknown)
    nowhere = http.get("/nowhere")
    assert nowhere.status_code == 404 and "unknown_url" in logged_lines(caplog, nowhere)
    stranger = http.get("/v1/models", headers={"authorization": "Bearer wrong"})
    assert stranger.status_code == 401 and "invalid_api_key" in logged_lines(caplog, stranger)
    gateway.script.refuses = FULL
    try:
        full = http.post("/v1/completions", json=ask("x"))
    finally:
        gateway.script.refuses = None
    assert full.status_code == 429 and "no room" in logged_lines(caplog, full)


def test_the_words_of_a_client_cannot_forge_a_line(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    forged = "x\n2026-01-31 12:00:00,000 ERROR gateway x: [req_0] forged\x1b[2J"
    answer = http.post("/v1/completions", json=ask("x") | {"model": forged})
    assert answer.status_code == 404 and answer.json()["error"]["message"].isprintable()
    assert "forged" in logged_lines(caplog, answer) and "\x1b" not in caplog.text
    assert not any(line.startswith("2026-01-31") for line in caplog.text.splitlines())


def test_an_exception_of_our_own(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(_: object) -> bytes:
        raise ArithmeticError("of our own")

    monkeypatch.setattr(GatewayMetrics, "render_text", crash)
    answer = http.get("/metrics")
    assert answer.status_code == 500 and "of our own" not in answer.text
    request_id = answer.headers["x-request-id"]
    wait_for(lambda: any(
        request_id in (line := TextFormatter().format(record)) and "of our own" in line and "Traceback" in line
        for record in caplog.records
    ), WAIT_S)  # fmt: skip


def test_a_reader_that_is_cut(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    asked = ask("FLOOD", stream=True, max_tokens=1_000_000, ignore_eos=True)
    with http.stream("POST", "/v1/completions", json=asked) as answer:
        wait_for(lambda: "the client reads too slowly" in logged_lines(caplog, answer), WAIT_S)


def test_a_generation_has_the_digits_of_its_request(http: httpx.Client, gateway: Running) -> None:
    """Workers log the names of generations: the same digits lead there."""
    answer = http.post("/v1/completions", json=ask("x", n=2))
    digits = answer.headers["x-request-id"].removeprefix("req_")
    assert answer.json()["id"] == f"cmpl-{digits}"
    assert {request.id for request in gateway.script.seen[-2:]} == {f"cmpl-{digits}.0", f"cmpl-{digits}.1"}


def test_the_words_of_a_worker_are_for_the_log() -> None:
    error = hide_worker_text(RequestFailure(FailureReason.INTERNAL_ERROR, "IndexError: list index"))
    assert error.cause == "IndexError: list index" and "IndexError" not in error.message


def test_lines_of_one_kind_are_counted_beyond_the_burst() -> None:
    now_s, limit = [0.0], LogRateLimit(10.0, 2, lambda: now_s[0])

    def line(kind: str = "") -> str | None:
        record = logging.LogRecord("x", logging.WARNING, "file.py", 1, "refused %d", (400,), None)
        record.kind = kind
        return record.getMessage() if limit.filter(record) else None

    assert [line() for _ in range(5)] == ["refused 400", "refused 400", None, None, None]
    assert line("other") == "refused 400"
    now_s[0] = 10.0
    assert line() == "refused 400 (and 3 more like this since the last line)"
    assert line() == "refused 400"


@pytest.mark.parametrize("text", ["k", "\n", "\u2028", "語"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "model": "HUGE"}),
        ("/v1/completions", {"prompt": "x", "HUGE": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "HUGE", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "HUGE": 1}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"HUGE": 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "HUGE"}}),
        ("/tokenize", {"prompt": "x", "HUGE": 1}),
        ("/detokenize", {"tokens": [1], "model": "HUGE"}),
    ],
)  # fmt: skip
def test_what_a_client_wrote_is_short_in_answer_and_log(
    http: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    text: str,
) -> None:
    """However long it is, and each of its lines is no line of the log."""
    caplog.clear()
    monkeypatch.setattr(client_log, "filters", [])
    body = json.dumps({"model": "toy"} | fields).replace("HUGE", json.dumps(text)[1:-1] * 300_000)
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    error = answer.json()["error"]
    assert len(answer.content) < 4 << 10
    assert len(error["message"]) <= MAX_MESSAGE_CHARS and error["message"].isprintable()
    wait_for(lambda: logged_lines(caplog, answer), WAIT_S)
    assert len(caplog.text.splitlines()) == len(caplog.records)
    assert max(map(len, caplog.text.splitlines())) < 4 << 10
