"""One question with one seed on the three routes of chats, over two pools: the same tokens, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.deployment import Served, serve_parts
from tests.system import message_events, response_events

QUESTION = "What is a list in Python?"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 24},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 24},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 24},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_parts("--prefill", "1", "--decode", "1") as running:
        yield running


def text_of(path: str, body: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if path == "/v1/responses":
        return "".join(part["text"] for item in body["output"] for part in item["content"])
    if path == "/v1/messages":
        return "".join(block["text"] for block in body["content"])
    return str(body["choices"][0]["message"]["content"])


def streamed_text(path: str, text: str) -> str:
    """The text of a stream, whose events are checked."""
    if path == "/v1/responses":
        return text_of(path, response_events.check_events(response_events.read_events(text)))
    if path == "/v1/messages":
        return text_of(path, message_events.check_events(message_events.read_events(text)))
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_seed_gives_the_same_tokens_on_all_routes(served: Served, seed: int) -> None:
    texts = set()
    with httpx.Client(base_url=served.url, trust_env=False, timeout=120) as http:
        for path, fields in BODIES.items():
            body = {"model": "tiny", "seed": seed, "temperature": 1, **fields}
            whole = http.post(path, json=body)
            assert whole.status_code == 200, whole.text
            texts |= {
                text_of(path, whole.json()),
                streamed_text(path, http.post(path, json={**body, "stream": True}).text),
            }
    assert len(texts) == 1 and texts != {""}


def test_official_clients_get_answers_from_pools(served: Served) -> None:
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as ours,
        anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as theirs,
    ):
        response = ours.responses.create(model="tiny", input=QUESTION, max_output_tokens=8, temperature=0)
        messages: Any = MESSAGES
        with theirs.messages.stream(
            model="tiny", max_tokens=8, messages=messages, extra_body={"temperature": 0}
        ) as stream:
            text = "".join(stream.text_stream)
        assert response.output_text == text != "" and response.status == "incomplete"
