"""Whether two deployments give the same answers: requests of every kind, and the tokens in which answers differ.

Workers on different devices add in different orders, so a token may differ where the model hardly prefers one of two.
Such a difference is *explained* if the reference's two best log-probabilities there lie within a bound. What follows it
in the same answer is not compared.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.load.channel_deployment import ChannelAnswer, ChannelDeployment, wait_answers
from diptych.request import Grammar, SamplingParams

# Of the embedded model: ids below are special or rare.
FIRST_ID, VOCAB = 260, 4096
# How near two log-probabilities are for rounding to decide, by the type of weights and KV.
NEAR = {"float32": 1e-3, "bfloat16": 0.1}
MAX_EXAMPLES = 5
# Settings of requests that are not greedy, one after the other.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.95},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.5, "temperature": 0.0},
    {"repetition_penalty": 1.2, "top_p": 0.8},
    {"logit_bias": {300: 4.0, 301: -100.0}},
    {"min_tokens": 12, "stop_token_ids": (0, 5, 13)},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 0.0},
    {"grammar": Grammar("regex", "[a-z]{3,9}( [a-z]{3,9}){2,9}")},
    {"grammar": Grammar("json_object"), "temperature": 0.0},
)


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """A prompt and how to sample its answer."""

    prompt: list[int]
    sampling: SamplingParams


@dataclass(slots=True)
class Comparison:
    """How answers differ from those of a reference, by answer."""

    answers: int = 0
    identical: int = 0
    explained: int = 0
    unexplained: int = 0
    failed: int = 0
    examples: list[str] = field(default_factory=list)


def make_requests(
    greedy: int,
    others: int,
    seed: int = 0,
    max_tokens: int = 24,
    kinds: Sequence[Mapping[str, Any]] = KINDS,
) -> list[AskedRequest]:
    """Requests of random tokens. Every third one begins with the same chunks as another one. Those that are not greedy
    have the settings of `kinds`, one after the other.
    """
    rng = random.Random(seed)
    shared = [[rng.randrange(FIRST_ID, VOCAB) for _ in range(64 * rng.randint(1, 6))] for _ in range(6)]
    asked = []
    for number in range(greedy + others):
        prompt = [rng.randrange(FIRST_ID, VOCAB) for _ in range(rng.choice((3, 40, 64, 65, 150, 400, 700)))]
        if number % 3 == 0:
            prompt = rng.choice(shared) + prompt
        kind = {"temperature": 0.0} if number < greedy else kinds[number % len(kinds)]
        asked.append(AskedRequest(prompt, SamplingParams(max_tokens, rng.randrange(1 << 60), **kind)))
    rng.shuffle(asked)
    return asked


def ask_all(deployment: ChannelDeployment, asked: Sequence[AskedRequest]) -> list[ChannelAnswer]:
    """All answers; they were asked for at once. Raises TimeoutError if one does not end."""
    answers = [deployment.submit(one.prompt, one.sampling) for one in asked]
    if late := wait_answers(answers):
        raise TimeoutError(f"{late} of {len(answers)} requests did not end; {deployment.held()}")
    return answers


def ask_reference(deployment: ChannelDeployment, asked: Sequence[AskedRequest]) -> list[ChannelAnswer]:
    """The same answers with two log-probabilities per token at least, which do not change them.

    Raises:
        RuntimeError: a request failed.
    """
    scored = [
        AskedRequest(
            one.prompt, msgspec.structs.replace(one.sampling, logprobs=max(2, one.sampling.logprobs or 0))
        )
        for one in asked
    ]
    answers = ask_all(deployment, scored)
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        raise RuntimeError(f"{len(failures)} requests failed at the reference: {failures[0]}")
    return answers


def compare_answers(
    reference: Iterable[ChannelAnswer], answers: Iterable[ChannelAnswer], near: float = NEAR["float32"]
) -> Comparison:
    """Compare answers with those of `ask_reference` to the same requests, in the same order."""
    found = Comparison()
    for right, answer in zip(reference, answers, strict=True):
        found.answers += 1
        if answer.failure is not None or not answer.finish:
            found.failed += 1
            _add_example(found, f"{answer.request.id}: {answer.failure or 'has not ended'}")
        elif answer.tokens == right.tokens and answer.finish == right.finish:
            found.identical += 1
        elif (gap := first_gap(right, answer)) <= near:
            found.explained += 1
        else:
            found.unexplained += 1
            sampling = answer.request.sampling
            _add_example(
                found, f"{answer.request.id}, {sampling}, gap {gap:.2g}: {right.tokens}, {answer.tokens}"
            )
    return found


def largest_difference(reference: Iterable[ChannelAnswer], answers: Iterable[ChannelAnswer]) -> float:
    """The most by which the log-probability of a token differs that both give, before the first that differs."""
    largest = 0.0
    for right, answer in zip(reference, answers, strict=True):
        pairs = zip(right.tokens, answer.tokens, right.logprobs, answer.logprobs, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        largest = max([largest, *(abs(mine.logprob - other.logprob) for _, _, mine, other in same)])
    return largest


def first_gap(right: ChannelAnswer, answer: ChannelAnswer) -> float:
    """How far the reference's two best log-probabilities lie apart at the first token that differs; infinite if none
    does, or if they are not known.
    """
    pairs = zip(right.tokens, answer.tokens, right.logprobs, strict=False)
    for mine, other, logprob in pairs:
        if mine != other:
            best = [value for _, value in logprob.top[:2]]
            return best[0] - best[1] if len(best) == 2 else math.inf
    return math.inf


def _add_example(found: Comparison, text: str) -> None:
    if len(found.examples) < MAX_EXAMPLES:
        found.examples.append(text)
