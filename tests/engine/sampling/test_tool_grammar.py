"""Grammars of calls: whatever tokens they allow, a reader finds valid calls in them, in every family's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from diptych.errors import GrammarError
from diptych.request import Grammar
from engine.sampling.grammar import GrammarMatcher, build_tokenizer, check_grammar, compile_grammar
from engine.sampling.tool_grammar import CallSyntax, ToolForm, ToolGrammar, write_markup
from services.gateway.parsing.answer_markup import AnswerMarkup
from services.gateway.parsing.answer_parts import AnswerPart
from services.gateway.parsing.answer_reader import AnswerReader
from services.gateway.parsing.call_writing import WRITING, choose_syntax
from services.gateway.parsing.families import TOOL_CALLS, choose_format
from services.gateway.tokenization.tokenizer import GatewayTokenizer

MAX_WALK = 300
TINY = Path(__file__).parents[3] / "models" / "tiny"
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "note": {"type": ["string", "null"]},
        "hours": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "deep": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
LOOSE = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}} | {
    "additionalProperties": False
}
TOOLS = {"weather": CITY, "now": NONE, "loose": LOOSE}
FORMS = tuple(ToolForm(name, schema) for name, schema in TOOLS.items())
TYPES = {
    name: {
        key: (field["type"],) if isinstance(field["type"], str) else tuple(field["type"])
        for key, field in schema["properties"].items()
    }
    for name, schema in TOOLS.items()
}


def load_family(family: str) -> tuple[GatewayTokenizer, AnswerMarkup]:
    """The embedded model's vocabulary with a family's markers, and its markup."""
    tokenizer = GatewayTokenizer.load(str(TINY))
    reasoning = "openai_gptoss" if family == "openai" else "none"
    answer_format = choose_format("", family, reasoning)
    assert answer_format is not None
    tokenizer.backend.add_special_tokens([one for one in answer_format.literals if len(one) > 1])
    added = {one.content: token for token, one in tokenizer.backend.get_added_tokens_decoder().items()}
    return tokenizer, AnswerMarkup(answer_format, added.get)


def walk(tokenizer: GatewayTokenizer, matcher: GrammarMatcher, seed: int) -> list[int] | None:
    """Random tokens that the grammar allows, until it is satisfied; None if it takes too long."""
    rng, vocab = np.random.default_rng(seed), tokenizer.backend.get_vocab_size()
    # Short ones, so that texts end, and tags within them are written in several tokens.
    is_short = np.array([len(tokenizer.token_bytes(token)) <= 2 for token in range(vocab)])
    output: list[int] = []
    while not matcher.done:
        allowed = matcher.token_mask(vocab)
        allowed[list(tokenizer.end_ids)] = False
        if not allowed.any() or (matcher.accepting and rng.random() < 0.5):
            break
        short = np.flatnonzero(allowed & is_short)
        tokens = short if len(short) and rng.random() < 0.7 else np.flatnonzero(allowed)
        output.append(int(rng.choice(tokens)))
        matcher.push(output[-1])
        if len(output) > MAX_WALK:
            return None
    return output


def read_calls(tokenizer: GatewayTokenizer, markup: AnswerMarkup, output: list[int]) -> list[AnswerPart]:
    reader, detokenizer = AnswerReader(markup, "", TYPES), tokenizer.new_detokenizer(False)
    for token in output:
        mark = markup.mark_of.get(token)
        reader.feed(detokenizer.feed(token) if mark is None else detokenizer.flush() + mark)
    reader.feed(detokenizer.flush())
    reader.close()
    return reader.take_parts()


def as_grammar(**fields: Any) -> Grammar:
    return Grammar("tools", msgspec.json.encode(ToolGrammar(**fields)).decode())


def test_every_family_s_calls_can_be_written() -> None:
    assert set(WRITING) == {*TOOL_CALLS, "mistral_list"}


@pytest.mark.parametrize("family", TOOL_CALLS)
def test_what_a_grammar_allows_is_read_as_valid_calls(family: str) -> None:
    tokenizer, markup = load_family(family)
    syntax = choose_syntax(markup)
    assert syntax is not None
    table = build_tokenizer(tokenizer.backend, tokenizer.end_ids)
    prototype = compile_grammar(as_grammar(syntax=syntax, tools=FORMS, many=True), table)
    complete = 0
    for seed in range(20):
        output = walk(tokenizer, prototype.copy(), seed)
        if output is None:
            continue
        complete += 1
        parts = read_calls(tokenizer, markup, output)
        names = [part.text for part in parts if part.kind == "call"]
        arguments = [""] * len(names)
        for part in parts:
            assert part.kind != "content", tokenizer.decode(output, False)
            if part.kind == "arguments":
                arguments[part.call] += part.text
        assert names, tokenizer.decode(output, False)
        for name, text in zip(names, arguments, strict=True):
            jsonschema.validate(json.loads(text), TOOLS[name])
    assert complete >= 3


def test_names_are_bound_and_an_open_call_goes_on_behind_its_marker() -> None:
    tokenizer, markup = load_family("tiny")
    syntax = choose_syntax(markup)
    table = build_tokenizer(tokenizer.backend, tokenizer.end_ids)
    [marker] = markup.mark_of
    closed = compile_grammar(as_grammar(syntax=syntax, tools=FORMS), table)
    assert np.flatnonzero(closed.token_mask(4096)).tolist() == [marker]
    opened = compile_grammar(as_grammar(syntax=syntax, tools=FORMS, is_open=True), table)
    first = {tokenizer.token_text(int(token))[0] for token in np.flatnonzero(opened.token_mask(4096))}
    assert first == {"w", "n", "l"}
    opened.replay(tokenizer.encode("now({})", False))
    assert opened.done


def test_an_answer_may_be_text_of_a_schema_instead() -> None:
    tokenizer, markup = load_family("tiny")
    table = build_tokenizer(tokenizer.backend, tokenizer.end_ids)
    content = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    grammar = as_grammar(syntax=choose_syntax(markup), tools=FORMS, content=content)
    for text in ('{"x": 3}', "<|tool|>now({})"):
        matcher = compile_grammar(grammar, table)
        matcher.replay(tokenizer.backend.encode(text).ids)
        assert matcher.accepting


def test_a_schema_that_is_not_known_is_an_error_only_if_it_must_be_exact() -> None:
    tokenizer, markup = load_family("tiny")
    table = build_tokenizer(tokenizer.backend, tokenizer.end_ids)
    strange = {"type": "object", "properties": {"a": {"type": "string", "format": "no-such-format"}}}
    for exact in (False, True):
        grammar = as_grammar(syntax=choose_syntax(markup), tools=(ToolForm("f", strange, exact),))
        if exact:
            with pytest.raises(GrammarError):
                check_grammar(grammar, table)
        else:
            check_grammar(grammar, table)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"syntax": 3}'])
def test_other_text_is_no_grammar_of_tools(text: str) -> None:
    tokenizer, _ = load_family("tiny")
    with pytest.raises(GrammarError, match="malformed"):
        compile_grammar(Grammar("tools", text), build_tokenizer(tokenizer.backend, tokenizer.end_ids))


def test_counted_repeats_of_all_tools_are_bounded_together() -> None:
    tokenizer, markup = load_family("tiny")
    field = {"type": "string", "pattern": "(a{100}){100}"}
    tools = tuple(ToolForm(f"f{i}", {"properties": {"a": field}}) for i in range(20))
    grammar = as_grammar(syntax=choose_syntax(markup), tools=tools)
    with pytest.raises(GrammarError, match="repeats"):
        check_grammar(grammar, build_tokenizer(tokenizer.backend, tokenizer.end_ids))


@pytest.mark.parametrize("tools", [(), FORMS], ids=["text", "text-or-calls"])
def test_counted_repeats_of_a_text_are_bounded(tools: tuple[ToolForm, ...]) -> None:
    tokenizer, markup = load_family("openai")
    content = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{1000}){1000}"}}}
    grammar = as_grammar(syntax=choose_syntax(markup), tools=tools, content=content)
    with pytest.raises(GrammarError, match="repeats"):
        check_grammar(grammar, build_tokenizer(tokenizer.backend, tokenizer.end_ids))


def test_markup_joins_literals_and_quotes_them() -> None:
    assert write_markup(("a", '"\n', 5, "b", 6, 7)) == '"a\\"\\n" <[5]> "b" <[6]> <[7]>'
    assert write_markup(()) == ""
    assert CallSyntax(opener=(), begin=(), name_end=(), end=()).style == "json"
