"""Sampling where the logits are: the tokens and errors of the host's sampler, whatever a row asks for."""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from diptych.request import Grammar, SamplingParams
from engine.gpu import sampler as device_sampling
from engine.gpu.sampler import NARROW, DeviceSampler
from engine.model.device_step import SAMPLER_ARRAYS
from engine.protocols import SampledToken
from engine.sampling import grammar
from engine.sampling.sampler import Sampler, SamplerRow, noise_start
from engine.sequence import Sequence
from tests.support.factories import make_tokenizer

CPU = torch.device("cpu")


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def open_row(vocab: int, seed: int = 0, index: int = 0, **asked: Any) -> SamplerRow:
    row = SamplerRow([0], [], SamplingParams(max_tokens=9, seed=seed, **asked), vocab, None)
    row.index = index
    return row


class SpyingSampler(Sampler):
    """Notes how many rows it samples."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.sampled: list[int] = []

    def sample(self, logits: Any, rows: Any) -> list[SampledToken | Exception]:
        self.sampled.append(len(rows))
        return super().sample(logits, rows)


def compare_samplers(
    logits: torch.Tensor, rows: list[SamplerRow], block: int | None = None
) -> tuple[DeviceSampler, SpyingSampler]:
    """Both samplers must say the same. Returns the one under test, and the host's in it."""
    host = SpyingSampler(logits.shape[1])
    sampler = DeviceSampler(host, CPU, block)
    kept = logits.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about rows that are not finite
        expected = Sampler(logits.shape[1]).sample(list(torch.split(logits, 1)), rows)
        picks = sampler.sample(list(torch.split(logits, 1)), rows)
    for row, right, pick in zip(rows, expected, picks, strict=True):
        if isinstance(right, Exception):
            assert (type(pick), str(pick)) == (type(right), str(right)), row.sampling
        else:
            assert pick == right, row.sampling
    assert torch.equal(logits.view(torch.int32), kept.view(torch.int32))
    return sampler, host


GRID: list[dict[str, Any]] = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product(
        [0.0, 1e-9, 0.4, 1.0, 1.9], [0, 1, 7, 40, 5000], [1.0, 0.95, 0.5, 1e-9], [0.0, 0.03, 1.0]
    )
]


@pytest.mark.parametrize("vocab", [2, 50, NARROW, NARROW + 1, 3000])
@pytest.mark.parametrize("shape", ["spread", "flat", "tied"])
def test_every_filter_chooses_the_tokens_of_the_host(vocab: int, shape: str) -> None:
    logits = random_logits(len(GRID), vocab, vocab, 0.01 if shape == "flat" else 3.0)
    if shape == "tied":
        logits = logits.round()
    rows = [open_row(vocab, 1000 * place - 7, place % 5, **asked) for place, asked in enumerate(GRID)]
    sampler, _ = compare_samplers(logits, rows)
    # Only ties of a small vocabulary end a nucleus exactly between two tokens.
    assert sampler.undecided <= (len(GRID) // 4 if shape == "tied" else 0)


def test_noise_is_that_of_the_host_to_the_last_bit_of_its_hash() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    vocab = 1000
    expected = np.empty((len(seeds), vocab))
    mask = (1 << 64) - 1
    for place, seed in enumerate(seeds):
        for token in range(vocab):
            z = (noise_start(seed, place) + 0x9E3779B97F4A7C15 * (token + 1)) & mask
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            uniform = (((z ^ (z >> 31)) >> 12) + 0.5) * 2.0**-52
            expected[place, token] = math.log(-math.log(uniform))
    starts = np.array([noise_start(seed, place) for place, seed in enumerate(seeds)], np.uint64)
    steps = DeviceSampler(Sampler(vocab), CPU)._steps
    found = device_sampling._negative_noise(torch.from_numpy(starts.view(np.int64))[:, None] + steps)
    # Of different bits, uniform numbers are at least 2**-52 apart: a wrong hash cannot be this near.
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("more", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_rows_that_cannot_be_sampled_get_the_errors_of_the_host(more: dict[str, Any]) -> None:
    logits = random_logits(8, 40)
    logits[1, 3], logits[2, 3], logits[3, 3] = math.nan, -math.nan, math.inf
    logits[4] = -math.inf
    logits[5, 1:] = -math.inf
    logits[6] = torch.finfo(torch.float32).max
    sampler, _ = compare_samplers(logits, [open_row(40, seed, **more) for seed in range(8)])
    assert sampler.undecided >= 4


def test_of_equal_logits_the_lowest_ids_stay() -> None:
    logits = torch.zeros(4, 3000)
    logits[:, [2999, 1700, 60]] = 2.0
    logits[3] = torch.tensor([0.0, -0.0]).repeat(1500)  # which are equal
    sampler = DeviceSampler(Sampler(3000), CPU)
    for seed in range(30):
        asked: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 1e-6}, {"top_k": 3}]
        rows = [open_row(3000, seed, **more) for more in asked]
        picks = sampler.sample(list(torch.split(logits, 1)), rows)
        tokens = [pick.token for pick in picks if isinstance(pick, SampledToken)]
        assert tokens[0] == 60 and tokens[1] in (60, 1700) and tokens[2] == 60 and tokens[3] in (0, 1, 2)
        compare_samplers(logits, rows)


def test_scores_within_rounding_of_each_other_are_the_hosts_to_decide() -> None:
    """Two tokens whose noises differ by less than 10**-6: a logit of that size makes their scores all but equal."""
    steps = DeviceSampler(Sampler(2), CPU)._steps
    starts = np.array([noise_start(seed, 0) for seed in range(200_000)], np.uint64)
    noise = -device_sampling._negative_noise(torch.from_numpy(starts.view(np.int64))[:, None] + steps)
    gaps = (noise[:, 0] - noise[:, 1]).abs()
    seed = int(gaps.argmin())
    assert 0 < gaps[seed] < 1e-4
    near = float(noise[seed, 0] - noise[seed, 1])
    logits = torch.tensor([[0.0, near]])
    rounding = abs(float(logits[0, 1]) - near)
    for doubt, undecided in ((2 * rounding, 1), (rounding / 2, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_sampling, "_score_doubt", lambda best, doubt=doubt: best.abs() * 0 + doubt)
            sampler, _ = compare_samplers(logits, [open_row(2, seed)])
        assert sampler.undecided == undecided
    assert float(device_sampling._score_doubt(torch.tensor(1e7))) == pytest.approx(1e7 * 2.0**-50, rel=1e-3)


@pytest.mark.parametrize("more", [{}, {"top_k": 4}, {"min_p": 0.9}])
def test_a_nucleus_that_ends_between_two_tokens_is_the_hosts_to_decide(more: dict[str, Any]) -> None:
    logits = torch.full((3, 8), -5.0)
    logits[:, 2:6] = 1.0
    if not more:
        logits[:, [0, 1, 6, 7]] = -math.inf
    rows = [open_row(8, 1, top_p=top_p, **more) for top_p in (0.5, 0.5 - 1e-9, 0.5 + 1e-9)]
    sampler, host = compare_samplers(logits, rows)
    assert sampler.undecided == 1 and host.sampled == [1]


def test_wrong_decisions_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a device's sums were far off, tokens would differ: what these tests compare is not all decided by the host."""
    rows = [open_row(3000, seed, top_p=0.9) for seed in range(200)]
    logits = random_logits(200, 3000)
    exact = torch.Tensor.cumsum_
    monkeypatch.setattr(torch.Tensor, "cumsum_", lambda self, dim: exact(self.sqrt_(), dim))
    with pytest.raises(AssertionError):
        compare_samplers(logits, rows)


@pytest.mark.parametrize("block", [1, 7000, None])
def test_batch_and_block_change_nothing(block: int | None) -> None:
    rows = [open_row(3000, place, place, **asked) for place, asked in enumerate(GRID[::7])]
    logits = random_logits(len(rows), 3000)
    sampler, host = compare_samplers(logits, rows, block)
    assert host.sampled == []
    whole = sampler.sample(list(torch.split(logits, 1)), rows)
    alone = [sampler.sample([logits[place : place + 1]], [row])[0] for place, row in enumerate(rows)]
    assert whole == alone
    assert sampler.scratch_bytes == SAMPLER_ARRAYS * 8 * max(block or device_sampling.CPU_BLOCK, 3000)


def test_a_wide_nucleus_takes_a_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(4, 5 * NARROW, spread=0.1)
    asked: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_p": 0.01},
        {"top_p": 0.9, "top_k": 50},
        {"top_k": 3 * NARROW, "top_p": 0.7},
    ]
    rows = [open_row(5 * NARROW, seed, **more) for seed, more in enumerate(asked)]
    passes: list[int] = []
    whole = DeviceSampler._draw_wide

    def note_pass(self: DeviceSampler, part: torch.Tensor, params: Any) -> torch.Tensor:
        passes.append(len(part))
        return whole(self, part, params)

    monkeypatch.setattr(DeviceSampler, "_draw_wide", note_pass)
    _, host = compare_samplers(logits, rows)
    # The one that asks for so many at once, and the one for which few did not suffice.
    assert passes == [1, 1] and host.sampled == []


def test_only_rows_that_ask_for_more_go_to_the_host() -> None:
    more: list[dict[str, Any]] = [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 4.0}},
        {"min_tokens": 3, "stop_token_ids": (1, 2)},
        {"logprobs": 0},
        {"logprobs": 2, "temperature": 0.0},
    ]
    plain: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
    # Enough tokens are there already, so nothing has to be forbidden.
    late = {"min_tokens": 3, "stop_token_ids": (1, 2)}
    rows = [open_row(64, seed, **asked) for seed, asked in enumerate([*plain, *more])]
    rows.insert(3, open_row(64, 5, 3, **late))
    sampler, host = compare_samplers(random_logits(len(rows), 64), rows)
    assert host.sampled == [len(more)] and sampler.undecided == 0


def test_grammars_and_scores_are_the_hosts() -> None:
    tokenizer = make_tokenizer()
    host = Sampler(300, grammar.build_tokenizer(tokenizer, [2]))
    sampler = DeviceSampler(host, CPU)
    woken = threading.Event()
    sampler.notify(woken.set)
    asked = SamplingParams(max_tokens=9, seed=3, grammar=Grammar("regex", "[0-9]+"))
    seq = Sequence("r", 1, [1], asked, math.inf, output=[])
    sampler.expect(seq)
    assert woken.wait(30)
    logits = random_logits(1, sampler.vocab_size)
    row = sampler.open(seq)
    (pick,) = sampler.sample([logits], [row])
    assert isinstance(pick, SampledToken)
    assert tokenizer.decode([pick.token]).isdigit()
    assert [pick] == host.sample([logits], [host.open(seq)])
    assert sampler.score(logits, [3], 2) == host.score(logits, [3], 2)


def test_warming_needs_no_request() -> None:
    for vocab in (2, 2 * NARROW):
        sampler = DeviceSampler(Sampler(vocab), "cpu")
        sampler.warm()
        assert sampler.undecided == 0
