"""LiteLLM as a client of an OpenAI-compatible server and of an Anthropic-compatible one."""

from __future__ import annotations

import os
from typing import Any

import litellm

URL, MODEL = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
FUNCTION = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"is_cold": {"type": "boolean"}},
        "required": ["is_cold"],
        "additionalProperties": False,
    },
}


def use_model(**where: Any) -> None:
    """Two turns, the second one streamed, and a round with a tool."""
    messages: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]
    first = litellm.completion(messages=messages, max_tokens=24, **where)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    assert list(litellm.completion(messages=messages, max_tokens=24, stream=True, **where))
    messages = [{"role": "user", "content": "What is the weather?"}]
    tools = [{"type": "function", "function": FUNCTION}]
    answer = litellm.completion(
        messages=messages, max_tokens=512, tools=tools, tool_choice="required", **where
    )
    (call,) = answer.choices[0].message.tool_calls
    messages += [
        answer.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    assert litellm.completion(messages=messages, max_tokens=24, tools=tools, **where).choices


if __name__ == "__main__":
    use_model(model=f"openai/{MODEL}", api_base=f"{URL}/v1", num_retries=0)
    use_model(model=f"anthropic/{MODEL}", api_base=URL, num_retries=0)
