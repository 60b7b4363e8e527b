"""The last word: what the product's own decisions are asked about a placement, and what becomes of their answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner.placement.validate
from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.costs.profile import Overheads
from planner.placement import candidates
from planner.placement.enlarged import resource_uses
from planner.placement.plan_file import load_plan, save_plan
from planner.placement.problem import Problem
from planner.placement.solve import Solution, solve_placement
from planner.placement.validate import (
    LONGER_RUN,
    RATE_STEP,
    STEPS_DOWN,
    _exact_trial,
    confirm_goodput,
    product_limits,
    validate_placement,
    validate_rate,
)
from planner.report.explain import (
    compare_others,
    disaggregation_gain,
    explain_solution,
    make_plan_file,
    solution_headline,
    solution_json,
)
from planner.sim.exact.deployment import SimDeployment
from planner.sim.exact.simulate import simulate_exact
from planner.types import Job, JobResult, Parallelism, Placement
from tests.unit.planner.small_problems import profile, question

ONE = Parallelism()
PAIR = candidates.make_pair(ONE, ONE, "low", 1, "made", "made")
ALONE = candidates.make_colocated(ONE, "made")
HYBRID = candidates.combine_placements((PAIR, ALONE))
SLO = Slo(0.2, 0.03, 0.9)
# Reading takes long and nobody minds long steps: a decode instance that reads as well helps.
READING = question(per_node=2, slos={"": Slo(0.6, 0.5, 0.9)}, measured=profile(prefill=4.0, decode=0.3))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[SimDeployment]:
    """What is simulated by the product's own decisions."""
    seen: list[SimDeployment] = []

    def look(deployment: SimDeployment, jobs: Sequence[Job], *sink: Any) -> Sequence[JobResult]:
        seen.append(deployment)
        return simulate_exact(deployment, jobs, *sink)

    monkeypatch.setattr(planner.placement.validate, "simulate_exact", look)
    return seen


def test_a_hybrid_is_verified_as_what_is_started_of_it(started: list[SimDeployment]) -> None:
    request = question(per_node=3, limits=product_limits([SLO], 512))
    assert validate_rate(request, HYBRID, 1.0, climb=False).local_prefill == "auto"
    (one,) = started
    assert [pool.role for pool in one.placement.pools] == ["prefill", "decode", "decode"]
    assert one.local_prefill == "auto"
    assert [machine.tpot_s for machine in one.instances] == [None, 0.03, 0.03]
    assert {(machine.max_num_batched_tokens, machine.chunked_prefill) for machine in one.instances} == {
        (512, True)
    }


def test_only_prompts_that_are_cut_are_read_within_the_objective(started: list[SimDeployment]) -> None:
    for chunk_tokens, tpot_s in ((512, 0.03), (0, None)):
        validate_rate(question(limits=product_limits([SLO], chunk_tokens)), ALONE, 1.0, climb=False)
        (machine,) = started.pop().instances
        assert (machine.chunked_prefill, machine.tpot_s) == (chunk_tokens > 0, tpot_s)
    validate_rate(question(slos={"": Slo(0.2)}, limits=product_limits([Slo(0.2)])), ALONE, 1.0, climb=False)
    assert started.pop().instances[0].tpot_s is None, "without an objective there is nothing to keep within"


def test_a_validation_is_about_one_rate() -> None:
    request = question()
    high = validate_rate(request, PAIR, 60.0, climb=False)
    assert high.goodput_rps == 0.0 and high.rate_rps == high.fails_rps == 60.0 and high.attainment < 0.9
    found = validate_rate(request, PAIR, 60.0, climb=True)
    assert 0.0 < found.goodput_rps == found.rate_rps and found.attainment >= 0.9
    assert found.fails_rps == pytest.approx(found.goodput_rps * RATE_STEP)
    assert validate_rate(request, PAIR, found.goodput_rps, climb=False).attainment == found.attainment


def test_where_no_rate_is_met_the_lowest_one_tried_is_named() -> None:
    found = validate_rate(question(slos={"": Slo(1e-6, 0.03)}), PAIR, 60.0, climb=True)
    assert (found.goodput_rps, found.rate_rps, found.attainment) == (0.0, 60.0, 0.0)
    assert found.fails_rps == pytest.approx(60.0 * RATE_STEP**-STEPS_DOWN)


def test_a_goodput_is_confirmed_by_a_longer_run() -> None:
    request = question()
    short = validate_rate(request, PAIR, 14.0, climb=True)
    high = replace(short, goodput_rps=2.0 * short.goodput_rps)
    found = confirm_goodput(request, PAIR, high)
    assert found.requests == LONGER_RUN * short.requests
    assert 0.0 < found.goodput_rps < high.goodput_rps and found.attainment >= 0.9
    assert found.fails_rps == pytest.approx(found.goodput_rps * RATE_STEP)
    kept = confirm_goodput(request, PAIR, replace(short, goodput_rps=0.5 * short.goodput_rps))
    assert (kept.goodput_rps, kept.fails_rps) == (0.5 * short.goodput_rps, short.fails_rps)


def test_a_pair_is_tried_with_prompts_read_by_decode_instances_too() -> None:
    plain, found = (
        validate_rate(READING, PAIR, 6.0, climb=True),
        validate_placement(READING, PAIR, 6.0, climb=True),
    )
    assert (plain.local_prefill, found.local_prefill) == ("never", "auto")
    assert found.goodput_rps >= plain.goodput_rps * RATE_STEP
    rate = found.goodput_rps
    assert validate_rate(READING, PAIR, rate, climb=False).goodput_rps == 0.0
    assert validate_placement(READING, PAIR, rate, climb=False).goodput_rps == rate


def test_a_tie_leaves_reading_to_prefill_instances() -> None:
    request = question(per_node=2, slos={"": Slo(0.6, 0.012, 0.9)})
    assert validate_placement(request, PAIR, 5.0, climb=True) == validate_rate(request, PAIR, 5.0, climb=True)
    assert validate_placement(request, ALONE, 5.0, climb=True) == validate_rate(
        request, ALONE, 5.0, climb=True
    )


@cache
def reading() -> Solution:
    return solve_placement(
        replace(
            READING,
            families=("disaggregated",),
            verified=True,
            limits=product_limits([*READING.slos.values()]),
        )
    )


def test_a_plan_says_who_reads_prompts() -> None:
    answer = reading()
    assert answer.best_candidate.local_prefill == make_plan_file(answer, "small").local_prefill == "auto"
    assert "decode instances prefill where that is sooner" in solution_headline(answer)[0]
    assert solution_json(answer)["best"]["local_prefill"] == "auto"


def slow(**more: Any) -> Problem:
    """A question where messages take a time that only the product's own decisions know of."""
    measured = replace(profile(), overheads=Overheads(hop_s=0.06))
    given: dict[str, Any] = {
        "per_node": 2,
        "verified": True,
        "limits": product_limits([SLO]),
        "measured": measured,
    } | more
    return question(**given)


@cache
def slowed() -> Solution:
    return solve_placement(slow())


def test_what_is_promised_is_what_the_product_s_decisions_keep(tmp_path: Path) -> None:
    answer = slowed()
    best, checked = answer.best_candidate, answer.validation
    assert checked is not None and best.fast_result.validation is None
    assert best.goodput_rps == checked.goodput_rps < best.fast_result.goodput_rps
    assert (best.attainment, best.rate_rps) == (checked.attainment, checked.goodput_rps)
    assert best.interval_rps == (checked.goodput_rps, checked.fails_rps)
    assert best.requests == checked.requests == LONGER_RUN * answer.problem.requests
    low, high = best.fast_result.interval_rps
    assert low <= best.fast_result.goodput_rps <= high
    per_hour = best.goodput_rps * best.attainment * 3600.0
    tokens = best.price_per_hour * 1e6 / best.cost_per_million / per_hour
    jobs = answer.problem.samples(answer.problem.requests)[0]
    assert tokens == pytest.approx(sum(job.output for job in jobs) / len(jobs))
    lines = solution_headline(answer)
    assert f"goodput {best.goodput_rps:.3g} requests/s (by the product's" in lines[1]
    assert f"searched: {best.fast_result.goodput_rps:.3g} requests/s" in lines[3]
    save_plan(tmp_path / "plan.json", make_plan_file(answer, "small"))
    predicted = load_plan(tmp_path / "plan.json").predicted
    assert (predicted.goodput_rps, predicted.searched_rps) == (best.goodput_rps, best.fast_result.goodput_rps)
    assert predicted.attainment == checked.attainment and predicted.interval_rps == best.interval_rps
    plain = solution_json(answer)["best"]
    assert plain["verified"]["goodput_rps"] == plain["goodput_rps"] < plain["searched"]["goodput_rps"]


def test_runners_up_are_compared_by_one_simulator() -> None:
    answer = slowed()
    validated = [one for one in (answer.best_candidate, *answer.others) if one.validation]
    assert {one.family for one in validated} == {"colocated", "disaggregated"}
    assert [one.goodput_rps for one in validated] == sorted(
        (one.goodput_rps for one in validated), reverse=True
    )
    best = {one.family: one.per_device_rps for one in reversed(validated)}
    assert disaggregation_gain(answer) == pytest.approx(best["disaggregated"] / best["colocated"])
    searched = [one for one in answer.others if not one.validation]
    lines = compare_others(answer)[1:]
    assert [line.endswith("(as searched)") for line in lines] == [not one.validation for one in answer.others]
    for one, line in zip(answer.others, lines, strict=True):
        base = answer.best_candidate if one.validation else answer.best_candidate.fast_result
        assert f"goodput {one.goodput_rps / base.goodput_rps - 1:+.0%}" in line
    assert searched, "there is one that only the search has seen"


def test_for_a_rate_goodput_is_what_was_asked() -> None:
    answer = solve_placement(slow(per_node=4, rate=5.0, span_s=5.0))
    best, checked = answer.best_candidate, answer.validation
    assert checked is not None and best.goodput_rps == best.rate_rps == checked.goodput_rps == 5.0
    assert best.attainment == checked.attainment >= 0.9 and best.fast_result.goodput_rps > 5.0
    assert "as asked, more was not tried" in solution_headline(answer)[1]
    refuted = [one for one in answer.others if one.validation]
    assert all(one.goodput_rps == 0.0 and one.attainment < 0.9 for one in refuted)
    for one, line in zip(answer.others, compare_others(answer)[1:], strict=True):
        assert ("meet both SLOs at" in line) == bool(one.validation)


def test_what_is_started_of_placements() -> None:
    for placement in (PAIR, ALONE):
        assert candidates.deployed_placement(placement) == placement
        assert candidates.local_prefill_mode(placement) == "never"
    assert candidates.local_prefill_mode(HYBRID) == "auto"
    assert [pool.role for pool in candidates.deployed_placement(HYBRID).pools] == [
        "prefill",
        "decode",
        "decode",
    ]
    assert [pool.role for pool in candidates.with_local_prefill(PAIR).pools] == ["prefill", "both"]
    assert candidates.combine_placements((PAIR, Placement((candidates.colocated_companion(PAIR),)))) == HYBRID


def test_a_run_cut_short_of_its_horizon_promises_no_more_than_is_sustained() -> None:
    """2,000 requests at a rate a third too high end within a minute of waiting: all keep a TTFT of a minute."""
    request = question(per_node=1, span_s=60.0, slos={"": Slo(60.0, 10.0, 0.9)})
    rate = 1.3 * request.sustained_rps(ALONE)
    assert rate * request.horizon_s > 2000 and not request.is_open_ended
    checked = validate_rate(request, ALONE, rate, False)
    assert checked.attainment >= 0.9 and checked.goodput_rps == 0.0


def test_what_is_sustained_counts_decode_instances_that_read() -> None:
    request = replace(READING, slos={"": Slo(math.inf, 0.5, 0.9)})
    alone, helped = (_exact_trial(request, PAIR, 1.0, reads).most_rps(PAIR) for reads in ("never", "auto"))
    assert alone == request.sustained_rps(PAIR) and helped > 1.1 * alone


def test_a_hybrid_needs_three_devices() -> None:
    with pytest.raises(ConfigError) as caught:
        solve_placement(question(per_node=2, families=("hybrid",)))
    assert "take 3 devices" in caught.value.why


def test_what_the_search_has_measured_is_reported_at_its_own_rate() -> None:
    answer = slowed()
    assert answer.best_candidate.fast_result.rate_rps != answer.best_candidate.rate_rps
    fast = answer.best_candidate.fast_result
    uses = resource_uses(answer.problem, fast.placement, fast.searched_rps, fast.rate_rps)
    assert answer.uses == uses
    limits = next(line for line in explain_solution(answer) if line.startswith("what limits it"))
    assert f"at {answer.best_candidate.fast_result.rate_rps:.3g} requests/s, as searched" in limits
