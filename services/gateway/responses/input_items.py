"""Turns the items of `/v1/responses` into the messages of a chat.

One message of the assistant takes a thought, a text and the calls behind it, as an answer of a chat has them.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

from services.gateway.openai.schemas.message_parts import PastCall, PastFunction, PastFunctionCall
from services.gateway.openai.schemas.request_schema import Message
from services.gateway.openai.schemas.response_items import (
    AnswerTextPart,
    CallInput,
    InputItem,
    InputTextPart,
    ItemPart,
    MessageInput,
    OutputInput,
    PlainTextPart,
    RefusedPart,
    ThoughtInput,
)
from services.gateway.openai.schemas.responses_request import ResponsesRequest
from services.gateway.openai.schemas.typed_objects import show_type
from services.gateway.openai.translated import PlacedMessages, check_caller
from services.gateway.openai.validate import invalid_value_error, unsupported_error

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
    _calls: list[PastCall] = field(default_factory=list)

    def add_item(self, item: InputItem, where: str) -> None:
        """Add the next item. Raises RequestError (400) if it cannot be a part of a chat."""
        if isinstance(item, MessageInput):
            self._add_message(item, where)
        elif isinstance(item, ThoughtInput):
            if self._text is not None or self._calls:
                self.end_message()
            self._open(where)
            thought = _read_thought(item, where)
            self._thought = "\n".join(text for text in (self._thought, thought) if text is not None)
        elif isinstance(item, CallInput):
            self._open(where)
            _check_caller(item, where)
            if item.is_async:
                raise unsupported_error(
                    f"{where}.async", "cannot be true: a call is followed by its output here"
                )
            function = PastFunction(item.name, item.arguments)
            self._calls.append(PastFunctionCall(function, id=item.call_id))
        elif isinstance(item, OutputInput):
            self.end_message()
            _check_caller(item, where)
            output = _join_parts(item.output, f"{where}.output")
            message = Message(role="tool", content=output, tool_call_id=item.call_id, name=item.name)
            self.append_message(message, where)
        else:
            problem = "is not supported: only messages, functions and thoughts of this server are"
            raise unsupported_error(f"{where}.type", f"{show_type(item)} {problem}")

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

    def _add_message(self, item: MessageInput, where: str) -> None:
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


def _read_thought(item: ThoughtInput, where: str) -> str:
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


def _check_caller(item: CallInput | OutputInput, where: str) -> None:
    """Refuse calls of programs, and of functions in namespaces. Raises RequestError (400)."""
    check_caller(item.caller.type if item.caller else None, where)
    if item.namespace is not None:
        raise unsupported_error(f"{where}.namespace", "is not supported: functions have no namespaces here")


def _join_parts(content: str | list[ItemPart], where: str) -> str:
    """The text of an item. Raises RequestError (400) if it has something else."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, RefusedPart):
            texts.append(part.refusal)
        elif isinstance(part, InputTextPart | AnswerTextPart | PlainTextPart):
            texts.append(part.text)
        else:
            problem = f"{show_type(part)} is not supported; this model reads text"
            raise unsupported_error(f"{where}[{i}].type", problem)
    return "".join(texts)
