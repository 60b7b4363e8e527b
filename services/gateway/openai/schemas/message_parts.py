"""The parts of a chat's messages: content, past calls, and which tool is to be called."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.openai.schemas.typed_objects import TypedObject

ToolMode = Literal["auto", "required"]


class CacheBreakpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a prefix ends that shall be kept. Here all prefixes are."""

    mode: Literal["explicit"]


class CacheControl(Struct, frozen=True):
    """The same in Anthropic's words, with how long. As nothing follows from it, it may have other fields too."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    # Claude Code says with whom a prefix may be shared.
    scope: str | None = None


class Part(TypedObject):
    """One part of a message's content; only text and an assistant's refusal are served."""

    __slots__ = ()


class TextPart(Part, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str

    # Without effect: prefixes are cached anyway.
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    cache_control: CacheControl | None = None


class RefusalPart(Part, Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["refusal"]
    refusal: str


class OtherPart(Part, Struct, frozen=True):
    type: str


Part.kinds, Part.other = {"text": TextPart, "refusal": RefusalPart}, OtherPart


class PastFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str = ""
    # What OpenAI's client has read of the arguments; it sends it back.
    parsed_arguments: Any = None


class PastCall(TypedObject):
    """A call of an earlier message. One without a type is a function's."""

    __slots__ = ()


class PastFunctionCall(PastCall, Struct, frozen=True, forbid_unknown_fields=True):
    function: PastFunction
    type: Literal["function"] | None = "function"
    id: str | None = None
    # What clients keep that put an answer together from a stream, and what other servers gave beside a call.
    index: int | None = None
    extra_content: dict[str, Any] | None = None


class OtherCall(PastCall, Struct, frozen=True):
    type: str


PastCall.kinds, PastCall.other = {None: PastFunctionCall, "function": PastFunctionCall}, OtherCall


class FunctionName(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """One tool, in `tool_choice` or in its list of those that are allowed."""

    function: FunctionName


class AllowedList(Struct, frozen=True, forbid_unknown_fields=True):
    mode: ToolMode
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=128)]


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Some of the tools, of which one may or must be called."""

    allowed_tools: AllowedList


ToolChoice = str | NamedTool | AllowedTools


def choose_function(name: str) -> NamedTool:
    """The choice of one tool."""
    return NamedTool(FunctionName(name))


def allow_functions(mode: ToolMode, names: list[str]) -> AllowedTools:
    """The choice of some tools."""
    return AllowedTools(AllowedList(mode, [choose_function(name) for name in names]))
