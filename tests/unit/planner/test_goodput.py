"""S12, S13 and S20 of the acceptance list: the search for a rate, and what a goodput says of itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from diptych.errors import ConfigError
from planner.goodput import find_rate, goodput, margin, spread
from planner.tally import joint
from planner.terms import Job, Served, Slo
from planner.workload import Workload, synthetic

SLO = Slo(ttft_s=1.0, tpot_s=0.1, attainment=0.9)
SLOS = {"": SLO}


def queue(workload: Workload, rate: float, seed: int, n: int, work_s: float = 0.2) -> Iterator[Served]:
    """One server, first come first served, `work_s` for each request: M/D/1."""
    free_s = 0.0
    for job in workload.sample(n, rate, seed):
        free_s = max(free_s, job.at_s) + work_s
        yield Served(job, free_s - job.at_s, 0.05, free_s + 0.05 * (job.output - 1))


# ---- S13


@pytest.mark.parametrize("knee", [0.3, 1.0, 7.77, 63.2])
def test_the_bracket_is_as_narrow_as_asked_and_holds_the_knee(knee: float) -> None:
    found = find_rate(lambda rate: float(rate <= knee), 0.9, width=0.25, highest=100.0)
    assert found.rate == found.low <= knee < found.high
    assert found.high - found.low <= 0.25
    good = [rate for rate, attained in found.tried if attained >= 0.9]
    assert max(good, default=0.0) == found.low
    assert len(found.tried) <= 2 * math.log2(knee / 0.25 + 2) + 2


@pytest.mark.parametrize("highest", [8.0, 13.7, 100.0, 5000.0])
def test_the_highest_rate_allowed_does_not_matter_once_above(highest: float) -> None:
    found = find_rate(lambda rate: 1.0 - rate / 70.0, 0.9, width=0.125, highest=highest)
    assert found.rate == 7.0


def test_the_highest_rate_allowed_bounds_what_is_found() -> None:
    found = find_rate(lambda rate: 1.0, 0.9, width=0.25, highest=3.1)
    assert (found.rate, found.high) == (3.0, math.inf)
    assert find_rate(lambda rate: 0.0, 0.9, width=0.25, highest=3.1).rate == 0.0


def test_noise_never_widens_the_bracket() -> None:
    noisy = {0.5: 1.0, 1.0: 1.0, 2.0: 0.0, 1.5: 1.0}
    found = find_rate(lambda rate: noisy[rate], 0.9, width=0.5, highest=100.0)
    assert (found.low, found.high) == (1.5, 2.0)
    failed = [rate for rate, attained in found.tried if attained < 0.9]
    assert all(rate < min(failed, default=math.inf) or rate in failed for rate, _ in found.tried)


@pytest.mark.parametrize(("width", "highest"), [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_a_senseless_search_is_refused(width: float, highest: float) -> None:
    with pytest.raises(ConfigError, match="searched"):
        find_rate(lambda rate: 1.0, 0.9, width, highest)


# ---- S20


def test_a_goodput_carries_its_horizon_and_its_doubt() -> None:
    workload = synthetic("humaneval")
    n, seeds = 400, (1, 2, 3)

    def run(rate: float, seed: int) -> Iterator[Served]:
        return queue(workload, rate, seed, n)

    found = goodput(run, SLOS, seeds, n, warmup=50, width=0.1, highest=10.0)
    assert (found.n, found.warmup, found.seeds) == (n, 50, seeds)
    assert len(found.rates) == len(found.found) == 3
    low, high = found.interval
    assert low <= found.rate <= high and high - low < 2.0
    assert 3.5 < found.rate < 5.0  # the server's own limit is 5 a second
    alone = goodput(run, SLOS, seeds[:1], n, width=0.1, highest=10.0)
    assert alone.interval == (-math.inf, math.inf)


def test_short_runs_promise_more_than_long_ones_keep() -> None:
    workload = synthetic("humaneval")

    def found(n: int) -> float:
        def run(rate: float, seed: int) -> Iterator[Served]:
            return queue(workload, rate, seed, n)

        return goodput(run, SLOS, (1, 2, 3, 4), n, width=0.05, highest=10.0).rate

    assert found(30) > 1.1 * found(3000)


def test_no_seeds_or_nothing_but_warm_up_is_refused() -> None:
    for seeds, warmup in (((), 0), ((1,), 10), ((1,), -1)):
        with pytest.raises(ConfigError, match="goodput"):
            goodput(lambda rate, seed: [], SLOS, seeds, 10, warmup, width=0.1, highest=1.0)


def test_the_interval_is_students() -> None:
    assert spread([1.0, 3.0]) == pytest.approx((2.0 - 12.706, 2.0 + 12.706))
    assert spread([2.0] * 30) == (2.0, 2.0)


# ---- S12: two marginal objectives are not a joint one


def test_the_margin_is_joint_not_two_quantiles() -> None:
    late = [Served(Job(float(i), 1, 2), 2.0 if i % 10 == 0 else 0.5, 0.05, 0.0) for i in range(100)]
    slow = [Served(one.job, one.ttft_s, 0.5 if i % 10 == 5 else 0.05, 0.0) for i, one in enumerate(late)]
    assert margin(late, SLOS, 100) == pytest.approx(0.0)
    assert margin(slow, SLOS, 100) < 0.0  # 90 % keep the one, 90 % the other, 80 % both
    assert joint(slow, SLOS) == pytest.approx(0.8)


def test_a_rate_found_is_kept_jointly_on_a_fresh_seed() -> None:
    workload = synthetic("humaneval")
    n = 6000

    def run(rate: float, seed: int) -> Iterator[Served]:
        return queue(workload, rate, seed, n)

    found = goodput(run, SLOS, (1, 2), n, warmup=100, width=0.05, highest=10.0)
    again = joint(queue(workload, found.rate, 99, 4 * n), SLOS)
    assert again >= SLO.attainment - 0.02


def test_the_worst_kind_decides() -> None:
    slos = {"a": Slo(1.0, 1.0, 0.9), "b": Slo(1.0, 1.0, 0.5)}
    told = [
        Served(Job(0.0, 1, 2, kind), 0.5 if kept else 2.0, 0.1, 0.0)
        for kind, kept in (("a", 1), ("b", 1), ("b", 0))
    ]
    assert margin(told, slos, 3) == pytest.approx(0.0)
    assert margin([*told, Served(Job(0.0, 1, 2, "a"), 2.0, 0.1, 0.0)], slos, 4) < 0.0


def test_a_hopeless_run_is_not_read_to_its_end() -> None:
    read = 0

    def run() -> Iterator[Served]:
        nonlocal read
        for number in range(1000):
            read += 1
            yield Served(Job(float(number), 1, 2), 9.0, 0.1, 0.0)

    assert margin(run(), SLOS, 1000) < 0.0
    assert read == 101
    assert margin([], SLOS, 10) < 0.0
    assert margin(run(), SLOS, 1000, after_s=2000.0) < 0.0
