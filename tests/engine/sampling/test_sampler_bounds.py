"""Whatever numbers the API accepts, the sampler finds a token: none of them is zero or infinite in float32."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.request import SamplingParams
from engine.protocols import SampledToken
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from services.gateway.openai.schemas.request_schema import (
    LogitBias,
    MinP,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)

VOCAB = 64
TINY = 5e-324  # the smallest number above 0 that JSON can say
ENDS: dict[str, tuple[Any, tuple[float, ...]]] = {
    "temperature": (Temperature, (0, TINY, 1e-40, 2)),
    "top_p": (TopP, (0, TINY, 1)),
    "top_k": (TopK, (-1, 0, 1, 2**31 - 1)),
    "min_p": (MinP, (0, TINY, 1)),
    "presence_penalty": (Penalty, (-2, TINY, 2)),
    "frequency_penalty": (Penalty, (-2, -TINY, 2)),
    "repetition_penalty": (RepetitionPenalty, (1e-3, 1, 100)),
}


def accepted(name: str, value: float) -> bool:
    try:
        msgspec.json.decode(msgspec.json.encode(value), type=ENDS[name][0])
    except msgspec.ValidationError:
        return False
    return True


def check(raw: torch.Tensor, asked: dict[str, Any]) -> None:
    asked = asked | {"top_k": max(0, asked.get("top_k", 0))}
    sampling = SamplingParams(max_tokens=9, seed=3, **asked)
    sequence = Sequence("r", 1, [1, 2, VOCAB - 2], sampling, math.inf, output=[3] * 40)
    sampler = Sampler(VOCAB)
    (pick,) = sampler.sample([raw], [sampler.open(sequence)])
    assert isinstance(pick, SampledToken), (asked, pick)


@pytest.mark.parametrize("name", ENDS)
def test_these_are_the_ends_of_what_is_accepted(name: str) -> None:
    values = ENDS[name][1]
    assert all(accepted(name, value) for value in values)
    assert not accepted(name, 1e300) or name == "top_k"
    for outside in (min(values) - 1e-4, max(values) + 1e-4):
        assert not accepted(name, outside)


def test_a_penalty_that_is_nothing_in_float32_is_not_accepted() -> None:
    assert not accepted("repetition_penalty", 1e-50)
    assert not accepted("repetition_penalty", 0)


@pytest.mark.parametrize("spread", [0.0, 1.0, 1e4])
def test_every_pair_of_ends_leaves_a_token(spread: float) -> None:
    raw = torch.linspace(-spread, spread, VOCAB).reshape(1, VOCAB)
    with np.errstate(all="ignore"):
        for one, other in itertools.combinations(ENDS, 2):
            for first, second in itertools.product(ENDS[one][1], ENDS[other][1]):
                check(raw, {"temperature": 1.0} | {one: first, other: second})


@given(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, (_, values) in ENDS.items()}),
    st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 100.0, TINY])),
)
def test_all_ends_at_once_leave_a_token(asked: dict[str, Any], bias: dict[int, float]) -> None:
    msgspec.convert(bias, LogitBias)
    with np.errstate(all="ignore"):
        check(torch.linspace(-30, 30, VOCAB).reshape(1, VOCAB), asked | {"logit_bias": bias})
