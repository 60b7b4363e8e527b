"""The cases by which Open Responses (version of 2026-04-24) tells whether a server conforms, over HTTP.

Its other cases ask for a WebSocket, for `/responses/compact`, or for an image: not served here, and said so. For each
event the fields are those that its schema requires.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.model_folder import make_folder
from tests.system.response_events import check_events, check_response, read_events
from tests.system.scripted_gateway import Running, scripted
from tests.unit.gateway.thinking_model import MARKERS, THINKING_TEMPLATE

CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": PLACE}
PLACED = {"item_id", "output_index"}
PART = PLACED | {"content_index"}
# The fields of each event beside its type and number.
EVENT_FIELDS: dict[str, set[str]] = {
    **dict.fromkeys(("created", "in_progress", "completed", "incomplete", "failed"), {"response"}),
    "output_item.added": {"output_index", "item"},
    "output_item.done": {"output_index", "item"},
    "content_part.added": PART | {"part"},
    "content_part.done": PART | {"part"},
    "output_text.delta": PART | {"delta"},
    "output_text.done": PART | {"text"},
    "function_call_arguments.delta": PLACED | {"delta"},
    "function_call_arguments.done": PLACED | {"arguments"},
}


@dataclass(frozen=True)
class Case:
    """A published case: what is sent, what the model says, and what must be among the items or events."""

    name: str
    sent: list[dict[str, Any]]
    said: str = "Hello there, friend."
    stream: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    item: str = "message"


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


CASES = [
    Case("basic-response", [message("user", "Greet me in three words.")]),
    Case(
        "assistant-phase",
        [
            message("assistant", "I look it up.", phase="commentary"),
            message("assistant", "It is four.", phase="final_answer"),
            message("user", "Only the number, please."),
        ],
    ),
    Case("streaming-response", [message("user", "Count to five.")], stream=True),
    Case("system-prompt", [message("system", "Talk like a pirate."), message("user", "Greet me.")]),
    Case("tool-calling", [message("user", "The weather?")], CALL, tools=(WEATHER,), item="function_call"),
    Case(
        "tool-calling-streaming",
        [message("user", "The weather?")],
        CALL,
        stream=True,
        tools=(WEATHER,),
        item="function_call",
    ),
    Case(
        "multi-turn",
        [message("user", "I am Alice."), message("assistant", "Hello, Alice."), message("user", "Who am I?")],
    ),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_folder(tmp_path_factory.mktemp("thinking"), 1024, MARKERS, THINKING_TEMPLATE)
    with scripted(folder) as running:
        yield running


def post(gateway: Running, body: dict[str, Any], path: str = "/v1/responses") -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json={"model": "toy", **body}, trust_env=False, timeout=60)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_published_cases(gateway: Running, case: Case) -> None:
    gateway.script.text = case.said
    answer = post(gateway, {"input": case.sent, "stream": case.stream, "tools": [*case.tools]})
    assert answer.status_code == 200, answer.text
    if case.stream:
        events = read_events(answer.text)
        for event in events:
            named = EVENT_FIELDS[event["type"].removeprefix("response.")]
            assert event.keys() >= named | {"type", "sequence_number"}, event
        response = check_events(events)
        began = {event["item"]["type"] for event in events if event["type"] == "response.output_item.added"}
        ended = {event["item"]["type"] for event in events if event["type"] == "response.output_item.done"}
        assert case.item in began & ended
    else:
        response = answer.json()
        check_response(response)
    assert response["status"] == "completed" and case.item in {item["type"] for item in response["output"]}


def test_what_is_not_served_of_them_is_said(gateway: Running) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    refused = post(gateway, {"input": [{"type": "message", "role": "user", "content": [image]}]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input[0].content[0].type"
    refused = post(gateway, {"input": "hi", "previous_response_id": "resp_1"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "previous_response_id"
    assert post(gateway, {"input": "hi"}, "/v1/responses/compact").status_code == 404
    assert httpx.get(f"{gateway.url}/v1/responses", trust_env=False).status_code == 405
