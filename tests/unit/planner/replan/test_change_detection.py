"""Change detection: bounds that hold, no alarm on stationary noise, and one soon after a change."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import chain

import pytest

from planner.replan.change_detection import (
    DAY_S,
    BucketSums,
    ChangeDetector,
    TrafficShift,
    attainment_is_short,
    bernoulli_divergence,
    busiest_rate,
    length_changes,
    poisson_surprise,
    rate_changes,
)
from planner.replan.traffic_windows import TrafficBucket, TrafficSummary, TrafficWindows, bin_of
from planner.types import Job
from planner.workload.workload import Workload, synthetic_workload

WINDOW_S, BUCKET_S = 300.0, 10.0


def alarms(
    jobs: Iterator[Job],
    until_s: float,
    window_s: float = WINDOW_S,
    bucket_s: float = BUCKET_S,
    allowed: float = 0.5,
) -> list[TrafficShift]:
    windows = TrafficWindows(bucket_s, 10 * window_s)
    detector = ChangeDetector(window_s, bucket_s, allowed, 0.0)
    found, next_s = [], bucket_s
    for job in jobs:
        while job.at_s >= next_s:
            if shift := detector.check_buckets(windows.close(next_s)):
                found.append(shift)
                detector.anchor(shift.since_s, windows)
            next_s += bucket_s
        if job.at_s >= until_s:
            break
        windows.arrived(job.at_s, job.prompt, job.kind)
        windows.ended(job.at_s, job.prompt, job.output, job.kind)
    return found


def later(jobs: Iterator[Job], at_s: float) -> Iterator[Job]:
    return (Job(at_s + job.at_s, job.prompt, job.output, job.kind) for job in jobs)


def before(jobs: Iterator[Job], at_s: float) -> Iterator[Job]:
    for job in jobs:
        if job.at_s >= at_s:
            return
        yield job


def one_kind(name: str, rate: float, seed: int) -> Iterator[Job]:
    return (Job(job.at_s, job.prompt, job.output) for job in synthetic_workload(name).stream(rate, seed))


@pytest.mark.parametrize(
    ("first", "second", "share"), [(40, 60, 0.5), (100, 40, 0.2), (5, 0, 0.3), (0, 9, 0.5)]
)
def test_the_bound_of_two_counts_is_above_their_true_tail(first: int, second: int, share: float) -> None:
    whole = first + second
    chance = [math.comb(whole, k) * share**k * (1 - share) ** (whole - k) for k in range(whole + 1)]
    tail = sum(chance[second:]) if second > whole * share else sum(chance[: second + 1])
    assert tail <= math.exp(-poisson_surprise(first, 1 - share, second, share)) * (1 + 1e-12)


def test_divergence_is_zero_only_where_coins_are_equal() -> None:
    assert bernoulli_divergence(0.3, 0.3) == 0.0
    assert bernoulli_divergence(0.0, 0.5) == bernoulli_divergence(1.0, 0.5) == pytest.approx(math.log(2))


def test_equal_lengths_pass_and_others_do_not() -> None:
    draw = random.Random(1)

    def sample(mean: float, count: int) -> BucketSums:
        bins = [bin_of(round(draw.lognormvariate(math.log(mean), 0.8)) or 1) for _ in range(count)]
        cells = tuple(("", number, bins.count(number)) for number in sorted(set(bins)))
        pairs = tuple(("", number, number, count) for _, number, count in cells)
        return BucketSums([TrafficBucket(0.0, 100.0, cells, pairs)])

    level = 1e-4
    equal = [list(length_changes(sample(200, 400), sample(200, 60), level)) for _ in range(100)]
    assert not any(equal)
    found = list(length_changes(sample(200, 400), sample(900, 60), level))
    assert [what for what, *_ in found] == ["prompt", "output"]


def test_a_stationary_day_is_quiet() -> None:
    """Poisson arrivals, lengths like ShareGPT's, in buckets of a minute; the benchmark has longer runs."""
    found = [alarms(one_kind("sharegpt", 0.1, seed), DAY_S, 1800.0, 60.0) for seed in range(2)]
    assert sum(map(len, found)) == 0


def test_a_change_of_lengths_is_seen_within_its_window() -> None:
    jobs = chain(before(one_kind("humaneval", 4.0, 1), 900.0), later(one_kind("longbench", 4.0, 2), 900.0))
    first, *_ = alarms(jobs, 1500.0)
    assert 900.0 < first.at_s <= 900.0 + WINDOW_S / 4
    assert first.since_s == pytest.approx(900.0, abs=40.0)
    assert first.what == "prompt"
    assert first.before == pytest.approx(171, rel=0.2)
    assert first.after > 600
    assert "prompt" in str(first)


@pytest.mark.parametrize("factor", [3.0, 0.25])
def test_a_leap_of_the_rate_is_seen_within_its_window(factor: float) -> None:
    jobs = chain(
        before(one_kind("sharegpt", 3.0, 1), 1200.0), later(one_kind("sharegpt", 3.0 * factor, 2), 1200.0)
    )
    first, *_ = alarms(jobs, 1800.0)
    assert first.what == "rate"
    assert 1200.0 < first.at_s <= 1200.0 + WINDOW_S / 2
    assert first.after / first.before == pytest.approx(factor, rel=0.6)


def test_drift_that_no_window_sees_adds_up() -> None:
    """4 % more in each window: the reference stays where it is."""

    def drifting() -> Iterator[Job]:
        draw, now_s = random.Random(5), 0.0
        while True:
            now_s += draw.expovariate(4.0 * 1.04 ** (now_s / WINDOW_S))
            yield Job(now_s, 100, 10)

    first, *_ = alarms(drifting(), 4 * 3600.0)
    assert first.what == "rate"
    assert first.at_s < 3 * 3600.0


def test_a_new_kind_is_known_by_its_name() -> None:
    old, new = Workload.of([Job(0.0, 100, 10)], "chat"), Workload.of([Job(0.0, 100, 10)], "batch")
    jobs = chain(before(old.stream(4.0, 1), 900.0), later(new.stream(4.0, 2), 900.0))
    first, *_ = alarms(jobs, 1500.0)
    assert (first.what, first.kind) in (("rate", "batch"), ("rate", "chat"))


def test_steady_bursts_are_no_change() -> None:
    """Gamma arrivals with a coefficient of variation of 3: nine times Poisson's variance."""
    jobs = (Job(job.at_s, 100, 10) for job in synthetic_workload("sharegpt").stream(2.0, 7, cv=3.0))
    assert len(alarms(jobs, 6 * 3600.0, 1800.0, 60.0)) <= 1


def test_rates_of_no_time_are_not_compared() -> None:
    some = BucketSums([TrafficBucket(0.0, 10.0)])
    assert list(rate_changes(BucketSums(), some, 0.1)) == []
    assert list(length_changes(some, some, 0.1)) == []


def test_a_bucket_that_is_taken_out_leaves_nothing() -> None:
    buckets = [
        TrafficBucket(0.0, 10.0, (("", 3, 2),), (("", 3, 5, 1),)),
        TrafficBucket(10.0, 10.0, (("a", 4, 7),)),
    ]
    sums = BucketSums(buckets)
    sums.add(buckets[0], -1)
    rest = BucketSums(buckets[1:])
    assert (+sums.prompts, +sums.outputs, +sums.kinds) == (rest.prompts, rest.outputs, rest.kinds)
    assert (sums.seconds, sums.arrivals, sums.buckets, sums.spread) == (10.0, 7, 1, rest.spread)


def test_a_shortfall_counts_only_if_chance_does_not_explain_it() -> None:
    assert attainment_is_short(TrafficSummary(0.0, 1.0, checked=1000, good=800), 0.9, 1e-4)
    assert not attainment_is_short(TrafficSummary(0.0, 1.0, checked=20, good=16), 0.9, 1e-4)
    assert not attainment_is_short(TrafficSummary(0.0, 1.0, checked=1000, good=950), 0.9, 1e-4)
    assert not attainment_is_short(TrafficSummary(0.0, 1.0), 0.9, 1e-4)


def test_the_busiest_window_may_lie_across_buckets() -> None:
    counts = [0, 10, 10, 0, 4, 4, 4]
    buckets = [TrafficBucket(10.0 * n, 10.0, (("", 1, count),)) for n, count in enumerate(counts)]
    assert busiest_rate(buckets, 20.0) == 1.0
    assert busiest_rate(buckets[:1], 20.0) == 0.0
    assert busiest_rate([], 20.0) == 0.0
