"""The bodies of `POST /v1/messages` and its `count_tokens`: Anthropic's fields that are known here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai.schemas.request_schema import ShortText, Temperature, TopK, TopP
from services.gateway.openai.schemas.server_fields import ServerFields

MAX_BLOCKS = 256


class ContentBlock(msgspec.Struct, frozen=True):
    """A block of a message: text, a thought, a call, or its result; others are refused.

    What earlier answers had beside these fields, and `cache_control`, is passed over.
    """

    type: ShortText
    text: str | None = None
    thinking: str | None = None
    id: ShortText | None = None
    name: ShortText | None = None
    input: dict[str, Any] | None = None
    tool_use_id: ShortText | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None


BlockList = Annotated[list[ContentBlock], Meta(max_length=MAX_BLOCKS)]


class InputMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | BlockList


class MessageTool(msgspec.Struct, frozen=True):
    """A tool of the client, of type `custom` or none; others are passed over."""

    name: ShortText
    type: ShortText | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolPick(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessageFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None


class ConversationFields(ServerFields, kw_only=True, forbid_unknown_fields=True):
    """What both routes take."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=2048)]
    system: str | BlockList | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=256)] | None = None
    tool_choice: ToolPick | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None

    # Fields that are accepted and have no effect here.
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: ShortText | None = None
    workspace_id: ShortText | None = None

    # Fields that are known and are refused by name, unless they ask for nothing.
    context_management: dict[str, Any] | None = None
    mcp_servers: Annotated[list[dict[str, Any]], Meta(max_length=64)] | None = None


class CountTokensRequest(ConversationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/messages/count_tokens`."""


class MessagesRequest(ConversationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[str], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None

    # Fields that are accepted and have no effect here.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: ShortText | None = None
    diagnostics: dict[str, Any] | None = None

    # Refused unless it is null.
    container: str | dict[str, Any] | None = None
