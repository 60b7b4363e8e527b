"""Where one objective is infinite: goodput is what a deployment sustains, however much a finite run lets through."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from diptych.errors import ConfigError
from planner import candidates
from planner.finalists import Found
from planner.placement import place
from planner.request import Request, enlarged
from planner.search import RATIO
from planner.terms import DECODE, PREFILL, Placement, Slo, Split
from planner.trial import scaled
from planner.verify import limits, verify
from tests.unit.planner.planned import question

EITHER = pytest.mark.parametrize(
    "slo", [Slo(math.inf, 0.03, 0.9), Slo(0.2, math.inf, 0.9)], ids=["tpot", "ttft"]
)
PAIR = candidates.pair(Split(), Split(), "low", 1, "made", "made")


def asked(slo: Slo, per_node: int = 2, **more: Any) -> Request:
    """With the product's limits, which say how large a batch may be."""
    given: dict[str, Any] = {"limits": limits([slo]), "requests": 80} | more
    return question(per_node=per_node, slos={"": slo}, **given)


@EITHER
def test_goodput_is_at_most_what_is_sustained(slo: Slo) -> None:
    request = asked(slo)
    answer = place(request)
    for option in (answer.best, *answer.others):
        most = request.most_rps(option.placement)
        assert 0.0 < option.goodput_rps <= most
        assert option.interval_rps[1] <= most and option.searched_rps <= most
    assert any("one objective is infinite" in note for note in answer.notes)
    limiting = max(answer.uses, key=lambda use: use.utilisation or 0.0)
    assert limiting.gain > 0.0, "more of what is full is more goodput"
    again = place(replace(request, verified=True))
    placement, helped = again.best.placement, again.best.local_prefill == "auto"
    does = candidates.reading(placement) if helped else placement
    assert 0.0 < again.best.goodput_rps <= request.saturated_rps(does)


@EITHER
@pytest.mark.parametrize("placement", [PAIR, candidates.alone(Split(), "made")])
def test_what_is_called_sustained_is_about_what_comes_out(slo: Slo, placement: Placement) -> None:
    """More is asked for than can be done: what ends in the middle of the run is what is sustained."""
    request = asked(slo, requests=1500)
    (sample,) = request.samples(1500)
    most = request.most_rps(placement)
    served = request.runner(request.site)(placement, scaled(sample, 1.5 * most))
    ended = sorted(one.ended_s for one in served)
    assert most == pytest.approx(750 / (ended[1125] - ended[375]), rel=0.1)
    assert most <= request.saturated_rps(placement)


@EITHER
def test_a_rate_gets_as_many_instances_as_sustain_it(slo: Slo) -> None:
    """Without an objective of TPOT one decode instance would pass any run, and so would one reader without TTFT."""
    request = asked(slo, per_node=8, families=("disaggregated",), affinity="high")
    one = request.saturated_rps(Placement(PAIR.pools, "high"))
    best = place(replace(request, rate=1.8 * one)).best
    assert request.saturated_rps(best.placement) >= 1.8 * one
    assert best.placement.devices > 2
    with pytest.raises(ConfigError, match="do not carry"):
        place(replace(request, rate=50.0 * one))


@EITHER
def test_the_last_word_too_knows_what_is_sustained(slo: Slo) -> None:
    request = asked(slo)
    most = request.saturated_rps(PAIR)
    assert verify(request, PAIR, 1.2 * most, climb=False).goodput_rps == 0.0
    assert 0.0 < verify(request, PAIR, 0.7 * most, climb=True).goodput_rps <= most


def test_phases_and_hybrids_are_bounded_too() -> None:
    request = asked(Slo(math.inf, 0.03, 0.9), per_node=3)
    for role, at in ((PREFILL, 0), (DECODE, 1)):
        alone = Placement((PAIR.pools[at],), "high")
        assert alone.pools[0].role == role
        assert not request.trial(alone).passes(alone, 1.01 * request.saturated_rps(alone))
    hybrid = candidates.both((PAIR, candidates.alone(Split(), "made")))
    assert request.bound(hybrid) == {"sustained": request.saturated_rps(hybrid)}
    for one in Found(request).finalists():
        assert one.expected_rps <= request.saturated_rps(one.placement) * RATIO


def test_with_both_objectives_nothing_is_capped() -> None:
    request = question()
    assert not request.open_ended and request.most_rps(PAIR) == math.inf
    assert "sustained" not in request.bound(PAIR)


def test_seats_bound_what_an_instance_writes() -> None:
    slo = Slo(0.2, math.inf, 0.9)
    many, few = (asked(slo, limits=replace(limits([slo]), decode_rows=rows)) for rows in (256, 4))
    assert few.saturated_rps(PAIR) < many.saturated_rps(PAIR)
    more = enlarged(few.site, "decode", 2.0)
    assert more.rows == 4
