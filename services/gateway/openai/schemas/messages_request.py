"""The bodies of `POST /v1/messages` and its `count_tokens`: Anthropic's fields that are known here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai.schemas.message_blocks import BlockList, MessageTool
from services.gateway.openai.schemas.message_parts import CacheControl
from services.gateway.openai.schemas.request_schema import ShortText, Temperature, TopK, TopP
from services.gateway.openai.schemas.server_fields import ServerFields


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | BlockList
    # Until when a message of the system is shown.
    clear_at: Literal["next_user_message", "never"] | None = None
    # The effort of one turn; it has no effect here.
    output_config: dict[str, Any] | None = None


class ToolPick(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None
    # What is done with thoughts of other conversations; it has no effect here, for none is checked.
    block_binding: dict[str, Any] | None = None


class MessageFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class MessageMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who asks; it has no effect here."""

    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class Diagnostics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What Anthropic would compare the prompt with; it has no effect here."""

    previous_message_id: ShortText | None = None


class OutputOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None
    # What the whole of a task may cost; it has no effect here.
    task_budget: dict[str, Any] | None = None


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
    cache_control: CacheControl | None = None
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
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: ShortText | None = None
    diagnostics: Diagnostics | None = None

    # Refused unless it is null.
    container: str | dict[str, Any] | None = None
