"""Bodies of other routes as chats, and the names of fields in their errors."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.schemas.message_parts import allow_functions
from services.gateway.openai.schemas.responses_request import ResponsesRequest
from services.gateway.openai.translated import FieldNames, TranslatedRequest
from services.gateway.openai.validate import RequestRules
from services.gateway.responses.input_items import seal_thought
from services.gateway.responses.translate import translate_responses

NAMES = FieldNames(
    {"response_format": "text.format", "max_tokens": "max_output_tokens"},
    ["instructions", "input[2]"],
    ["tools[3]"],
    {".function.": "."},
)


@pytest.mark.parametrize(
    ("chat", "theirs"),
    [
        ("messages[1].content", "input[2].content"),
        ("messages[0]", "instructions"),
        ("messages[7]", "messages[7]"),
        ("tools[0].function.name", "tools[3].name"),
        ("response_format.json_schema", "text.format.json_schema"),
        ("response_formats", "response_formats"),
        ("temperature", "temperature"),
    ],
)
def test_fields_have_the_names_of_the_route(chat: str, theirs: str) -> None:
    assert NAMES.rename_field(chat) == theirs


def test_a_failure_names_them_in_its_text_too() -> None:
    failure = RequestFailure(FailureReason.INVALID_VALUE, "'max_tokens' is 'auto', not 'x y'", "max_tokens")
    with pytest.raises(RequestError) as caught, NAMES.rename_errors():
        raise RequestError(failure)
    renamed = caught.value.failure
    assert (renamed.param, renamed.message) == (
        "max_output_tokens",
        "'max_output_tokens' is 'auto', not 'x y'",
    )


def translated(**fields: Any) -> TranslatedRequest:
    body = msgspec.json.encode({"model": "toy", "input": "hi", **fields})
    # The rules count for thoughts of `/v1/messages` alone.
    return translate_responses(parse_body(body, ResponsesRequest, 64), cast(RequestRules, None))


def messages_of(*items: dict[str, Any], **fields: Any) -> list[tuple[str, Any, Any, int]]:
    found = translated(input=list(items), **fields).chat.messages
    return [
        (message.role, message.content, message.reasoning_content, len(message.tool_calls or ()))
        for message in found
    ]


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


USER, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}


def test_a_thought_a_text_and_its_calls_are_one_message() -> None:
    output = {"type": "function_call_output", "call_id": "a", "output": "x"}
    assert messages_of(USER, thought("hm"), SAID, call("a"), call("b"), output) == [
        ("user", "hi", None, 0),
        ("assistant", "Hello.", "hm", 2),
        ("tool", "x", None, 0),
    ]


def test_what_follows_calls_is_another_message() -> None:
    found = messages_of(call("a"), SAID, SAID, thought("hm"), thought("so"), USER)
    assert found == [
        ("assistant", None, None, 1),
        ("assistant", "Hello.", None, 0),
        ("assistant", "Hello.", None, 0),
        ("assistant", None, "hm\nso", 0),
        ("user", "hi", None, 0),
    ]


def test_a_sealed_thought_is_opened_and_a_strange_one_has_its_summary() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": seal_thought("hm, ja")}
    strange = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "short"}],
        "encrypted_content": "gA",
    }
    assert messages_of(sealed, SAID, strange, SAID) == [
        ("assistant", "Hello.", "hm, ja", 0),
        ("assistant", "Hello.", "short", 0),
    ]


def test_instructions_and_what_leads_the_input_are_one_message() -> None:
    led = [{"role": "developer", "content": "b"}, {"role": "system", "content": "c"}]
    assert messages_of(*led, USER, *led[:1], instructions="a") == [
        ("system", "a\n\nb\n\nc", None, 0),
        ("user", "hi", None, 0),
        ("developer", "b", None, 0),
    ]
    assert translated(input=[*led, USER], instructions="a").names.messages == ["instructions", "input[2]"]


def test_hosted_tools_are_passed_over() -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f"}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, tools[1]]}
    found = translated(tools=tools, tool_choice=allowed)
    assert [tool.function.name for tool in found.chat.tools or ()] == ["f"]
    assert found.chat.tool_choice == allow_functions("auto", ["f"])
    assert translated(tools=tools[:1], tool_choice={**allowed, "tools": tools[:1]}).chat.tool_choice == "auto"
