"""Anthropic's Python client: counted tokens, two turns, a stream, and a round with a tool."""

from __future__ import annotations

import os
from typing import Any

import anthropic

MODEL = os.environ["COMPAT_MODEL"]
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


def two_turns(client: Any) -> None:
    """The second turn is streamed."""
    messages: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, system=system)
    first = client.messages.create(model=MODEL, messages=messages, system=system, max_tokens=24)
    assert first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) == counted.input_tokens
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Go on."}]
    with client.messages.stream(model=MODEL, messages=messages, system=system, max_tokens=24) as stream:
        assert stream.get_final_message().stop_reason in ("end_turn", "max_tokens")


def use_tool(client: Any) -> None:
    """A forced call, its answer, and what the model says then."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {"model": MODEL, "tools": [TOOL], "max_tokens": 512}
    answer = client.messages.create(messages=messages, tool_choice={"type": "any"}, **asked)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use" and set(call.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=messages, **asked).stop_reason


if __name__ == "__main__":
    with anthropic.Anthropic(base_url=os.environ["COMPAT_URL"], max_retries=0) as opened:
        two_turns(opened)
        use_tool(opened)
