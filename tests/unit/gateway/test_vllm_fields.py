"""Fields of vLLM beyond plain sampling: resolved as vLLM reads them, or refused with what would be right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych.errors import RequestError
from diptych.failure_statuses import RequestFailure
from diptych.request import Grammar
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.openai.vllm_fields import GUIDED, GUIDED_OPTIONS
from services.gateway.preparation.resolve_body import resolve_body
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import CONTEXT, END, END_OF_TEXT
from tests.unit.gateway.thinking_model import thinking_rules

BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "toy", "messages": [{"role": "user", "content": "hi"}]},
    "completion": {"model": "toy", "prompt": "one two three four five six"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRUCTURED: list[tuple[dict[str, Any], Grammar]] = [
    ({"json": SCHEMA}, Grammar("json_schema", msgspec.json.encode(SCHEMA).decode())),
    (
        {"json": msgspec.json.encode(SCHEMA).decode()},
        Grammar("json_schema", msgspec.json.encode(SCHEMA).decode()),
    ),
    ({"json": {}}, Grammar("json_schema", "{}")),
    ({"regex": "[a-f]{3}"}, Grammar("regex", "[a-f]{3}")),
    ({"choice": ["yes", "no"]}, Grammar("choice", '["yes","no"]')),
    ({"grammar": "start: /a/"}, Grammar("lark", "start: /a/")),
]


def resolve(
    rules: RequestRules, route: str = "completion", why: str | None = None, **fields: Any
) -> ResolvedRequest:
    body = msgspec.json.encode({**BODIES[route], **fields})
    resolved = resolve_body(route, body, Caller(0.0), rules, lambda grammar, field: why)
    assert isinstance(resolved, ResolvedRequest)
    return resolved


def refusal(
    rules: RequestRules, route: str = "completion", why: str | None = None, **fields: Any
) -> RequestFailure:
    with pytest.raises(RequestError) as caught:
        resolve(rules, route, why, **fields)
    assert caught.value.failure.status == 400
    return caught.value.failure


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(("asked", "grammar"), STRUCTURED)
def test_structured_outputs_are_grammars(
    rules: RequestRules, route: str, asked: dict[str, Any], grammar: Grammar
) -> None:
    assert resolve(rules, route, structured_outputs=asked).sampling.grammar == grammar
    failure = refusal(rules, route, "it is too complex", structured_outputs=asked)
    assert failure.param == "structured_outputs" and "too complex" in failure.message


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({}, "has none"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"choice": []}, "length"),
        ({"choice": [""]}, "length"),
        ({"choice": ["a"] * 1025}, "length"),
        ({"json": "{"}, "JSON schema"),
        ({"json": "[]"}, "JSON schema"),
        ({"json": {"pattern": "a" * 2000}}, "pattern"),
        ({"regex": "a" * 2000}, "1024 characters"),
        ({"regex": 5}, "str"),
        ({"whitespace_pattern": "x", "regex": "a"}, "unrecognized"),
    ],
)
def test_what_is_no_structure_is_refused(rules: RequestRules, route: str, asked: Any, word: str) -> None:
    failure = refusal(rules, route, structured_outputs=asked)
    assert failure.param is not None and failure.param.startswith("structured_outputs")
    assert word in failure.message


def test_one_thing_binds_an_answer(rules: RequestRules, tmp_path: Path) -> None:
    both: dict[str, Any] = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    assert "send one of them" in refusal(rules, **both).message
    assert resolve(
        rules, structured_outputs={"regex": "a"}, response_format={"type": "text"}
    ).sampling.grammar
    tools = [{"type": "function", "function": {"name": "f"}}]
    failure = refusal(thinking_rules(tmp_path), "chat", structured_outputs={"regex": "a"}, tools=tools)
    assert failure.param == "structured_outputs" and "response_format" in failure.message


def test_structures_begin_behind_the_thought(tmp_path: Path) -> None:
    grammar = resolve(thinking_rules(tmp_path), "chat", structured_outputs={"choice": ["a"]}).sampling.grammar
    assert grammar is not None and grammar.kind == "choice" and grammar.gate is not None


@pytest.mark.parametrize("old", [*GUIDED, *GUIDED_OPTIONS])
@pytest.mark.parametrize("route", BODIES)
def test_older_names_are_refused_with_the_new_ones(rules: RequestRules, route: str, old: str) -> None:
    lenient = replace(rules, ignore_unknown=True)
    for one in (rules, lenient):
        failure = refusal(one, route, **{old: "a"})
        assert failure.param == old and "structured_outputs" in failure.message
        assert GUIDED.get(old, "") in failure.message


def test_named_tokens_arrive(rules: RequestRules) -> None:
    sampling = resolve(rules, allowed_token_ids=[7, 5], bad_words=["hi"]).sampling
    assert sampling.allowed_token_ids == (7, 5)
    assert sampling.bad_words[0] == tuple(rules.tokenizer.encode("hi", False))
    assert not resolve(rules).sampling.bad_words and not resolve(rules).sampling.allowed_token_ids


def test_bad_words_have_the_tokens_that_vllm_gives_them(rules: RequestRules) -> None:
    """As they are, and behind a space if that has another first token and as many tokens."""
    encode, expected = rules.tokenizer.encode, []
    for word in ("one", "two three", "x", "the"):
        bare, spaced = tuple(encode(word, False)), tuple(encode(" " + word, False))
        expected += [bare, *([spaced] if spaced[0] != bare[0] and len(spaced) == len(bare) else [])]
    asked = resolve(rules, bad_words=["one", " two three", "x", "the"]).sampling.bad_words
    assert asked == tuple(dict.fromkeys(expected)) and len(asked) >= 4


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("allowed_token_ids", [], "length"),
        ("allowed_token_ids", [1] * 4097, "length"),
        ("allowed_token_ids", [10**6], "below"),
        ("allowed_token_ids", [-1], ">= 0"),
        ("bad_words", [""], "length"),
        ("bad_words", [" "], "no tokens"),
        ("bad_words", ["x"] * 65, "length"),
        ("bad_words", ["x" * 65], "length"),
        ("prompt_logprobs", 21, "<= 20"),
        ("prompt_logprobs", -1, ">= 0"),
        ("truncate_prompt_tokens", 0, "at least 1, or -1"),
        ("truncate_prompt_tokens", -2, ">= -1"),
        ("return_token_ids", "yes", "bool"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(
    rules: RequestRules, route: str, field: str, value: Any, word: str
) -> None:
    failure = refusal(rules, route, **{field: value})
    assert failure.param is not None and failure.param.startswith(field), failure
    assert word in failure.message


@pytest.mark.parametrize("route", BODIES)
def test_named_tokens_of_which_none_is_left_are_refused(rules: RequestRules, route: str) -> None:
    (token,) = rules.tokenizer.encode("a", False)
    none: list[dict[str, Any]] = [
        {"allowed_token_ids": [token], "bad_words": ["a"]},
        {"allowed_token_ids": [END], "min_tokens": 1},
        {"allowed_token_ids": [token, 7], "stop_token_ids": [7], "min_tokens": 1, "bad_words": ["a"]},
    ]
    for fields in none:
        failure = refusal(rules, route, **fields)
        assert failure.param == "allowed_token_ids" and "leaves no" in failure.message, failure
        assert "min_tokens" in failure.message or "bad_words" in failure.message
    some: list[dict[str, Any]] = [
        {"allowed_token_ids": [token, 7], "bad_words": ["a"]},
        {"allowed_token_ids": [token, END], "min_tokens": 1},
        {"allowed_token_ids": [END]},
        {"allowed_token_ids": [END], "min_tokens": 1, "ignore_eos": True},
    ]
    for fields in some:
        resolve(rules, route, **fields)


def test_a_chat_computes_the_scores_that_it_lists(rules: RequestRules) -> None:
    def scored(route: str, **fields: Any) -> list[int | None]:
        asked = resolve(rules, route, prompt_logprobs=2, n=3, **fields)
        return [asked.sampling_for(asked.prompts[0], i).prompt_logprobs for i in range(3)]

    assert scored("chat") == [2, None, None]
    # Each choice of a completion lists them.
    assert scored("completion") == [2, 2, 2]


def test_scores_of_a_prompt_are_not_streamed(rules: RequestRules) -> None:
    for count in (0, 3):
        assert refusal(rules, prompt_logprobs=count, stream=True).param == "prompt_logprobs"


def test_the_most_alternatives_are_computed(rules: RequestRules) -> None:
    assert resolve(rules, prompt_logprobs=3).sampling.prompt_logprobs == 3
    assert resolve(rules, prompt_logprobs=0).sampling.prompt_logprobs == 0
    both = resolve(rules, prompt_logprobs=2, echo=True, logprobs=4)
    assert (both.sampling.prompt_logprobs, both.prompt_logprobs, both.logprobs) == (4, 2, 4)
    assert resolve(rules, "chat", prompt_logprobs=1).sampling.prompt_logprobs == 1
    assert resolve(rules, prompt_logprobs=1, max_tokens=0).sampling.max_tokens == 0


@pytest.mark.parametrize("route", BODIES)
def test_prompts_keep_their_last_tokens(rules: RequestRules, route: str) -> None:
    (whole,) = resolve(rules, route).prompts
    for kept in (1, 3, len(whole.tokens), len(whole.tokens) + 1, 10_000):
        (cut,) = resolve(rules, route, truncate_prompt_tokens=kept).prompts
        assert cut.tokens.tolist() == whole.tokens.tolist()[-kept:]


@pytest.mark.parametrize("prompt", ["word " * 5000, [7] * 5000, [[7] * 5000, [8]]])
def test_a_prompt_is_cut_to_what_fits(rules: RequestRules, prompt: Any) -> None:
    def first(**fields: Any) -> int:
        return len(resolve(rules, prompt=prompt, truncate_prompt_tokens=-1, **fields).prompts[0].tokens)

    assert refusal(rules, prompt=prompt).code == "context_length_exceeded"
    assert first() == CONTEXT - 16
    assert first(max_tokens=100) == CONTEXT - 100
    assert first(max_tokens=4, echo=True) == CONTEXT - 4
    assert first(max_tokens=0, echo=True) == CONTEXT
    assert first(min_tokens=10) == CONTEXT - 16
    assert refusal(rules, prompt=prompt, truncate_prompt_tokens=CONTEXT).code == "context_length_exceeded"
    many = {"model": "toy", "messages": [{"role": "user", "content": "word " * 5000}]}
    body = msgspec.json.encode({**many, "truncate_prompt_tokens": -1})
    resolved = resolve_body("chat", body, Caller(0.0), rules, lambda grammar, field: None)
    assert isinstance(resolved, ResolvedRequest)
    assert (len(resolved.prompts[0].tokens), resolved.sampling.max_tokens) == (CONTEXT - 1, 1)


def test_a_cut_prompt_echoes_what_is_left(rules: RequestRules) -> None:
    (cut,) = resolve(rules, echo=True, truncate_prompt_tokens=2).prompts
    assert cut.text == rules.tokenizer.decode(cut.tokens.tolist()) and cut.offsets is not None


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("kept", [1, 7, 200, -1])
def test_of_a_long_text_only_the_end_is_tokenized(
    rules: RequestRules, route: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last tokens are the same."""
    text = " ".join(f"wörd{i} the €uro \U0001f600{i * i}," for i in range(20_000))
    whole = rules.tokenizer.encode(text, False)
    sizes: list[int] = []
    encode = type(rules.tokenizer).encode

    def note(tokenizer: GatewayTokenizer, text: str, special: bool) -> list[int]:
        sizes.append(len(text.encode()))
        return encode(tokenizer, text, special)

    monkeypatch.setattr(type(rules.tokenizer), "encode", note)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    body = {"prompt": text} if route == "completion" else chat
    (cut,) = resolve(rules, route, truncate_prompt_tokens=kept, **body).prompts
    assert sum(sizes) <= (CONTEXT + 64) * rules.tokenizer.longest_bytes
    if kept > 0:
        assert len(cut.tokens) == kept and sum(sizes) <= (kept + 64) * rules.tokenizer.longest_bytes
    if route == "completion":
        assert cut.tokens.tolist() == whole[-len(cut.tokens) :]
    system: dict[str, Any] = {
        "messages": [{"role": "system", "content": text}, {"role": "user", "content": "hi"}]
    }
    sizes.clear()
    evicting = replace(rules, keep_threshold=0.5)
    (cut,) = resolve(evicting, "chat", truncate_prompt_tokens=kept, **system).prompts
    assert sum(sizes) <= (CONTEXT + 64) * rules.tokenizer.longest_bytes


def test_only_own_tokens_are_reasons_to_stop(rules: RequestRules) -> None:
    assert resolve(rules, stop_token_ids=[9, END]).own_stop_ids == (9,)
    assert resolve(rules, stop_token_ids=[9, END], ignore_eos=True).own_stop_ids == (9, END)
    assert resolve(rules).own_stop_ids == () and END_OF_TEXT in resolve(rules).sampling.stop_token_ids


def test_unknown_fields_are_refused_or_passed_over(rules: RequestRules) -> None:
    strange: dict[str, Any] = {
        "store_it": True,
        "messages": [{"role": "user", "content": "hi", "mood": 1}, {"role": "user", "content": "x"}],
        "response_format": {"type": "text", "more": {"a": 1}},
        "logit_bias": {"5": 1},
    }
    assert refusal(rules, "chat", **strange).code == "unrecognized_request_argument"
    lenient = replace(rules, ignore_unknown=True)
    resolved = resolve(lenient, "chat", **strange)
    assert sorted(resolved.ignored_fields) == ["messages[].mood", "response_format.more", "store_it"]
    assert resolved.sampling.logit_bias == {5: 1.0}
    assert resolve(lenient, "chat").ignored_fields == ()
    # What is known is checked as before, and so many names are enough.
    assert refusal(lenient, "chat", store_it=1, temperature=9).param == "temperature"
    many: dict[str, Any] = {f"x{i}": i for i in range(17)}
    assert refusal(lenient, **many).code == "unrecognized_request_argument"
    with pytest.raises(RequestError):
        resolve_body("tokenize", b'{"prompt":"a","x":1}', Caller(0.0), lenient, lambda grammar, field: None)
