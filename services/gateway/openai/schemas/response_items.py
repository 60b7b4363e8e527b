"""What stands in lists of `/v1/responses`: items of `input` with their parts, tools, and the choice of one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from services.gateway.openai.schemas.message_parts import CacheBreakpoint
from services.gateway.openai.schemas.typed_objects import TypedObject

ShortText = Annotated[str, Meta(max_length=256)]
SchemaName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class ItemPart(TypedObject):
    """One part of an item: text in one of its kinds, or a refusal; others are refused."""

    __slots__ = ()


class InputTextPart(ItemPart, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class AnswerTextPart(ItemPart, Struct, frozen=True, forbid_unknown_fields=True):
    """Text of an earlier answer, with what stood beside it there."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[dict[str, Any]], Meta(max_length=4096)] | None = None
    logprobs: list[dict[str, Any]] | None = None
    # What OpenAI's client has read of the text.
    parsed: Any = None


class PlainTextPart(ItemPart, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "summary_text", "reasoning_text"]
    text: str


class RefusedPart(ItemPart, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["refusal"]
    refusal: str


class OtherItemPart(ItemPart, Struct, frozen=True):
    type: str


ItemPart.kinds = {
    "input_text": InputTextPart,
    "output_text": AnswerTextPart,
    "text": PlainTextPart,
    "summary_text": PlainTextPart,
    "reasoning_text": PlainTextPart,
    "refusal": RefusedPart,
}
ItemPart.other = OtherItemPart

PartList = Annotated[list[ItemPart], Meta(max_length=256)]
ItemText = str | PartList


class ItemCaller(Struct, frozen=True, forbid_unknown_fields=True):
    """Who called a function: the model itself, or a program of a hosted tool, which is refused."""

    type: ShortText
    caller_id: ShortText | None = None


class InputItem(TypedObject):
    """An item of `input`: a message (also without a type), a call, its output, or a thought."""

    __slots__ = ()


class InputItemFields(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What items of earlier answers have; it says nothing to the model."""

    id: ShortText | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageInput(InputItem, InputItemFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemText
    # Whether an earlier answer's message was its last one, and who wrote it; it says nothing to the model.
    phase: Literal["commentary", "final_answer"] | None = None
    is_last: bool | None = field(name="end_turn", default=None)
    name: ShortText | None = None


class CallInput(InputItem, InputItemFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call"]
    call_id: ShortText
    name: ShortText
    arguments: str
    # What OpenAI's client has read of the arguments.
    parsed_arguments: Any = None
    # Refused, unless they ask for nothing.
    caller: ItemCaller | None = None
    namespace: ShortText | None = None
    is_async: bool | None = field(name="async", default=None)


class OutputInput(InputItem, InputItemFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a call has given."""

    type: Literal["function_call_output"]
    call_id: ShortText
    output: ItemText
    name: ShortText | None = None
    # Refused, unless they ask for nothing.
    caller: ItemCaller | None = None
    namespace: ShortText | None = None


class ThoughtInput(InputItem, InputItemFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: Literal["reasoning"]
    summary: PartList | None = None
    content: ItemText | None = None
    encrypted_content: str | None = None


class OtherInput(InputItem, Struct, frozen=True):
    type: str


InputItem.kinds = {
    None: MessageInput,
    "message": MessageInput,
    "function_call": CallInput,
    "function_call_output": OutputInput,
    "reasoning": ThoughtInput,
}
InputItem.other = OtherInput


class ResponseTool(TypedObject):
    """A function that the model may call, or a hosted tool, which is passed over."""

    __slots__ = ()


class ResponseFunction(ResponseTool, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ShortText
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    # Refused, unless they ask for nothing.
    allowed_callers: Annotated[list[ShortText], Meta(max_length=8)] | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None
    is_async: bool | None = field(name="async", default=None)


class HostedTool(ResponseTool, Struct, frozen=True):
    type: ShortText


ResponseTool.kinds, ResponseTool.other = {"function": ResponseFunction}, HostedTool


class AllowedTool(TypedObject):
    """A tool among those that may be called. Hosted ones are passed over."""

    __slots__ = ()


class AllowedFunction(AllowedTool, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ShortText


class AllowedHosted(AllowedTool, Struct, frozen=True):
    type: ShortText


AllowedTool.kinds, AllowedTool.other = {"function": AllowedFunction}, AllowedHosted


class ItemChoice(TypedObject):
    """Which tools may or must be called: a mode, a function, or some of them. Hosted ones are refused."""

    __slots__ = ()


class ModeChoice(ItemChoice, Struct, frozen=True):
    mode: str


class FunctionChoice(ItemChoice, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ShortText


class AllowedChoice(ItemChoice, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["allowed_tools"]
    tools: Annotated[list[AllowedTool], Meta(max_length=256)]
    # Open Responses lets it be left out, and be "none".
    mode: Literal["none", "auto", "required"] = "auto"


class HostedChoice(ItemChoice, Struct, frozen=True):
    type: str


ItemChoice.kinds = {"function": FunctionChoice, "allowed_tools": AllowedChoice}
ItemChoice.other, ItemChoice.word = HostedChoice, ModeChoice


class PlainFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class ObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """What a schema allows."""

    name: SchemaName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


TextFormat = PlainFormat | ObjectFormat | SchemaFormat
