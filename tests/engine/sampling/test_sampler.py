"""The sampler against a plain and slow reference, over a grid of everything a request may ask for."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.request import SamplingParams
from engine.isolation import BadSamplingParams, failure_code
from engine.protocols import SampledToken
from engine.sampling.sampler import TOP_P_PRESORT, Sampler, SamplerRow, noise_start
from engine.sampling.scores import LOWEST_LOGPROB
from engine.sampling.token_bans import make_bans
from engine.sequence import Sequence

MASK = (1 << 64) - 1


def sequence(
    asked: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None
) -> Sequence:
    return Sequence("r", 1, prompt or [1], asked, math.inf, output=output or [])


def logits(vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw(raw: torch.Tensor, seq: Sequence) -> int:
    sampler = Sampler(raw.shape[1])
    (pick,) = sampler.sample([raw], [sampler.open(seq)])
    assert isinstance(pick, SampledToken), pick
    return pick.token


# ---- the reference: plain Python, one token after the other


def noise(seed: int, index: int, token: int) -> float:
    """Gumbel noise from a hash of the three, 52 bits of it."""

    def mixed(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    start = mixed((mixed(seed & MASK) + 0x9E3779B97F4A7C15 * (index + 1)) & MASK)
    bits = mixed((start + 0x9E3779B97F4A7C15 * (token + 1)) & MASK) >> 12
    return -math.log(-math.log((bits + 0.5) / 2**52))


def is_banned(asked: SamplingParams, output: list[int], token: int) -> bool:
    """Whether a token is not among the allowed ones, or would complete a bad word."""
    then = (*output, token)
    outside = bool(asked.allowed_token_ids) and token not in asked.allowed_token_ids
    return outside or any(then[-len(word) :] == word for word in asked.bad_words)


def reference(raw: torch.Tensor, seq: Sequence) -> int:
    asked, index = seq.sampling, len(seq.output)
    values = [np.float32(value) for value in raw[0].tolist()]
    for token, bias in asked.logit_bias.items():
        values[token] += np.float32(bias)
    for token in set(seq.prompt + seq.output):
        factor = np.float32(asked.repetition_penalty)
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(seq.output):
        times = np.float32(seq.output.count(token))
        values[token] -= np.float32(asked.frequency_penalty) * times + np.float32(asked.presence_penalty)
    if index < asked.min_tokens:
        for token in asked.stop_token_ids:
            values[token] = np.float32(-math.inf)
    for token in range(len(values)):
        if is_banned(asked, seq.output, token):
            values[token] = np.float32(-math.inf)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if asked.temperature == 0:
        return order[0]
    scaled = [float(value) / asked.temperature for value in values]
    weight = [math.exp(value - scaled[order[0]]) for value in scaled]
    order = [token for token in order if weight[token] >= asked.min_p and weight[token] > 0]
    order = order[: asked.top_k] if asked.top_k else order
    total = sum(weight[token] for token in order)
    kept, before = [], 0.0
    for token in order:
        if asked.top_p < 1 and before >= asked.top_p * total:
            break
        kept.append(token)
        before += weight[token]
    return max(sorted(kept), key=lambda token: scaled[token] + noise(asked.seed, index, token))


GRID = [
    dict(zip(("temperature", "top_k", "top_p", "min_p", "penalties", "rest"), values, strict=True))
    for values in itertools.product(
        [0.0, 0.3, 1.0, 1.9], [0, 1, 7, 1000], [1.0, 0.9, 0.05], [0.0, 0.1], [False, True], [False, True]
    )
]


@pytest.mark.parametrize("vocab", [50, 333])
def test_every_setting_agrees_with_the_reference(vocab: int) -> None:
    for case, choice in enumerate(GRID):
        penalties = {"presence_penalty": 0.7, "frequency_penalty": -0.4, "repetition_penalty": 1.3}
        rest = {"logit_bias": {3: 2.5, 40: -100.0}, "min_tokens": 6, "stop_token_ids": (5, 9)}
        asked = SamplingParams(
            max_tokens=9,
            seed=1000 * case - 7,
            temperature=choice["temperature"],
            top_k=int(choice["top_k"]),
            top_p=choice["top_p"],
            min_p=choice["min_p"],
            **(penalties if choice["penalties"] else {}),  # type: ignore[arg-type]
            **(rest if choice["rest"] else {}),  # type: ignore[arg-type]
        )
        raw = logits(vocab, case)
        raw[0, [5, 9]] += 6  # stop tokens that would win
        for output in ([], [3, 3, 8, 40], [1, 2, 3, 4, 5, 6, 7]):
            seq = sequence(asked, [1, 2, 2, 3], output)
            assert draw(raw, seq) == reference(raw, seq), (asked, output)


tokens = st.integers(0, 11)


@settings(max_examples=300, deadline=None)
@given(
    allowed=st.lists(tokens, max_size=8),
    words=st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=6),
    output=st.lists(tokens, max_size=12),
    temperature=st.sampled_from([0.0, 0.8]),
    fewest=st.integers(0, 14),
)
def test_named_tokens_are_chosen_as_by_the_reference(
    allowed: list[int], words: list[list[int]], output: list[int], temperature: float, fewest: int
) -> None:
    asked = SamplingParams(
        max_tokens=99,
        seed=5,
        temperature=temperature,
        min_tokens=fewest,
        stop_token_ids=(3,),
        presence_penalty=0.5,
        allowed_token_ids=tuple(allowed),
        bad_words=tuple(map(tuple, words)),
    )
    raw, sampler = logits(12, len(output)), Sampler(12)
    opened, pushed = sampler.open(sequence(asked, output=output)), sampler.open(sequence(asked))
    for token in output:
        pushed.push(token)
    early = {3} if len(output) < fewest else set()
    if all(token in early or is_banned(asked, output, token) for token in range(12)):
        results = sampler.sample([raw, raw], [opened, pushed])
        assert all(isinstance(one, BadSamplingParams) for one in results)
        return
    first, second = sampler.sample([raw, raw], [opened, pushed])
    assert first == second == SampledToken(reference(raw, sequence(asked, output=output)))


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.2}])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_without_a_token_left_says_whose_fault_it_is(
    filters: dict[str, Any], temperature: float
) -> None:
    asked = SamplingParams(
        max_tokens=9,
        seed=5,
        temperature=temperature,
        allowed_token_ids=(4,),
        bad_words=((4,),),
        **filters,
    )
    sampler = Sampler(12)
    (result,) = sampler.sample([logits(12, 0)], [sampler.open(sequence(asked))])
    assert isinstance(result, BadSamplingParams) and failure_code(result) == "no_token_left"


def test_bans_are_as_large_as_what_is_named() -> None:
    """And not as what is left of the vocabulary."""
    bans = make_bans(
        SamplingParams(max_tokens=9, seed=5, allowed_token_ids=(4, 700), bad_words=((7,), (4, 5))), ()
    )
    assert bans is not None
    kept = [value for value in vars(bans).values() if isinstance(value, np.ndarray)]
    assert sum(value.nbytes for value in kept) <= 8 * 4


def test_requests_without_named_tokens_are_drawn_as_before() -> None:
    row = Sampler(12).open(sequence(SamplingParams(max_tokens=9, seed=1)))
    assert not row.special and row._bans is None


def test_ranks_count_the_tokens_that_are_as_likely() -> None:
    raw = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    assert [Sampler(4).score(raw, [token], 0)[0].rank for token in range(4)] == [4, 2, 3, 2]


@pytest.mark.parametrize("spread", [0.01, 0.5, 4.0])
def test_a_nucleus_wider_than_the_first_sort(spread: float) -> None:
    for seed, top_p in enumerate((0.2, 0.6, 0.97, 0.99999)):
        raw = logits(3 * TOP_P_PRESORT, seed, spread)
        for more in ({}, {"top_k": 1500}, {"top_k": 2000, "min_p": 0.9}):
            asked = SamplingParams(max_tokens=1, seed=seed, top_p=top_p, **more)
            assert draw(raw, sequence(asked)) == reference(raw, sequence(asked))


def test_penalties_grow_with_the_output_as_if_it_had_been_there() -> None:
    asked = SamplingParams(
        max_tokens=50,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        temperature=0.7,
    )
    sampler = Sampler(40)
    output: list[int] = []
    row = sampler.open(sequence(asked, [1, 2]))
    for step in range(50):
        raw = logits(40, step)
        (pick,) = sampler.sample([raw], [row])
        assert isinstance(pick, SampledToken)
        (again,) = sampler.sample([raw], [sampler.open(sequence(asked, [1, 2], output))])
        assert pick == again and pick.token == reference(raw, sequence(asked, [1, 2], output))
        row.push(pick.token)
        output.append(pick.token)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    raw = torch.zeros(1, 100)
    raw[0, [17, 60, 99]] = 2.0
    assert draw(raw, sequence(SamplingParams(max_tokens=1, seed=0, temperature=0))) == 17
    steps = torch.zeros(1, 1000)
    steps[0, ::7] = 1.0
    top = [token for token, _ in Sampler(1000).score(steps, [3], 200)[0].top]
    assert top == [*range(0, 1000, 7), *(i for i in range(1000) if i % 7)][:200]
    for seed in range(20):  # of equals at the edge of top_k and top_p, the lowest ids stay
        assert draw(raw, sequence(SamplingParams(max_tokens=1, seed=seed, top_k=2))) in (17, 60)
        assert draw(raw, sequence(SamplingParams(max_tokens=1, seed=seed, top_p=1e-6))) == 17


def rows_of_all_kinds(vocab: int) -> list[SamplingParams]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "logprobs": 5},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.9, "min_p": 0.02, "presence_penalty": 1.0, "logprobs": 3},
        {"temperature": 1.0, "logit_bias": {vocab - 1: 5.0}},
    ]
    return [SamplingParams(max_tokens=9, seed=i, **kind) for i, kind in enumerate(kinds * 3)]  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", [97, 4096, 32003])
def test_companions_change_nothing(vocab: int) -> None:
    sampler = Sampler(vocab)
    asked = rows_of_all_kinds(vocab)
    raws = [logits(vocab, i) for i in range(len(asked))]
    alone = [
        sampler.sample([raw], [sampler.open(sequence(one))])[0] for raw, one in zip(raws, asked, strict=True)
    ]
    for order in (list(range(len(asked))), list(range(len(asked)))[::-1], [4, 3, 17, 5]):
        rows = [sampler.open(sequence(asked[i])) for i in order]
        assert sampler.sample([raws[i] for i in order], rows) == [alone[i] for i in order]  # to the last bit


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
def test_no_token_that_could_win_is_left_out(spread: float) -> None:
    """Most tokens are passed over without a logarithm; close calls are where that could go wrong."""
    raw = logits(300, 1, spread)
    scaled = raw[0].tolist()
    for seed in range(150):
        best = max(range(300), key=lambda token: scaled[token] + noise(seed, 0, token))
        assert draw(raw, sequence(SamplingParams(max_tokens=1, seed=seed))) == best


def test_logits_are_left_as_they_are() -> None:
    raw = logits(64)
    kept = raw.clone()
    draw(raw, sequence(SamplingParams(max_tokens=1, seed=0, top_k=3, logit_bias={1: 4.0}, logprobs=2)))
    assert torch.equal(raw, kept)


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws: below the 99.9 % point of 7 degrees of freedom, for indices and for seeds."""
    raw = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.1]])
    expected = torch.softmax(raw[0].double() / 0.8, -1) * 20_000
    for by_seed in (False, True):
        asked = [
            SamplingParams(max_tokens=1, seed=i if by_seed else 11, temperature=0.8) for i in range(20_000)
        ]
        rows = [SamplerRow([0], [], one, 8, None) for one in asked]
        for i, row in enumerate(rows):
            row.index = 0 if by_seed else i
        picks = Sampler(8).sample([raw] * len(rows), rows)
        counts = torch.bincount(
            torch.tensor([pick.token for pick in picks if isinstance(pick, SampledToken)]), minlength=8
        )
        assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_noise_differs_by_seed_and_index() -> None:
    starts = {noise_start(seed, index) for seed in range(-50, 50) for index in range(100)}
    assert len(starts) == 10_000
    assert noise_start(5, 7) == noise_start(5 + (1 << 64), 7) != noise_start(6, 6)


def test_a_row_that_cannot_be_sampled_fails_alone() -> None:
    sampler = Sampler(16)
    raws = [logits(16, i) for i in range(4)]
    raws[1][0, 3] = math.nan
    raws[2][0, 3] = math.inf
    rows = [sampler.open(sequence(SamplingParams(max_tokens=1, seed=0, logprobs=i % 2))) for i in range(4)]
    picks = sampler.sample(raws, rows)
    assert [type(pick) for pick in picks] == [SampledToken, ValueError, ValueError, SampledToken]
    everything = SamplingParams(max_tokens=1, seed=0, min_tokens=1, stop_token_ids=tuple(range(16)))
    (pick,) = sampler.sample(raws[:1], [sampler.open(sequence(everything))])
    assert isinstance(pick, ValueError)
    for wrong in ({"stop_token_ids": (16,)}, {"logit_bias": {-1: 1.0}}):
        with pytest.raises(ValueError, match="vocabulary"):
            sampler.open(sequence(SamplingParams(max_tokens=1, seed=0, **wrong)))


def test_extreme_temperatures() -> None:
    raw = logits(64)
    best = int(raw.argmax())
    for temperature in (1e-300, 1e-6, 1e-3):
        assert draw(raw, sequence(SamplingParams(max_tokens=1, seed=4, temperature=temperature))) == best
    assert (
        len({draw(raw, sequence(SamplingParams(max_tokens=1, seed=i, temperature=1e6))) for i in range(300)})
        > 50
    )


# ---- log-probabilities


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 700), st.integers(0, 25), st.integers(1, 12))
def test_scores_are_the_log_softmax_of_raw_logits(seed: int, vocab: int, top: int, rows: int) -> None:
    raw = torch.cat([logits(vocab, seed + i) for i in range(rows)])
    tokens = [(seed + i) % vocab for i in range(rows)]
    expected = torch.log_softmax(raw.double(), -1)
    sampler = Sampler(vocab)
    scores = sampler.score(raw, tokens, top)
    for i, score in enumerate(scores):
        assert (
            score == sampler.score(raw[i : i + 1], tokens[i : i + 1], top)[0]
        )  # alone or not, to the last bit
        assert score.token == tokens[i] and score.logprob == pytest.approx(
            float(expected[i, tokens[i]]), abs=1e-9
        )
        best = expected[i].topk(min(top, vocab))
        assert [logprob for _, logprob in score.top] == pytest.approx(best.values.tolist(), abs=1e-9)
        assert [token for token, _ in score.top] == best.indices.tolist()


def test_logprobs_are_raw_whatever_was_asked() -> None:
    raw = logits(100)
    asked = SamplingParams(max_tokens=1, seed=0, temperature=0.1, top_k=1, logit_bias={50: 100.0}, logprobs=2)
    sampler = Sampler(100)
    (pick,) = sampler.sample([raw], [sampler.open(sequence(asked))])
    assert isinstance(pick, SampledToken) and pick.token == 50
    (scored,) = sampler.score(raw, [50], 2)
    assert pick.logprob is not None and (pick.logprob.rank, scored.rank) == (0, 15)
    assert (pick.logprob.logprob, pick.logprob.top) == (scored.logprob, scored.top)


def test_scores_are_never_infinite() -> None:
    raw = torch.full((1, 8), -math.inf)
    raw[0, 2] = 3.0
    (score,) = Sampler(8).score(raw, [5], 3)
    assert score.logprob == LOWEST_LOGPROB == -9999.0
    assert score.top == [(2, 0.0), (0, LOWEST_LOGPROB), (1, LOWEST_LOGPROB)]
    with pytest.raises(ValueError, match="finite"):
        Sampler(8).score(torch.full((1, 8), math.nan), [5], 3)


def test_where_the_logits_lie_does_not_matter() -> None:
    """Rows of one matrix are read in place; others are put together; none is changed."""
    sampler, vocab, size = Sampler(64), 64, 7
    whole = torch.cat([logits(vocab, seed) for seed in range(size)])
    kept = whole.clone()
    asked = [
        SamplingParams(max_tokens=9, seed=row, temperature=0.9 * (row % 2), top_k=5 * (row % 3))
        for row in range(size)
    ]
    rows = [sampler.open(sequence(one)) for one in asked]
    alone = [sampler.sample([whole[row : row + 1].clone()], [rows[row]])[0] for row in range(size)]
    strided = torch.stack([whole, whole], dim=2)[:, :, 0]  # every other number in memory
    for parts in (
        list(torch.split(whole, 1)),
        [row.clone() for row in torch.split(whole, 1)],
        list(torch.split(strided, 1)),
        [whole[0:1], *(row.clone() for row in torch.split(whole[1:], 1))],
    ):
        assert sampler.sample(parts, rows) == alone
        backwards = sampler.sample(parts[::-1], rows[::-1])
        assert backwards == alone[::-1]
    assert torch.equal(whole, kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_choice_fails_alone(bad: float, temperature: float) -> None:
    sampler = Sampler(16)
    parts = [logits(16, 1), logits(16, 2), torch.full((1, 16), -math.inf), logits(16, 3)]
    parts[1][0, 7] = bad
    rows = [
        sampler.open(sequence(SamplingParams(max_tokens=3, seed=1, temperature=temperature))) for _ in parts
    ]
    picked = sampler.sample(list(torch.split(torch.cat(parts), 1)), rows)
    assert [isinstance(pick, SampledToken) for pick in picked] == [True, False, False, True]
