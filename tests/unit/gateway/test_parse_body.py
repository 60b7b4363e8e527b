"""Bodies and their errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diptych.errors import RequestError
from diptych.failure_statuses import RequestFailure
from services.gateway.openai.chat_messages import parse_chat_messages
from services.gateway.openai.parse_body import json_depth, parse_body
from services.gateway.openai.schemas.message_parts import RefusalPart, TextPart
from services.gateway.openai.schemas.request_schema import ChatRequest, CompletionRequest

GOOD: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


def said(*parts: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": parts}


def called(**call: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", **call}]}


def refused(body: bytes, kind: type = ChatRequest) -> RequestFailure:
    with pytest.raises(RequestError) as caught:
        parse_body(body, kind, 64)
    assert caught.value.failure.status == 400
    return caught.value.failure


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"model": None}, "invalid_value", "model"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "missing_required_parameter",
         "messages[0].content[0].type"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"top_p": -0.1}, "invalid_value", "top_p"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 129}, "invalid_value", "n"),
        ({"n": 1.5}, "invalid_value", "n"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"stop": ["a"] * 5}, "invalid_value", "stop"),
        ({"top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"logit_bias": {"1": 101}}, "invalid_value", "logit_bias[...]"),
        ({"logit_bias": {"one": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "invalid_value", "logit_bias"),
        ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "missing_required_parameter",
         "response_format.json_schema.name"),
        ({"kv_transfer_params": {}}, "unrecognized_request_argument", "kv_transfer_params"),
        ({"stream_options": {"usage": True}}, "unrecognized_request_argument", "stream_options.usage"),
        ({"messages": [*GOOD["messages"], said({"type": "text", "text": "a"}, {"type": "text", "text": "a", "x": 1})]},
         "unrecognized_request_argument", "messages[1].content[1].x"),
        ({"messages": [said({"type": "refusal", "refusal": "a", "text": "b"})]}, "unrecognized_request_argument",
         "messages[0].content[0].text"),
        ({"messages": [said({"type": "text", "text": 5})]}, "invalid_value", "messages[0].content[0].text"),
        ({"messages": [said("a")]}, "invalid_value", "messages[0].content[0]"),
        ({"messages": [called(function={"name": "f", "arguments": "{}", "x": 1})]}, "unrecognized_request_argument",
         "messages[0].tool_calls[0].function.x"),
        ({"messages": [called(function={"name": "f"}, x=1)]}, "unrecognized_request_argument",
         "messages[0].tool_calls[0].x"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}, "x": 1}}, "unrecognized_request_argument",
         "tool_choice.x"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "unrecognized_request_argument",
         "tools[0].function.x"),
    ],
)  # fmt: skip
def test_errors_name_the_field(change: dict[str, object], code: str, param: str) -> None:
    error = refused(msgspec.json.encode({**GOOD, **change}))
    assert (error.code, error.param) == (code, param)
    assert "`" not in error.message
    assert "$" not in error.message


def test_what_clients_keep_of_a_call_is_accepted() -> None:
    kept = called(function={"name": "f", "parsed_arguments": None}, type=None, extra_content={"google": {}})
    message = parse_body(msgspec.json.encode({**GOOD, "messages": [kept]}), ChatRequest, 64).messages[0]
    assert parse_chat_messages([message])[0]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    "huge",
    [
        b'{"model":"toy","messages":[{"role":"user","content":"hi"}],"%s":1}',
        b'{"model":"toy","messages":[{"role":"%s","content":"hi"}]}',
        b'{"model":"toy","messages":[{"role":"user","content":"hi","%s":1}]}',
        b'{"model":"toy","messages":[{"role":"user","content":"hi"}],"response_format":{"type":"%s"}}',
    ],
)
@pytest.mark.parametrize("text", [b"k", b"\\n", b"\\u2028", "語".encode()])
def test_what_a_client_wrote_is_cut(huge: bytes, text: bytes) -> None:
    error = refused(huge % (text * (1 << 20)))
    assert len(error.message) + len(error.param or "") <= 700
    assert (error.message + (error.param or "")).isprintable()


def test_a_name_is_never_read_as_a_list_of_places() -> None:
    # Where each was taken off by itself, this took hours.
    name = "x" + " - at `$a`" * 200_000
    assert refused(msgspec.json.encode({**GOOD, name: 1})).code == "unrecognized_request_argument"
    part = {"type": "text", "text": "x", "f - at `$b`": 1}
    body = msgspec.json.encode({"model": "toy", "messages": [{"role": "user", "content": [part]}]})
    assert (refused(body).param or "").startswith("messages[0].content[0].")


def test_a_missing_field_is_named() -> None:
    assert refused(b'{"model": "toy"}').param == "messages"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nul", b'{"model": "\xff"}', b'{"model": "\\ud800"}', b'{"n": NaN}', b"\x00"],
)
def test_what_is_not_json_is_said_to_be_so(body: bytes) -> None:
    assert refused(body).code == "invalid_json"


def test_a_deep_body_is_refused_before_it_is_parsed() -> None:
    for opening in (b"[", b'{"a":', b'[{"a":'):
        error = refused(b'{"x":' + opening * 100_000)
        assert error.code == "invalid_json"
        assert "nested" in error.message


def test_depth_ignores_brackets_in_strings() -> None:
    assert json_depth(b'{"a": "[[[[{{", "b": [1, {"c": "\\"]]"}]}') == 3
    assert json_depth(b"true") == 0
    assert json_depth(b'"' + b"[" * 1000 + b'"') == 0
    assert json_depth(b'"\\' + b"[" * 10) == 0  # an unfinished string


def test_an_object_is_wanted() -> None:
    assert refused(b"[]").param is None


def test_the_four_forms_of_a_prompt_are_taken() -> None:
    for prompt in ("text", ["a", "b"], [1, 2], [[1], [2, 3]]):
        body = msgspec.json.encode({"model": "toy", "prompt": prompt})
        assert parse_body(body, CompletionRequest, 64).prompt == prompt


def test_unknown_fields_of_one_kind_are_passed_over_where_they_are_unknown() -> None:
    """What is unknown in a text is a field of a refusal."""
    parts = [
        {"type": "text", "text": "a", "refusal": "b", "x": 1},
        {"type": "refusal", "refusal": "c", "x": 1},
    ]
    body = msgspec.json.encode({**GOOD, "messages": [said(*parts), said(*parts)]})
    ignored: list[str] = []
    content = parse_body(body, ChatRequest, 64, ignored).messages[1].content
    assert content == [TextPart("text", "a"), RefusalPart("refusal", "c")]
    assert sorted(ignored) == ["messages[].content[].refusal", "messages[].content[].x"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"foo": 1, "model": ',
        b'{"model":"toy","x` - at `$.messages":1,"messages":[{"role":"user"}]}',
        b'{"model":"toy","x` - at `$.messages[9].a[0]":1,"messages":[{"role":"user","content":"a"}]}',
    ],
)
def test_what_cannot_be_passed_over_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(body, ChatRequest, 64, [])
    assert caught.value.failure.status == 400
