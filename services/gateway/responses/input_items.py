"""Turns the items of `/v1/responses` into the messages of a chat.

One message of the assistant takes a thought, a text and the calls behind it, as an answer of a chat has them.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

from services.gateway.openai.parse_body import missing_parameter_error
from services.gateway.openai.schemas.request_schema import Message
from services.gateway.openai.schemas.responses_request import InputItem, ItemPart, ResponsesRequest
from services.gateway.openai.translated import PlacedMessages
from services.gateway.openai.validate import invalid_value_error, unsupported_error

TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
# What begins the `encrypted_content` of our own thoughts.
SEAL = "diptych."


def seal_thought(text: str) -> str:
    """A thought as `encrypted_content`. It hides nothing: its client has seen the thought."""
    return SEAL + base64.b64encode(text.encode()).decode()


@dataclass(slots=True)
class ItemMessages(PlacedMessages):
    """The messages of a chat, made of items."""

    # The assistant's message that further items may belong to.
    _place: str = ""
    _thought: str | None = None
    _text: str | None = None
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def add_item(self, item: InputItem, where: str) -> None:
        """Add the next item. Raises RequestError (400) if it cannot be a part of a chat."""
        kind = item.type or "message"
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            if self._text is not None or self._calls:
                self.end_message()
            self._open(where)
            thought = _read_thought(item, where)
            self._thought = "\n".join(text for text in (self._thought, thought) if text is not None)
        elif kind == "function_call":
            self._open(where)
            self._calls.append(_make_call(item, where))
        elif kind == "function_call_output":
            self.end_message()
            if item.call_id is None:
                raise missing_parameter_error(f"{where}.call_id")
            output = _join_parts(item.output, f"{where}.output")
            self.append_message(Message(role="tool", content=output, tool_call_id=item.call_id), where)
        else:
            problem = (
                f"'{kind[:40]}' is not supported: only messages, functions and thoughts of this server are"
            )
            raise unsupported_error(f"{where}.type", problem)

    def end_message(self) -> None:
        """No further item belongs to the assistant's message."""
        if self._place:
            calls = self._calls or None
            text = self._text if self._text is not None or calls or self._thought else ""
            message = Message(
                role="assistant", content=text, tool_calls=calls, reasoning_content=self._thought
            )
            self.append_message(message, self._place)
            self._place, self._thought, self._text, self._calls = "", None, None, []

    def _add_message(self, item: InputItem, where: str) -> None:
        if item.role is None:
            raise missing_parameter_error(f"{where}.role")
        text = _join_parts(item.content, f"{where}.content")
        if item.role == "assistant":
            if self._text is not None or self._calls:
                self.end_message()
            self._open(where)
            self._text = text
        else:
            self.end_message()
            self.append_message(Message(role=item.role, content=text), where)

    def _open(self, where: str) -> None:
        self._place = self._place or where


def list_messages(request: ResponsesRequest) -> ItemMessages:
    """The messages of a request. Its instructions and the system's messages behind them are one message.

    Raises:
        RequestError: 400, an item cannot be a part of a chat.
    """
    found = ItemMessages()
    if isinstance(request.input, str):
        found.messages, found.places = [Message(role="user", content=request.input)], ["input"]
    else:
        for i, item in enumerate(request.input):
            found.add_item(item, f"input[{i}]")
        found.end_message()
    if request.instructions:
        _put_instructions(found, request.instructions)
    return found


def _put_instructions(found: ItemMessages, instructions: str) -> None:
    """Put the instructions at the beginning. Many templates take one message of the system there, and no other."""
    num_led = 0
    while num_led < len(found.messages) and found.messages[num_led].role in ("system", "developer"):
        num_led += 1
    texts = [instructions, *(str(message.content) for message in found.messages[:num_led])]
    found.messages[:num_led] = [Message(role="system", content="\n\n".join(texts))]
    found.places[:num_led] = ["instructions"]


def _read_thought(item: InputItem, where: str) -> str:
    """The thought of an item: in the clear, sealed by us, or what its summary says."""
    if item.content:
        return _join_parts(item.content, f"{where}.content")
    sealed = item.encrypted_content
    if sealed is not None and sealed.startswith(SEAL):
        try:
            return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
        except (binascii.Error, ValueError) as error:
            raise invalid_value_error(f"{where}.encrypted_content", "is not one of this server") from error
    return _join_parts(item.summary or [], f"{where}.summary")


def _make_call(item: InputItem, where: str) -> dict[str, Any]:
    """A call as chats have it."""
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise missing_parameter_error(f"{where}.{name}")
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _join_parts(content: str | list[ItemPart] | None, where: str) -> str:
    """The text of an item. Raises RequestError (400) if it has something else."""
    if content is None:
        raise missing_parameter_error(where)
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type not in TEXT_PARTS and part.type != "refusal":
            problem = f"'{part.type[:40]}' is not supported; this model reads text"
            raise unsupported_error(f"{where}[{i}].type", problem)
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise invalid_value_error(
                f"{where}[{i}].{'refusal' if part.type == 'refusal' else 'text'}", "must be text"
            )
        texts.append(text)
    return "".join(texts)
