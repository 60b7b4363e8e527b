"""Turns the messages of `/v1/messages` into those of a chat: blocks of results become messages of tools."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from services.gateway.openai.schemas.message_blocks import (
    ContentBlock,
    GivenCall,
    GivenResult,
    GivenText,
    GivenThought,
    HiddenThought,
)
from services.gateway.openai.schemas.message_parts import PastCall, PastFunction, PastFunctionCall
from services.gateway.openai.schemas.messages_request import ConversationFields, InputMessage
from services.gateway.openai.schemas.request_schema import Message
from services.gateway.openai.schemas.typed_objects import show_type
from services.gateway.openai.translated import PlacedMessages, check_caller
from services.gateway.openai.validate import invalid_value_error, unsupported_error

# What begins the line by which Claude Code is billed. It is another one in each request, so that no prefix would ever
# be shared if it were a part of the prompt.
BILLING = "x-anthropic-billing-header:"
ERROR_MARK = "Error: "
# Between blocks of one message. An answer's own blocks are joined without it, as they came.
BREAK = "\n\n"


@dataclass(slots=True)
class BlockMessages(PlacedMessages):
    """The messages of a chat, made of messages of blocks."""

    def add_message(self, message: InputMessage, where: str) -> None:
        """Add a message. Raises RequestError (400) if it has what a chat cannot have."""
        if isinstance(message.content, str):
            self.append_message(Message(role=message.role, content=message.content), where)
        elif message.role == "assistant":
            self._add_answer(message.content, where)
        else:
            self._add_question(message, message.content, where)

    def _add_question(self, message: InputMessage, blocks: list[ContentBlock], where: str) -> None:
        """Add a message of the user. Results of calls in it come as messages of their own, in their order."""
        texts: list[str] = []

        def end_text() -> None:
            if texts:
                self.append_message(Message(role=message.role, content=BREAK.join(texts)), where)
                texts.clear()

        for i, block in enumerate(blocks):
            place = f"{where}.content[{i}]"
            if isinstance(block, GivenResult):
                end_text()
                _check_toolset(block, place)
                text = _join_texts(block.content or [], f"{place}.content", BREAK)
                text = ERROR_MARK + text if block.is_error else text
                self.append_message(Message(role="tool", content=text, tool_call_id=block.tool_use_id), place)
            else:
                texts.append(_read_text(block, place))
        end_text()
        if not blocks:
            raise invalid_value_error(f"{where}.content", "must have at least one block")

    def _add_answer(self, blocks: list[ContentBlock], where: str) -> None:
        """Add a message of the assistant. A thought that nobody can read is left out."""
        thoughts: list[str] = []
        texts: list[str] = []
        calls: list[PastCall] = []
        for i, block in enumerate(blocks):
            place = f"{where}.content[{i}]"
            if isinstance(block, GivenThought):
                thoughts.append(block.thinking)
            elif isinstance(block, GivenCall):
                calls.append(_make_call(block, place))
            elif not isinstance(block, HiddenThought):
                texts.append(_read_text(block, place))
        thought = "\n".join(thoughts) or None
        content = "".join(texts) if texts or not (calls or thought) else None
        message = Message(
            role="assistant", content=content, tool_calls=calls or None, reasoning_content=thought
        )
        self.append_message(message, where)


def list_messages(request: ConversationFields) -> BlockMessages:
    """The messages of a request, that of the system first.

    Raises:
        RequestError: 400, a block cannot be a part of a chat.
    """
    found = BlockMessages()
    system = _read_system(request)
    if system:
        found.messages, found.places = [Message(role="system", content=system)], ["system"]
    last = max((i for i, message in enumerate(request.messages) if message.role == "user"), default=-1)
    for i, message in enumerate(request.messages):
        if message.clear_at is not None and message.role != "system":
            raise invalid_value_error(f"messages[{i}].clear_at", "needs 'role' to be 'system'")
        if message.clear_at != "next_user_message" or i > last:
            found.add_message(message, f"messages[{i}]")
    return found


def _read_system(request: ConversationFields) -> str:
    """The text of the system, without the line by which Claude Code is billed."""
    system = request.system
    if system is None:
        return ""
    if isinstance(system, str):
        return system.partition("\n")[2].lstrip("\n") if system.startswith(BILLING) else system
    texts = [_read_text(block, f"system[{i}]") for i, block in enumerate(system)]
    return BREAK.join(text for text in texts if not text.startswith(BILLING))


def _make_call(block: GivenCall, where: str) -> PastCall:
    """A call as chats have it."""
    _check_toolset(block, where)
    check_caller(block.caller.type if block.caller else None, where)
    function = PastFunction(block.name, msgspec.json.encode(block.input).decode())
    return PastFunctionCall(function, id=block.id)


def _check_toolset(block: GivenCall | GivenResult, where: str) -> None:
    """Refuse a tool of a hosted set. Raises RequestError (400)."""
    if block.toolset_name is not None:
        raise unsupported_error(f"{where}.toolset_name", "is not supported: hosted tools are not offered")


def _join_texts(content: str | list[ContentBlock], where: str, between: str) -> str:
    """The text of a result. Raises RequestError (400) if it has something else."""
    if isinstance(content, str):
        return content
    return between.join(_read_text(block, f"{where}[{i}]") for i, block in enumerate(content))


def _read_text(block: ContentBlock, where: str) -> str:
    """The text of a block. Raises RequestError (400) if it is of another type."""
    if not isinstance(block, GivenText):
        raise unsupported_error(
            f"{where}.type", f"{show_type(block)} is not supported here; this model reads text"
        )
    return block.text
