"""What a stream of `/v1/messages` must be: Anthropic's types, and their order."""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
# By type of block: the deltas that it may have, and the field that each of them makes longer.
DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each with its name and one line of data, without pings."""
    events = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            events.append(event)
    assert text.endswith("\n\n")
    return events


def check_message(message: dict[str, Any]) -> None:
    """A whole message has all that it must have."""
    Message.model_validate(message, strict=True)
    assert message["role"] == "assistant" and message["type"] == "message"
    assert message["stop_reason"] is not None
    assert (message["stop_sequence"] is not None) == (message["stop_reason"] == "stop_sequence")


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check types and order of a complete stream; returns the message that it makes."""
    for event in events:
        EVENTS.validate_python(event)
    start, *inner, delta, stop = events
    assert (
        start["type"] == "message_start"
        and delta["type"] == "message_delta"
        and stop == {"type": "message_stop"}
    )
    message: dict[str, Any] = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["stop_sequence"] is None
    block: dict[str, Any] | None = None
    blocks: list[dict[str, Any]] = []
    for event in inner:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert block is None and event["index"] == len(blocks)
            block = event["content_block"]
            assert {key: block[key] for key in EMPTY[block["type"]]} == EMPTY[block["type"]]
            blocks.append(block)
            continue
        assert block is not None and event["index"] == len(blocks) - 1
        if kind == "delta":
            part = event["delta"]
            field = DELTAS[block["type"]][part["type"]]
            block[field] = block.get(field, "") + part[field]
            # The signature comes last.
            assert part["type"] == "signature_delta" or not block.get("signature")
            continue
        assert kind == "stop"
        if block["type"] == "tool_use" and "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
        block = None
    assert block is None
    message |= {"content": blocks, **delta["delta"], "usage": message["usage"] | delta["usage"]}
    check_message(message)
    return message
