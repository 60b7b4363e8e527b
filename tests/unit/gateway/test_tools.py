"""The tools of a request: what is refused, what the model is shown, and the grammar that binds its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych.errors import RequestError
from diptych.failure_statuses import RequestFailure
from diptych.request import Grammar, GrammarGate
from engine.sampling.tool_grammar import ToolGrammar
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.preparation.grammar_check import GrammarChecker
from services.gateway.preparation.resolve_body import resolve_body
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import make_folder
from tests.unit.gateway.thinking_model import ALWAYS_TEMPLATE, thinking_rules, token_ids

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}}}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("weather", CITY, description="The weather"), tool("now")]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> RequestRules:
    return thinking_rules(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def checker(thinking: RequestRules) -> GrammarChecker:
    return GrammarChecker(thinking.tokenizer)


def resolve(rules: RequestRules, checker: GrammarChecker | None = None, **fields: Any) -> ResolvedRequest:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}

    def check(grammar: Grammar, field: str) -> str | None:
        return checker.rejection_reason(grammar, field) if checker else None

    resolved = resolve_body("chat", msgspec.json.encode(body), Caller(0.0), rules, check)
    assert isinstance(resolved, ResolvedRequest)
    return resolved


def refused(rules: RequestRules, checker: GrammarChecker | None = None, **fields: Any) -> RequestFailure:
    with pytest.raises(RequestError) as caught:
        resolve(rules, checker, **fields)
    assert caught.value.failure.status == 400
    return caught.value.failure


def grammar_of(resolved: ResolvedRequest) -> tuple[ToolGrammar, GrammarGate | None]:
    grammar = resolved.sampling.grammar
    assert grammar is not None and grammar.kind == "tools"
    return msgspec.json.decode(grammar.text, type=ToolGrammar), grammar.gate


def names_of(grammar: ToolGrammar) -> list[str]:
    return [form.name for form in grammar.tools]


def test_the_template_shows_the_tools_and_the_reader_knows_them(thinking: RequestRules) -> None:
    resolved = resolve(thinking)
    text = thinking.tokenizer.decode(list(resolved.prompts[0].tokens), False)
    assert '"name": "weather", "description": "The weather"' in text and '"name": "now"' in text
    assert resolved.context is not None
    assert resolved.context.tools == {
        "weather": {"city": ("string",), "days": ("integer", "null")},
        "now": {},
    }
    none = resolve(thinking, tool_choice="none")
    assert "weather" not in thinking.tokenizer.decode(list(none.prompts[0].tokens), False)
    assert none.context is not None and none.context.tools is None and none.sampling.grammar is None


def test_in_auto_the_grammar_binds_from_a_call_s_marker_on(
    thinking: RequestRules, checker: GrammarChecker
) -> None:
    [marker] = token_ids(thinking, "<tool_call>")
    grammar, gate = grammar_of(resolve(thinking, checker))
    assert gate == GrammarGate(((marker,),), repeats=True, may_end=True)
    assert grammar.is_open and not grammar.many and names_of(grammar) == ["weather", "now"]
    auto = resolve(thinking, checker).context
    assert auto is not None and auto.calls_bound
    resolved = resolve(thinking, checker, parallel_tool_calls=False)
    _, gate = grammar_of(resolved)
    assert gate == GrammarGate(((marker,),), may_end=True)
    assert resolved.context is not None and resolved.context.one_call


@pytest.mark.parametrize(
    ("choice", "names", "many"),
    [
        ("required", ["weather", "now"], True),
        (named("now"), ["now"], False),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("now")]}},
            ["now"],
            True,
        ),
    ],
)
def test_a_call_that_must_come_is_bound_behind_the_thought(
    thinking: RequestRules, checker: GrammarChecker, choice: Any, names: list[str], many: bool
) -> None:
    begin, end = (token_ids(thinking, text)[0] for text in ("<think>", "</think>"))
    grammar, gate = grammar_of(resolve(thinking, checker, tool_choice=choice))
    assert (names_of(grammar), grammar.many, grammar.is_open) == (names, many, False)
    # A call may also come amid the thought, and ends it.
    [marker] = token_ids(thinking, "<tool_call>")
    assert gate == GrammarGate(((end,),), is_free=False, frees=begin, starts=(marker,))
    _, gate = grammar_of(resolve(thinking, checker, tool_choice=choice, reasoning_effort="none"))
    assert gate is None


def test_allowed_tools_bind_in_auto_and_all_are_shown(thinking: RequestRules) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("now")]}}
    resolved = resolve(thinking, tool_choice=allowed)
    grammar, gate = grammar_of(resolved)
    assert names_of(grammar) == ["now"] and gate is not None and gate.may_end
    assert "weather" in thinking.tokenizer.decode(list(resolved.prompts[0].tokens), False)


def test_a_text_with_a_schema_and_calls_share_one_grammar(
    thinking: RequestRules, checker: GrammarChecker
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    grammar, gate = grammar_of(resolve(thinking, checker, response_format=schema))
    assert grammar.content == {"type": "object"} and not grammar.is_open and grammar.many
    assert gate is not None and not gate.may_end
    grammar, _ = grammar_of(resolve(thinking, checker, response_format=schema, tool_choice="required"))
    assert grammar.content is None


def test_a_model_without_marker_tokens_calls_freely_in_auto(tmp_path: Path) -> None:
    tokenizer = GatewayTokenizer.load(str(make_folder(tmp_path, 512, (), ALWAYS_TEMPLATE)))
    rules = RequestRules(tokenizer, ("toy",), 512, RequestLimits(), markup=ModelMarkup.load(tokenizer))
    resolved = resolve(rules)
    assert resolved.sampling.grammar is None and resolved.context is not None
    assert not resolved.context.calls_bound
    grammar, _ = grammar_of(resolve(rules, tool_choice="required"))
    assert all(isinstance(part, str) for part in grammar.syntax.opener)


@pytest.mark.parametrize(
    ("markers", "choice", "is_bound"),
    [
        # Behind the first call others follow without a marker.
        (("<|python_tag|>",), "auto", False),
        (("<|python_tag|>",), "required", False),
        # Within a thought the gate would not see it.
        ((), "required", False),
    ],
)
def test_calls_are_bound_only_where_the_gate_sees_each(
    tmp_path: Path, markers: tuple[str, ...], choice: str, is_bound: bool
) -> None:
    folder = make_folder(tmp_path, 512, ("<think>", "</think>", *markers), ALWAYS_TEMPLATE)
    tokenizer = GatewayTokenizer.load(str(folder))
    markup = ModelMarkup.load(tokenizer, "llama3_json", "qwen3")
    resolved = resolve(
        RequestRules(tokenizer, ("toy",), 512, RequestLimits(), markup=markup), tool_choice=choice
    )
    assert resolved.sampling.grammar is not None and resolved.context is not None
    assert resolved.context.calls_bound == is_bound


def test_a_call_that_the_prompt_has_begun_is_not_bound(thinking: RequestRules) -> None:
    for begun, is_bound in (("I call", True), ("<tool_call>", False)):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": begun}]
        asked: dict[str, Any] = {
            "messages": messages,
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
        context = resolve(thinking, **asked).context
        assert context is not None and context.prefix == begun and context.calls_bound == is_bound


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("f", {"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", {"properties": [1]})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", deep(20))]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", {"description": "x" * 65536})]}, "tools[0].function.parameters"),
        (
            {"tools": [tool("f", {"properties": {"a": {"type": "string", "pattern": "a" * 1025}}})]},
            "tools[0].function.parameters",
        ),
        ({"tools": [tool(f"f{i}", {"description": "x" * 60000}) for i in range(5)]}, "tools"),
        ({"tools": [tool("f", {"properties": {"a": {"type": "no type"}}})]}, "tools"),
        ({"tools": [tool("f", {"properties": {"a": {"type": "string", "pattern": "("}}})]}, "tools"),
        ({"tool_choice": named("other")}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {**named("now"), "mode": "auto"}}, "tool_choice.mode"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [named("other")]},
                }
            },
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": named("f")}, "tool_choice"),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
            "messages[0].tool_call_id",
        ),
    ],
)
def test_bad_tools_are_refused_by_name(
    thinking: RequestRules, checker: GrammarChecker, fields: dict[str, Any], param: str
) -> None:
    assert refused(thinking, checker, **fields).param == param


def test_a_strict_schema_is_kept_to_the_letter_or_refused(
    thinking: RequestRules, checker: GrammarChecker
) -> None:
    strange = {"properties": {"a": {"type": "string", "format": "no-such-format"}}}
    assert resolve(thinking, checker, tools=[tool("f", strange)]).sampling.grammar is not None
    assert refused(thinking, checker, tools=[tool("f", strange, strict=True)]).param == "tools"


def test_models_that_cannot_be_shown_tools_refuse_them(tmp_path: Path, rules: RequestRules) -> None:
    assert refused(rules).param == "tools"
    template = "{%- if tools -%}{{ tools | length }}{%- endif -%}{{ messages[0].content }}<tool_call>"
    hidden = thinking_rules(tmp_path, template)
    assert refused(hidden).param == "tools[0]"
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert refused(hidden, tools=None, messages=messages).param == "messages[1].tool_calls"


def test_a_round_of_tools_is_rendered(thinking: RequestRules) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
    ]
    text = thinking.tokenizer.decode(list(resolve(thinking, messages=messages).prompts[0].tokens), False)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "tool\nsunny" in text
