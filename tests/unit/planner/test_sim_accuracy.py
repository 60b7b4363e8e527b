"""The arithmetic of benchmarks/sim_accuracy.py, without a deployment."""

from __future__ import annotations

import math

import pytest

from benchmarks import sim_accuracy
from benchmarks.sim_accuracy import (
    DEPLOYMENTS,
    Setting,
    knee,
    objectives,
    predicted,
    quantile,
    summary,
    times,
)
from planner.cost import StepCost
from planner.hardware import device
from planner.profile import Overheads, Profile
from planner.shape import known
from planner.simulator import Deployment, simulate
from planner.tally import joint
from planner.terms import Job, Served, Slo, Split
from planner.workload import synthetic

COST = StepCost((2e-3, 1e-4, 0.0), ((1e-3, 0.0, 2e-4),))
PROFILE = Profile(
    known("embedded"), device("cpu"), {Split(): COST}, {Split(): 40_000}, "made up", {}, Overheads(1e-3, 2e-4)
)
SETTING = Setting(synthetic("sharegpt").shrunk(4, 2048), None, (1.0,), 5.0, 1.0, seed=3)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_knee_is_where_the_objective_is_just_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_accuracy, "KNEE_REQUESTS", 120)
    slo = Slo(0.06, 0.004)

    def model(rate: float) -> Deployment:
        return predicted(DEPLOYMENTS[name], PROFILE, 128, None)

    at = knee(model, SETTING, slo, 20.0)
    below, above = (
        joint(simulate(model(rate), SETTING.workload.sample(120, rate, SETTING.seed + 1)), {"": slo})
        for rate in (at, 1.1 * at)
    )
    assert below >= slo.attainment > above


def test_objectives_leave_room_over_what_is_predicted_where_nobody_waits() -> None:
    slo = objectives(predicted(DEPLOYMENTS["1P1D"], PROFILE, 128, None), SETTING, 5.0)
    assert 0.02 < slo.ttft_s < 0.2 and 0.002 < slo.tpot_s < 0.01


def test_points_are_summed_up_over_rows() -> None:
    rows = [
        {"deployment": "a", "points": -3.0, "measured": 0.5, "hindsight": 0.52},
        {"deployment": "a", "points": 1.0, "measured": 0.9, "hindsight": 0.86},
        {"deployment": "b", "points": 5.0, "measured": 0.2, "hindsight": 0.2},
    ]
    told = summary(rows)
    assert (told["mean_abs_points"], told["max_abs_points"]) == (3.0, 5.0)
    assert told["mean_abs_points_by_deployment"] == {"a": 2.0, "b": 5.0}
    assert (told["hindsight_mean_abs_points"], told["hindsight_max_abs_points"]) == (2.0, 4.0)


def test_both_sides_are_told_in_milliseconds() -> None:
    sides = [[Served(Job(0.0, 1, 1), k * second, 0.0, 0.0) for k in range(1, 11)] for second in (1.0, 2.0)]
    told = times(sides[0], sides[1], "ttft_s")
    assert told["p50"] == [5000.0, 10000.0] and told["p90"] == [9000.0, 18000.0]
    assert quantile([], 0.5) == math.inf
    assert Slo().attainment == 0.9
