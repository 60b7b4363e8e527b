"""What official clients see of calls of tools, in streams and in whole answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.model_folder import make_folder
from tests.system.scripted_gateway import Running, scripted
from tests.unit.gateway.thinking_model import MARKERS, THINKING_TEMPLATE

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
    for name in ("jump", "look_up")
]
TEXT = (
    "<think>\nthe fox\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "jump", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
)
CALLS = [("jump", '{"x": 1}'), ("look_up", "{}")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("thinking"), 1024, MARKERS, THINKING_TEMPLATE)


@contextmanager
def serving(folder: Path, text: str) -> Iterator[tuple[Running, openai.OpenAI]]:
    with (
        scripted(folder, text=text) as running,
        openai.OpenAI(base_url=running.api, api_key="none", max_retries=0) as client,
    ):
        yield running, client


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with serving(folder, TEXT) as (_, made):
        yield made


def test_a_whole_answer_has_its_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=HI, tools=TOOLS, logprobs=True)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "One moment."
    assert choice.message.model_dump()["reasoning"] == "the fox"
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    assert len({call.id for call in calls}) == 2
    assert choice.logprobs is not None and answer.usage is not None
    assert len(choice.logprobs.content or ()) == answer.usage.completion_tokens - 1


def test_a_parsed_answer_is_sent_back_as_it_is(client: openai.OpenAI) -> None:
    """The client adds to answers what it has read of them, and sends that back."""
    tools: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    parse = client.chat.completions.parse
    message = parse(model="toy", messages=HI, tools=tools, tool_choice="required").choices[0].message
    calls: Any = message.tool_calls
    assert calls[0].function.parsed_arguments == {"x": 1}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    for sent in (message, message.model_dump()):
        messages: Any = [*HI, sent, *results]
        assert parse(model="toy", messages=messages, tools=tools).choices[0].message.content == "One moment."


def test_a_stream_sends_id_and_name_once_and_then_arguments(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="toy", messages=HI, tools=TOOLS, stream=True, logprobs=True)
    heads: list[tuple[int, str | None, str | None]] = []
    arguments: dict[int, str] = {}
    content, finish, tokens = "", [], 0
    for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        finish += [choice.finish_reason] if choice.finish_reason else []
        tokens += len(choice.logprobs.content or ()) if choice.logprobs else 0
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert call.type == "function" and call.function.arguments == ""
                heads.append((call.index, call.function.name, call.id))
            else:
                assert call.function.name is None and call.type is None
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert (content, finish) == ("One moment.", ["tool_calls"])
    assert [(index, name) for index, name, _ in heads] == [(0, "jump"), (1, "look_up")]
    assert [arguments[index] for index in (0, 1)] == [text for _, text in CALLS]
    whole = client.chat.completions.create(model="toy", messages=HI, tools=TOOLS, logprobs=True)
    assert whole.usage is not None and tokens == whole.usage.completion_tokens - 1


def test_one_call_ends_an_answer_that_may_have_only_one(client: openai.OpenAI) -> None:
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model="toy", messages=HI, tools=TOOLS, parallel_tool_calls=False, stream=stream
        )
        if not stream:
            [choice] = answer.choices
            assert [call.function.name for call in choice.message.tool_calls] == ["jump"]
            assert choice.finish_reason == "tool_calls"
            continue
        chunks = [chunk.choices[0] for chunk in answer]
        indexes = {call.index for choice in chunks for call in choice.delta.tool_calls or ()}
        assert indexes == {0} and chunks[-1].finish_reason == "tool_calls"


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(model="toy", messages=HI, **more)
        [choice] = answer.choices
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"
        assert '"name": "jump"' in (choice.message.content or "")


def test_an_answer_of_calls_alone_has_null_content(folder: Path) -> None:
    with serving(folder, '<tool_call>\n{"name": "jump", "arguments": {"x": 2}}\n</tool_call>') as (_, client):
        answer = client.chat.completions.create(model="toy", messages=HI, tools=TOOLS)
        message = answer.choices[0].message
        assert message.content is None and "content" in message.model_fields_set
        # And the next question.
        call: Any = message.tool_calls
        second = [*HI, message.model_dump(exclude_unset=True)]
        second.append({"role": "tool", "content": "done", "tool_call_id": call[0].id})
        assert client.chat.completions.create(model="toy", messages=second, tools=TOOLS).choices


def test_a_call_that_is_cut_says_so(folder: Path) -> None:
    with serving(folder, '<tool_call>\n{"name": "jump", "arguments": {"x": 123456789') as (_, client):
        answer = client.chat.completions.create(model="toy", messages=HI, tools=TOOLS, max_tokens=18)
        [choice] = answer.choices
        calls: Any = choice.message.tool_calls
        assert choice.finish_reason == "length" and calls[0].function.name == "jump"
        with pytest.raises(ValueError):
            json.loads(calls[0].function.arguments)


def test_the_grammar_reaches_the_worker(folder: Path) -> None:
    with serving(folder, TEXT) as (running, client):
        client.chat.completions.create(model="toy", messages=HI, tools=TOOLS, tool_choice="required")
        grammar = running.script.seen[-1].sampling.grammar
        assert grammar is not None and grammar.kind == "tools" and grammar.gate is not None
        bad: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="toy", messages=HI, tools=bad)
        assert caught.value.code == "invalid_schema"
        # A large body is prepared beside the event loop.
        wide = {"type": "object", "properties": {f"p{i}": {"type": "no type"} for i in range(200)}}
        tools = [TOOLS[0], {"type": "function", "function": {"name": "g", "parameters": wide}}]
        body = {"model": "toy", "messages": HI, "tools": tools}
        answer = httpx.post(f"{running.api}/chat/completions", json=body, trust_env=False)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
