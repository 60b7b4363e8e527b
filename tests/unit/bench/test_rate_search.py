"""What several runs say together: loads, curves, and the search for the largest good rate."""

from __future__ import annotations

import math
from array import array

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.types import Job, JobResult
from planner.workload.workload import Workload, synthetic_workload
from services.bench.load_generator import GIVEN_UP, LoadRun, RequestRecord
from services.bench.rate_search import BenchLoad, GoodputSearch, RateStudy

TRACE = [Job(100.0 + number, 50, 5) for number in range(20)]


class Knee:
    """Attains everything up to a rate of its own for each seed; counts how often it is asked."""

    def __init__(self, *knees: float) -> None:
        self.knees, self.asked = knees, list[tuple[float, int]]()

    def __call__(self, rate: float, seed: int) -> float:
        self.asked.append((rate, seed))
        return 1.0 if rate <= self.knees[seed] else 0.5


def size(rate: float) -> tuple[int, int]:
    return round(10 * rate), round(rate)


@pytest.mark.parametrize("knee", [0.3, 1.0, 5.7, 44.0, 800.0])
@pytest.mark.parametrize("start", [0.5, 1.0, 30.0])
def test_a_search_finds_the_knee_from_wherever_it_begins(knee: float, start: float) -> None:
    runs = Knee(knee)
    found = GoodputSearch(runs, 0.9).find_goodput([0], start, 1e4, size)
    assert 0.88 * knee <= found.rate <= knee
    assert len(set(runs.asked)) == len(runs.asked), "no rate is run twice"
    assert len(runs.asked) <= 16
    assert (found.n, found.warmup) == size(found.rate)


def test_its_steps_are_as_wide_as_asked_for() -> None:
    found = GoodputSearch(Knee(5.7), 0.9, width=0.5).find_goodput([0], 1.0, 1e4, size)
    assert found.rate == 5.5 and found.found[0].high == 6.0


def test_nothing_good_is_nought_and_nothing_bad_is_the_highest() -> None:
    assert GoodputSearch(Knee(0.0), 0.9).find_goodput([0], 1.0, 100.0, size).rate == 0.0
    assert GoodputSearch(Knee(1e9), 0.9, width=1.0).find_goodput([0], 1.0, 100.0, size).rate == 100.0


def test_seeds_give_a_mean_and_an_interval() -> None:
    found = GoodputSearch(Knee(4.0, 5.0, 6.0), 0.9, width=0.25).find_goodput([0, 1, 2], 1.0, 1e3, size)
    assert found.rates == (4.0, 5.0, 6.0) and found.rate == 5.0
    assert found.interval[0] < 4.0 and found.interval[1] > 6.0
    assert found.interval == pytest.approx((5 - 4.303 / math.sqrt(3), 5 + 4.303 / math.sqrt(3)), abs=1e-3)


def test_the_result_does_not_depend_on_the_highest_rate() -> None:
    assert (
        len(
            {
                GoodputSearch(Knee(5.7), 0.9, 0.1).find_goodput([0], 1.0, top, size).rate
                for top in (6.0, 60.0, 1e5)
            }
        )
        == 1
    )


def test_a_run_is_as_long_as_asked_for() -> None:
    workload = synthetic_workload("humaneval")
    assert len(BenchLoad(workload, seconds=30.0).make_jobs(2.0, 0)) == 60
    assert len(BenchLoad(workload, seconds=30.0, requests=7).make_jobs(2.0, 0)) == 7
    assert (
        BenchLoad(workload).make_jobs(2.0, 1)
        == BenchLoad(workload).make_jobs(2.0, 1)
        != BenchLoad(workload).make_jobs(2.0, 2)
    )


def test_a_replay_keeps_the_traces_times_or_their_shape() -> None:
    load = BenchLoad(Workload.of(TRACE), replay=True, seconds=10.0)
    assert [job.at_s for job in load.make_jobs(None, 0)] == [float(number) for number in range(11)]
    assert [job.at_s for job in load.make_jobs(2.0, 0)] == [number / 2 for number in range(20)]


def test_a_replay_sends_the_whole_trace_by_default() -> None:
    hour = Workload.of([Job(60.0 * number, 50, 5) for number in range(61)])
    assert (
        len(BenchLoad(hour, replay=True).make_jobs(None, 0))
        == BenchLoad(hour, replay=True).trace_requests
        == 61
    )
    assert len(BenchLoad(hour, replay=True).make_jobs(0.1, 0)) == 61
    assert len(BenchLoad(hour, replay=True, seconds=60.0).make_jobs(None, 0)) == 2
    assert len(BenchLoad(hour, replay=True, requests=7).make_jobs(None, 0)) == 7
    assert BenchLoad(hour).trace_requests is None and len(BenchLoad(hour).make_jobs(2.0, 0)) == 120


def test_a_formula_cannot_be_replayed() -> None:
    with pytest.raises(ConfigError, match="cannot be replayed"):
        BenchLoad(synthetic_workload("sharegpt"), replay=True).make_jobs(None, 0)


def test_a_tenth_is_warm_up_by_default() -> None:
    load = BenchLoad(Workload.of(TRACE), replay=True)
    assert load.warmup_of(load.make_jobs(None, 0)) == pytest.approx(1.9)
    assert BenchLoad(Workload.of(TRACE), replay=True, warmup_s=0.0).warmup_of(load.make_jobs(None, 0)) == 0.0


def seen(ttft_s: float, failed: str = "") -> RequestRecord:
    return RequestRecord(JobResult(Job(1.0, 10, 5), ttft_s, 0.01, 2.0, failed), 5, 10, array("d"), 0.0)


def test_points_are_of_all_seeds_and_bounds_where_a_run_was_given_up() -> None:
    study = RateStudy.__new__(RateStudy)
    study._options = type("P", (), {"slo": Slo(1.0, 1.0)})()
    whole = LoadRun(2.0, 0, 4, 0.0, [seen(0.5), seen(0.5), seen(2.0), seen(0.5)], num_expected=4)
    other = LoadRun(2.0, 1, 4, 0.0, [seen(0.5)] * 4, num_expected=4)
    hopeless = LoadRun(
        4.0, 0, 10, 0.0, [seen(0.5), seen(2.0), seen(math.inf, GIVEN_UP)], True, num_expected=10
    )
    study.runs = [hopeless, whole, other]
    low, high = study.rate_points()
    assert (low.rate, low.attainment, low.hopeless) == (2.0, 7 / 8, False)
    assert low.low < 7 / 8 < low.high
    assert (high.rate, high.attainment, high.hopeless) == (4.0, 0.8, True)
