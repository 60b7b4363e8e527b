"""Turns the messages of a chat request into the conversation that a chat template renders."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from services.gateway.openai.parse_body import missing_parameter_error
from services.gateway.openai.schemas.message_parts import PastCall, PastFunctionCall, RefusalPart, TextPart
from services.gateway.openai.schemas.request_schema import Message
from services.gateway.openai.schemas.typed_objects import show_type
from services.gateway.openai.validate import invalid_value_error, unsupported_error


def parse_chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them: text parts joined, null fields left out, tool arguments parsed.

    Raises:
        RequestError: a part or a field is not supported, or a field that the role needs is missing.
    """
    called: set[str] = set()
    parsed = []
    for i, message in enumerate(messages):
        parsed.append(_parse_message(message, f"messages[{i}]"))
        called.update(str(call.id) for call in message.tool_calls or () if isinstance(call, PastFunctionCall))
        if message.role == "tool" and message.tool_call_id not in called:
            problem = "is the id of no call in 'tool_calls' of an earlier message"
            raise invalid_value_error(f"messages[{i}].tool_call_id", problem)
    return parsed


def _parse_message(message: Message, where: str) -> dict[str, Any]:
    for field in ("function_call", "audio"):
        if getattr(message, field) is not None:
            raise unsupported_error(f"{where}.{field}")
    if message.role == "tool" and message.tool_call_id is None:
        raise missing_parameter_error(f"{where}.tool_call_id")
    content = _join_text_parts(message, where)
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if content is None and not (message.role == "assistant" and (message.tool_calls or reasoning)):
        raise invalid_value_error(f"{where}.content", "must be text")
    parsed: dict[str, Any] = {"role": message.role, "content": content}
    if reasoning is not None:
        parsed["reasoning_content"] = reasoning
        parsed["content"] = content or ""
    if message.name is not None:
        parsed["name"] = message.name
    if message.tool_call_id is not None:
        parsed["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        parsed["tool_calls"] = [
            _parse_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return parsed


def _join_text_parts(message: Message, where: str) -> str | None:
    if message.content is None or isinstance(message.content, str):
        return message.refusal if message.content is None else message.content
    texts: list[str] = []
    for i, part in enumerate(message.content):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            raise unsupported_error(
                f"{where}.content[{i}].type",
                f"{show_type(part)} is not supported; this model reads text",
            )
    return "".join(texts)


def _parse_tool_call(call: PastCall, where: str) -> dict[str, Any]:
    """A past tool call with its arguments as an object, which is what templates print."""
    if not isinstance(call, PastFunctionCall):
        raise unsupported_error(f"{where}.type", f"{show_type(call)} is not supported; functions are called")
    arguments: Any = call.function.arguments
    with suppress(msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.decode(arguments) if arguments else {}
    return {
        **({} if call.id is None else {"id": call.id}),
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
