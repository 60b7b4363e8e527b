"""Where one objective is infinite: goodput is what a deployment sustains, however much a finite run lets through."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.placement import candidates
from planner.placement.enlarged import enlarge_resource
from planner.placement.families import FamilySearch
from planner.placement.problem import Problem
from planner.placement.search import RUNG_RATIO
from planner.placement.solve import solve_placement
from planner.placement.trial import speed_up_jobs
from planner.placement.validate import product_limits, validate_rate
from planner.types import DECODE, PREFILL, Parallelism, Placement
from tests.unit.planner.small_problems import question

EITHER = pytest.mark.parametrize(
    "slo", [Slo(math.inf, 0.03, 0.9), Slo(0.2, math.inf, 0.9)], ids=["tpot", "ttft"]
)
PAIR = candidates.make_pair(Parallelism(), Parallelism(), "low", 1, "made", "made")


def asked(slo: Slo, per_node: int = 2, **more: Any) -> Problem:
    """With the product's limits, which say how large a batch may be."""
    given: dict[str, Any] = {"limits": product_limits([slo]), "requests": 80} | more
    return question(per_node=per_node, slos={"": slo}, **given)


@EITHER
def test_goodput_is_at_most_what_is_sustained(slo: Slo) -> None:
    request = asked(slo)
    answer = solve_placement(request)
    for option in (answer.best_candidate, *answer.others):
        most = request.most_rps(option.placement)
        assert 0.0 < option.goodput_rps <= most
        assert option.interval_rps[1] <= most and option.searched_rps <= most
    assert any("one SLO is infinite" in note for note in answer.notes)
    limiting = max(answer.uses, key=lambda use: use.utilisation or 0.0)
    assert limiting.gain > 0.0, "more of what is full is more goodput"
    again = solve_placement(replace(request, verified=True))
    placement, helped = again.best_candidate.placement, again.best_candidate.local_prefill == "auto"
    does = candidates.with_local_prefill(placement) if helped else placement
    assert 0.0 < again.best_candidate.goodput_rps <= request.saturated_rps(does)


@EITHER
@pytest.mark.parametrize("placement", [PAIR, candidates.make_colocated(Parallelism(), "made")])
def test_what_is_called_sustained_is_about_what_comes_out(slo: Slo, placement: Placement) -> None:
    """More is asked for than can be done: what ends in the middle of the run is what is sustained."""
    request = asked(slo, requests=1500)
    (sample,) = request.samples(1500)
    most = request.most_rps(placement)
    served = request.runner(request.site)(placement, speed_up_jobs(sample, 1.5 * most))
    ended = sorted(one.ended_s for one in served)
    assert most == pytest.approx(750 / (ended[1125] - ended[375]), rel=0.1)
    assert most <= request.saturated_rps(placement)


@EITHER
def test_a_rate_gets_as_many_instances_as_sustain_it(slo: Slo) -> None:
    """Without an objective of TPOT one decode instance would pass any run, and so would one reader without TTFT."""
    request = asked(slo, per_node=8, families=("disaggregated",), affinity="high")
    one = request.saturated_rps(Placement(PAIR.pools, "high"))
    best = solve_placement(replace(request, rate=1.8 * one)).best_candidate
    assert request.saturated_rps(best.placement) >= 1.8 * one
    assert best.placement.devices > 2
    with pytest.raises(ConfigError, match="do not carry"):
        solve_placement(replace(request, rate=50.0 * one))


@EITHER
def test_the_last_word_too_knows_what_is_sustained(slo: Slo) -> None:
    request = asked(slo)
    most = request.saturated_rps(PAIR)
    assert validate_rate(request, PAIR, 1.2 * most, climb=False).goodput_rps == 0.0
    assert 0.0 < validate_rate(request, PAIR, 0.7 * most, climb=True).goodput_rps <= most


def test_phases_and_hybrids_are_bounded_too() -> None:
    request = asked(Slo(math.inf, 0.03, 0.9), per_node=3)
    for role, at in ((PREFILL, 0), (DECODE, 1)):
        alone = Placement((PAIR.pools[at],), "high")
        assert alone.pools[0].role == role
        assert not request.trial(alone).passes(alone, 1.01 * request.saturated_rps(alone))
    hybrid = candidates.combine_placements((PAIR, candidates.make_colocated(Parallelism(), "made")))
    assert request.bound(hybrid) == {"sustained": request.saturated_rps(hybrid)}
    for one in FamilySearch(request).finalists():
        assert one.expected_rps <= request.saturated_rps(one.placement) * RUNG_RATIO


def test_with_both_objectives_nothing_is_capped() -> None:
    request = question()
    assert not request.is_open_ended and request.most_rps(PAIR) == math.inf
    assert "sustained" not in request.bound(PAIR)


def test_seats_bound_what_an_instance_writes() -> None:
    slo = Slo(0.2, math.inf, 0.9)
    many, few = (asked(slo, limits=replace(product_limits([slo]), decode_rows=rows)) for rows in (256, 4))
    assert few.saturated_rps(PAIR) < many.saturated_rps(PAIR)
    more = enlarge_resource(few.site, "decode", 2.0)
    assert more.rows == 4
