"""Readers of answers: every family, at every cut, with markers that are tokens and with those that are text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.parsing.answer_reader import AnswerReader
from services.gateway.parsing.families import REASONING, TOOL_CALLS, choose_format
from services.gateway.parsing.tagged_calls import write_value
from tests.unit.gateway.parsing.answer_samples import (
    SAMPLES,
    TOOLS,
    AnswerSample,
    call,
    join_parts,
    make_markup,
    read_pieces,
)

FAMILIES = sorted({(sample.calls, sample.reasoning) for sample in SAMPLES})
samples = pytest.mark.parametrize(
    "sample", SAMPLES, ids=lambda sample: f"{sample.calls}-{sample.text[:20]!r}"
)


def test_every_format_has_a_sample() -> None:
    assert {sample.calls for sample in SAMPLES} == set(TOOL_CALLS)
    assert {sample.reasoning for sample in SAMPLES} | {"deepseek_v3"} == {*REASONING, "none"}


@samples
@pytest.mark.parametrize("as_tokens", [False, True])
def test_an_answer_says_the_same_at_every_cut(sample: AnswerSample, as_tokens: bool) -> None:
    answer_format = sample.answer_format
    markup = make_markup(answer_format, answer_format.literals if as_tokens else ())
    text = markup.markers.mark_text(sample.text)
    assert join_parts(read_pieces(markup, [text])) == sample.said
    assert join_parts(read_pieces(markup, list(text))) == sample.said
    for cut in range(1, len(text)):
        assert join_parts(read_pieces(markup, [text[:cut], text[cut:]])) == sample.said


@samples
def test_every_beginning_of_an_answer_can_be_its_end(sample: AnswerSample) -> None:
    markup = make_markup(sample.answer_format)
    for end in range(len(sample.text)):
        text = sample.text[:end]
        assert join_parts(read_pieces(markup, list(text))) == join_parts(read_pieces(markup, [text]))


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_any_text_says_the_same_at_every_cut(family: tuple[str, str], data: st.DataObject) -> None:
    answer_format = choose_format("", *family)
    assert answer_format is not None
    pieces = [sample.text for sample in SAMPLES if sample.calls == family[0]]
    fragments = [text[i : i + 7] for text in pieces for i in range(0, len(text), 7)]
    words = st.sampled_from(
        [*answer_format.literals, *fragments, '"', "{", "}", "[", "\\", "\n", " ", "x", ":", ","]
    )
    tokens = data.draw(st.lists(st.sampled_from(answer_format.literals), unique=True))
    markup = make_markup(answer_format, tokens)
    text = markup.markers.mark_text("".join(data.draw(st.lists(words, max_size=30))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read_pieces(markup, [text])
    assert (
        join_parts(whole)
        == join_parts(read_pieces(markup, cut))
        == join_parts(read_pieces(markup, list(text)))
    )
    for part in whole:
        part.text.encode()
    calls = [part.call for part in whole if part.kind == "call"]
    assert calls == list(range(len(calls)))


@given(st.text(max_size=60))
def test_text_without_markup_passes_unchanged(text: str) -> None:
    for calls in ("hermes", "tiny", "deepseek_v31"):
        answer_format = choose_format("", calls, "qwen3")
        assert answer_format is not None
        markup = make_markup(answer_format, answer_format.literals)
        assert join_parts(read_pieces(markup, list(text))) == ([("content", text)] if text else [])


def test_text_that_spells_a_token_stays_text() -> None:
    answer_format = SAMPLES[0].answer_format
    markup = make_markup(answer_format, answer_format.literals)
    text = 'write <tool_call>{"name": "f"}</tool_call> or </think>'
    assert join_parts(read_pieces(markup, [text])) == [("content", text)]


def test_an_end_that_is_text_may_stand_in_a_string() -> None:
    arguments = '{"a": "</tool_call>"}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert join_parts(read_pieces(make_markup(SAMPLES[0].answer_format), list(text))) == call("f", arguments)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nothing</tool_call> b",
        '<tool_call>{"nome": "f"}</tool_call>',
        '<tool_call>{"name": "a b"}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        "a </tool_call> b </think>",
        '<tool_call>{"arguments": {',
    ],
)
def test_what_cannot_be_read_is_text(text: str) -> None:
    for tokens in ((), ("<tool_call>", "</tool_call>", "</think>")):
        markup = make_markup(SAMPLES[0].answer_format, tokens)
        assert join_parts(read_pieces(markup, list(markup.markers.mark_text(text)))) == [("content", text)]


def test_markup_that_is_cut_is_not_shown() -> None:
    """But text that only spells a marker is."""
    for tokens, shown in ((("<tool_call>",), "hi"), ((), "hi\n<tool_call>\n")):
        markup = make_markup(SAMPLES[0].answer_format, tokens)
        text = markup.markers.mark_text("hi\n<tool_call>\n")
        assert join_parts(read_pieces(markup, list(text))) == [("content", shown)]
    for header in ("<|start|>assistant to=functions.f<|channel|>commentary", "<|channel|>final", "<|start|>"):
        harmony = choose_format("", "openai", "openai_gptoss")
        assert harmony is not None
        text = f"<|channel|>analysis<|message|>so<|end|>{header}"
        assert join_parts(read_pieces(make_markup(harmony), list(text))) == [("reasoning", "so")]


@pytest.mark.parametrize("family", ["hermes", "deepseek_v31", "mistral", "llama3_json", "gemma4"])
def test_a_marker_s_token_in_a_string_is_text(family: str) -> None:
    """Vocabularies have one token for the marker, also where a model only writes about it."""
    answer_format = choose_format("", family, "qwen3")
    assert answer_format is not None and answer_format.calls is not None
    opener, close = answer_format.calls.opens[0], (*answer_format.calls.closes, "")[0]
    said = f"use {opener} and {close or '</think>'} <think>"
    written = {
        "hermes": f'{opener}{{"name": "f", "arguments": {{"a": "{said}"}}}}{close}',
        "deepseek_v31": f'{opener}f<｜tool▁sep｜>{{"a": "{said}"}}{close}',
        "mistral": f'{opener}f[ARGS]{{"a": "{said}"}}',
        "llama3_json": f'{opener}{{"name": "f", "parameters": {{"a": "{said}"}}}}',
        "gemma4": f'{opener}call:f{{a:<|"|>{said}<|"|>}}{close}',
    }[family]
    markup = make_markup(answer_format, answer_format.literals)
    [(_, name), (_, arguments)] = join_parts(read_pieces(markup, list(markup.markers.mark_text(written))))
    assert name == "f" and json.loads(arguments) == {"a": said}


def test_a_call_without_its_marker_is_not_marked() -> None:
    bare = next(sample for sample in SAMPLES if sample.text.startswith("Write <function=f>"))
    for sample, is_marked in ((bare, False), (SAMPLES[0], True)):
        parts = read_pieces(make_markup(sample.answer_format), [sample.text])
        assert {part.is_marked for part in parts if part.kind == "call"} == {is_marked}


def test_a_call_that_is_cut_keeps_what_it_has() -> None:
    markup = make_markup(SAMPLES[0].answer_format)
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    assert join_parts(read_pieces(markup, list(text))) == call("f", '{"a": "b')


def test_a_prompt_may_have_begun_the_thought() -> None:
    markup = make_markup(SAMPLES[0].answer_format)
    reader = AnswerReader(markup, "<think>\n")
    assert (reader.thinking, reader.takes_content) == (True, False)
    reader.feed("\nhm\n</think>\n\n")
    assert (reader.thinking, reader.takes_content) == (False, True)
    reader.feed("yes")
    reader.close()
    assert join_parts(reader.take_parts()) == [("reasoning", "hm"), ("content", "yes")]
    said = join_parts(read_pieces(markup, ["\nyes"], "<think>\n\n</think>\n\n"))
    assert said == [("content", "yes")]
    # A continued message has its own begin.
    assert join_parts(read_pieces(markup, [" world \n"], "Hello")) == [("content", " world \n")]


def test_a_prompt_s_end_is_found_behind_the_last_anchor() -> None:
    answer_format = choose_format("<|im_start|>assistant\\n </think>", "hermes")
    assert answer_format is not None
    markup = make_markup(answer_format)
    prompt = "<|im_start|>assistant\nold<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert markup.find_prefix(prompt) == "<think>\n"
    assert markup.find_prefix("no anchor") == ""


def test_streams_of_strings_do_not_wait_for_their_end() -> None:
    sample = next(sample for sample in SAMPLES if sample.calls == "qwen3_coder")
    reader = AnswerReader(make_markup(sample.answer_format), "", TOOLS)
    reader.feed("<tool_call>\n<function=f>\n<parameter=a>\nlong text")
    assert join_parts(reader.take_parts()) == call("f", '{"a": "long text')


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("glm45", '<tool_call>g\n<arg_key>z</arg_key><arg_value>{"a": "\\ud800"}</arg_value></tool_call>'),
        ("glm45", '<tool_call>f\n<arg_key>a</arg_key><arg_value>x<arg_key>"y</arg_value></tool_call>'),
        ("gemma4", '<|tool_call>call:f{a<|"|>b:<|"|>c<|tool_call>'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "<｜tool▁sep｜>"}<｜tool▁call▁end｜>'),
    ],
)
def test_what_is_found_can_always_be_sent(family: str, text: str, as_tokens: bool) -> None:
    answer_format = choose_format("", family, "none")
    assert answer_format is not None
    markup = make_markup(answer_format, answer_format.literals if as_tokens else ())
    for part in read_pieces(markup, list(markup.markers.mark_text(text))):
        part.text.encode()


@pytest.mark.parametrize(
    ("raw", "types", "written"),
    [
        ("5", ("string",), '"5"'),
        ("5", ("integer",), "5"),
        ("5.0", ("integer",), "5"),
        ("5.5", ("integer",), '"5.5"'),
        ("5.5", ("number",), "5.5"),
        ("True", ("boolean",), "true"),
        ("None", ("null", "string"), "null"),
        ("null", ("string", "null"), "null"),
        ("None", ("string", "null"), '"None"'),
        ("x", ("null", "string"), '"x"'),
        ("[1]", ("array",), "[1]"),
        ("[1", ("array",), '"[1"'),
        ("NaN", ("number",), '"NaN"'),
        ("1e999", (), '"1e999"'),
        ("007", (), '"007"'),
        ('{"a": 1}', (), '{"a": 1}'),
    ],
)
def test_values_get_the_types_of_their_schema(raw: str, types: tuple[str, ...], written: str) -> None:
    assert write_value(raw, types) == written
    json.loads(written)
