"""The requests that Open WebUI 0.12 makes of an OpenAI-compatible server, recorded from what its source builds.

It lists the models, streams each turn of a chat, asks for a title, follow-up questions and tags beside it, and runs
tools: it sends calls back as it put them together from the stream, with their `index`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import httpx

MODEL = os.environ["COMPAT_MODEL"]
PARAMETERS = {
    "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 1, "stop": ["##"],
    "max_tokens": 96,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"is_cold": {"type": "boolean", "description": "Whether it is cold."}},
            "required": ["is_cold"],
        },
    },
}


def stream_chat(client: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A turn: the message that its chunks make."""
    body = {"stream": True, "model": MODEL, "messages": messages, **fields}
    calls: dict[int, dict[str, Any]] = {}
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    with client.stream("POST", "/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                said["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or []:
                    known = calls.setdefault(call["index"], call)
                    if known is not call:
                        known["function"]["arguments"] += call["function"]["arguments"]
    return said | ({"tool_calls": [*calls.values()]} if calls else {})


def ask_beside(client: httpx.Client, text: str, **fields: Any) -> None:
    """A title, questions or tags."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": False, **fields}
    client.post("/chat/completions", json=body).raise_for_status()


def main() -> None:
    """Two turns, what is asked beside them, and a round with a tool."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with httpx.Client(base_url=f"{os.environ['COMPAT_URL']}/v1", headers=headers, timeout=600) as client:
        assert MODEL in [model["id"] for model in client.get("/models").raise_for_status().json()["data"]]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Tell me about the sea."},
        ]
        messages.append(stream_chat(client, messages, stream_options={"include_usage": True}))
        ask_beside(client, "A title for this chat, as JSON.", max_completion_tokens=1000)
        ask_beside(client, "Three questions that may follow, as JSON.")
        ask_beside(client, "Tags of this chat, as JSON.")
        messages.append({"role": "user", "content": [{"type": "text", "text": "Go on."}]})
        messages.append(stream_chat(client, messages, **PARAMETERS))
        asked = stream_chat(client, messages[:2], tools=[TOOL], tool_choice="required", max_tokens=512)
        (call,) = asked["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        stream_chat(client, [*messages[:2], asked, result], tools=[TOOL], max_tokens=96)


if __name__ == "__main__":
    main()
