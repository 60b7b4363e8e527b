"""Translates a body of `/v1/messages` into the chat that it asks for."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from services.gateway.messages.conversation import list_messages
from services.gateway.openai.parse_body import missing_parameter_error
from services.gateway.openai.schemas.message_blocks import ClientTool
from services.gateway.openai.schemas.message_parts import ToolChoice, choose_function
from services.gateway.openai.schemas.messages_request import (
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
    ThinkingOptions,
    ToolPick,
)
from services.gateway.openai.schemas.request_schema import (
    ChatRequest,
    FunctionTool,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
    Tool,
)
from services.gateway.openai.schemas.server_fields import server_options
from services.gateway.openai.thoughts import EFFORT, SWITCHES
from services.gateway.openai.translated import FieldNames, TranslatedRequest, check_callers
from services.gateway.openai.validate import RequestRules, invalid_value_error, unsupported_error

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "tool_calls": "tool_use",
}
PARTS = {".function.parameters": ".input_schema", ".function.": ".", ".tool_call_id": ".tool_use_id"}


class MessageRouteFields(msgspec.Struct, frozen=True):
    """What the format of a message needs to know of its request.

    `max_tokens` is the length that was asked for; the context may leave less. With `hides_thoughts` they are left out
    of the answer, but for their signature.
    """

    max_tokens: int = 0
    hides_thoughts: bool = False


# What Claude Code sends: no thought shall be taken out of the conversation. Here none ever is.
KEEP_THOUGHTS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


def translate_messages(request: MessagesRequest, rules: RequestRules) -> TranslatedRequest:
    """The chat that a request asks for. Raises RequestError (400) if it asks for what is no chat."""
    if request.container is not None:
        raise unsupported_error("container")
    options = StreamOptions(include_usage=True) if request.stream else None
    thinking = request.thinking
    hides = thinking is not None and thinking.display == "omitted"
    if (
        thinking is not None
        and thinking.budget_tokens is not None
        and thinking.budget_tokens >= request.max_tokens
    ):
        raise invalid_value_error("thinking.budget_tokens", "must be below 'max_tokens'")
    return _translate(
        request,
        rules,
        msgspec.json.encode(MessageRouteFields(request.max_tokens, hides)),
        max_completion_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        stream_options=options,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )


def translate_count(request: CountTokensRequest, rules: RequestRules) -> TranslatedRequest:
    """The chat whose prompt is counted. Raises RequestError (400) if it is no chat."""
    return _translate(request, rules, b"")


def _translate(
    request: ConversationFields, rules: RequestRules, route_fields: bytes, **fields: Any
) -> TranslatedRequest:
    if request.mcp_servers:
        raise unsupported_error("mcp_servers")
    if request.context_management and request.context_management != KEEP_THOUGHTS:
        raise unsupported_error("context_management")
    found = list_messages(request)
    offered = [(i, tool) for i, tool in enumerate(request.tools or []) if isinstance(tool, ClientTool)]
    tools = [_make_tool(tool, f"tools[{i}]") for i, tool in offered]
    if len(tools) > MAX_TOOLS:
        raise invalid_value_error(
            "tools", f"are at most {MAX_TOOLS} of the client, and {len(tools)} were sent"
        )
    pick, config, thinking = request.tool_choice, request.output_config, request.thinking
    last = found.messages[-1]
    if last.role == "assistant" and (last.tool_calls or not last.content):
        raise invalid_value_error(
            found.places[-1], "cannot be continued: the last message ends in a call or a thought"
        )
    is_off = thinking is not None and thinking.type == "disabled"
    chat = ChatRequest(
        model=request.model,
        messages=found.messages,
        continue_final_message=True if last.role == "assistant" else None,
        tools=tools or None,
        tool_choice=_make_choice(pick),
        parallel_tool_calls=False if pick is not None and pick.disable_parallel_tool_use else None,
        response_format=None
        if config is None or config.format is None
        else _make_format(config.format.schema),
        **_think(request, rules),
        **fields,
    )
    names = dict(NAMES, reasoning_effort="thinking.type") if is_off else NAMES
    places = FieldNames(names, found.places, [f"tools[{i}]" for i, _ in offered], PARTS)
    return TranslatedRequest(chat, places, route_fields, clips_length=True)


def _think(request: ConversationFields, rules: RequestRules) -> dict[str, Any]:
    """The fields of a chat that say whether and how much the model thinks, and those of this server.

    A model without thoughts has none, whatever may be spent on them; one without efforts makes none, and so does one
    that shall not think: clients set both on their own.
    """
    options, thinking, config = server_options(request), request.thinking, request.output_config
    template, given = rules.tokenizer.template, request.chat_template_kwargs or {}
    switches = [name for name in SWITCHES if template is not None and name in template.options]
    has_effort = bool(switches) or (template is not None and EFFORT in template.options)
    effort = config.effort if config is not None and has_effort else None
    if thinking is None:
        return options | {"reasoning_effort": effort}
    _check_thinking(thinking)
    if thinking.type == "disabled":
        return options | {"reasoning_effort": "none"}
    thinks = rules.markup is not None and rules.markup.thinks
    return options | {
        "reasoning_effort": effort,
        "thinking_token_budget": thinking.budget_tokens if thinks else None,
        "chat_template_kwargs": {**dict.fromkeys(switches, True), **given} or None,
    }


def _check_thinking(thinking: ThinkingOptions) -> None:
    """Refuse what is said of thoughts where there are none. Raises RequestError (400)."""
    if thinking.type == "between_tools":
        raise unsupported_error("thinking.type", "cannot be 'between_tools'; send 'adaptive'")
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise missing_parameter_error("thinking.budget_tokens")
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise invalid_value_error("thinking.budget_tokens", "needs 'thinking.type' to be 'enabled'")
    if thinking.type == "disabled" and thinking.display is not None:
        raise invalid_value_error(
            "thinking.display", "needs 'thinking.type' to be another one than 'disabled'"
        )


def _make_tool(tool: ClientTool, where: str) -> Tool:
    if TOOL_NAME.fullmatch(tool.name) is None:
        raise invalid_value_error(f"{where}.name", "must have 1 to 128 letters, digits, '_' and '-'")
    check_callers(tool.allowed_callers, tool.defer_loading, where)
    if tool.input_examples:
        raise unsupported_error(
            f"{where}.input_examples",
            "are not supported: chat templates do not show them; say them in 'description'",
        )
    return Tool("function", FunctionTool(tool.name, tool.description, tool.input_schema, tool.strict))


def _make_format(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat("json_schema", JsonSchema("answer", schema))


def _make_choice(pick: ToolPick | None) -> ToolChoice | None:
    """The choice as chats have it."""
    if pick is None:
        return None
    if pick.type == "none" and pick.disable_parallel_tool_use is not None:
        raise invalid_value_error(
            "tool_choice.disable_parallel_tool_use", "needs a 'tool_choice.type' that may call"
        )
    if pick.type != "tool":
        if pick.name is not None:
            raise invalid_value_error("tool_choice.name", "needs 'tool_choice.type' to be 'tool'")
        return {"auto": "auto", "any": "required", "none": "none"}[pick.type]
    if pick.name is None:
        raise missing_parameter_error("tool_choice.name")
    return choose_function(pick.name)
