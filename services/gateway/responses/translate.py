"""Translates a body of `/v1/responses` into the chat that it asks for."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET

from services.gateway.openai.schemas.message_parts import ToolChoice, allow_functions, choose_function
from services.gateway.openai.schemas.request_schema import (
    ChatRequest,
    FunctionTool,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
    Tool,
)
from services.gateway.openai.schemas.response_items import (
    AllowedChoice,
    AllowedFunction,
    FunctionChoice,
    ItemChoice,
    ModeChoice,
    PlainFormat,
    ResponseFunction,
    SchemaFormat,
    TextFormat,
)
from services.gateway.openai.schemas.responses_objects import RepeatedFields
from services.gateway.openai.schemas.responses_request import ResponsesRequest
from services.gateway.openai.schemas.server_fields import server_options
from services.gateway.openai.translated import FieldNames, TranslatedRequest, check_callers
from services.gateway.openai.validate import RequestRules, invalid_value_error, unsupported_error
from services.gateway.responses.input_items import list_messages

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
    "tool_calls": "input",
}
PARTS = {".function.": ".", ".tool_call_id": ".call_id"}
# Fields that ask for what a stateless server does not have.
REFUSED = (
    "previous_response_id", "conversation", "prompt", "context_management", "moderation", "prompt_cache_options",
    "image",
)  # fmt: skip


class ResponseRouteFields(msgspec.Struct, frozen=True):
    """What the format of a response needs to know of its request."""

    # What it repeats: `RepeatedFields`.
    repeated: msgspec.Raw
    # Whether thoughts are shown as their summary, and also as `encrypted_content`.
    summary: bool = False
    sealed: bool = False


def translate_responses(request: ResponsesRequest, rules: RequestRules) -> TranslatedRequest:
    """The chat that a request asks for.

    Raises:
        RequestError: 400, it asks for what a stateless server does not have, or for what is no chat.
    """
    _refuse_state(request)
    found, include = list_messages(request), request.include or []
    offered = [(i, tool) for i, tool in enumerate(request.tools or []) if isinstance(tool, ResponseFunction)]
    tools = [_make_tool(tool, f"tools[{i}]") for i, tool in offered]
    if len(tools) > MAX_TOOLS:
        raise invalid_value_error("tools", f"are at most {MAX_TOOLS} functions, and {len(tools)} were sent")
    if request.top_logprobs and LOGPROBS not in include:
        raise invalid_value_error("top_logprobs", f"needs '{LOGPROBS}' in 'include'")
    reasoning, options = request.reasoning, request.stream_options
    if options is not None and not request.stream:
        raise invalid_value_error("stream_options", "needs 'stream' to be true")
    hides = options is not None and bool(options.include_obfuscation)
    text_format = None if request.text is None else request.text.format
    chat = ChatRequest(
        model=request.model,
        messages=found.messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        logprobs=LOGPROBS in include,
        top_logprobs=request.top_logprobs,
        reasoning_effort=None if reasoning is None else reasoning.effort,
        thinking_token_budget=request.thinking_token_budget,
        response_format=None if text_format is None else _make_format(text_format),
        tools=tools or None,
        tool_choice=_make_choice(request.tool_choice, [tool.function.name for tool in tools]),
        parallel_tool_calls=request.parallel_tool_calls,
        stream=request.stream,
        stream_options=StreamOptions(include_usage=True, include_obfuscation=hides)
        if request.stream
        else None,
        **server_options(request),
    )
    names = FieldNames(NAMES, found.places, [f"tools[{i}]" for i, _ in offered], PARTS)
    summary = reasoning is not None and (reasoning.summary or reasoning.generate_summary) is not None
    repeated = msgspec.Raw(msgspec.json.encode(_repeat_fields(request, tools)))
    route_fields = msgspec.json.encode(ResponseRouteFields(repeated, summary, SEALED in include))
    return TranslatedRequest(chat, names, route_fields, text_logprobs=True)


def _refuse_state(request: ResponsesRequest) -> None:
    """Refuse what is asked for beyond one answer. Raises RequestError (400)."""
    if request.store:
        raise unsupported_error("store", "cannot be true: nothing is stored here; send the whole 'input'")
    if request.background:
        raise unsupported_error("background", "cannot be true: nothing is stored here; use a batch")
    if request.truncation == "auto":
        raise unsupported_error("truncation", "cannot be 'auto'; shorten 'input'")
    for name in REFUSED:
        if getattr(request, name):
            stateful = name in ("previous_response_id", "conversation", "prompt")
            why = "is not supported: nothing is stored here; send the whole 'input'"
            raise unsupported_error(name, why if stateful else "is not supported")
    reasoning = request.reasoning
    if reasoning is not None and reasoning.context not in (None, "auto"):
        raise unsupported_error(
            "reasoning.context", "other than 'auto' is not supported: the chat template decides"
        )
    if reasoning is not None and reasoning.mode not in (None, "standard"):
        raise unsupported_error("reasoning.mode", "other than 'standard' is not supported")


def _make_tool(tool: ResponseFunction, where: str) -> Tool:
    if TOOL_NAME.fullmatch(tool.name) is None:
        raise invalid_value_error(f"{where}.name", "must have 1 to 64 letters, digits, '_' and '-'")
    check_callers(tool.allowed_callers, tool.defer_loading, where)
    if tool.is_async:
        raise unsupported_error(f"{where}.async", "cannot be true: a call ends an answer here")
    if tool.output_schema is not None:
        raise unsupported_error(
            f"{where}.output_schema",
            "is not supported: chat templates do not show it; say it in 'description'",
        )
    return Tool("function", FunctionTool(tool.name, tool.description, tool.parameters, tool.strict))


def _make_format(text_format: TextFormat) -> ResponseFormat:
    if isinstance(text_format, SchemaFormat):
        return ResponseFormat("json_schema", JsonSchema(text_format.name, text_format.schema))
    return ResponseFormat("text" if isinstance(text_format, PlainFormat) else "json_object")


def _make_choice(choice: ItemChoice | None, known: list[str]) -> ToolChoice | None:
    """The choice as chats have it. Hosted tools among the allowed ones are passed over, as among `tools`."""
    if choice is None or isinstance(choice, ModeChoice):
        return None if choice is None else choice.mode
    if isinstance(choice, FunctionChoice):
        return choose_function(choice.name)
    if not isinstance(choice, AllowedChoice):
        raise unsupported_error(
            "tool_choice.type", "must be 'function' or 'allowed_tools': hosted tools are not offered"
        )
    if choice.mode == "none":
        return "none"
    names = [tool.name for tool in choice.tools if isinstance(tool, AllowedFunction)]
    if not names and known:
        raise invalid_value_error("tool_choice.tools", "must list at least one function")
    return allow_functions(choice.mode, names) if names else choice.mode


def _repeat_fields(request: ResponsesRequest, tools: list[Tool]) -> RepeatedFields:
    """What the answer repeats of its request. Tools are those that the model was offered."""
    reasoning, text = request.reasoning, request.text
    text_format = {"type": "text"} if text is None or text.format is None else _shown_format(text.format)
    verbosity = None if text is None else text.verbosity
    return RepeatedFields(
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        safety_identifier=request.safety_identifier,
        service_tier="default",
        text={"format": text_format, "verbosity": verbosity or "medium"},
        tool_choice=_shown_choice(request.tool_choice),
        tools=[_shown_tool(tool.function) for tool in tools],
        top_logprobs=request.top_logprobs or 0,
        user=UNSET if request.user is None else request.user,
    )


def _shown_choice(choice: ItemChoice | None) -> str | dict[str, Any]:
    if choice is None or isinstance(choice, ModeChoice):
        return "auto" if choice is None else choice.mode
    shown: dict[str, Any] = msgspec.to_builtins(choice)
    return shown


def _shown_format(text_format: TextFormat) -> dict[str, Any]:
    if not isinstance(text_format, SchemaFormat):
        return {"type": "text" if isinstance(text_format, PlainFormat) else "json_object"}
    return {
        "type": "json_schema",
        "name": text_format.name,
        "description": text_format.description,
        "schema": text_format.schema,
        "strict": True,
    }


def _shown_tool(function: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": bool(function.strict),
    }
