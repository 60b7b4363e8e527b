"""Comparing answers of two deployments, and the part of the check of a GPU that does it with real workers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu_parts import pair
from benchmarks.gpu_parts.check_part import PartContext
from benchmarks.load.answer_checks import KINDS, compare_answers, largest_difference, make_requests
from benchmarks.load.channel_deployment import ChannelAnswer
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import Logprob
from diptych.request import Request, SamplingParams


def make_answer(tokens: Sequence[int], gap: float = 1.0, finish: str = "length") -> ChannelAnswer:
    """An answer whose second token was preferred by `gap`."""
    answer = ChannelAnswer(Request("r", [1], SamplingParams(9, 0), math.inf))
    answer.tokens, answer.finish = list(tokens), finish
    gaps = [1.0, gap, *([1.0] * len(tokens))]
    answer.logprobs = [
        Logprob(token, -0.5, [(token, -0.5), (99, -0.5 - one)])
        for token, one in zip(tokens, gaps, strict=False)
    ]
    return answer


@pytest.mark.parametrize(
    ("tokens", "gap", "expected"),
    [
        ([5, 6, 7], 1.0, "identical"),
        ([5, 8, 9], 1.0, "unexplained"),
        ([5, 8, 9], 1e-4, "explained"),
        # The first difference counts, wherever another token was a near tie.
        ([4, 6, 7], 1e-4, "unexplained"),
        ([5, 6], 1e-4, "unexplained"),
    ],
)
def test_an_answer_is_identical_explained_or_unexplained(
    tokens: list[int], gap: float, expected: str
) -> None:
    found = compare_answers([make_answer([5, 6, 7], gap)], [make_answer(tokens)])
    counts = {"identical": found.identical, "explained": found.explained, "unexplained": found.unexplained}
    assert counts == {name: int(name == expected) for name in counts} and not found.failed
    assert len(found.examples) == (expected == "unexplained")


def test_the_largest_difference_is_that_of_tokens_before_the_first_that_differs() -> None:
    right, answer = make_answer([5, 6, 7]), make_answer([5, 6, 8])
    for place, value in enumerate((-0.5, -0.75, -9.0)):
        answer.logprobs[place] = Logprob(answer.tokens[place], value, [])
    assert largest_difference([right, right], [answer, right]) == 0.25
    assert largest_difference([], []) == 0.0


def test_answers_that_fail_or_do_not_end_are_failed() -> None:
    failed, endless = make_answer([5]), make_answer([5, 6], finish="")
    failed.fail_sequence(RequestFailure(FailureReason.INTERNAL_ERROR, "no"))
    found = compare_answers([make_answer([5, 6])] * 2, [failed, endless])
    assert (found.failed, found.unexplained, found.identical, found.answers) == (2, 0, 0, 2)


def test_another_finish_reason_is_a_difference() -> None:
    found = compare_answers([make_answer([5, 6])], [make_answer([5, 6], finish="stop")])
    assert found.unexplained == 1


def test_requests_are_of_every_kind_and_share_prefixes() -> None:
    asked = make_requests(40, 30)
    assert asked == make_requests(40, 30) != make_requests(40, 30, seed=1)
    assert sum(one.sampling.temperature == 0 for one in asked) >= 40
    others = [one.sampling for one in asked if one.sampling.temperature or one.sampling.grammar]
    for kind in KINDS:
        if kind.get("temperature", 1.0):
            assert any(all(getattr(one, name) == kind[name] for name in kind) for one in others), kind
    heads = [tuple(one.prompt[:64]) for one in asked if len(one.prompt) >= 64]
    assert len(set(heads)) < len(heads)
    assert all(len(one.prompt) + one.sampling.max_tokens < 2048 for one in asked)


def test_a_pair_of_workers_is_compared_and_survives_its_kills(tmp_path: Path) -> None:
    """On CPU workers, which are there without a GPU; all else is as on one."""
    context = PartContext("cpu", tmp_path, tmp_path / "pair.json")
    pair.measure_pair(context)
    found = json.loads(context.file.read_text())
    assert found["answers"] == 27 and found["killed_answers"] == 40
    zero = ("unexplained", "failed", "kv_at_rest", "killed_unexplained", "killed_failed", "killed_kv_at_rest")
    assert {name: found[name] for name in zero} == dict.fromkeys(zero, 0), found
    assert found["killed_hit"] > 0
