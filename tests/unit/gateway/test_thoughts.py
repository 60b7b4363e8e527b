"""What a chat request says about thoughts: effort, budget, and where its schema begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych.errors import ModelError, RequestError
from diptych.request import Grammar, GrammarGate, ThoughtBudget
from engine.sampling.tool_grammar import ToolGrammar
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.preparation.resolve_body import resolve_body
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import make_folder
from tests.unit.gateway.thinking_model import ALWAYS_TEMPLATE, THINKING_TEMPLATE, thinking_rules, token_ids

SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> RequestRules:
    return thinking_rules(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> RequestRules:
    return thinking_rules(tmp_path_factory.mktemp("always"), ALWAYS_TEMPLATE)


def resolve(rules: RequestRules, **fields: Any) -> ResolvedRequest:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **fields}
    resolved = resolve_body(
        "chat", msgspec.json.encode(body), Caller(0.0), rules, lambda grammar, field: None
    )
    assert isinstance(resolved, ResolvedRequest)
    return resolved


def refused(rules: RequestRules, **fields: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        resolve(rules, **fields)
    assert caught.value.failure.status == 400
    return caught.value.failure.message, caught.value.failure.param


def prefix_of(resolved: ResolvedRequest) -> str:
    assert resolved.context is not None
    return resolved.context.prefix


OFF = "<think>\n\n</think>\n\n"


def test_the_effort_drives_the_template(thinking: RequestRules) -> None:
    assert prefix_of(resolve(thinking)) == ""
    assert prefix_of(resolve(thinking, reasoning_effort="none")) == OFF
    assert prefix_of(resolve(thinking, reasoning_effort="high")) == ""
    assert prefix_of(resolve(thinking, chat_template_kwargs={"enable_thinking": False})) == OFF
    # What the client says of the template itself counts first.
    for effort in ("none", "high"):
        for is_on, prefix in ((True, ""), (False, OFF)):
            options = {"enable_thinking": is_on}
            both = resolve(thinking, reasoning_effort=effort, chat_template_kwargs=options)
            assert prefix_of(both) == prefix


def test_a_template_that_takes_an_effort_gets_it(tmp_path: Path) -> None:
    template = THINKING_TEMPLATE.replace(
        "{%- for message in messages -%}",
        "{%- if reasoning_effort is not defined -%}{%- set reasoning_effort = 'medium' -%}{%- endif -%}"
        "Reasoning: {{ reasoning_effort }}{%- for message in messages -%}",
        1,
    ).replace("enable_thinking", "unread")
    rules = thinking_rules(tmp_path, template)
    text = rules.tokenizer.decode(list(resolve(rules, reasoning_effort="high").prompts[0].tokens))
    assert text.startswith("Reasoning: high")
    assert refused(rules, reasoning_effort="none")[1] == "reasoning_effort"


def test_a_model_that_always_thinks_cannot_be_stopped(always: RequestRules) -> None:
    assert prefix_of(resolve(always)) == "<think>\n"
    message, param = refused(always, reasoning_effort="none")
    assert "always thinks" in message and param == "reasoning_effort"
    assert refused(always, reasoning_effort="low")[1] == "reasoning_effort"


def test_a_budget_is_resolved_with_the_tokens_that_it_needs(
    thinking: RequestRules, rules: RequestRules
) -> None:
    begin, end = (token_ids(thinking, text)[0] for text in ("<think>", "</think>"))
    call = token_ids(thinking, "<tool_call>")[0]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools, ends in ((None, (end,)), ([tool], (end, call))):
        budget = resolve(thinking, thinking_token_budget=5, max_tokens=9, tools=tools).sampling.thought
        assert budget == ThoughtBudget(5, (begin,), ends, False)
    assert resolve(thinking).sampling.thought is None
    message, param = refused(thinking, thinking_token_budget=10, max_tokens=9)
    assert "more than the 9 tokens" in message and param == "thinking_token_budget"
    assert refused(rules, thinking_token_budget=1)[1] == "thinking_token_budget"
    assert refused(thinking, thinking_token_budget=-1)[1] == "thinking_token_budget"


def test_a_schema_begins_behind_the_thought(
    thinking: RequestRules, always: RequestRules, rules: RequestRules
) -> None:
    begin, end = (token_ids(thinking, text)[0] for text in ("<think>", "</think>"))

    def gate(rules: RequestRules, **fields: Any) -> GrammarGate | None:
        grammar = resolve(rules, response_format=SCHEMA, **fields).sampling.grammar
        assert grammar is not None
        return grammar.gate

    # It may think first, or answer at once.
    assert gate(thinking) == GrammarGate(((end,),), is_free=False, frees=begin)
    assert gate(thinking, reasoning_effort="none") is None
    assert gate(rules) is None


def test_an_open_thought_leaves_the_answer_free(tmp_path: Path) -> None:
    template = THINKING_TEMPLATE.replace("'<think>\n\n</think>\n\n'", "'<think>\n'")
    rules = thinking_rules(tmp_path, template)
    end = token_ids(rules, "</think>")[0]
    resolved = resolve(rules, response_format=SCHEMA, reasoning_effort="none", thinking_token_budget=3)
    assert prefix_of(resolved) == "<think>\n"
    assert resolved.sampling.grammar is not None and resolved.sampling.thought is not None
    assert resolved.sampling.grammar.gate == GrammarGate(((end,),))
    assert resolved.sampling.thought.is_open


def test_gpt_oss_s_schema_begins_with_its_last_channel(tmp_path: Path) -> None:
    markers = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|constrain|>")
    ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
    template = "<|start|>user<|message|>{{ messages[0].content }}<|end|><|start|>assistant<|channel|>"
    tokenizer = GatewayTokenizer.load(str(make_folder(tmp_path, 512, markers, template)))
    markup = ModelMarkup.load(tokenizer)
    assert markup is not None and markup.thinks
    assert markup.thought_ends == tuple(tokenizer.backend.token_to_id(end) for end in ends)
    assert tokenizer.decode(list(markup.thought_begin), False) == "<|channel|>analysis<|message|>"
    gate = markup.gate_schema("", False)
    assert gate is not None and gate.is_free
    assert tokenizer.decode(list(gate.binds[0]), False) == "<|channel|>final<|message|>"
    # A JSON text is bound with the messages around it, so nothing else is said beside it.
    bound = markup.bind_text(Grammar("json_schema", '{"type": "integer"}'))
    assert msgspec.json.decode(bound.text, type=ToolGrammar).content == {"type": "integer"}
    assert markup.bind_text(Grammar("regex", "a")) == Grammar("regex", "a")


def test_a_checkpoint_s_own_template_comes_before_the_chat_template_s_signs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template=THINKING_TEMPLATE)
    settings = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    fields: dict[str, Any] = {"thinking": {"open": "<t>", "close": "</t>"}, "content": {}}
    own = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings | {"response_template": own}))
    tokenizer = GatewayTokenizer.load(str(folder))
    markup = ModelMarkup.load(tokenizer)
    assert markup is not None and markup.plain.reasoning.opens == ("<t>",)
    chosen = ModelMarkup.load(tokenizer, reasoning_parser="qwen3")
    assert chosen is not None and chosen.plain.reasoning.opens == ("<think>",)
    fields["thinking"]["open_pattern"] = fields["thinking"].pop("open") + "(a+)+"
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings | {"response_template": own}))
    with pytest.raises(ModelError, match="response_template"):
        ModelMarkup.load(GatewayTokenizer.load(str(folder)))
