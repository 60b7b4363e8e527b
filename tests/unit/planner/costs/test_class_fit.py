"""The work of a KV class from measured steps: known ratios are found again, and what cannot be told stays 1."""

from __future__ import annotations

from random import Random

import pytest

from diptych.errors import ConfigError
from planner.costs.class_fit import class_batch, fit_class_work
from planner.costs.profiler import MeasuredStep, fit_kv_class
from planner.costs.step import StepCost
from planner.types import StepBatch
from tests.unit.planner.costs.class_batches import COST, WORK, batches


def test_known_ratios_are_found_again() -> None:
    points = [(batch, COST.step_s(class_batch(batch, WORK))) for batch in batches(Random(1))]
    work, error = fit_class_work(points, COST)
    assert (work.token, work.square) == pytest.approx((WORK.token, WORK.square), rel=0.05)
    assert work.context == pytest.approx(WORK.context, rel=0.1)
    assert error.mean < 0.02 and error.held_out < 0.03 and error.points == len(points)


def test_noise_moves_them_little() -> None:
    rng = Random(2)
    points = [
        (batch, COST.step_s(class_batch(batch, WORK)) * rng.uniform(0.85, 1.15))
        for batch in batches(rng, 300)
    ]
    work, error = fit_class_work(points, COST)
    assert work.token == pytest.approx(WORK.token, rel=0.1) and work.context == pytest.approx(1.8, rel=0.2)
    assert 0.03 < error.held_out < 0.15


def test_what_the_steps_do_not_show_stays_1() -> None:
    """Steps that only decode say nothing of prompts; a cost without a term for context has nothing to multiply."""
    decodes = [StepBatch(0, 0.0, rows, rows * 800) for rows in range(1, 30)]
    points = [(batch, COST.step_s(class_batch(batch, WORK))) for batch in decodes]
    work, _ = fit_class_work(points, COST)
    assert (work.token, work.square) == pytest.approx((1.0, 1.0)) and work.context > 1.5
    flat = StepCost(COST.prefill, ((1e-3, 0.0, 3e-4),))
    assert fit_class_work(points, flat)[0].context == pytest.approx(1.0)


def test_steps_of_a_log_are_averaged_and_none_is_an_error() -> None:
    steps = [
        MeasuredStep(0.0, COST.step_s(class_batch(batch, WORK)), batch) for batch in batches(Random(3), 600)
    ]
    work, error = fit_kv_class(steps, COST)
    assert work.token == pytest.approx(WORK.token, rel=0.1) and error.points < len(steps)
    with pytest.raises(ConfigError, match="cannot be fitted"):
        fit_kv_class([], COST)
