"""Grammars that bind a part of an answer, and thoughts that end at their budget: the same from any token on."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from diptych.request import Grammar, GrammarGate, SamplingParams, ThoughtBudget
from engine.protocols import SampledToken
from engine.sampling import grammar
from engine.sampling.gate import GatedMatcher, ThoughtCounter
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from tests.support.factories import make_tokenizer

END, OPEN, CLOSE = 2, 290, 291
WIDTH = 320
WORD = Grammar("regex", "[ab]{2}")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def word(tokenizer: Any) -> grammar.GrammarMatcher:
    return grammar.compile_grammar(WORD, grammar.build_tokenizer(tokenizer, [END]))


def only(tokenizer: Any, text: str) -> int:
    [token] = tokenizer.encode(text, add_special_tokens=False)
    return int(token)


def state(match: GatedMatcher) -> tuple[bool, bool, bool]:
    """Whether it binds, whether the answer may end, and whether it is done."""
    return match.binds, match.may_end, match.done


def test_a_grammar_begins_behind_the_thought_that_may_come_first(
    tokenizer: Any, word: grammar.GrammarMatcher
) -> None:
    a = only(tokenizer, "a")
    gate = GrammarGate(((CLOSE,),), is_free=False, frees=OPEN)
    match = GatedMatcher(gate, word)
    mask = match.token_mask(WIDTH)
    assert mask[a] and mask[OPEN] and not mask[END]
    assert state(match) == (True, True, False)
    match.push(OPEN)
    assert state(match) == (False, False, False)
    assert match.token_mask(WIDTH).all()
    match.replay([7, 8, CLOSE])
    assert state(match) == (True, True, False)
    assert not match.token_mask(WIDTH)[OPEN]
    match.replay([a, a])
    assert match.done
    at_once = GatedMatcher(gate, word)
    at_once.replay([a])
    assert not at_once.token_mask(WIDTH)[OPEN]
    at_once.push(a)
    assert at_once.done


def test_a_grammar_may_bind_again_and_again(tokenizer: Any, word: grammar.GrammarMatcher) -> None:
    a = only(tokenizer, "a")
    match = GatedMatcher(GrammarGate(((OPEN, CLOSE),), repeats=True, may_end=True), word)
    match.replay([OPEN, 7, CLOSE])
    assert state(match) == (False, True, False)
    for _ in range(2):
        match.replay([OPEN, CLOSE])
        assert state(match) == (True, True, False)
        assert not match.token_mask(WIDTH)[7]
        match.replay([a, a])
        assert state(match) == (False, True, False)


def test_thoughts_are_counted_across_their_parts() -> None:
    budget = ThoughtBudget(3, (5, 6), (CLOSE, 9))
    tokens = [5, 7, 6, 5, 6, 1, 2, 9, 1, 1, 5, 6, 1, CLOSE]
    forced = [ThoughtCounter(budget, tokens[:count]).forced for count in range(len(tokens) + 1)]
    assert forced == [*[None] * 13, CLOSE, None]
    assert ThoughtCounter(ThoughtBudget(0, (OPEN,), (CLOSE,), is_open=True), []).forced == CLOSE


def test_a_token_within_a_thought_may_begin_what_the_grammar_binds(
    tokenizer: Any, word: grammar.GrammarMatcher
) -> None:
    a = only(tokenizer, "a")
    match = GatedMatcher(GrammarGate(((CLOSE,),), starts=(a,)), word)
    match.replay([7, 8])
    assert state(match) == (False, False, False)
    match.push(a)
    # It is the first token of the grammar, too.
    assert state(match) == (True, True, False)
    assert not match.token_mask(WIDTH)[7] and match.token_mask(WIDTH)[a]
    match.push(a)
    assert match.done


def test_what_ends_a_thought_may_begin_the_next() -> None:
    counter = ThoughtCounter(ThoughtBudget(3, (OPEN, 9), (CLOSE, OPEN)), [OPEN, 9, 1, OPEN, 9, 1, 1])
    assert counter.forced == CLOSE


def test_a_thought_that_a_grammar_binds_ends_with_a_whole_character(tokenizer: Any) -> None:
    sampler = Sampler(WIDTH, grammar.build_tokenizer(tokenizer, [END]))
    bound = Grammar("lark", f"start: <[{OPEN}]> TEXT <[{CLOSE}]>\nTEXT: /(.|\\n)*/")
    asked = SamplingParams(
        max_tokens=9,
        seed=1,
        grammar=bound,
        thought=ThoughtBudget(1, (OPEN,), (CLOSE,)),
        stop_token_ids=(END,),
    )
    first, *rest = tokenizer.encode("世", add_special_tokens=False)
    row = sampler.open(Sequence("r", 1, [1], asked, math.inf, output=[OPEN, first]))
    for token in rest:
        logits = np.zeros(WIDTH, np.float32)
        row.shape(logits)
        assert np.isfinite(logits[token]) and not np.isfinite(logits[CLOSE])
        row.push(token)
    logits = np.zeros(WIDTH, np.float32)
    row.shape(logits)
    assert rest and np.flatnonzero(np.isfinite(logits)).tolist() == [CLOSE]


def generate(sampler: Sampler, asked: SamplingParams, begun: list[int], count: int) -> list[int]:
    """Tokens that noise draws, from `begun` on, as another worker would continue them."""
    seq = Sequence("r", 1, [1], asked, math.inf, output=list(begun))
    row = sampler.open(seq)
    output = list(begun)
    while len(output) < count and not row.done:
        noise = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(len(output)))
        [picked] = sampler.sample([noise], [row])
        assert isinstance(picked, SampledToken), picked
        output.append(picked.token)
        row.push(picked.token)
    return output


def test_another_worker_goes_on_in_the_middle_of_a_thought_or_the_text(tokenizer: Any) -> None:
    sampler = Sampler(WIDTH, grammar.build_tokenizer(tokenizer, [END]))
    schema = Grammar("json_schema", json.dumps({"type": "object"}), GrammarGate(((CLOSE,),)))
    bias = {OPEN: -100.0, CLOSE: -100.0}
    asked = SamplingParams(
        max_tokens=60, seed=1, stop_token_ids=(END,), grammar=schema, logit_bias=bias,
        thought=ThoughtBudget(12, (OPEN,), (CLOSE,), is_open=True),
    )  # fmt: skip
    whole = generate(sampler, asked, [], 40)
    assert whole.index(CLOSE) == 12 and END not in whole[:12]
    text = tokenizer.decode(whole[13:])
    assert text.lstrip().startswith("{")
    for cut in range(len(whole)):
        assert generate(sampler, asked, whole[:cut], 40) == whole


def test_free_tokens_cost_no_mask(tokenizer: Any) -> None:
    sampler = Sampler(WIDTH, grammar.build_tokenizer(tokenizer, [END]))
    free = Grammar("regex", "a", GrammarGate(((OPEN,),), may_end=True))
    row = sampler.open(Sequence("r", 1, [1], SamplingParams(max_tokens=9, seed=1, grammar=free), math.inf))
    assert row.match is not None
    edited = [row.edited]
    for token in (7, OPEN):
        row.push(token)
        edited.append(row.edited)
    assert edited == [False, False, True]
    plain = SamplingParams(max_tokens=9, seed=1, thought=ThoughtBudget(2, (OPEN,), (CLOSE,)))
    thinking = sampler.open(Sequence("r", 1, [1], plain, math.inf))
    edited = []
    for token in (OPEN, 1, 1):
        thinking.push(token)
        edited.append(thinking.edited)
    assert edited == [False, False, True]
    logits = np.zeros(WIDTH, np.float32)
    thinking.shape(logits)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [CLOSE]
