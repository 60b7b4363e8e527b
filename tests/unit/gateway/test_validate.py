"""From a checked body to what is generated: everything is honoured or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diptych.errors import RequestError
from diptych.failure_statuses import RequestFailure
from diptych.request import SamplingParams, Tenancy
from services.gateway.openai.chat_messages import parse_chat_messages
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.resolve import make_prompt, resolve_completion
from services.gateway.openai.schemas.request_schema import (
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
)
from services.gateway.openai.validate import (
    RequestRules,
    build_grammar,
    check_model_name,
    check_text_length,
    split_prompts,
)
from tests.support.model_folder import CONTEXT, END, END_OF_TEXT
from tests.unit.gateway.resolved_bodies import chat, completion

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def refused(call: Any, *arguments: Any, **fields: Any) -> RequestFailure:
    with pytest.raises(RequestError) as caught:
        call(*arguments, **fields)
    return caught.value.failure


def test_defaults_are_openais(rules: RequestRules) -> None:
    ask = chat(rules, seed=1)
    assert ask.sampling == SamplingParams(max_tokens=CONTEXT - 10, seed=1, stop_token_ids=(END_OF_TEXT, END))
    assert (ask.n, ask.stops, ask.logprobs, ask.stream, ask.include_usage) == (1, (), None, False, False)
    assert completion(rules).sampling.max_tokens == 16


def test_every_sampling_field_arrives(rules: RequestRules) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.2,
        "logit_bias": {5: -100.0},
        "min_tokens": 3,
        "max_tokens": 9,
        "seed": 42,
    }
    sampling = chat(
        rules, stop_token_ids=[9], ignore_eos=True, logprobs=True, top_logprobs=4, **fields
    ).sampling
    assert sampling == SamplingParams(**fields, logprobs=4, stop_token_ids=(9,))


def test_whose_request_it_is_arrives_on_both_routes(rules: RequestRules) -> None:
    for make in (chat, completion):
        origin = make(rules, cache_salt="x", priority=-3).origin
        assert (origin.tenant, origin.priority) == ("", -3) and origin.scope
        assert make(rules).origin == Tenancy()


def test_top_k_of_minus_one_is_off(rules: RequestRules) -> None:
    assert chat(rules, top_k=-1).sampling.top_k == 0


def test_a_negative_seed_is_a_seed(rules: RequestRules) -> None:
    assert 0 <= chat(rules, seed=-5).sampling.seed < 2**63


def test_sequences_of_one_request_differ_in_their_seed_only(rules: RequestRules) -> None:
    ask = chat(rules, n=3, seed=2**63 - 1, max_tokens=5)
    samplings = [ask.sampling_for(ask.prompts[0], i) for i in range(3)]
    assert [sampling.seed for sampling in samplings] == [2**63 - 1, 0, 1]
    assert all(
        msgspec.structs.replace(sampling, seed=ask.sampling.seed) == ask.sampling for sampling in samplings
    )


def test_the_newer_name_of_max_tokens_wins(rules: RequestRules) -> None:
    assert chat(rules, max_tokens=5, max_completion_tokens=7).sampling.max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 9}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "x" * 300]}, "stop"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"logit_bias": {320: 1.0}}, "logit_bias"),
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    rules: RequestRules, fields: dict[str, Any], param: str
) -> None:
    error = refused(chat, rules, **fields)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {
            "parallel_tool_calls": True,
            "store": False,
            "service_tier": "auto",
            "user": "u",
            "metadata": {"a": "b"},
        },
        {"safety_identifier": "s", "prompt_cache_key": "k", "verbosity": "low", "reasoning_effort": "none"},
        {"modalities": ["text"], "response_format": {"type": "text"}, "stop": [], "stop_token_ids": []},
    ],
)
def test_harmless_fields_pass(rules: RequestRules, fields: dict[str, Any]) -> None:
    assert chat(rules, seed=1, **fields) == chat(rules, seed=1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompts": 20, "best_of": 4}, "n"),
    ],
)
def test_completions_refuse_by_name(rules: RequestRules, fields: dict[str, Any], param: str) -> None:
    assert refused(completion, rules, **fields).param == param


def test_scoring_a_prompt_asks_for_no_token(rules: RequestRules) -> None:
    sampling = completion(rules, prompt_tokens=CONTEXT, echo=True, max_tokens=0, logprobs=3).sampling
    assert (sampling.max_tokens, sampling.prompt_logprobs, sampling.logprobs) == (0, 3, 3)


def test_best_of_needs_logprobs_to_rank_by(rules: RequestRules) -> None:
    ask = completion(rules, best_of=4, n=2)
    assert (ask.sampling.logprobs, ask.logprobs, ask.best_of) == (0, None, 4)


def test_the_context_is_a_bound_with_its_arithmetic(rules: RequestRules) -> None:
    assert chat(rules, prompt_tokens=CONTEXT - 1).sampling.max_tokens == 1
    error = refused(chat, rules, prompt_tokens=CONTEXT)
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    error = refused(chat, rules, prompt_tokens=CONTEXT - 5, max_completion_tokens=6)
    assert error.code == "context_length_exceeded"
    assert f"{CONTEXT + 1} ({CONTEXT - 5} in the prompt, 6 in 'max_completion_tokens')" in error.message
    assert chat(rules, prompt_tokens=CONTEXT - 5, max_tokens=5).sampling.max_tokens == 5


def test_a_default_length_is_cut_to_the_room_of_each_prompt(rules: RequestRules) -> None:
    body = CompletionRequest(model="toy")
    long, short = make_prompt([5] * (CONTEXT - 3)), make_prompt([5])
    ask = resolve_completion(body, [long, short], None, rules)
    assert [ask.sampling_for(prompt, 0).max_tokens for prompt in ask.prompts] == [3, 16]


def test_a_hopelessly_long_text_is_not_tokenised(rules: RequestRules) -> None:
    error = refused(check_text_length, "x" * (rules.tokenizer.longest_bytes * (CONTEXT + 1)), rules, "prompt")
    assert error.code == "context_length_exceeded"
    check_text_length("x" * CONTEXT, rules, "prompt")


def test_prompts_come_in_four_forms(rules: RequestRules) -> None:
    assert split_prompts(None, rules) == [""]
    assert split_prompts("a", rules) == ["a"]
    assert split_prompts(["a", "b"], rules) == ["a", "b"]
    assert split_prompts([1, 2], rules) == [[1, 2]]
    assert split_prompts([[1], [2, 3]], rules) == [[1], [2, 3]]


@pytest.mark.parametrize("prompt", [["a", 1], [[1], "a"], [1, [2]], [[]], [320], [[1], [320]], ["a"] * 33])
def test_bad_prompts_are_refused(rules: RequestRules, prompt: list[Any]) -> None:
    assert refused(split_prompts, prompt, rules).param == "prompt"


def test_models_are_known_by_name(rules: RequestRules) -> None:
    assert check_model_name("org/toy", rules) == "org/toy"
    assert check_model_name(None, rules) == "toy"
    error = refused(check_model_name, "gpt-5", rules)
    assert (error.status, error.code) == (404, "model_not_found")


def parse_messages(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = msgspec.json.encode({"model": "toy", "messages": messages})
    return parse_chat_messages(parse_body(body, ChatRequest, 16).messages)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages({"role": "user", "content": parts}) == [{"role": "user", "content": "ab"}]


def test_past_tool_calls_reach_the_template_with_their_arguments_parsed() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = parse_messages(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    )
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert messages[1] == {"role": "tool", "content": "2", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_bad_messages_are_refused_by_name(message: dict[str, Any], param: str) -> None:
    assert refused(parse_messages, message).param == param


def schema_format(schema: dict[str, Any]) -> ResponseFormat:
    return msgspec.convert(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, ResponseFormat
    )


def test_grammars_are_bounded_before_they_are_compiled() -> None:
    limits = RequestLimits()
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"items": deep}
    schemas: list[dict[str, Any]] = [
        {"enum": ["x" * 100] * 1000},
        deep,
        {"patternProperties": {"x" * 2000: {}}},
    ]
    for schema in schemas:
        assert refused(build_grammar, schema_format(schema), limits).code == "invalid_schema"
    grammar = build_grammar(schema_format({"type": "object"}), limits)
    assert grammar is not None
    assert (grammar.kind, grammar.text) == ("json_schema", '{"type":"object"}')
