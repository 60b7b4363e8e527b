"""The bodies and events of `/v1/responses`, with every field that OpenAI's and Open Responses' schemas require."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType, structs

from services.gateway.openai.schemas.response_schema import DetailsField, KvDetails

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message; `logprobs` are JSON already."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: Raw


class ThoughtPart(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Text of a thought."""

    text: str


class SummaryPart(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    """A thought where its summary is asked for."""

    text: str


ItemContent = OutputTextPart | ThoughtPart | SummaryPart


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryPart]
    content: list[ThoughtPart] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextPart]


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = ReasoningItem | MessageItem | CallItem


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    diptych: KvDetails | UnsetType = UNSET


class ResponseProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed: OpenAI's nearest code, and ours as the type."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    type: str
    param: str | None = None


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class AnsweredFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a response says of itself. `RepeatedFields` stand beside them in the same object."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseProblem | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    background: bool = False
    store: bool = False
    previous_response_id: None = None
    truncation: str = "disabled"
    diptych: DetailsField = UNSET


class RepeatedFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a response repeats of its request."""

    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    user: str | UnsetType = UNSET


# A response as clients see it, written from its two halves: for `/openapi.json`.
ResponseObject = msgspec.defstruct(
    "ResponseObject",
    [
        (field.name, field.type) if field.required else (field.name, field.type, field.default)
        for half in (AnsweredFields, RepeatedFields)
        for field in structs.fields(half)
    ],
    kw_only=True,
)


class PlaceInItem(msgspec.Struct, frozen=True, kw_only=True):
    """Where in the output an event belongs. `type` is the name of the event."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event with the whole response; its JSON is there already."""

    type: str
    sequence_number: int
    response: Raw


class ItemEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An item begins, or is complete."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(PlaceInItem, frozen=True, kw_only=True):
    """A part of an item begins, or is complete."""

    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: ItemContent


class DeltaEvent(PlaceInItem, frozen=True, kw_only=True):
    """More of a text, a thought, or the arguments of a call. Only texts have `logprobs`."""

    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    delta: str
    logprobs: Raw | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


class DoneEvent(PlaceInItem, frozen=True, kw_only=True):
    """All of a text, a thought, or the arguments of a call."""

    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


ResponseStreamEvent = ResponseEvent | ItemEvent | PartEvent | DeltaEvent | DoneEvent
