"""Decisions: the cheapest fleet within the budget, the way to it, and reasons to stay."""

from __future__ import annotations

import random

import pytest

from planner.replan.attainment_cache import AttainmentCache, FleetSize
from planner.replan.decide import (
    DRAINING,
    READY,
    STARTING,
    SWITCHING,
    FleetDecision,
    FleetSituation,
    FleetWorker,
    Flip,
    ReplanPolicy,
    Start,
    Stop,
    count_fleet,
    decide_fleet,
)
from planner.replan.traffic_windows import LengthMix
from planner.types import BOTH, DECODE, PREFILL
from tests.unit.planner.replan.closed_form import Rates
from tests.unit.planner.replan.length_mixes import LONG, POLICY, SHORT


def ready_workers(prefill: int, decode: int, both: int = 0) -> tuple[FleetWorker, ...]:
    counts = {PREFILL: prefill, DECODE: decode, BOTH: both}
    return tuple(FleetWorker(f"{role}-{n}", role) for role, count in counts.items() for n in range(count))


def at(
    workers: tuple[FleetWorker, ...], mix: LengthMix, rate: float, busiest: float = 0.0, **more: object
) -> FleetSituation:
    return FleetSituation(100.0, workers, mix, rate, max(rate, busiest), **more)  # type: ignore[arg-type]


def decided(
    situation: FleetSituation, policy: ReplanPolicy = POLICY, rates: Rates | None = None
) -> FleetDecision:
    return decide_fleet(situation, policy, AttainmentCache(rates or Rates()))


def test_a_fleet_that_serves_at_the_least_cost_stays() -> None:
    decision = decided(at(ready_workers(1, 3), SHORT, 4.0))
    assert decision.actions == ()
    assert decision.target == FleetSize(1, 3)
    assert "stays" in decision.reason


def test_other_lengths_switch_workers_at_once() -> None:
    decision = decided(at(ready_workers(1, 4), LONG, 3.1), ReplanPolicy(budget=5, floor=5))
    assert decision.target == FleetSize(4, 1)
    assert decision.actions == tuple(Flip(f"decode-{n}", PREFILL) for n in range(3))


def test_the_least_loaded_switch_and_barred_ones_do_not() -> None:
    workers = tuple(
        FleetWorker(name, DECODE, load=load) for name, load in (("a", 3.0), ("b", 1.0), ("c", 2.0))
    )
    situation = at((FleetWorker("p", PREFILL), *workers), LONG, 1.5, barred=("b",))
    assert decided(situation, ReplanPolicy(budget=4, floor=4)).actions == (Flip("c", PREFILL),)


def test_one_of_each_role_goes_on_serving() -> None:
    """The only ready decode worker is not switched, even if reading needs all."""
    workers = (FleetWorker("p", PREFILL), FleetWorker("d", DECODE), FleetWorker("e", DECODE, STARTING))
    decision = decided(at(workers, LONG, 3.0), ReplanPolicy(budget=3, floor=3))
    assert not any(isinstance(action, Flip) for action in decision.actions)
    assert all(fleet.can_serve for fleet in [decision.target])


def test_more_traffic_starts_workers_within_the_budget() -> None:
    decision = decided(at(ready_workers(1, 2), SHORT, 7.0))
    assert decision.target == FleetSize(1, 5)
    assert decision.actions == (Start(DECODE, 3),)
    small = decided(at(ready_workers(1, 2), SHORT, 70.0), ReplanPolicy(budget=5))
    assert small.target == FleetSize(1, 4)
    assert small.actions == (Start(DECODE, 2),)


def test_devices_that_still_drain_leave_no_room_for_others() -> None:
    workers = (
        *ready_workers(1, 2),
        FleetWorker("old-1", DECODE, DRAINING),
        FleetWorker("old-2", DECODE, DRAINING),
    )
    decision = decided(at(workers, SHORT, 7.0), ReplanPolicy(budget=6))
    assert decision.target == FleetSize(1, 5)
    assert decision.actions == (Start(DECODE, 1),)


def test_less_traffic_stops_workers_but_not_before_it_is_sure() -> None:
    quiet = at(ready_workers(2, 5), SHORT, 1.0)
    decision = decided(quiet)
    assert decision.target == FleetSize(1, 1)
    assert {type(action) for action in decision.actions} == {Stop}
    assert decided(at(ready_workers(2, 5), SHORT, 1.0, busiest=7.0)).target == FleetSize(1, 5)
    assert decided(at(ready_workers(2, 5), SHORT, 1.0, calm=False)).actions == ()
    assert decided(quiet, ReplanPolicy(budget=8, floor=7)).actions == ()


def test_a_worker_that_is_starting_is_stopped_first_and_counted_as_there() -> None:
    workers = (*ready_workers(1, 2), FleetWorker("new", DECODE, STARTING))
    assert decided(at(workers, SHORT, 4.0)).actions == ()
    assert decided(at(workers, SHORT, 2.0)).actions == (Stop("new"),)


def test_a_fleet_beyond_the_budget_shrinks_whatever_it_costs() -> None:
    decision = decided(at(ready_workers(2, 6), SHORT, 9.0, calm=False), ReplanPolicy(budget=4))
    assert POLICY.held(decision.target) <= 4
    assert sum(isinstance(action, Stop) for action in decision.actions) == 4


def test_small_savings_are_no_reason_to_move() -> None:
    """From 4 + 4 to 3 + 5 would serve a little better: less than the margin."""
    rates = Rates(write=100.0)
    situation = at(ready_workers(4, 4), SHORT, 6.4)
    stay = decided(situation, ReplanPolicy(budget=8, floor=8, margin=1e9), rates)
    assert stay.actions == ()
    move = decided(situation, ReplanPolicy(budget=8, floor=8, margin=0.0), rates)
    assert move.actions != ()


def test_workers_of_unequal_size_are_not_switched() -> None:
    policy = ReplanPolicy(budget=8, devices={PREFILL: 2, DECODE: 1})
    decision = decided(at(ready_workers(1, 5), LONG, 2.5), policy)
    assert decision.target == FleetSize(3, 1)
    assert not any(isinstance(action, Flip) for action in decision.actions)
    assert [type(action) for action in decision.actions] == [Stop] * 4  # starts wait until these are gone


def test_colocated_fleets_grow_and_shrink() -> None:
    assert decided(at(ready_workers(0, 0, 2), SHORT, 4.0)).actions == (Start(BOTH, 1),)
    assert decided(at(ready_workers(0, 0, 4), SHORT, 1.0)).target == FleetSize(both=1)


def test_the_switch_is_a_part_of_the_price() -> None:
    """Switching costs seconds and starting minutes of lost requests: where either would do, workers switch."""
    decision = decided(at(ready_workers(4, 1), SHORT, 4.0))
    assert Flip("prefill-0", DECODE) in decision.actions
    assert not any(isinstance(action, Start) for action in decision.actions)


def test_no_traffic_needs_one_of_each() -> None:
    assert decided(at(ready_workers(3, 3), SHORT, 0.0)).target == FleetSize(1, 1)


@pytest.mark.parametrize("seed", range(40))
def test_promises_that_hold_for_every_decision(seed: int) -> None:
    draw = random.Random(seed)
    workers = tuple(
        FleetWorker(f"{role}-{n}", role, draw.choice((READY, READY, READY, SWITCHING, STARTING, DRAINING)))
        for role, most in ((PREFILL, 4), (DECODE, 5))
        for n in range(draw.randint(1, most))
    )
    workers += (FleetWorker("p", PREFILL), FleetWorker("d", DECODE))
    policy = ReplanPolicy(budget=draw.randint(len(workers), 14))
    decision = decided(at(workers, draw.choice((SHORT, LONG)), draw.uniform(0.2, 12.0)), policy)
    started = sum(action.count for action in decision.actions if isinstance(action, Start))
    assert len(workers) + started <= policy.budget
    touched = [action.worker for action in decision.actions if not isinstance(action, Start)]
    assert len(touched) == len(set(touched))
    ready = [w for w in workers if w.state == READY and w.name not in touched]
    assert decision.target.can_serve
    assert {w.role for w in ready} == {PREFILL, DECODE}, "each role goes on"
    assert set(touched) <= {w.name for w in workers if w.state in (READY, STARTING)}


def test_an_evaluator_is_not_asked_what_follows() -> None:
    rates = Rates()
    known = AttainmentCache(rates)
    known.set_mix(SHORT, 1.0)
    assert known.reaches_target(FleetSize(1, 3), 4.0, 0.9)
    assert known.reaches_target(FleetSize(2, 3), 3.0, 0.9)
    assert not known.reaches_target(FleetSize(1, 1), 4.0, 0.9)
    assert not known.reaches_target(FleetSize(1, 1), 9.0, 0.9)
    assert rates.asked == [(FleetSize(1, 3), 4.0), (FleetSize(1, 1), 4.0)]
    assert [answer.fleet for answer in known.take_fresh()] == [FleetSize(1, 3), FleetSize(1, 1)]
    assert known.take_fresh() == ()
    known.set_mix(LONG, 1.0)
    assert not known.reaches_target(FleetSize(1, 3), 4.0, 0.9)
    assert known.attainment(FleetSize(0, 3), 4.0, 0.9) == 0.0


def test_fleets_are_counted_by_state() -> None:
    workers = (*ready_workers(1, 2), FleetWorker("x", PREFILL, DRAINING))
    assert count_fleet(workers, READY) == FleetSize(1, 2)
    assert count_fleet(workers, READY, DRAINING) == FleetSize(2, 2)
    assert str(FleetSize(1, 2)) == "1 × prefill + 2 × decode"
    assert str(FleetSize()) == "nothing"
