"""The body of `POST /v1/responses`: every field of OpenAI's schema that is known here, with its range."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai.schemas.request_schema import Count, Metadata, ShortText, Temperature, TopK, TopP
from services.gateway.openai.schemas.response_items import (
    InputItem,
    ItemChoice,
    ResponseTool,
    TextFormat,
)
from services.gateway.openai.schemas.server_fields import ServerFields

# Items become at most as many messages, and a chat has at most 2,048.
MAX_ITEMS = 2048


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


SummaryKind = Literal["auto", "concise", "detailed"]


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: SummaryKind | None = None
    generate_summary: SummaryKind | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: ShortText | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ResponsesRequest(ServerFields, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/responses`."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: Annotated[list[Includable], Meta(max_length=16)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Count | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=256)] | None = None
    tool_choice: ItemChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    # Fields that are repeated in the answer and have no other effect here.
    metadata: Metadata | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    # What Codex sends about itself and its user; it has no effect here.
    client_metadata: dict[str, Any] | None = None
    access_programs: dict[str, Any] | None = None

    # Fields that are known and are refused by name, unless they ask for nothing.
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: Annotated[list[dict[str, Any]], Meta(max_length=64)] | None = None
    moderation: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    image: dict[str, Any] | None = None
