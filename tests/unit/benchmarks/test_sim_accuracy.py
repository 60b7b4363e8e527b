"""The arithmetic of benchmarks/sim_accuracy.py, without a deployment."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import sim_accuracy
from benchmarks.sim_accuracy import (
    DEPLOYMENTS,
    Model,
    Setting,
    choose_slo,
    knee,
    merged,
    predict_attainment,
    quantile,
    remembered,
    spread,
    starts_of,
    summary,
    times,
)
from diptych.slo import Slo
from planner.costs.model import find_model
from planner.costs.profile import CostProfile, Overheads
from planner.costs.profiler import MeasuredStep, WorkerTrace
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.types import Job, JobResult, Parallelism, StepBatch
from planner.workload.workload import synthetic_workload
from services.bench.profile_run import Measurement

COST = StepCost((2e-3, 1e-4, 0.0), ((1e-3, 0.0, 2e-4),))
PROFILE = CostProfile(
    find_model("embedded"),
    find_device("cpu"),
    {Parallelism(): COST},
    {Parallelism(): 40_000},
    "made up",
    {},
    Overheads(1e-3, 2e-4),
)
SETTING = Setting(synthetic_workload("sharegpt").shrunk(4, 2048), None, (1.0,), 5.0, 2, 1.0, seed=3)
LIVES = {
    "1P1D": [WorkerTrace("prefill-0", "prefill", 128), WorkerTrace("decode-0", "decode", 0)],
    "colocated": [WorkerTrace("decode-0", "decode", 0), WorkerTrace("decode-1", "decode", 0)],
}


def model(name: str) -> Model:
    """A deployment whose steps take just what they cost."""
    return Model(DEPLOYMENTS[name], Measurement(PROFILE, 128, LIVES[name], [], {}), COST)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_knee_is_where_the_objective_is_just_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_accuracy, "KNEE_REQUESTS", 120)
    slo = Slo(0.06, 0.004)
    at = knee(model(name), SETTING, slo, 20.0)
    below, above = (predict_attainment(model(name), SETTING, slo, rate) for rate in (at, 1.15 * at))
    assert below >= slo.attainment > above


def test_objectives_leave_room_over_what_is_predicted_where_nobody_waits() -> None:
    slo = choose_slo(model("1P1D"), SETTING, 5.0)
    assert 0.02 < slo.ttft_s < 0.2 and 0.002 < slo.tpot_s < 0.01


def test_each_pass_has_its_own_requests_and_a_row_is_their_mean() -> None:
    assert SETTING.jobs(8.0, 0) != SETTING.jobs(8.0, 1)
    one = {"deployment": "1P1D", "rate": 8.0, "requests": 40, "failed": 0}
    passes = [
        one | {"predicted": 0.9, "measured": 0.8, "hindsight": 0.85},
        one | {"predicted": 0.7, "measured": 0.74, "hindsight": 0.75},
    ]
    row = merged(passes)
    assert (row["requests"], row["predicted"], row["measured"], row["points"]) == (80, 0.8, 0.77, 3.0)
    assert row["hindsight"] == 0.8 and row["passes"] == passes
    third = merged([*passes, one | {"predicted": 0.9, "measured": 0.2, "hindsight": 0.2}])
    assert third["median_points"] == 10.0, "of 10, -4 and 70"
    assert row["spread"] == 7.0, "10 and -4 points: 9.9 apart from their mean, over the root of two"
    assert spread(passes[:1]) is None


def test_runs_are_simulated_from_places_all_over_what_was_noted() -> None:
    first, second = starts_of(1), starts_of(2)
    assert first == starts_of(1) != second
    for starts in (first, second):
        gaps = [(after - one) % 1.0 for one, after in zip(starts, starts[1:], strict=False)]
        assert gaps == pytest.approx([1.0 / len(starts)] * (len(starts) - 1))


def test_a_worker_is_known_by_its_profile_and_by_what_the_one_in_its_place_did_since() -> None:
    steps = [MeasuredStep(float(at), at + 0.5, StepBatch(0, 0.0, 1, 9)) for at in range(4)]
    before = [
        WorkerTrace("prefill-0", "prefill", 128, steps[:1]),
        WorkerTrace("decode-0", "decode", 0, steps[1:2]),
    ]
    since = [WorkerTrace("decode-0", "decode", 0, steps[2:]), WorkerTrace("prefill-0", "prefill", 64)]
    known_ = {life.worker: life for life in remembered(before, since)}
    assert known_["decode-0"].steps == steps[1:] and known_["prefill-0"].steps == steps[:1]
    assert known_["prefill-0"].saturation_tokens == 64, "of the deployment that is up"
    lately = {life.worker: life for life in remembered(before, since, 2.5)}
    assert lately["decode-0"].steps == steps[3:] and not lately["prefill-0"].steps


def test_points_are_summed_up_over_rows() -> None:
    first = {"passes": [{"predicted": 0.5, "measured": 0.58}]}
    rows: list[dict[str, Any]] = [
        first
        | {"deployment": "a", "points": -3.0, "median_points": -2.0, "measured": 0.5, "hindsight": 0.52},
        first | {"deployment": "a", "points": 1.0, "median_points": 0.5, "measured": 0.9, "hindsight": 0.86},
        first | {"deployment": "b", "points": 5.0, "median_points": 2.0, "measured": 0.2, "hindsight": 0.2},
    ]
    totals = summary(rows)
    assert (totals["mean_abs_points"], totals["max_abs_points"]) == (3.0, 5.0)
    assert totals["of_medians"] == {"mean_abs_points": 1.5, "max_abs_points": 2.0}
    assert totals["mean_abs_points_by_deployment"] == {"a": 2.0, "b": 5.0}
    assert totals["first_pass_mean_abs_points"] == 8.0
    assert (totals["hindsight_mean_abs_points"], totals["hindsight_max_abs_points"]) == (2.0, 4.0)


def test_both_sides_are_reported_in_milliseconds() -> None:
    sides = [[JobResult(Job(0.0, 1, 1), k * second, 0.0, 0.0) for k in range(1, 11)] for second in (1.0, 2.0)]
    milliseconds = times(sides[0], sides[1], "ttft_s")
    assert milliseconds["p50"] == [5000.0, 10000.0] and milliseconds["p90"] == [9000.0, 18000.0]
    assert quantile([], 0.5) == math.inf
    assert Slo().attainment == 0.9
