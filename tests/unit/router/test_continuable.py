"""Which answers another worker continues exactly, by what they ask for and what it can."""

from __future__ import annotations

from itertools import chain, combinations, product
from typing import Any

import msgspec
import pytest

from diptych.request import (
    BANS,
    CONTINUED,
    GRAMMAR,
    PENALTIES,
    SEED,
    Grammar,
    SamplingParams,
    ThoughtBudget,
)
from router.requests.continuable import NO_TRAITS, can_continue, traits_to_begin, traits_to_continue

PLAIN = SamplingParams(max_tokens=8, seed=1, temperature=0.0)
NEEDS: dict[str, dict[str, Any]] = {
    GRAMMAR: {"grammar": Grammar("json_object")},
    PENALTIES: {"presence_penalty": 0.5},
    SEED: {"temperature": 0.7},
}
SUBSETS = [frozenset(names) for names in chain.from_iterable(combinations(CONTINUED, n) for n in range(4))]
# What depends on the tokens so far alone, in every way that they may be divided into prompt and answer.
HARMLESS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "logit_bias": {3: 2.0},
    "min_tokens": 4,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "stop_token_ids": (7,),
    "allowed_token_ids": (1, 7),
    "bad_words": ((4,), (5,)),
}


def test_a_bad_word_of_several_tokens_may_begin_before_the_cut() -> None:
    assert traits_to_continue(msgspec.structs.replace(PLAIN, bad_words=((5,), (1, 2)))) == {PENALTIES}


@pytest.mark.parametrize(("asked", "traits"), list(product(SUBSETS, SUBSETS)))
def test_every_trait_that_is_asked_for_is_needed(asked: frozenset[str], traits: frozenset[str]) -> None:
    changes = {name: value for trait in asked for name, value in NEEDS[trait].items()}
    sampling = msgspec.structs.replace(PLAIN, **changes)
    assert traits_to_continue(sampling) == asked
    assert can_continue(sampling, traits) == (asked <= traits)
    assert can_continue(sampling, sorted(traits)) == (asked <= traits)


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_depends_on_the_tokens_alone_needs_nothing(name: str) -> None:
    assert can_continue(msgspec.structs.replace(PLAIN, **{name: HARMLESS[name]}), ())


@pytest.mark.parametrize(("name", "value"), [("presence_penalty", -1.0), ("frequency_penalty", 0.1)])
def test_either_penalty_of_the_answer_counts(name: str, value: float) -> None:
    assert traits_to_continue(msgspec.structs.replace(PLAIN, **{name: value})) == {PENALTIES}


def test_a_budget_of_thoughts_follows_the_answer_as_a_grammar_does() -> None:
    thought = ThoughtBudget(begin=(3,), ends=(4,), tokens=5)
    assert traits_to_continue(msgspec.structs.replace(PLAIN, thought=thought)) == {GRAMMAR}


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"allowed_token_ids": (3,)}, {BANS}),
        ({"bad_words": ((3,),)}, {BANS}),
        ({"bad_words": ((3, 4),)}, {BANS}),
        ({"grammar": Grammar("choice", '["a"]')}, {BANS}),
        ({"grammar": Grammar("regex", "a")}, NO_TRAITS),
        ({"logit_bias": {3: 1.0}, "prompt_logprobs": 1}, NO_TRAITS),
    ],
)
def test_who_does_not_know_what_is_asked_for_may_not_even_begin(
    changes: dict[str, Any], needed: frozenset[str]
) -> None:
    assert traits_to_begin(msgspec.structs.replace(PLAIN, **changes)) == needed


def test_noise_that_no_client_asked_for_may_be_any() -> None:
    sampling = msgspec.structs.replace(PLAIN, temperature=1.0, seeded=False)
    assert can_continue(sampling, ())
    assert not can_continue(msgspec.structs.replace(sampling, grammar=Grammar("json_object")), (SEED,))


def test_every_field_was_considered() -> None:
    """A new field of sampling has to be among the needs or among what is harmless."""
    considered = {name for changes in NEEDS.values() for name in changes} | set(HARMLESS)
    considered |= {"frequency_penalty", "thought", "seeded", "seed", "max_tokens", "pooling"}
    assert considered == set(SamplingParams.__struct_fields__)
