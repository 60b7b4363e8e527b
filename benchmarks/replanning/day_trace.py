"""Traces that change over time: cut into windows, or stretched over a day whose load has a shape."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count

from diptych.errors import ConfigError
from planner.types import Job
from planner.workload.workload import mean_arrival_rate

DAY_S = 86_400.0

# Load by hour of the day over the day's mean: low at night, two humps while people work. Our own round figures; the
# trace itself covers one hour. Their mean is 1.
WORKDAY = (
    0.45, 0.35, 0.30, 0.30, 0.35, 0.45, 0.65, 0.95, 1.30, 1.55, 1.65, 1.60,
    1.45, 1.55, 1.65, 1.60, 1.50, 1.35, 1.15, 1.05, 0.95, 0.80, 0.60, 0.45,
)  # fmt: skip


def cut_windows(jobs: Iterable[Job], length_s: float) -> Iterator[tuple[float, list[Job]]]:
    """(start, the jobs that came within `length_s` of it), in order; jobs in order of arrival; empty windows too."""
    start_s, held = 0.0, list[Job]()
    for job in jobs:
        while job.at_s >= start_s + length_s:
            yield start_s, held
            start_s, held = start_s + length_s, []
        held.append(job)
    yield start_s, held


def stretch_over_day(
    jobs: Sequence[Job],
    rate: float,
    seed: int,
    shape: Sequence[float] = WORKDAY,
    length_s: float = DAY_S,
) -> Iterator[Job]:
    """A day made of a shorter trace: its requests again and again, faster and slower as the day goes.

    The trace's own gaps are kept in units of its mean rate, so its burstiness is; each round begins at another request
    of it. Blocks of prefixes are renamed from round to round: a new round's clients are others.

    Args:
        jobs: the trace, in order of arrival.
        rate: mean arrivals a second over the whole day.
        shape: load over its mean, of equal parts of the day; straight within a part. Normalised to mean 1.
        length_s: seconds of the day; a day may be replayed in an hour.
    """
    if not shape or min(shape) < 0.0 or sum(shape) <= 0.0 or rate <= 0.0 or length_s <= 0.0:
        why = f"rate {rate}, length {length_s} s, shape {list(shape)[:6]}"
        raise ConfigError("no day has such a shape", why, "give positive numbers, and loads of 0 or more")
    part_s = length_s / len(shape)
    scale = rate * len(shape) / sum(shape)
    expected = [
        0.0,
        *accumulate(load * scale * part_s for load in shape),
    ]  # arrivals until the end of each part
    for position, job in _repeat_jobs(jobs, seed):
        if position >= expected[-1]:
            return
        part = bisect_right(expected, position) - 1
        within = (position - expected[part]) / (expected[part + 1] - expected[part])
        yield replace(job, at_s=(part + within) * part_s)


def _repeat_jobs(jobs: Sequence[Job], seed: int) -> Iterator[tuple[float, Job]]:
    """(expected number of arrivals so far, job) for ever."""
    mean_rate = mean_arrival_rate(jobs)
    gaps = [(after.at_s - before.at_s) * mean_rate for before, after in zip(jobs, jobs[1:], strict=False)]
    gaps.append(1.0)  # from the last to the first
    names = 1 + max((name for job in jobs for name in job.prefix), default=0)
    chance, position = random.Random(f"day {seed}"), 0.0
    for number in count():
        begin = chance.randrange(len(jobs)) if number else 0
        for index in (*range(begin, len(jobs)), *range(begin)):
            job = jobs[index]
            prefix = tuple(name + number * names for name in job.prefix)
            yield position, replace(job, prefix=prefix) if prefix else job
            position += gaps[index]
