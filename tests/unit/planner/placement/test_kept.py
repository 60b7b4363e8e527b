"""Plans for requests that evict KV: no bound is too low, and plans are verified with what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diptych.errors import ConfigError
from planner.costs.kv.eviction import DecidingCost
from planner.placement.bounds import lowest_bound, rate_bounds
from planner.placement.candidates import make_pair
from planner.placement.plan_file import load_plan, save_plan
from planner.placement.problem import Problem
from planner.placement.solve import solve_placement
from planner.replan.attainment_cache import FleetSize
from planner.replan.evaluate import FleetHardware, SimulatedEvaluator
from planner.replan.traffic_windows import TrafficWindows
from planner.report.explain import make_plan_file
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    InstancePool,
    Job,
    KvClassWork,
    KvKeep,
    Parallelism,
    Placement,
)
from tests.unit.planner.small_problems import profile, question

SPLIT = Parallelism()
ONE = Placement((InstancePool(BOTH, SPLIT),), "none")
PAIR = make_pair(SPLIT, SPLIT, "high", 1, "made", "made")
KEEP = KvKeep(0.95, 0.25, 1e-6, 1e-6, KvClassWork(context=0.4))


def asked(keep: KvKeep | None = KEEP, **more: Any) -> Problem:
    return question(measured=profile(rooms=more.pop("rooms", 20_000)), keep=keep, **more)


def test_bytes_and_room_are_those_of_what_is_kept() -> None:
    site, whole, job = asked().site, asked(None).site, Job(0.0, 1000, 5)
    assert whole.kv_bytes(job) == 1000 * whole.token_bytes
    assert site.kv_bytes(job) == 5 * 64 * site.token_bytes, "259 tokens of 1000, in whole chunks"
    assert (site.kv_size(job), whole.kv_size(job)) == (0.25, 1.0)
    assert isinstance(site.cost(ONE.pools[0]), DecidingCost)


@pytest.mark.parametrize("placement", [ONE, PAIR], ids=str)
def test_no_bound_is_below_what_the_search_s_simulator_serves(placement: Placement) -> None:
    for keep in (KEEP, replace(KEEP, share=0.9)):
        problem = asked(keep, rooms=6_000)
        trial = problem.trial(placement)
        bound = lowest_bound(rate_bounds(trial, problem.site, placement))
        assert bound > 0.0 and not trial.passes(placement, 1.02 * bound)


def test_memory_binds_later_with_eviction() -> None:
    whole, kept = (
        rate_bounds(problem.trial(ONE), problem.site, ONE)["kv"]
        for problem in (asked(keep, rooms=2_500, requests=1500) for keep in (None, KEEP))
    )
    assert kept > 2 * whole


def test_a_plan_is_verified_with_eviction_and_names_the_threshold(tmp_path: Any) -> None:
    answer = solve_placement(asked(per_node=2, families=("disaggregated",), verified=True, rooms=4_000))
    file = make_plan_file(answer, "small")
    assert (
        file.kv_keep == 0.95
        and answer.best_candidate.validation is not None
        and answer.best_candidate.goodput_rps > 0
    )
    save_plan(tmp_path / "plan.json", file)
    assert load_plan(tmp_path / "plan.json") == file
    text = (tmp_path / "plan.json").read_text()
    for wrong in ("0.0", "1.5"):
        (tmp_path / "plan.json").write_text(text.replace('"kv_keep": 0.95', f'"kv_keep": {wrong}'))
        with pytest.raises(ConfigError, match="not a plan"):
            load_plan(tmp_path / "plan.json")


def test_an_instance_needs_room_for_a_ring_and_a_map() -> None:
    """Workers refuse a request that evicts if its tokens just fit."""
    longest = asked().longest
    for rooms, keep, fits in ((longest, None, True), (longest, KEEP, False), (longest + 128, KEEP, True)):
        assert asked(keep, rooms=rooms).fits(ONE.pools[0]) is fits


def test_a_fleet_is_estimated_with_what_is_kept() -> None:
    made = profile(rooms=1)
    splits = {PREFILL: SPLIT, DECODE: SPLIT, BOTH: SPLIT}

    def fleet(keep: KvKeep | None) -> SimulatedEvaluator:
        plain = made.cost(SPLIT)
        cost = plain if keep is None else DecidingCost(plain, keep)
        hardware = FleetHardware(
            splits, dict.fromkeys(splits, cost), dict.fromkeys(splits, 2_000.0), keep=keep
        )
        return SimulatedEvaluator(hardware, {"": asked().slos[""]})

    windows = TrafficWindows(1.0, 10.0)
    for number in range(50):
        windows.arrived(0.5 + 0.001 * number, 400)
        windows.ended(0.6 + 0.001 * number, 400, 100)
    windows.close(1.0)
    mix, size = windows.traffic(0.0, 1.0).mix(), FleetSize(2, 1)
    assert fleet(KEEP).overload(size, mix, 4.0) < fleet(None).overload(size, mix, 4.0)
    assert fleet(KEEP).attainment(size, mix, 4.0, 1.0) > fleet(None).attainment(size, mix, 4.0, 1.0)
