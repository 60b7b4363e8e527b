"""A body goes through parse, validate, tokenize and resolve once, in this order, on every route."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from diptych.errors import RequestError
from diptych.request import Grammar, Pooling, SamplingParams
from engine.model.pooling import ModelPooler
from router.routing.prefix_index import name_chunks
from services.gateway.openai.resolve import Prompt, ResolvedRequest, make_prompt
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.preparation import resolve_body as steps
from services.gateway.preparation.preparation_job import PreparedRequest
from services.gateway.preparation.resolve_body import ROUTES, resolve_body
from services.gateway.tokenization.tokenizer import GatewayTokenizer

POOLER = ModelPooler(Pooling("last", normalize=True), size=8)
MESSAGES = [{"role": "user", "content": "hi"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
ANSWER = {"type": "json_schema", "schema": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "toy", "messages": MESSAGES, "response_format": FORMAT},
    "completion": {"model": "toy", "prompt": "hi", "response_format": FORMAT},
    "responses": {
        "model": "toy",
        "input": "hi",
        "text": {"format": {"type": "json_schema", "name": "f", "schema": {"type": "object"}}},
    },
    "messages": {"model": "toy", "max_tokens": 9, "messages": MESSAGES, "output_config": {"format": ANSWER}},
    "count_tokens": {"model": "toy", "messages": MESSAGES, "output_config": {"format": ANSWER}},
    "tokenize": {"prompt": "hi"},
    "detokenize": {"tokens": [1, 2]},
    "embedding": {"model": "toy", "input": "hi"},
    "rerank": {"model": "toy", "query": "hi", "documents": ["hi"]},
    "score": {"model": "toy", "text_1": "hi", "text_2": "hi"},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that are called, in order."""
    called: list[str] = []

    def watch(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            called.append(name)
            return plain(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    for name in ("parse_body", "build_grammar", "parse_chat_messages", "resolve_chat", "resolve_completion"):
        watch(steps, name)
    watch(GatewayTokenizer, "render_conversation")
    watch(GatewayTokenizer, "encode")
    return called


def resolve(route: str, rules: RequestRules, calls: list[str], **fields: Any) -> ResolvedRequest | bytes:
    def check(grammar: Grammar, field: str) -> str | None:
        calls.append("check_grammar")
        return None

    body = msgspec.json.encode({**BODIES[route], **fields})
    return resolve_body(route, body, Caller(0.0), rules, check)


STEPS = {
    "chat": (
        "parse_body build_grammar parse_chat_messages check_grammar render_conversation encode resolve_chat"
    ),
    "completion": "parse_body build_grammar check_grammar encode resolve_completion",
    "responses": (
        "parse_body build_grammar parse_chat_messages check_grammar render_conversation encode resolve_chat"
    ),
    "messages": (
        "parse_body build_grammar parse_chat_messages check_grammar render_conversation encode resolve_chat"
    ),
    "count_tokens": "parse_body build_grammar parse_chat_messages check_grammar render_conversation encode",
    "tokenize": "parse_body encode",
    "detokenize": "parse_body",
    "embedding": "parse_body encode",
    "rerank": "parse_body encode encode",
    "score": "parse_body encode encode",
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_step_is_done_once_and_in_order(route: str, rules: RequestRules, calls: list[str]) -> None:
    resolve(route, replace(rules, pooler=POOLER), calls)
    assert " ".join(calls) == STEPS[route]


def test_the_grammar_that_was_checked_is_the_one_that_workers_get(
    rules: RequestRules, calls: list[str]
) -> None:
    for route in ("chat", "completion"):
        ask = resolve(route, rules, calls)
        assert isinstance(ask, ResolvedRequest)
        assert ask.sampling.grammar == Grammar(kind="json_schema", text='{"type":"object"}')


def test_a_grammar_that_is_refused_ends_the_body_before_its_prompt_is_rendered(
    rules: RequestRules, calls: list[str]
) -> None:
    body = msgspec.json.encode(BODIES["chat"])
    with pytest.raises(RequestError, match="cannot be served: it is too large"):
        resolve_body("chat", body, Caller(0.0), rules, lambda grammar, field: "it is too large")
    assert "render_conversation" not in calls


def test_an_empty_prompt_is_the_start_token(rules: RequestRules, calls: list[str]) -> None:
    ask = resolve("completion", rules, calls, prompt="", response_format=None)
    assert isinstance(ask, ResolvedRequest)
    assert [prompt.tokens.tolist() for prompt in ask.prompts] == [[rules.tokenizer.start_id]]


@pytest.mark.parametrize("caching", [False, True])
def test_chunks_are_named_with_the_prompt_if_workers_share_prefixes(
    rules: RequestRules, calls: list[str], caching: bool
) -> None:
    rules = replace(rules, prefix_caching=caching)
    prompts = [[5] * 200, [6] * 64, [7]]
    ask = resolve(
        "completion", rules, calls, prompt=prompts, max_tokens=1, response_format=None, cache_salt="s"
    )
    assert isinstance(ask, ResolvedRequest)
    named = [name_chunks(prompt, ask.origin.scope) for prompt in prompts]
    assert [len(names) for names in named] == [3, 1, 0]
    assert [prompt.chunks for prompt in ask.prompts] == (named if caching else [None] * 3)


def test_a_long_prompt_comes_out_of_a_preparer_at_the_cost_of_a_copy() -> None:
    prompt = make_prompt(range(1000, 33_000)).tokens.obj
    assert isinstance(prompt, bytes)
    ask = ResolvedRequest("toy", [Prompt(prompt) for _ in range(16)], SamplingParams(1, 0), 40_000)
    frame = msgspec.msgpack.encode(PreparedRequest(ask))
    assert len(frame) < 4.1 * 16 * 32_000
    before = sys.getallocatedblocks()
    report = msgspec.msgpack.decode(frame, type=PreparedRequest)
    assert sys.getallocatedblocks() - before < 1000, "no object for each token"
    assert report.ask.prompt_tokens == 16 * 32_000 and report.ask.prompts[3].tokens[7] == 1007


def test_messages_take_what_the_context_leaves(rules: RequestRules) -> None:
    for route, clips in (("messages", True), ("chat", False)):
        body = msgspec.json.encode(BODIES[route])
        resolved = resolve_body(route, body, Caller(0.0), rules, lambda grammar, field: None)
        assert isinstance(resolved, ResolvedRequest) and resolved.clips_length == clips
