"""Makes messages and deltas of chats from what a reader has found in an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from msgspec import UNSET

from services.gateway.generation.output_text import OutputPiece
from services.gateway.openai.schemas.response_schema import CalledFunction, ChatMessage, Delta, ToolCall
from services.gateway.parsing.answer_parts import AnswerPart

# Characters of the ids that templates of Mistral's models require.
SHORT_ID_CHARS = 9
ID_CHARS = 24


def make_call_id(name: str, is_short: bool) -> str:
    """The id of the call with a name of ours that no other call has."""
    digest = hashlib.blake2b(name.encode(), digest_size=ID_CHARS // 2).hexdigest()
    return digest[:SHORT_ID_CHARS] if is_short else f"call_{digest}"


def make_delta(part: AnswerPart, call_id: str) -> Delta:
    """What a chunk tells of a part of an answer."""
    if part.kind == "reasoning":
        return Delta(reasoning=part.text, reasoning_content=part.text)
    if part.kind == "content":
        return Delta(content=part.text)
    if part.kind == "call":
        function = CalledFunction("", part.text)
        return Delta(tool_calls=[ToolCall(index=part.call, id=call_id, type="function", function=function)])
    return Delta(tool_calls=[ToolCall(index=part.call, function=CalledFunction(part.text))])


def make_message(piece: OutputPiece, call_id: Callable[[int], str]) -> ChatMessage:
    """The message of a whole answer. Its content is null if it has nothing but calls."""
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    arguments: dict[int, list[str]] = {}
    for part in piece.parts:
        if part.kind == "reasoning":
            thoughts.append(part.text)
        elif part.kind == "arguments":
            arguments.setdefault(part.call, []).append(part.text)
    for part in piece.parts:
        if part.kind == "call":
            function = CalledFunction("".join(arguments.get(part.call, ())), part.text)
            calls.append(ToolCall(id=call_id(part.call), type="function", function=function))
    thought = "".join(thoughts) or UNSET
    content = piece.text if piece.text or not calls else None
    return ChatMessage(content, reasoning=thought, reasoning_content=thought, tool_calls=calls or UNSET)
