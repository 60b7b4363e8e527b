"""OpenAI's Python client: chat, completions, responses, whole and streamed; second turns, and a round with a tool."""

from __future__ import annotations

import os
from typing import Any

import openai

MODEL = os.environ["COMPAT_MODEL"]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}


def chat_turns(client: Any) -> None:
    """Two turns, the second one streamed with its usage."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about the sea."}]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=24)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.completion_tokens > 0


def chat_tool(client: Any) -> None:
    """A forced call, its answer, and what the model says then."""
    function = {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER}
    tools = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {"model": MODEL, "tools": tools, "max_tokens": 512}
    answer = client.chat.completions.create(messages=messages, tool_choice="required", **asked)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and answer.choices[0].finish_reason == "tool_calls"
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert client.chat.completions.create(messages=messages, **asked).choices[0].finish_reason


def parsed_tool(client: Any) -> None:
    """The same with a call that the client has parsed, which it sends back so."""
    function = {"name": "get_weather", "parameters": WEATHER, "strict": True}
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {"model": MODEL, "tools": [{"type": "function", "function": function}], "max_tokens": 512}
    answer = client.chat.completions.parse(messages=messages, tool_choice="required", **asked)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert set(call.function.parsed_arguments) == {"city"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert client.chat.completions.create(messages=messages, **asked).choices[0].finish_reason


def response_turns(client: Any) -> None:
    """Two turns of responses, the second one streamed, and a round with a tool."""
    first = client.responses.create(
        model=MODEL, input="Tell me about the sea.", max_output_tokens=24, store=False
    )
    items: list[Any] = [{"role": "user", "content": "Tell me about the sea."}, *first.output]
    items.append({"role": "user", "content": "Go on."})
    with client.responses.stream(model=MODEL, input=items, max_output_tokens=24, store=False) as stream:
        assert list(stream)[-1].type in ("response.completed", "response.incomplete")
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    items = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {"model": MODEL, "tools": [tool], "max_output_tokens": 512, "store": False}
    answer = client.responses.create(input=items, tool_choice="required", **asked)
    (call,) = (item for item in answer.output if item.type == "function_call")
    items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    assert client.responses.create(input=items, **asked).status in ("completed", "incomplete")


if __name__ == "__main__":
    with openai.OpenAI(base_url=os.environ["COMPAT_URL"] + "/v1", max_retries=0) as opened:
        assert MODEL in [model.id for model in opened.models.list()]
        opened.completions.create(model=MODEL, prompt="The sea", max_tokens=8)
        chat_turns(opened)
        chat_tool(opened)
        parsed_tool(opened)
        response_turns(opened)
