"""Fits: what was generated is found again (S3), what costs nothing is not invented, errors are reported."""

from __future__ import annotations

import random

import pytest

from diptych.errors import ConfigError
from planner.costs.distserve_fits import BATCHES, LENGTHS, MAX_BATCH_TOKENS
from planner.costs.fit import fit_decode, fit_handling, fit_mixed, fit_prefill
from planner.costs.step import CostLine, StepCost
from planner.types import GatewayCpuCost, StepBatch

GRID = [(n, length) for n in BATCHES for length in LENGTHS if n * length <= MAX_BATCH_TOKENS]
PREFILL: CostLine = (0.0181, 1.0191e-4, 7.12e-9)  # OPT-13B on one A100
DECODE: CostLine = (0.0199, 6.27e-7, 3.85e-5)


def prefill_points(line: CostLine, noise: float, seed: int = 1) -> list[tuple[float, float, float]]:
    draw = random.Random(seed)
    a, b, c = line
    return [
        (n * m, n * m * m, (a + b * n * m + c * n * m * m) * (1 + draw.gauss(0, noise)))
        for n, m in GRID
        if n * m <= 16384
    ]


def decode_points(
    lines: tuple[CostLine, ...], noise: float, seed: int = 2
) -> list[tuple[float, float, float]]:
    draw = random.Random(seed)
    return [
        (n * m, n, max(a + b * n * m + c * n for a, b, c in lines) * (1 + draw.gauss(0, noise)))
        for n, m in GRID
    ]


def test_prefill_is_recovered_within_two_percent() -> None:
    found = fit_prefill(prefill_points(PREFILL, 0.02))
    for x, y, seconds in prefill_points(PREFILL, 0.0):
        assert found.at(x, y) == pytest.approx(seconds, rel=0.02)
    assert min(found.lines[0]) >= 0
    assert 0.005 < found.error.mean < found.error.largest < 0.1
    assert found.error.held_out == pytest.approx(found.error.mean, rel=0.3)


def test_decode_is_recovered_within_two_percent_by_one_line() -> None:
    found = fit_decode(decode_points((DECODE,), 0.02))
    assert len(found.lines) == 1
    for x, y, seconds in decode_points((DECODE,), 0.0):
        assert found.at(x, y) == pytest.approx(seconds, rel=0.02)


def test_a_second_line_is_taken_where_it_earns_its_keep() -> None:
    two = (DECODE, (0.0072, 5.8e-7, 1.583e-4))
    found = fit_decode(decode_points(two, 0.01))
    assert len(found.lines) == 2
    for x, y, seconds in decode_points(two, 0.0):
        assert found.at(x, y) == pytest.approx(seconds, rel=0.03)


def test_a_negative_square_becomes_none() -> None:
    bent: CostLine = (0.0584, 3.826e-4, -7.1e-9)  # vLLM, OPT-66B TP2, as published
    found = fit_prefill(prefill_points(bent, 0.0))
    assert found.lines[0][2] == 0 and min(found.lines[0]) >= 0
    assert 0 < found.error.largest < 0.05


def test_mixed_steps_share_a_constant_or_not() -> None:
    for shared, cross in ((1.0, 0.0), (0.0, 0.0), (0.6, 0.0), (1.0, 5e-7)):
        cost = StepCost(PREFILL, (DECODE,), shared=shared, cross=cross)
        batches = [
            StepBatch(t, float(t * t), r, r * 500) for t in (16, 128, 512, 2048) for r in (1, 8, 32, 128)
        ]
        found = fit_mixed([(batch, cost.step_s(batch)) for batch in batches], PREFILL, (DECODE,))
        assert found.shared == pytest.approx(shared, abs=0.02)
        assert found.cross == pytest.approx(cross, rel=0.02, abs=1e-12)
        assert found.error.held_out < 0.01


def test_too_little_to_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot be fitted"):
        fit_prefill([(1, 1, 1.0)] * 3)
    with pytest.raises(ConfigError, match="cannot be fitted"):
        fit_decode([(1, 1, 0.0)] * 5)
    with pytest.raises(ConfigError, match="cannot be fitted"):
        fit_mixed([], PREFILL, (DECODE,))


def test_what_a_gateways_processor_does_is_recovered() -> None:
    chance, truth = random.Random(5), GatewayCpuCost(3e-4, 5e-5, 6e-3)
    parts = []
    for _ in range(12):
        messages, tokens, requests = (
            chance.randint(900, 2000),
            chance.randint(1900, 6000),
            chance.randint(30, 110),
        )
        seconds = messages * truth.message_s + tokens * truth.token_s + requests * truth.request_s
        parts.append((float(messages), float(tokens), float(requests), seconds))
    found = fit_handling([*parts, (10.0, 10.0, 1.0, 0.0)])
    assert found.message_s == pytest.approx(truth.message_s, rel=1e-6)
    assert found.token_s == pytest.approx(truth.token_s, rel=1e-6)
    assert found.request_s == pytest.approx(truth.request_s, rel=1e-6)
    assert fit_handling([]) == fit_handling([(5.0, 5.0, 1.0, 0.0)]) == GatewayCpuCost()
