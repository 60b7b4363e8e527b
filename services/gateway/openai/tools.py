"""The tools of a chat request: which are shown to the model, which it may or must call, and the grammar of calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych.request import Grammar, GrammarGate
from engine.sampling.tool_grammar import ToolForm, ToolGrammar
from services.gateway.openai.schemas.message_parts import AllowedTools, NamedTool, ToolChoice, ToolMode
from services.gateway.openai.schemas.request_schema import ChatRequest, FunctionTool, ResponseFormat
from services.gateway.openai.validate import (
    RequestRules,
    check_schema,
    invalid_value_error,
    schema_error,
    unsupported_error,
)
from services.gateway.parsing.model_markup import ModelMarkup

# Most bytes of the schemas of all tools together.
MAX_TOOLS_BYTES = 256 << 10
TOOLS, CHOICE = "tools", "tool_choice"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools that a request shows, and those that may be called: `mode` says whether one must be.

    With `many`, an answer may have several calls.
    """

    shown: list[FunctionTool]
    callable: list[FunctionTool]
    mode: ToolMode
    many: bool

    @property
    def types(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """The types of each parameter of each tool, for the reader of answers."""
        return {tool.name: _parameter_types(tool.parameters or {}) for tool in self.shown}

    def template_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates show them."""
        return [
            {"type": "function", "function": msgspec.to_builtins(msgspec.structs.replace(tool, strict=None))}
            for tool in self.shown
        ]


def plan_tools(request: ChatRequest, rules: RequestRules) -> ToolPlan | None:
    """The tools of a request; None if it has none, or asks to have them ignored.

    Raises:
        RequestError: 400, a tool or the choice is invalid, or this model cannot be shown tools.
    """
    choice = request.tool_choice
    if not request.tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise invalid_value_error(CHOICE, "other than 'none' and 'auto' needs 'tools'")
        return None
    if rules.tokenizer.template is None or not rules.tokenizer.template.shows_tools:
        raise unsupported_error(TOOLS, "are not supported: this model's chat template cannot show them")
    if rules.markup is None or rules.markup.calls.calls is None:
        raise unsupported_error(TOOLS, "are not supported: how this model calls them is not known")
    shown = [tool.function for tool in request.tools]
    _check_tools(shown, rules)
    mode, names = _read_choice(choice, [tool.name for tool in shown])
    if mode == "required" and rules.markup.call_syntax is None:
        raise unsupported_error(
            CHOICE, "can only be 'auto' or 'none': no grammar of this model's calls is known"
        )
    many = request.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return ToolPlan(shown, [tool for tool in shown if tool.name in names], mode, many)


def build_tool_grammar(
    plan: ToolPlan, response_format: ResponseFormat | None, markup: ModelMarkup
) -> Grammar | None:
    """The grammar of an answer's calls, or also of its text if that has a schema; None: nothing binds it.

    Raises:
        RequestError: 400, the text has a schema, and this model's calls cannot be told from it.
    """
    content = None
    if response_format is not None and response_format.type != "text":
        schema = response_format.json_schema
        content = (schema.schema if schema else None) or {"type": "object"}
    syntax, is_bound = markup.call_syntax, plan.mode == "required" or content is not None
    if syntax is None or (not is_bound and markup.call_opener is None):
        if content is not None:
            raise unsupported_error("response_format", "is not supported with 'tools' by this model's format")
        return None
    tools = tuple(
        ToolForm(tool.name, {"type": "object", **(tool.parameters or {})}, tool.strict is True)
        for tool in plan.callable
    )
    grammar = ToolGrammar(
        syntax,
        tools,
        many=plan.many and is_bound,
        is_open=not is_bound,
        content=None if plan.mode == "required" else content,
    )
    return Grammar("tools", msgspec.json.encode(grammar).decode())


def gate_calls(
    plan: ToolPlan, grammar: Grammar, prefix: str, is_thinking: bool, markup: ModelMarkup
) -> Grammar:
    """The grammar with where it binds: behind the thought, or in `auto` from each call's marker on."""
    if msgspec.json.decode(grammar.text, type=ToolGrammar).is_open:
        assert markup.call_opener is not None
        gate: GrammarGate | None = GrammarGate(((markup.call_opener,),), repeats=plan.many, may_end=True)
    elif markup.calls.format.channels:
        gate = None
    else:
        gate = markup.gate_schema(prefix, is_thinking)
        if gate is not None:
            gate = msgspec.structs.replace(gate, starts=markup.call_starts)
    return msgspec.structs.replace(grammar, gate=gate)


def binds_calls(grammar: Grammar, prefix: str, markup: ModelMarkup) -> bool:
    """Whether the gated grammar binds each call of an answer behind `prefix` that begins with a marker of calls."""
    calls = markup.calls.format.calls
    if grammar.kind != "tools" or calls is None or any(literal in prefix for literal in calls.opens):
        # The grammar binds no call that the prompt has begun.
        return False
    return grammar.gate is None or markup.sees_calls(grammar.gate)


def _check_tools(tools: list[FunctionTool], rules: RequestRules) -> None:
    """Refuse doubled names, and schemas beyond their bounds. Raises RequestError: 400."""
    names: set[str] = set()
    num_bytes = 0
    for i, tool in enumerate(tools):
        where = f"tools[{i}].function"
        if tool.name in names:
            raise invalid_value_error(f"{where}.name", f"'{tool.name}' is the name of another tool, too")
        names.add(tool.name)
        schema = tool.parameters or {}
        if schema.get("type", "object") != "object" or not isinstance(schema.get("properties", {}), dict):
            raise schema_error(f"{where}.parameters", "must be the schema of an object")
        num_bytes += len(check_schema(schema, f"{where}.parameters", rules.limits))
        if num_bytes > MAX_TOOLS_BYTES:
            raise schema_error(TOOLS, f"have schemas of more than {MAX_TOOLS_BYTES} bytes together")


def _read_choice(choice: ToolChoice | None, known: list[str]) -> tuple[ToolMode, set[str]]:
    """Whether a tool must be called, and which may be. Raises RequestError: 400."""
    if choice is None or choice == "auto":
        return "auto", set(known)
    if choice == "required":
        return "required", set(known)
    if isinstance(choice, NamedTool):
        return "required", {_function_name(choice, CHOICE, known)}
    if not isinstance(choice, AllowedTools):
        raise invalid_value_error(CHOICE, "must be 'none', 'auto', 'required', a function or 'allowed_tools'")
    allowed = choice.allowed_tools
    where = f"{CHOICE}.allowed_tools.tools"
    return allowed.mode, {
        _function_name(tool, f"{where}[{i}]", known) for i, tool in enumerate(allowed.tools)
    }


def _function_name(tool: NamedTool, where: str, known: list[str]) -> str:
    """The name of a tool that is chosen. Raises RequestError: 400, there is none of this name."""
    if tool.function.name not in known:
        raise invalid_value_error(f"{where}.function.name", "must be the name of one of 'tools'")
    return tool.function.name


def _parameter_types(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The types of each parameter of a schema."""
    fields = schema.get("properties")
    return {key: _schema_types(field) for key, field in fields.items()} if isinstance(fields, dict) else {}


def _schema_types(schema: Any) -> tuple[str, ...]:
    """The types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return ()
    named = schema.get("type")
    types = [named] if isinstance(named, str) else [one for one in named or () if isinstance(one, str)]
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(choices, list):
            types += [name for choice in choices for name in _schema_types(choice)]
    return tuple(dict.fromkeys(types))
