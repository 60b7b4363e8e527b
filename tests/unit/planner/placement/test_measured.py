"""How a deployment is measured: by one trial, without the requests that find it empty; and what is said to limit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from diptych.slo import Slo
from planner.placement import candidates
from planner.placement import validate as verifying
from planner.placement.enlarged import ResourceUse
from planner.placement.solve import solve_placement
from planner.placement.trial import Trial
from planner.types import Job, JobResult, Parallelism, Placement
from tests.unit.planner.small_problems import question

PAIR = candidates.make_pair(Parallelism(), Parallelism(), "low", 1, "made", "made")


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("rate", [None, 5.0])
def test_goodput_lies_in_its_interval(rate: float | None, seeds: int) -> None:
    """Both are of the same runs: by one seed they are the same."""
    request = question(rate=rate, span_s=6.0 if rate else 0.0, seeds=seeds, families=("colocated",))
    best = solve_placement(request).best_candidate
    low, high = best.interval_rps
    assert low <= best.goodput_rps <= high
    assert low == high or seeds > 1


def test_a_measurement_leaves_out_its_first_tenth() -> None:
    request = question(requests=60, seeds=2)
    measured, searched = request.trial(PAIR, fresh=True), request.trial(PAIR)
    count = len(measured.samples[0])
    assert (measured.warmup, searched.warmup) == (count // 10, 0)
    assert sum(measured.counted().values()) == 2 * (count - count // 10)
    exact = verifying._exact_trial(request, PAIR, 3.0, "never")
    assert exact.warmup == len(exact.samples[0]) // 10 > 0


def test_a_plan_is_evaluated_by_the_requests_that_find_it_at_work() -> None:
    """In its first tenth nobody waits; with these the same run at the same rate is better than it will be."""
    request = question(requests=200, slos={"": Slo(0.05, 0.03, 0.9)})
    trial = request.trial(PAIR, fresh=True)
    rate = 0.9 * request.saturated_rps(PAIR)
    shares, all_of_it = (one.shares(PAIR, rate)[""] for one in (trial, replace(trial, warmup=0)))
    assert shares < all_of_it


def test_requests_at_the_moment_at_which_the_warm_up_ends_are_counted_once() -> None:
    sample = tuple(Job(float(at // 4), 10, 10) for at in range(12))

    def kept(placement: Placement, jobs: Sequence[Job]) -> list[JobResult]:
        return [JobResult(job, 0.0, 0.0, job.at_s) for job in jobs]

    trial = Trial((sample,), {"": Slo(0.5, 1.0, 1.0)}, kept, warmup=6)
    assert trial.counted() == {"": 8} and trial.shares(PAIR, 3.0) == {"": 1.0}


def test_what_limits_is_the_busiest_where_nothing_more_helps() -> None:
    answer = solve_placement(question())
    idle = (
        ResourceUse("prefill", 0.2, 0.0),
        ResourceUse("decode", 0.9, 0.0),
        ResourceUse("link", 0.3, -0.02),
        ResourceUse("memory", None, 0.0),
    )
    assert replace(answer, uses=idle).binding.resource == "decode"
    ragged = (
        ResourceUse("prefill", 0.2, 0.0),
        ResourceUse("decode", 0.5, 0.0),
        ResourceUse("link", 0.9, -0.02),
    )
    assert replace(answer, uses=ragged).binding.resource == "link"
    assert replace(answer, uses=(*idle, ResourceUse("memory", None, 0.04))).binding.resource == "memory"
