"""What a stream of `/v1/responses` must be: OpenAI's types, and their order (Open Responses' rules for items)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDS = {"completed", "incomplete", "failed"}
# Fields of a response that Open Responses requires, also where they are null.
REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens",
    "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
PARTS = {
    "output_text": "output_text",
    "reasoning_text": "reasoning_text",
    "summary_text": "reasoning_summary_text",
}


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each with its name and one line of data; [DONE] is at the end and only there."""
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    assert frames[-1] == "data: [DONE]"
    events = []
    for frame in frames[:-1]:
        name, data = frame.split("\n")
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def check_response(response: dict[str, Any]) -> None:
    """A response has all that it must have."""
    Response.model_validate(response)
    assert response.keys() >= REQUIRED
    usage, is_over = response["usage"], response["status"] in ("completed", "incomplete")
    assert (usage is not None) == is_over
    if is_over:
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]
    assert (response["completed_at"] is not None) == (response["status"] == "completed")
    assert (response["incomplete_details"] is not None) == (response["status"] == "incomplete")
    assert (response["error"] is not None) == (response["status"] == "failed")


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check types, numbers and order of a stream; returns its last response."""
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *inner, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    for event in (created, last):
        check_response(event["response"])
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}" and response["status"] in ENDS
    assert response["id"] == created["response"]["id"] and created["response"]["output"] == []
    steps, items = iter(inner), list[dict[str, Any] | None]()
    for event in steps:
        items.append(_check_item(event, steps, len(items), response["status"] == "failed"))
    done = [item for item in items if item is not None]
    assert response["output"][: len(done)] == done
    assert len(response["output"]) == len(items)
    return response


def _check_item(
    added: dict[str, Any], steps: Iterable[dict[str, Any]], index: int, may_end: bool
) -> dict[str, Any] | None:
    """Check the events of one item; returns it, or None if the stream fails before it is done."""
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item, kind = added["item"], added["item"]["type"]
    assert item["status"] == "in_progress"
    seen = [added]
    for event in steps:
        assert event["output_index"] == index
        seen.append(event)
        if event["type"] == "response.output_item.done":
            break
        assert event["item_id"] == item["id"]
    else:
        assert may_end
        return None
    done: dict[str, Any] = seen[-1]["item"]
    assert done["id"] == item["id"] and done["status"] in ("completed", "incomplete")
    names = [event["type"].removeprefix("response.") for event in seen[1:-1]]
    deltas = [event["delta"] for event in seen if event["type"].endswith(".delta")]
    if kind == "function_call":
        *sent, last = names
        assert set(sent) <= {"function_call_arguments.delta"} and last == "function_call_arguments.done"
        assert "".join(deltas) == seen[-2]["arguments"] == done["arguments"] and item["arguments"] == ""
        assert done["call_id"] == item["call_id"] and done["name"] == item["name"]
        return done
    part = seen[1]["part"]
    text, box = (
        PARTS[part["type"]],
        "reasoning_summary_part" if part["type"] == "summary_text" else "content_part",
    )
    assert names[0] == f"{box}.added" and names[-2:] == [f"{text}.done", f"{box}.done"]
    assert set(names[1:-2]) <= {f"{text}.delta"}
    [whole] = done["summary"] if part["type"] == "summary_text" else done["content"]
    assert whole == seen[-2]["part"] and part["text"] == ""
    assert "".join(deltas) == seen[-3]["text"] == whole["text"]
    if kind == "message":
        scored = [entry for event in seen if event["type"].endswith(".delta") for entry in event["logprobs"]]
        assert scored == seen[-3]["logprobs"] == whole["logprobs"]
    return done
