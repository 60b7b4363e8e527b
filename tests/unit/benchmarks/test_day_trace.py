"""A trace stretched over a day: its shape, its burstiness, and no shared prefixes between rounds."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.replanning.day_trace import WORKDAY, cut_windows, stretch_over_day
from diptych.errors import ConfigError
from planner.types import Job
from tests.unit.planner.workload.sample_jobs import JOBS, talk


def test_windows_cover_time_without_gaps() -> None:
    jobs = [Job(at_s, 1, 1) for at_s in (0.0, 0.5, 1.0, 3.5)]
    cut = list(cut_windows(jobs, 1.0))
    assert [(start_s, len(held)) for start_s, held in cut] == [(0.0, 2), (1.0, 1), (2.0, 0), (3.0, 1)]


def test_a_day_has_its_shape_and_the_traces_burstiness() -> None:
    jobs = list(stretch_over_day(JOBS, rate=0.5, seed=1))
    assert len(jobs) == pytest.approx(0.5 * 86_400, rel=0.001)
    assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)
    hours = [len(held) / 1800 for _, held in cut_windows(jobs, 3600.0)]
    assert hours == pytest.approx(list(WORKDAY), abs=0.01)
    assert statistics.fmean(WORKDAY) == pytest.approx(1.0, abs=0.003)
    assert len(list(stretch_over_day(JOBS, 10.0, 1, shape=(0.0, 1.0), length_s=100.0))) == 1000
    with pytest.raises(ConfigError, match="shape"):
        list(stretch_over_day(JOBS, 1.0, 1, shape=()))


def test_a_days_rounds_share_no_prefix() -> None:
    jobs = list(stretch_over_day(talk(3, 5), 1.0, 1, shape=(1.0,), length_s=44.5))
    assert len(jobs) == 45
    assert not {name for job in jobs[:15] for name in job.prefix} & {
        n for job in jobs[15:] for n in job.prefix
    }
