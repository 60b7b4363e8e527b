"""Plans for several classes of KV: what is searched, bounded, verified and written, and what cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from diptych.errors import ConfigError
from planner.costs.kv.classes import plan_kv_classes, same_classes
from planner.placement.bounds import lowest_bound, min_tpot_s, min_ttft_s, rate_bounds
from planner.placement.candidates import make_pair
from planner.placement.feasibility import _check_class_rooms
from planner.placement.plan_file import load_plan, save_plan
from planner.placement.problem import Problem
from planner.placement.solve import solve_placement
from planner.placement.validate import validate_rate
from planner.report.explain import make_plan_file
from planner.types import BOTH, InstancePool, Job, KvClassWork, Parallelism, Placement
from planner.workload.kv_mix import KvMixedSource
from tests.unit.planner.small_problems import CHAT, SMALL, profile, question

SPLIT = Parallelism()
ONE = Placement((InstancePool(BOTH, SPLIT),), "none")
PAIR = make_pair(SPLIT, SPLIT, "high", 1, "made", "made")
WORK = KvClassWork(token=1.3, square=1.2, context=0.6)


def asked(text: str = "raw:0.25,int8", shares: tuple[float, float] = (0.5, 0.5), **more: Any) -> Problem:
    """A question whose requests ask for the two classes of `text` by `shares`."""
    measured = replace(profile(rooms=more.pop("rooms", 20_000)), kv_classes={"int8": WORK})
    classes = plan_kv_classes(measured, text)
    mix = {one.name: share for one, share in zip(classes, shares, strict=True)}
    source = KvMixedSource(CHAT, mix)
    return question(measured=measured, source=source, kv_classes=classes, kv_mix=mix, **more)


def test_sizes_and_work_are_those_of_a_request_s_class() -> None:
    problem = asked()
    site, raw, coded = problem.site, Job(0.0, 100, 5, kv_class="raw"), Job(0.0, 100, 5, kv_class="int8")
    # 16 bits and 9 (codes, with scale and minimum for 16 values), of 2 x 8 layers x 4 heads x 16 numbers.
    sizes = 2 * 8 * 4 * 16 * 2, 2 * 8 * 4 * 16 * (8 + 32 / 16) / 8
    assert (site.kv_bytes(raw), site.kv_bytes(coded)) == (100 * sizes[0], 100 * sizes[1])
    (pool,) = ONE.pools
    assert site.room(pool, raw) == 5_000
    assert site.room(pool, coded) == pytest.approx(15_000 * sizes[0] / sizes[1])
    assert site.kv_size(raw) == 1.0 and site.kv_size(coded) == pytest.approx(sizes[1] / sizes[0])
    cost = site.cost(pool)
    assert min_ttft_s(cost, coded, WORK) > min_ttft_s(cost, raw)
    assert min_tpot_s(cost, coded, WORK) < min_tpot_s(cost, raw)


@pytest.mark.parametrize("placement", [ONE, PAIR], ids=str)
def test_no_bound_is_below_what_the_search_s_simulator_serves(placement: Placement) -> None:
    for shares in ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0)):
        problem = asked(shares=shares, rooms=6_000)
        trial = problem.trial(placement)
        bound = lowest_bound(rate_bounds(trial, problem.site, placement))
        assert bound > 0.0 and not trial.passes(placement, 1.02 * bound)


def test_the_kv_bound_counts_bytes() -> None:
    """Where memory is what binds, requests of small KV may come more often."""
    rates = [
        rate_bounds(problem.trial(ONE), problem.site, ONE)["kv"]
        for problem in (
            asked(shares=shares, rooms=2_500, requests=1500) for shares in ((1.0, 0.0), (0.0, 1.0))
        )
    ]
    assert rates[1] > 1.3 * rates[0]


def test_a_plan_is_verified_with_its_classes_and_names_them(tmp_path: Any) -> None:
    problem = asked(per_node=2, families=("disaggregated",), notes=("KV class raw",))
    answer = solve_placement(problem)
    validation = validate_rate(
        problem, answer.best_candidate.placement, 0.8 * answer.best_candidate.goodput_rps, False
    )
    assert validation.goodput_rps > 0
    file = make_plan_file(answer, "small")
    assert file.kv_cache_codec == "raw:0.25,int8:0.75" and file.traffic.kv_mix == {"raw": 0.5, "int8": 0.5}
    save_plan(tmp_path / "plan.json", file)
    assert load_plan(tmp_path / "plan.json") == file
    assert "KV class raw" in answer.notes


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.0, 1.0)])
def test_a_share_too_small_for_one_request_is_named(shares: tuple[float, float]) -> None:
    """Also if no request asks for the class: `diptych serve --plan` would refuse it."""
    with pytest.raises(ConfigError, match="class raw is too small") as caught:
        solve_placement(asked("raw:0.002,int8", shares))
    lines = caught.value.lines()
    assert len(lines) <= 6 and "0.002 of an instance holds" in " ".join(lines)


def test_shares_that_are_advised_for_the_longest_requests_suffice() -> None:
    """Also where instances have no room for a request of full length; if no shares do, that is said."""
    small: dict[str, Any] = {"rooms": 2_500, "per_node": 1}
    with pytest.raises(ConfigError, match="class raw is too small") as caught:
        solve_placement(asked("raw:0.002,int8", **small))
    found = re.search(r"--kv-cache-codec (\S+), or take more devices", caught.value.fix or "")
    assert found is not None and 0.002 < float(found[1].split(",")[0].partition(":")[2]) < 1
    _check_class_rooms(asked(found[1], **small))
    with pytest.raises(ConfigError, match="too small") as caught:
        _check_class_rooms(asked("raw:0.5,int8", **small | {"rooms": 600}))
    assert "take fewer classes, or take more devices" in (caught.value.fix or "")


def test_an_instance_without_room_for_a_request_of_full_length_serves_shorter_ones() -> None:
    """`diptych serve` then needs a shorter `--max-model-len`, which the longest request has to fit into."""
    problem = asked("raw:0.002,int8")
    full, longest = problem.model.max_len, problem.longest_of("raw")
    assert 0 < longest < full
    assert problem.class_need("raw", full) == full and problem.class_need("raw", full - 1) == longest


def test_lists_are_compared_by_what_they_mean() -> None:
    for one, other, same in (
        ("raw:0.25,tq4", "raw:0.25,tq4.s0:0.75", True),
        ("raw:0.25,tq4", "tq4:0.75,raw:0.25", False),
        ("raw:0.25,tq4", "raw:0.3,tq4", False),
        ("raw:0.25,tq4", "raw", False),
        ("raw:0.333,tq4:0.333,int8", "raw:0.333,tq4:0.333,int8:0.334", True),
    ):
        assert same_classes(SMALL, one, other) is same
