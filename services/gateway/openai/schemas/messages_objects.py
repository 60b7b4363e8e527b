"""The bodies and events of `/v1/messages`, in Anthropic's shapes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.openai.schemas.response_schema import DetailsField, KvDetails

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """A thought. Its signature is a digest that nobody checks."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails | UnsetType = UNSET
    diptych: KvDetails | UnsetType = UNSET


class MessageObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """An answer; in the first event of a stream it has no content yet."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    diptych: DetailsField = UNSET


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageObject


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class JsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDeltaPart = TextDelta | ThinkingDelta | SignatureDelta | JsonDelta


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDeltaPart


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class StopDetails(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """How the answer ended, and all that was counted."""

    delta: StopDetails
    usage: MessageUsage
    diptych: DetailsField = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The stream is complete."""


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """The server is alive."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


class CountedTokens(msgspec.Struct, frozen=True):
    input_tokens: int


class MessageProblem(msgspec.Struct, frozen=True):
    """What failed: Anthropic's type, and our field and code."""

    type: str
    message: str
    param: str | None
    code: str


class MessageErrorReply(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The body of every answer of these routes that is not a success, and the event of a failure in a stream."""

    error: MessageProblem
    request_id: str | None = None
