"""What stands in lists of `/v1/messages`: blocks of messages, and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.openai.schemas.message_parts import CacheControl
from services.gateway.openai.schemas.typed_objects import TypedObject

MAX_BLOCKS = 256
ShortText = Annotated[str, Meta(max_length=256)]


class ContentBlock(TypedObject):
    """A block of a message: text, a thought, a call, or its result; others are refused."""

    __slots__ = ()


BlockList = Annotated[list[ContentBlock], Meta(max_length=MAX_BLOCKS)]


class GivenText(ContentBlock, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    # What hosted tools have found; it says nothing to the model.
    citations: Annotated[list[dict[str, Any]], Meta(max_length=4096)] | None = None


class GivenThought(ContentBlock, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class HiddenThought(ContentBlock, Struct, frozen=True, forbid_unknown_fields=True):
    """A thought that nobody can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class BlockCaller(Struct, frozen=True, forbid_unknown_fields=True):
    """Who called a tool: the model itself (`direct`), or a program of a hosted tool, which is refused."""

    type: ShortText
    tool_id: ShortText | None = None


class GivenCall(ContentBlock, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["tool_use"]
    id: ShortText
    name: ShortText
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    # Refused, unless they ask for nothing.
    caller: BlockCaller | None = None
    toolset_name: ShortText | None = None


class GivenResult(ContentBlock, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: str | BlockList | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    # Refused, unless it is null.
    toolset_name: ShortText | None = None


class OtherBlock(ContentBlock, Struct, frozen=True):
    type: str


ContentBlock.kinds = {
    "text": GivenText,
    "thinking": GivenThought,
    "redacted_thinking": HiddenThought,
    "tool_use": GivenCall,
    "tool_result": GivenResult,
}
ContentBlock.other = OtherBlock


class MessageTool(TypedObject):
    """A tool of the client, of type `custom` or none; others are passed over."""

    __slots__ = ()


class ClientTool(MessageTool, Struct, frozen=True, forbid_unknown_fields=True):
    name: ShortText
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None

    # Without effect: prefixes are cached anyway, and arguments are sent as they come wherever a grammar binds them.
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None

    # Refused, unless they ask for nothing.
    allowed_callers: Annotated[list[ShortText], Meta(max_length=8)] | None = None
    defer_loading: bool | None = None
    input_examples: Annotated[list[dict[str, Any]], Meta(max_length=64)] | None = None


class AnthropicTool(MessageTool, Struct, frozen=True):
    type: ShortText


MessageTool.kinds, MessageTool.other = {None: ClientTool, "custom": ClientTool}, AnthropicTool
