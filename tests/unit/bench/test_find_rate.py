"""S12, S13 and S20 of the acceptance list: the search for a rate, and what a goodput says of itself.

`find_rate` alone, and as `diptych bench --search` uses it (`services.bench.rate_search.GoodputSearch`), here
over a queue whose knee is known instead of a server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.attainment import joint_attainment
from planner.placement.trial import Trial
from planner.types import InstancePool, Job, JobResult, Parallelism, Placement
from planner.workload.workload import synthetic_workload
from services.bench.goodput import GoodputEstimate, find_rate, mean_interval
from services.bench.rate_search import GoodputSearch

SLO = Slo(ttft_s=1.0, tpot_s=0.1, attainment=0.9)
SLOS = {"": SLO}


def queue(rate: float, seed: int, n: int, work_s: float = 0.2) -> Iterator[JobResult]:
    """One server, first come first served, `work_s` for each request: M/D/1."""
    free_s = 0.0
    for job in synthetic_workload("humaneval").sample(n, rate, seed):
        free_s = max(free_s, job.at_s) + work_s
        yield JobResult(job, free_s - job.at_s, 0.05, free_s + 0.05 * (job.output - 1))


def goodput(seeds: Sequence[int], n: int, warmup: int = 0, width: float = 0.05) -> GoodputEstimate:
    """Of that server, by runs of `n` requests, of which the first `warmup` do not count."""

    def attained(rate: float, seed: int) -> float:
        return joint_attainment(list(queue(rate, seed, n))[warmup:], SLOS)

    return GoodputSearch(attained, SLO.attainment, width).find_goodput(
        seeds, 1.0, 10.0, lambda rate: (n, warmup)
    )


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
    found = goodput((1, 2, 3), 400, warmup=50, width=0.1)
    assert (found.n, found.warmup, found.seeds) == (400, 50, (1, 2, 3))
    assert len(found.rates) == len(found.found) == 3
    low, high = found.interval
    assert low <= found.rate <= high and high - low < 2.0
    assert 3.5 < found.rate < 5.0  # the server's own limit is 5 a second
    assert goodput((1,), 400, width=0.1).interval == (-math.inf, math.inf)


def test_short_runs_promise_more_than_long_ones_keep() -> None:
    assert goodput((1, 2, 3, 4), 30).rate > 1.1 * goodput((1, 2, 3, 4), 3000).rate


def test_the_interval_is_students() -> None:
    assert mean_interval([1.0, 3.0]) == pytest.approx((2.0 - 12.706, 2.0 + 12.706))
    assert mean_interval([2.0] * 30) == (2.0, 2.0)


# ---- S12: two marginal objectives are not a joint one


def test_a_rate_found_is_kept_jointly_on_a_fresh_seed() -> None:
    n = 6000
    found = goodput((1, 2), n, warmup=100)
    assert joint_attainment(queue(found.rate, 99, 4 * n), SLOS) >= SLO.attainment - 0.02


def make_trial(kinds: str, kept: str, slos: dict[str, Slo]) -> Trial:
    """A trial of one request a second: of which kinds, and which of them keep their objectives ("1")."""
    jobs = tuple(Job(float(at), 1, 2, kind) for at, kind in enumerate(kinds))

    def run(placement: Placement, asked: Sequence[Job]) -> list[JobResult]:
        return [
            JobResult(job, 0.5 if well == "1" else 2.0, 0.05, 0.0)
            for job, well in zip(asked, kept, strict=True)
        ]

    return Trial((jobs,), slos, run)


@pytest.mark.parametrize(
    ("kinds", "kept", "passes"),
    [("abb", "110", True), ("abba", "1100", False), ("abb", "100", False), ("bb", "10", True)],
)
def test_the_kind_that_is_worst_off_decides(kinds: str, kept: str, passes: bool) -> None:
    slos = {"a": Slo(1.0, 1.0, 0.9), "b": Slo(1.0, 1.0, 0.5)}
    assert (
        make_trial(kinds, kept, slos).passes(Placement((InstancePool("both", Parallelism()),)), 1.0) is passes
    )


def test_attainment_is_joint_not_two_quantiles() -> None:
    """90 % keep the one objective, 90 % the other, 80 % both."""
    late = [JobResult(Job(float(i), 1, 2), 2.0 if i % 10 == 0 else 0.5, 0.05, 0.0) for i in range(100)]
    slow = [JobResult(one.job, one.ttft_s, 0.5 if i % 10 == 5 else 0.05, 0.0) for i, one in enumerate(late)]
    assert joint_attainment(late, SLOS) == pytest.approx(0.9)
    assert joint_attainment(slow, SLOS) == pytest.approx(0.8)
