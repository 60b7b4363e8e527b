"""What the clients that people have send without being asked: an answer sent back as history, usage in every chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import make_folder
from tests.system.api_answers import HI, check_error, events
from tests.system.scripted_gateway import Running, scripted
from tests.unit.gateway.chat_template_samples import THINKING


@pytest.mark.parametrize("form", ["object", "dump", "dump of what is set"])
def test_an_answer_is_sent_back_as_history(client: openai.OpenAI, gateway: Running, form: str) -> None:
    first = client.chat.completions.create(model="toy", messages=HI, max_tokens=9).choices[0].message
    forms: dict[str, Any] = {
        "object": first,
        "dump": first.model_dump(),
        "dump of what is set": first.model_dump(exclude_unset=True),
    }
    messages: list[Any] = [*HI, forms[form], {"role": "user", "content": "go on"}]
    answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    plain: list[Any] = [*HI, {"role": "assistant", "content": first.content}, messages[2]]
    prompt = gateway.script.seen[-1].prompt
    client.chat.completions.create(model="toy", messages=plain, max_tokens=5)
    assert gateway.script.seen[-1].prompt == prompt


def test_what_other_servers_add_to_an_answer_is_accepted_as_history(http: httpx.Client) -> None:
    answer = {
        "role": "assistant", "content": "Hello", "refusal": None, "annotations": [{"type": "url_citation"}],
        "audio": None, "function_call": None, "tool_calls": [], "reasoning": "hm", "name": None,
    }  # fmt: skip
    kept = {
        "role": "user",
        "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
    }
    body = {"model": "toy", "max_tokens": 3, "messages": [*HI, answer, kept]}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_an_earlier_answer_reaches_the_template(name: str, tmp_path: Path) -> None:
    (make_folder(tmp_path) / "chat_template.jinja").write_text(THINKING)
    with (
        scripted(tmp_path) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        messages = [*HI, {"role": "assistant", "content": None, name: "because"}]
        body = {"model": "toy", "max_tokens": 3, "messages": messages, "add_generation_prompt": False}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        prompt = GatewayTokenizer.load(str(tmp_path)).decode(list(running.script.seen[-1].prompt))
    assert "<think>\nbecause\n</think>" in prompt


def test_options_of_the_template_are_the_client_s(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "chat_template.jinja").write_text(THINKING)
    messages = [*HI, {"role": "assistant", "content": "x", "reasoning": "because"}]
    with (
        scripted(tmp_path) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        counts = []
        for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            body = {"messages": messages, "chat_template_kwargs": options}
            counts.append(http.post("/tokenize", json=body).json()["count"])
            chat = http.post("/v1/chat/completions", json={"model": "toy", "max_tokens": 1, **body})
            assert chat.json()["usage"]["prompt_tokens"] == counts[-1]
        assert counts[0] == counts[1] > counts[2]
        body = {"model": "toy", "messages": HI, "chat_template_kwargs": {"think": True}}
        response = http.post("/v1/chat/completions", json=body)
        check_error(response, 400, "invalid_value", "chat_template_kwargs")


@pytest.mark.parametrize(
    "fields",
    [
        {
            "store": False,
            "metadata": {"a": "b"},
            "user": "me",
            "service_tier": "auto",
            "parallel_tool_calls": True,
        },
        {
            "safety_identifier": "x",
            "prompt_cache_key": "y",
            "prompt_cache_retention": "24h",
            "verbosity": "low",
        },
        {"tools": [], "tool_choice": "auto", "functions": None, "logit_bias": {}, "stop": [], "n": None},
        {"logprobs": False, "top_logprobs": 0, "modalities": ["text"], "response_format": {"type": "text"}},
        {"max_tokens": 9, "max_completion_tokens": 3, "stream_options": None, "reasoning_effort": "none"},
        {
            "temperature": 1,
            "top_p": 1,
            "top_k": -1,
            "seed": -1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
        },
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"model": "toy", "messages": HI, "max_tokens": 3, **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("n", [1, 2])
def test_usage_so_far_is_in_every_chunk(http: httpx.Client, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"max_tokens": 12, "n": n, "stream_options": options}
    for path, more in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "say"})):
        *chunks, last = events(http, path, **body, **more)
        for index in range(n):
            own = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
            counts = [usage["completion_tokens"] for usage in own]
            assert counts == sorted(counts) and counts[-1] == 12 and len(set(counts)) > 3
            assert {usage["prompt_tokens"] for usage in own} == {last["usage"]["prompt_tokens"]}
            assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in own)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12 * n


def test_usage_in_every_chunk_is_ignored_without_usage(http: httpx.Client) -> None:
    """As vLLM does."""
    options = {"continuous_usage_stats": True}
    for path, more in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "say"})):
        chunks = events(http, path, max_tokens=3, stream_options=options, **more)
        assert chunks and not any("usage" in chunk for chunk in chunks)
