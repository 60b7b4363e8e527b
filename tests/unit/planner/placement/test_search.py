"""The search finds what measuring everything finds, and its bounds are bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.slo import Slo
from planner.placement.bounds import lowest_bound, rate_bounds
from planner.placement.enlarged import enlarge_resource
from planner.placement.problem import Problem
from planner.placement.search import (
    MAX_RUNG,
    MIN_RUNG,
    RUNG_RATIO,
    SearchResult,
    climb_ladder,
    rung_of,
    search_units,
)
from planner.placement.trial import Trial, overall_attainment, speed_up_jobs
from planner.placement.validate import product_limits
from planner.types import InstancePool, Job, JobResult, Parallelism, Placement
from planner.workload.workload import WorkloadMix
from tests.unit.planner.small_problems import CHAT, profile, question

UNIT = Placement((InstancePool("both", Parallelism()),), "none")
QUESTIONS = {
    "balanced": question(),
    "tight ttft": question(slos={"": Slo(0.06, 0.1, 0.9)}),
    "tight tpot": question(slos={"": Slo(1.0, 0.008, 0.9)}),
    "little memory": question(measured=profile(rooms=2000)),
    "bursty": question(cv=3.0),
    "cut": question(limits=product_limits([Slo(0.2, 0.03)], 256)),
    "cut where TTFT is tight": question(
        limits=product_limits([Slo(0.06, 0.1)]), slos={"": Slo(0.06, 0.1, 0.9)}
    ),
    "most of them": question(slos={"": Slo(0.2, 0.03, 0.99)}),
    "two kinds": question(
        source=WorkloadMix([("a", 1.0, CHAT, Slo()), ("b", 1.0, CHAT, Slo())]),
        slos={"a": Slo(0.1, 0.05, 0.8), "b": Slo(0.5, 0.015, 0.95)},
    ),
}


@cache
def measured(name: str) -> SearchResult:
    """Every unit's goodput, without a bound."""
    request = QUESTIONS[name]
    return search_units(
        pair_or_single(request), request.trial, lambda unit: {}, request.weight, exhaustive=True
    )


def pair_or_single(request: Problem) -> list[Placement]:
    return [*request.units("low"), *request.units("colocated")]


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "little memory"])
def test_dropping_loses_nothing(name: str) -> None:
    request = QUESTIONS[
        name
    ]  # with little memory attainment does not fall steadily, and either search stops somewhere
    units = pair_or_single(request)
    pruned = search_units(units, request.trial, request.bound, request.weight, near=0.05)
    every = measured(name)
    assert pruned.best is not None and every.best is not None
    near = [one for one in every.scored if one.rung >= every.best.rung - 3]
    assert list(pruned.scored) == near  # the best, and all within 5 % of it
    assert sum(pruned.dropped.values()) + len(pruned.scored) + len(pruned.impossible) == len(units)


@pytest.mark.parametrize("name", QUESTIONS)
def test_nothing_exceeds_its_bound(name: str) -> None:
    request = QUESTIONS[name]
    units = pair_or_single(request)
    every = measured(name)
    for one in every.scored:
        assert (
            rung_of(
                lowest_bound(rate_bounds(request.trial(one.placement), request.site, one.placement))
                / one.weight
            )
            >= one.rung
        )
    found = {one.placement for one in every.scored}
    for unit in units:
        if lowest_bound(request.bound(unit)) <= 0.0:
            assert unit not in found  # what a bound calls impossible passes at no rate


def test_a_link_bounds_the_rate() -> None:
    """The KV of a prompt on the link, against the link's bandwidth: pairs on a slow link carry that and no more."""
    request = question(slos={"": Slo(5.0, 1.0, 0.9)}, requests=200)
    unit = next(request.units("low"))
    slow = enlarge_resource(request.site, "link", 1e-4)
    trial = request.again(request.trial(unit), slow)
    prompt = sum(job.prompt for job in trial.samples[0]) / len(trial.samples[0])
    cap = slow.link(unit).bytes_per_s / (prompt * slow.token_bytes)
    found = rate_bounds(trial, slow, unit)
    assert min(found, key=lambda name: found[name]) == "link" and found["link"] < 3 * cap
    rung = climb_ladder(trial, unit, 1.0, MIN_RUNG, MAX_RUNG, rung_of(cap))
    assert rung is not None and cap / 2 < RUNG_RATIO**rung <= found["link"] * RUNG_RATIO


@given(st.integers(-60, 60), st.integers(-60, 60), st.integers(-80, 0), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_climbing_ends_at_the_highest_rung_that_passes(
    threshold: int, guess: int, floor: int, top: int
) -> None:
    tried = []

    class Steps(Trial):
        def passes(self, placement: Placement, rate: float) -> bool:
            tried.append(rate)
            return bool(rate <= RUNG_RATIO ** (threshold + 0.5))

    trial = Steps(((),), {}, lambda placement, jobs: [])
    expected = None if threshold < floor else min(threshold, top)
    assert climb_ladder(trial, UNIT, 1.0, floor, top, guess) == expected
    assert len(tried) <= 20


def test_rungs_are_rates() -> None:
    assert [rung_of(RUNG_RATIO**rung) for rung in (-300, 0, 7)] == [-300, 0, 7]
    assert rung_of(0.0) < MIN_RUNG and rung_of(math.inf) == MAX_RUNG


def alternating(placement: Placement, jobs: Sequence[Job]) -> list[JobResult]:
    """Every other request is late."""
    return [JobResult(job, float(index % 2), 0.0, job.at_s) for index, job in enumerate(jobs)]


@pytest.mark.parametrize(("attainment", "expected"), [(0.5, True), (0.51, False)])
def test_attainment_counts_all_samples_together(attainment: float, expected: bool) -> None:
    sample = tuple(Job(float(at), 10, 10) for at in range(10))
    trial = Trial((sample, sample), {"": Slo(0.5, 1.0, attainment)}, alternating)
    assert trial.shares(UNIT, 2.0) == {"": 0.5}
    assert trial.passes(UNIT, 2.0) is expected
    assert overall_attainment(trial.shares(UNIT, 2.0), trial.counted()) == 0.5


def test_a_hopeless_run_ends_early() -> None:
    sample = tuple(Job(float(at), 10, 10) for at in range(10))
    trial = Trial((sample,) * 5, {"": Slo(0.5, 1.0, 0.9)}, alternating)
    assert not trial.passes(UNIT, 1.0)
    assert trial.effort.runs == 2  # ten of fifty have missed, and five are allowed to


def test_the_warm_up_is_served_and_not_counted() -> None:
    sample = tuple(Job(float(at), 10, 10) for at in range(10))

    def cold(placement: Placement, jobs: Sequence[Job]) -> list[JobResult]:
        return [JobResult(job, 1.0 if index < 4 else 0.0, 0.0, job.at_s) for index, job in enumerate(jobs)]

    trial = Trial((sample,), {"": Slo(0.5, 1.0, 1.0)}, cold)
    assert not trial.passes(UNIT, 3.0) and replace(trial, warmup=4).passes(UNIT, 3.0)


def test_a_rate_scales_the_moments_and_nothing_else() -> None:
    jobs = [Job(0.0, 5, 6), Job(2.0, 7, 8)]
    assert speed_up_jobs(jobs, 4.0) == [Job(0.0, 5, 6), Job(0.5, 7, 8)]
