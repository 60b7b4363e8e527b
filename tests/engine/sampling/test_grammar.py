"""Structured output: what masks allow parses, it ends when it may, and no client's grammar can hang a worker."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from diptych.errors import GrammarError
from diptych.request import Grammar, SamplingParams, Tenancy
from engine.protocols import SampledToken
from engine.sampling import grammar
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from tests.support.factories import make_tokenizer

END = 2
WIDTH = 320  # of the logits: more than the 300 that the tokenizer has

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def loaded(tokenizer: Any) -> LLTokenizer:
    return grammar.build_tokenizer(tokenizer, [END])


def ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def state(match: grammar.GrammarMatcher) -> tuple[bool, bool, bool]:
    """Accepting, done, and whether the end token is allowed."""
    return match.accepting, match.done, bool(match.token_mask(WIDTH)[END])


def generate(
    asked: Grammar, loaded: LLTokenizer, seed: int, limit: int = 400, min_tokens: int = 0
) -> list[int]:
    """Sample noise under a grammar until it is complete, as an engine does. The closing end token is left out."""
    sampler = Sampler(WIDTH, loaded)
    sampling = SamplingParams(limit, seed, min_tokens, stop_token_ids=(END,), grammar=asked)
    row = sampler.open(Sequence("r", 1, [1], sampling, math.inf))
    tokens: list[int] = []
    raw = torch.zeros(1, WIDTH)
    raw[0, [3 + b for b in range(10)]] = 2.0
    while not row.done and len(tokens) < limit:
        (pick,) = sampler.sample([raw], [row])
        assert isinstance(pick, SampledToken), pick
        if pick.token == END:
            break
        row.push(pick.token)
        tokens.append(pick.token)
    return tokens


def matches(value: dict[str, Any]) -> bool:
    tags = value.get("tags", [])
    within = set(value) <= {"name", "age", "tags"} and 0 <= value["age"] <= 150 and len(value["name"]) <= 8
    return within and len(tags) <= 3 and all(tag in ("a", "b") for tag in tags)


def test_what_is_sampled_under_a_schema_is_valid(tokenizer: Any, loaded: LLTokenizer) -> None:
    whole = 0
    for seed in range(30):
        text = tokenizer.decode(generate(Grammar("json_schema", json.dumps(SCHEMA)), loaded, seed))
        try:
            value = json.loads(text)
        except ValueError:
            continue  # its 400 tokens were over
        assert matches(value)
        whole += 1
    assert whole >= 25


def test_what_is_sampled_under_a_regex_or_lark_matches(tokenizer: Any, loaded: LLTokenizer) -> None:
    for seed in range(30):
        text = tokenizer.decode(generate(Grammar("regex", "[a-c]{3,9}-(x|yy)"), loaded, seed))
        assert re.fullmatch("[a-c]{3,9}-(x|yy)", text)
        text = tokenizer.decode(generate(Grammar("lark", 'start: "(" start ")" | "1"'), loaded, seed))
        assert re.fullmatch(r"\(*1\)*", text) and text.count("(") == text.count(")")


def test_json_object_starts_and_ends_as_one(tokenizer: Any, loaded: LLTokenizer) -> None:
    match = grammar.compile_grammar(Grammar("json_object"), loaded)
    first = set(np.flatnonzero(match.token_mask(WIDTH)))
    assert set(ids(tokenizer, "{")) <= first and not first & set(ids(tokenizer, "[1a"))
    match.replay(ids(tokenizer, '{"a": [1, {"b": null}]'))
    assert state(match) == (False, False, False)
    match.replay(ids(tokenizer, "}"))
    assert state(match) == (True, True, True)


def test_the_end_is_allowed_exactly_when_the_text_satisfies_the_grammar(
    tokenizer: Any, loaded: LLTokenizer
) -> None:
    match = grammar.compile_grammar(Grammar("regex", "ab*|cd"), loaded)
    assert state(match) == (False, False, False)
    match.push(ids(tokenizer, "a")[0])
    assert state(match) == (True, False, True) and match.token_mask(WIDTH).sum() == 2
    match.push(END)
    assert match.done
    match = grammar.compile_grammar(Grammar("regex", "ab*|cd"), loaded)
    match.replay(ids(tokenizer, "c"))
    assert state(match) == (False, False, False)
    match.replay(ids(tokenizer, "d"))
    assert state(match) == (True, True, True)


def test_every_end_token_of_a_model_may_end_it(tokenizer: Any) -> None:
    match = grammar.compile_grammar(
        Grammar("regex", "a*"), grammar.build_tokenizer(tokenizer.backend_tokenizer, [1, END])
    )
    assert match.token_mask(WIDTH)[[1, END]].all()


def test_settings_of_the_callers_tokenizer_stay_with_it() -> None:
    theirs = make_tokenizer()
    theirs.backend_tokenizer.enable_truncation(3)
    assert len(grammar.build_tokenizer(theirs, [END]).tokenize_str("abcdef")) == 6
    assert theirs.backend_tokenizer.truncation["max_length"] == 3
    with pytest.raises(GrammarError, match="not possible"):
        grammar.build_tokenizer(object(), [END])


def test_masks_are_as_wide_as_the_logits(loaded: LLTokenizer) -> None:
    match = grammar.compile_grammar(Grammar("regex", "(?s).*"), loaded)
    for width in (200, 300, 333):
        mask = match.token_mask(width)
        assert mask.shape == (width,) and not mask[300:].any() and mask[3:200].any()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 60))
def test_replayed_output_continues_alike(seed: int, cut: int) -> None:
    loaded = grammar.build_tokenizer(make_tokenizer(), [END])
    asked = Grammar("json_schema", json.dumps(SCHEMA))
    tokens = generate(asked, loaded, seed, limit=60)
    sampler = Sampler(WIDTH, loaded)
    sampling = SamplingParams(60, seed, stop_token_ids=(END,), grammar=asked)
    cut = min(cut, len(tokens))
    row = sampler.open(Sequence("r", 1, [1], sampling, math.inf, output=tokens[:cut]))
    raw = torch.zeros(1, WIDTH)
    raw[0, [3 + b for b in range(10)]] = 2.0
    for token in tokens[cut:]:
        assert sampler.sample([raw], [row]) == [SampledToken(token)]
        row.push(token)


def test_min_tokens_yield_to_a_grammar_that_leaves_nothing_else(tokenizer: Any, loaded: LLTokenizer) -> None:
    for seed in range(10):
        assert len(generate(Grammar("regex", "a{1,6}"), loaded, seed, min_tokens=4)) >= 4
    sampler = Sampler(WIDTH, loaded)
    asked = SamplingParams(9, 0, 9, temperature=0.0, stop_token_ids=(END,), grammar=Grammar("regex", ""))
    assert sampler.sample([torch.zeros(1, WIDTH)], [sampler.open(Sequence("r", 1, [1], asked, 0.0))]) == [
        SampledToken(END)
    ]


def test_a_token_that_does_not_fit_is_an_error(tokenizer: Any, loaded: LLTokenizer) -> None:
    for wrong in (ids(tokenizer, "b")[0], 310, -1):
        match = grammar.compile_grammar(Grammar("regex", "a+"), loaded)
        with pytest.raises(GrammarError, match="does not fit"):
            match.push(wrong)
        assert not match.done
    asked = SamplingParams(9, 0, grammar=Grammar("regex", "a+"))
    with pytest.raises(GrammarError, match="does not fit"):
        Sampler(WIDTH, loaded).open(Sequence("r", 1, [1], asked, 0.0, output=ids(tokenizer, "b"))).match  # noqa: B018
    with pytest.raises(GrammarError, match="not possible"):
        Sampler(WIDTH).open(Sequence("r", 1, [1], asked, 0.0))


def deep(levels: int) -> str:
    return '{"type": "array", "items": ' * levels + "{}" + "}" * levels


def doubling(rules: int) -> str:
    return "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(rules)) + f'\nr{rules}: "x"\nstart: r0'


# Each of these took seconds to forever, or the whole process down, before llguidance was guarded (or is plainly wrong).
REFUSED = {
    "kind": ("yaml", "a: b"),
    "not json": ("json_schema", "{"),
    "not an object": ("json_schema", "[1]"),
    "surrogates": ("regex", "\ud800"),
    "escaped surrogates": ("json_schema", '{"const": "\\ud800"}'),
    "not a number": ("json_schema", '{"type": "number", "maximum": NaN}'),
    "unknown type": ("json_schema", '{"type": "strin"}'),
    "unsupported keyword": ("json_schema", '{"type": "object", "not": {}}'),
    "remote reference": ("json_schema", '{"$ref": "https://example.com/x"}'),
    "endless reference": (
        "json_schema",
        '{"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}',
    ),
    "huge number": ("json_schema", json.dumps({"type": "integer", "maximum": 10**300})),
    "nested schema": ("json_schema", deep(33)),
    "nested source": ("json_schema", "[" * 60_000),
    "long schema": ("json_schema", json.dumps({"enum": ["x" * 70_000]})),
    "open class": ("regex", "[a-"),
    "look-ahead": ("regex", "(?=a)b"),
    "nested regex": ("regex", "(" * 33 + ")" * 33),
    "long regex": ("regex", "a" * 9000),
    "doubling repeats": ("regex", "a" + "{2}" * 30),
    "huge repeat": ("regex", "(ab){1000000000}"),
    "repeats in a pattern": ("json_schema", json.dumps({"type": "string", "pattern": "a" + "{2}" * 30})),
    "repeats in a key": (
        "json_schema",
        json.dumps({"type": "object", "patternProperties": {"(a{999}){999}": {}}}),
    ),
    "many patterns": ("json_schema", json.dumps({"enum": [f"{i}a{{9999}}" for i in range(20)]})),
    "no rule": ("lark", "start: nothing"),
    "rule chain": ("lark", doubling(3000)),
    "terminal repeats": ("lark", "start: A\nA: B{1000}\nB: C{1000}\nC: /x/"),
    "ambiguous choices": ("lark", 'start: b\nb: "x" | ' + "|".join(["b b"] * 300)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_grammars_are_refused(name: str, loaded: LLTokenizer) -> None:
    kind, text = REFUSED[name]
    with pytest.raises(GrammarError):
        grammar.check_grammar(Grammar(kind, text), loaded)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_object", ""),
        ("json_schema", "{}"),
        ("json_schema", json.dumps(SCHEMA)),
        ("json_schema", deep(15)),
        (
            "json_schema",
            json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}}),
        ),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(4000)]})),
        ("json_schema", json.dumps({"type": "string", "format": "uuid", "minLength": 36})),
        (
            "json_schema",
            '{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}',
        ),
        ("regex", "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
        ("regex", r"([a-z]([a-z0-9-]{0,61}[a-z0-9])?\.){1,8}[a-z]{2,63}"),
        ("regex", r".{1,5000}\u{41}"),
        ("lark", doubling(60)),
    ],
)
def test_reasonable_grammars_are_taken(kind: str, text: str, loaded: LLTokenizer) -> None:
    grammar.check_grammar(Grammar(kind, text), loaded)


def test_whitespace_is_bounded(tokenizer: Any, loaded: LLTokenizer) -> None:
    match = grammar.compile_grammar(Grammar("json_object"), loaded)
    match.replay(ids(tokenizer, "{" + " " * 32))
    assert (
        not match.token_mask(WIDTH)[ids(tokenizer, " ")[0]]
        and match.token_mask(WIDTH)[ids(tokenizer, '"')[0]]
    )


@pytest.mark.parametrize(
    ("pattern", "symbols"),
    [("abc", 3), ("a{3}", 3), ("(ab{2}){3}c", 10), (r"\{5\}{3}", 5), ("[a{9}]{2}", 2), ("a{2}{2}{2}", 8)],
)
def test_repeats_are_written_out(pattern: str, symbols: int) -> None:
    assert grammar._expanded_size(pattern) == symbols


@pytest.mark.parametrize("pattern", ["(a{100})){100}", "(((a{10000}", "(?x)( # )\n a{100} ){100}"])
def test_odd_patterns_count_as_their_larger_reading(pattern: str) -> None:
    assert grammar._expanded_size(pattern) >= 10_000


def written_out_by_reference(pattern: str) -> int:
    """As `grammar._written_out`, with one regular expression that looks for the end of every bracket."""
    atoms = re.compile(r"\\[xuU]\{\w*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}|.", re.DOTALL)
    before: list[int] = []
    total = last = 0
    for atom in atoms.findall(pattern):
        if atom == "(":
            before.append(total)
            total = last = 0
        elif atom == ")":
            last = total
            total += before.pop() if before else 0
        elif counted := re.fullmatch(r"\{(\d+)(?:,(\d*))?\}", atom):
            times = max(1, int(counted[1][:9]), int((counted[2] or "0")[:9]))
            total, last = total + last * (times - 1), last * times
        else:
            total, last = total + 1, 1
    return min(grammar.MAX_EXPANDED_SYMBOLS + 1, total + sum(before))


@given(
    st.lists(
        st.sampled_from(["[", "]", "^", "(", ")", "\\", "a", "{3}", "{2,9}", "\\x{41}", "{"]), max_size=24
    )
)
def test_written_out_symbols_are_those_of_the_plain_reading(pieces: list[str]) -> None:
    pattern = "".join(pieces)
    assert grammar._expanded_size(pattern) == written_out_by_reference(pattern)


@pytest.mark.parametrize("piece", ["[)", "[", "[^", "[\\]", "[]", "(", "{1", "\\x{", "a{9}"])
def test_counting_written_out_symbols_is_linear(piece: str) -> None:
    began_s = time.process_time()
    grammar._expanded_size(piece * (32_000 // len(piece)))
    assert time.process_time() - began_s < 0.5  # 12 s when it was quadratic


@pytest.mark.parametrize(
    ("text", "depth"),
    [("[(a])", 2), ("[)" * 20, 20), (")]}" * 9, 0), ("({[]})", 3), ("\\[[", 1), ("([)]", 2), ("[(]" * 50, 2)],
)
def test_a_bracket_is_closed_by_its_own_kind(text: str, depth: int) -> None:
    assert grammar._bracket_depth(text) == depth


class Compiles:
    """Counts calls of `grammar.compile`; each waits for `gate`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.threads, self.sources = threading.Event(), list[int](), list[str]()
        self._real = grammar.compile_grammar
        monkeypatch.setattr("engine.sampling.grammar_cache.compile_grammar", self._compile)

    def _compile(self, asked: Grammar, tokenizer: LLTokenizer) -> grammar.GrammarMatcher:
        assert self.gate.wait(20.0)
        self.threads.append(threading.get_ident())
        self.sources.append(asked.text)
        return self._real(asked, tokenizer)


def asking(asked: Grammar, name: str = "r", tenant: str = "") -> Sequence:
    sampling = SamplingParams(400, 7, stop_token_ids=(END,), grammar=asked)
    return Sequence(name, 1, [1], sampling, math.inf, tenancy=Tenancy(tenant))


def test_equal_grammars_are_compiled_once_and_beside_the_engine(
    loaded: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles, sampler, ready = Compiles(monkeypatch), Sampler(WIDTH, loaded), threading.Semaphore(0)
    sampler.notify(ready.release)
    seqs = [asking(Grammar("json_object"), name) for name in "abc"]
    for seq in seqs:
        sampler.expect(seq)
        sampler.expect(seq)
    assert not any(seq.ready for seq in seqs) and not ready.acquire(timeout=0.01)
    compiles.gate.set()
    for _ in seqs:
        assert ready.acquire(timeout=20.0)
    rows = [sampler.open(seq) for seq in seqs]
    late = asking(Grammar("json_object"), "late")
    sampler.expect(late)
    assert late.ready  # at once
    assert len(compiles.threads) == 1 and threading.get_ident() not in compiles.threads
    states = [row.match for row in rows]
    assert isinstance(states[0], grammar.GrammarMatcher) and isinstance(states[1], grammar.GrammarMatcher)
    states[0].push(ids(make_tokenizer(), "{")[0])
    assert (
        not states[1].accepting and states[1].token_mask(WIDTH)[ids(make_tokenizer(), "{")[0]]
    )  # it is its own


def test_tokens_that_were_delivered_since_it_was_expected_count(loaded: LLTokenizer, tokenizer: Any) -> None:
    sampler, seq = Sampler(WIDTH, loaded), asking(Grammar("regex", "ab"))
    sampler.expect(seq)
    seq.output = ids(tokenizer, "a")
    match = sampler.open(seq).match
    assert match is not None and match.token_mask(WIDTH)[ids(tokenizer, "b")[0]]


def test_unwanted_grammars_are_not_compiled_and_tenants_alternate(
    loaded: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles, sampler, ready = Compiles(monkeypatch), Sampler(WIDTH, loaded), threading.Semaphore(0)
    sampler.notify(ready.release)
    first = asking(Grammar("regex", "first"))
    sampler.expect(first)
    for count in range(300):  # these are gone at once
        sampler.expect(asking(Grammar("regex", f"gone{count}"), tenant="flood"))
    kept = [asking(Grammar("regex", f"kept{count}"), tenant="flood") for count in range(9)]
    quiet = asking(Grammar("regex", "quiet"), tenant="quiet")
    for seq in [*kept, quiet]:
        sampler.expect(seq)
    compiles.gate.set()
    for _ in range(11):
        assert ready.acquire(timeout=20.0)
    assert all(seq.ready for seq in [first, *kept, quiet])
    assert len(compiles.sources) == 11 and not any("gone" in source for source in compiles.sources)
    assert compiles.sources.index("quiet") < 5  # not behind all of the other tenant


def test_a_grammar_that_does_not_compile_fails_its_own_row(loaded: LLTokenizer) -> None:
    sampler = Sampler(WIDTH, loaded)
    rows = [
        sampler.open(asking(Grammar("regex", "a+"))),
        Sampler(WIDTH, loaded).open(asking(Grammar("regex", "b+"))),
    ]
    assert all(isinstance(pick, SampledToken) for pick in sampler.sample([torch.zeros(1, WIDTH)] * 2, rows))
    bad = asking(Grammar("lark", "start: nothing"))
    sampler.expect(bad)
    with pytest.raises(GrammarError):
        bad.matcher.result()
    with pytest.raises(GrammarError):
        sampler.open(bad)
    with pytest.raises(GrammarError):
        sampler.open(asking(Grammar("lark", "start: nothing")))  # it is known by now


def test_few_compiled_grammars_are_kept(loaded: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles, sampler = Compiles(monkeypatch), Sampler(WIDTH, loaded)
    compiles.gate.set()
    asked = [Grammar("regex", f"a{{{count}}}") for count in range(1, 41)]
    rows = [sampler.open(asking(one)) for one in asked]
    assert all(row.match is not None for row in rows) and len(compiles.threads) == 40
    assert sampler.open(asking(asked[-1])).match is not None and len(compiles.threads) == 40
    assert sampler.open(asking(asked[0])).match is not None and len(compiles.threads) == 41


TEXTS = st.text(
    st.characters(codec="ascii", exclude_categories=()) | st.sampled_from("äß€🦊"), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None)
@given(choices=st.lists(TEXTS, min_size=1, max_size=6), other=TEXTS)
def test_choices_are_exactly_these_texts(
    tokenizer: Any, loaded: LLTokenizer, choices: list[str], other: str
) -> None:
    asked = Grammar("choice", json.dumps(choices))
    for text in [*choices, other]:
        match = grammar.compile_grammar(asked, loaded)
        try:
            match.replay(ids(tokenizer, text))
            whole = match.accepting
        except GrammarError:
            whole = False
        assert whole == (text in choices), text


@pytest.mark.parametrize("text", ["[]", '["a", ""]', '["a", 1]', "{", '"a"'])
def test_what_is_no_list_of_choices_is_refused(loaded: LLTokenizer, text: str) -> None:
    with pytest.raises(GrammarError):
        grammar.compile_grammar(Grammar("choice", text), loaded)


def test_many_choices_compile(loaded: LLTokenizer) -> None:
    many = [f"choice number {i} ((({'[' * 40}" for i in range(1000)]
    grammar.check_grammar(Grammar("choice", json.dumps(many)), loaded)
