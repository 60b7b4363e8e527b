"""Answers of three kinds of thinking models over chat, Responses and Messages: the thought, the text and the calls are
the same on each route, streamed and whole, and so is what is counted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.reasoning_models import MODELS, ReasoningModel
from tests.system import message_events, response_events
from tests.system.scripted_gateway import Running, scripted

THOUGHT, TEXT, ARGUMENTS = "the quick fox", "It jumps: über den Hund.", {"x": 1}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
ROUTES = ("chat", "responses", "messages")
MOST = 300


@dataclass(frozen=True)
class Said:
    """What an answer says, and how many of its tokens are thoughts; Messages and Responses say so, too."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    tokens: int
    reasoning_tokens: int


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    folders = [model.write_folder(tmp_path_factory.mktemp(model.name)) for model in MODELS]
    with scripted(folders[0]) as qwen3, scripted(folders[1]) as r1, scripted(folders[2]) as gpt_oss:
        yield dict(zip((model.name for model in MODELS), (qwen3, r1, gpt_oss), strict=True))


def make_body(route: str, has_tools: bool, is_off: bool, stream: bool) -> dict[str, Any]:
    """The same request on a route."""
    body: dict[str, Any] = {"model": "toy", "stream": stream}
    function = {"name": "jump", "parameters": PARAMETERS}
    if route == "chat":
        body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": MOST}
        body |= {"tools": [{"type": "function", "function": function}]} if has_tools else {}
        body |= {"reasoning_effort": "none"} if is_off else {}
        return body | ({"stream_options": {"include_usage": True}} if stream else {})
    if route == "responses":
        body |= {"input": "hi", "max_output_tokens": MOST}
        body |= {"tools": [{"type": "function", **function}]} if has_tools else {}
        return body | ({"reasoning": {"effort": "none"}} if is_off else {})
    body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": MOST}
    body |= {"tools": [{"name": "jump", "input_schema": PARAMETERS}]} if has_tools else {}
    return body | ({"thinking": {"type": "disabled"}} if is_off else {})


def ask(running: Running, route: str, body: dict[str, Any]) -> Said:
    """What the answer of a route says."""
    path = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}[route]
    answer = httpx.post(f"{running.api}{path}", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    if route == "chat":
        return join_chat(answer.text) if body["stream"] else read_chat(answer.json())
    if route == "responses":
        events = response_events.read_events(answer.text) if body["stream"] else []
        return read_response(response_events.check_events(events) if body["stream"] else answer.json())
    events = message_events.read_events(answer.text) if body["stream"] else []
    return read_message(message_events.check_events(events) if body["stream"] else answer.json())


def read_chat(body: dict[str, Any]) -> Said:
    message, usage = body["choices"][0]["message"], body["usage"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]
    return Said(
        message.get("reasoning") or "",
        message["content"] or "",
        tuple(calls),
        usage["completion_tokens"],
        usage["completion_tokens_details"]["reasoning_tokens"],
    )


def join_chat(text: str) -> Said:
    """A stream of a chat, as the whole answer."""
    message: dict[str, Any] = {"reasoning": "", "content": "", "tool_calls": []}
    usage: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            message["reasoning"] += delta.get("reasoning") or ""
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    message["tool_calls"].append(
                        {"function": {"name": call["function"]["name"], "arguments": ""}}
                    )
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return read_chat({"choices": [{"message": message}], "usage": usage})


def read_response(body: dict[str, Any]) -> Said:
    items = body["output"]
    texts = {
        kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    }
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    usage = body["usage"]
    counted = usage["output_tokens_details"]["reasoning_tokens"]
    return Said(texts["reasoning"], texts["message"], tuple(calls), usage["output_tokens"], counted)


def read_message(body: dict[str, Any]) -> Said:
    def join(kind: str) -> str:
        return "".join(block[kind] for block in body["content"] if block["type"] == kind)

    calls = [
        (block["name"], json.dumps(block["input"]))
        for block in body["content"]
        if block["type"] == "tool_use"
    ]
    usage = body["usage"]
    counted = usage["output_tokens_details"]["thinking_tokens"]
    return Said(join("thinking"), join("text"), tuple(calls), usage["output_tokens"], counted)


def count_thought(running: Running, model: ReasoningModel, script: str) -> int:
    """The tokens of the script's thought with those that begin and end it."""
    tokens = running.script.tokens
    ids = tokens.encode(script, False)
    close = ids.index(tokens.encode(model.closes.strip(), False)[0])
    # The header of a message of gpt-oss counts from its last token on.
    first = ids.index(tokens.encode("<|message|>", False)[0]) if model.name == "gpt-oss" else 0
    return close - first + 1


CASES = [
    case
    for case in itertools.product(MODELS, (False, True), ("text", "call", "text and call"))
    if case[0].has_switch or not case[1]
]


def name_case(case: tuple[ReasoningModel, bool, str]) -> str:
    return f"{case[0].name}-{'off' if case[1] else 'on'}-{case[2]}"


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_all_routes_say_the_same(
    gateways: dict[str, Running], case: tuple[ReasoningModel, bool, str]
) -> None:
    model, is_off, kind = case
    running = gateways[model.name]
    call = model.call.replace("NAME", "jump").replace("ARGS", json.dumps(ARGUMENTS))
    said = f"{model.text}{TEXT}"
    if kind != "text":
        between = "<|end|><|start|>assistant" if model.name == "gpt-oss" else ""
        said = call if kind == "call" else f"{said}{between}{call}"
    script = model.write_answer(None if is_off else THOUGHT, said)
    running.script.text = script
    found = {}
    for route, stream in itertools.product(ROUTES, (False, True)):
        found[route, stream] = ask(running, route, make_body(route, kind != "text", is_off, stream))
    expected = Said(
        "" if is_off else THOUGHT,
        "" if kind == "call" else TEXT,
        () if kind == "text" else (("jump", json.dumps(ARGUMENTS)),),
        # The end token, too.
        len(running.script.tokens.encode(script, False)) + 1,
        0 if is_off else count_thought(running, model, script),
    )
    assert found == dict.fromkeys(found, expected)
