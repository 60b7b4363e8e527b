"""The proxy of `benchmarks.compat` keeps what it passes on, and the check of answers finds what no schema takes."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from openai.types import Completion

from benchmarks.compat import ANSWER_TOKENS, CONTEXT_TOKENS, make_long_model
from benchmarks.compat_clients.check_answers import bodies_of, check_body
from benchmarks.compat_clients.recording import RecordingProxy

CHUNK: dict[str, Any] = {
    "id": "chatcmpl-1", "created": 1, "model": "tiny", "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}],
}  # fmt: skip
STREAM = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n"


class Answering(BaseHTTPRequestHandler):
    """Answers /good with a stream, anything else with 404 and the body that it got."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        good = self.path == "/good?x=1"
        self.send_response(200 if good else 404)
        self.send_header("content-type", "text/event-stream" if good else "application/json")
        self.end_headers()
        self.wfile.write(STREAM.encode() if good else body)

    def log_message(self, *_: object) -> None:
        """Nothing: pytest prints what is written to standard error."""


def test_what_goes_through_the_proxy_is_kept() -> None:
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        with RecordingProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
            with httpx.Client(base_url=proxy.url, trust_env=False, timeout=60) as http:
                assert http.post("/good?x=1", content=b"{}").text == STREAM
                assert http.post("/bad", content=b'{"a": 1}').text == '{"a": 1}'
            good, bad = proxy.answers
        server.shutdown()
        thread.join()
    assert (good.path, good.status, good.is_stream, good.text) == ("/good", 200, True, STREAM)
    assert (bad.path, bad.status, bad.is_stream, bad.request) == ("/bad", 404, False, '{"a": 1}')


@pytest.mark.parametrize("wrong", [{"choices": None}, {"object": "chunk"}, {"created": "today"}])
def test_an_event_that_no_schema_takes_is_found(wrong: dict[str, Any]) -> None:
    answer = {"path": "/v1/chat/completions", "is_stream": True, "text": STREAM}
    ((kind, text),) = bodies_of(answer)
    assert check_body(kind, text) == ""
    answer["text"] = f"data: {json.dumps(CHUNK | wrong)}\n\n"
    ((kind, text),) = bodies_of(answer)
    assert next(iter(wrong)) in check_body(kind, text)


def test_an_event_may_say_that_its_answer_goes_on_but_a_whole_answer_may_not() -> None:
    choice = {"text": "a", "index": 0, "logprobs": None, "finish_reason": None}
    body = {"id": "a", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}
    assert check_body(Completion, json.dumps(body), is_event=True) == ""
    assert "finish_reason" in check_body(Completion, json.dumps(body))


def test_routes_without_a_published_type_are_not_checked() -> None:
    assert bodies_of({"path": "/health", "is_stream": False, "text": "ok"}) == []
    models = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model", "created": "no"}]})
    ((kind, text),) = bodies_of({"path": "/v1/models", "is_stream": False, "text": models})
    assert "created" in check_body(kind, text)


def test_the_model_has_a_long_context_and_short_answers(tmp_path: Path) -> None:
    folder = make_long_model(tmp_path)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == CONTEXT_TOKENS
    assert json.loads((folder / "generation_config.json").read_text())["max_new_tokens"] == ANSWER_TOKENS
