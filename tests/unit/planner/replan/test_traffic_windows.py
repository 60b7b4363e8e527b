"""Windows over traffic: what is kept, for how long, and what lengths it gives back."""

from __future__ import annotations

import random
from statistics import fmean

import msgspec
import pytest

from planner.replan.traffic_windows import (
    MAX_KINDS,
    TrafficBucket,
    TrafficWindows,
    arrival_dispersion,
    bin_of,
    length_of,
    mix_lengths,
    sum_buckets,
)
from planner.types import Job
from planner.workload.workload import synthetic_workload


def filled(jobs: list[Job], bucket_s: float = 10.0, keep_s: float = 3600.0) -> TrafficWindows:
    windows = TrafficWindows(bucket_s, keep_s)
    for job in jobs:
        windows.close(job.at_s)
        windows.arrived(job.at_s, job.prompt, job.kind)
        windows.ended(job.at_s, job.prompt, job.output, job.kind, good=job.output % 2 == 0)
    return windows


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 511, 1738, 131_072])
def test_a_bin_is_within_a_sixteenth_of_an_octave(tokens: int) -> None:
    assert length_of(bin_of(tokens)) == pytest.approx(tokens, rel=2 ** (1 / 16) - 1 + 1e-9)


def test_rates_and_lengths_are_those_of_the_traffic() -> None:
    jobs = synthetic_workload("sharegpt").sample(4000, 5.0, seed=1)
    windows = filled(jobs)
    traffic = windows.traffic(0.0, 700.0)
    seen = [job for job in jobs if job.at_s < 700.0]
    assert traffic.arrivals == len(seen)
    assert traffic.seconds == 700.0
    assert traffic.rate == len(seen) / 700.0
    assert traffic.attainment == fmean(job.output % 2 == 0 for job in seen)
    assert traffic.burst == 1.0
    mix = traffic.mix()
    assert mix.prompt == pytest.approx(fmean(job.prompt for job in seen), rel=0.02)
    assert mix.output == pytest.approx(fmean(job.output for job in seen), rel=0.03)


def test_only_whole_buckets_are_looked_at() -> None:
    windows = TrafficWindows(10.0, 100.0)
    windows.arrived(3.0, 5)
    assert windows.close(9.9) == []
    assert windows.traffic(0.0, 100.0).arrivals == 0
    (bucket,) = windows.close(10.0)
    assert (bucket.at_s, bucket.seconds, bucket.arrivals) == (0.0, 10.0, 1)
    assert windows.traffic(0.0, 10.0).arrivals == 1
    assert windows.traffic(5.0, 10.0).arrivals == 0  # it began before


def test_empty_buckets_count_as_time_without_arrivals() -> None:
    windows = TrafficWindows(10.0, 100.0)
    windows.arrived(3.0, 5)
    assert [bucket.arrivals for bucket in windows.close(45.0)] == [1, 0, 0, 0]
    assert windows.traffic(0.0, 45.0).rate == pytest.approx(1 / 40)


def test_what_is_old_is_forgotten_and_a_long_silence_costs_nothing() -> None:
    windows = TrafficWindows(10.0, 100.0)
    windows.arrived(3.0, 5)
    assert len(windows.close(10_000_000.0)) <= 12
    assert windows.closed_s == 10_000_000.0
    assert windows.traffic(0.0, windows.closed_s).seconds == 100.0


def test_memory_is_bounded_whatever_comes() -> None:
    windows, draw = TrafficWindows(10.0, 100.0), random.Random(1)
    for number in range(20_000):
        windows.arrived(0.0, draw.randrange(1, 100_000), f"tenant {number}")
    (bucket,) = windows.close(10.0)
    assert len({kind for kind, _, _ in bucket.prompts}) <= MAX_KINDS + 1
    assert len(bucket.prompts) <= (MAX_KINDS + 1) * (bin_of(100_000) + 1)
    assert bucket.arrivals == 20_000


def test_a_clock_may_begin_anywhere() -> None:
    windows = TrafficWindows(10.0, 100.0, start_s=12_345.0)
    windows.arrived(12_346.0, 5)
    assert windows.close(12_344.0) == []
    assert [bucket.at_s for bucket in windows.close(12_356.0)] == [12_345.0]


def test_buckets_survive_the_journal_and_give_the_same_traffic() -> None:
    windows = filled(synthetic_workload("humaneval").sample(500, 3.0, seed=2))
    buckets = [
        msgspec.json.decode(msgspec.json.encode(one), type=TrafficBucket)
        for one in windows.buckets(0.0, 150.0)
    ]
    again = TrafficWindows(10.0, 3600.0)
    for bucket in reversed(buckets):
        again.absorb_bucket(bucket)
    assert again.closed_s == 150.0
    assert again.traffic(0.0, 150.0) == windows.traffic(0.0, 150.0)


def test_lengths_follow_arrivals_although_long_answers_end_late() -> None:
    prompts = (("", bin_of(100), 50), ("", bin_of(1600), 50))
    pairs = (("", bin_of(100), bin_of(20), 90), ("", bin_of(1600), bin_of(400), 10))
    mix = mix_lengths(prompts, pairs)
    assert sum(weight for _, prompt, _, weight in mix.weights if prompt == bin_of(1600)) == 50
    assert mix.output == pytest.approx((length_of(bin_of(20)) + length_of(bin_of(400))) / 2)


def test_prompts_of_a_new_length_take_the_outputs_of_the_nearest() -> None:
    mix = mix_lengths(
        (("", bin_of(4000), 7),), (("", bin_of(100), bin_of(10), 1), ("", bin_of(900), bin_of(90), 1))
    )
    assert mix.weights == (("", bin_of(4000), bin_of(90), 7.0),)
    assert mix_lengths((("", 1, 1),), ()).weights == ()


def test_jobs_resample_the_mix_at_the_rate_and_with_the_seed() -> None:
    source = synthetic_workload("sharegpt").sample(3000, 5.0, seed=3)
    mix = filled(source).traffic(0.0, 500.0).mix()
    jobs = mix.jobs(4000, 8.0, seed=1)
    assert jobs == mix.jobs(4000, 8.0, seed=1)
    assert jobs != mix.jobs(4000, 8.0, seed=2)
    assert 4000 / jobs[-1].at_s == pytest.approx(8.0, rel=0.05)
    assert fmean(job.prompt for job in jobs) == pytest.approx(fmean(job.prompt for job in source), rel=0.06)
    gaps = [after.at_s - before.at_s for before, after in zip(jobs, jobs[1:], strict=False)]
    assert 0.9 < dispersion_of(gaps) < 1.1
    bursty = mix.jobs(4000, 8.0, seed=1, cv=3.0)
    assert dispersion_of([b.at_s - a.at_s for a, b in zip(bursty, bursty[1:], strict=False)]) > 5


def dispersion_of(gaps: list[float]) -> float:
    """Squared coefficient of variation."""
    mean = fmean(gaps)
    return fmean((gap - mean) ** 2 for gap in gaps) / mean**2


def test_burstiness_is_seen_only_where_it_is_plain() -> None:
    draw = random.Random(4)
    poisson = sum_buckets(
        [TrafficBucket(10.0 * n, 10.0, (("", 1, count),)) for n, count in enumerate(counts(draw, 1.0))]
    )
    bursts = sum_buckets(
        [TrafficBucket(10.0 * n, 10.0, (("", 1, count),)) for n, count in enumerate(counts(draw, 9.0))]
    )
    assert poisson.burst == 1.0
    assert bursts.burst in (2.0, 3.0, 4.0)
    assert arrival_dispersion([]) == arrival_dispersion([3, 3]) == 1.0


def counts(draw: random.Random, cluster: float, mean: float = 50.0) -> list[int]:
    """Arrivals per bucket that come in clusters: variance is about the cluster's size times the mean."""
    found = []
    for _ in range(100):
        at, number = draw.expovariate(mean / cluster), 0
        while at < 1.0:
            number += round(cluster)
            at += draw.expovariate(mean / cluster)
        found.append(number)
    return found
