"""What benchmarks/replan.py counts, and how it names the ways to size a fleet."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replan import HOUR_S, MAX_OUTPUT, MAX_PROMPT, Book, dynamo, live, trace
from benchmarks.replanning.baselines import StaticFleet
from planner.replan.attainment_cache import FleetSize
from planner.types import Job, JobResult
from planner.workload.traces import write_trace
from planner.workload.workload import synthetic_workload


def test_a_request_that_is_never_answered_counts_as_one_that_missed() -> None:
    book = Book()
    jobs = [Job(at_s, 100, 10) for at_s in (1.0, 2.0, HOUR_S + 1.0, HOUR_S + 2.0)]
    for job in jobs:
        book.came(job)
    book.ended(JobResult(jobs[0], 0.1, 0.01, 3.0))
    book.ended(JobResult(jobs[1], 0.1, 0.01, 3.0))
    book.ended(JobResult(jobs[2], 0.1, 0.01, HOUR_S + 3.0))
    figures = book.figures(2 * HOUR_S)
    assert (figures["requests"], figures["attainment"], figures["worst_hour"]) == (4, 0.75, 0.5)
    assert figures["hours_below_target"] == 1
    assert figures["good_per_device_hour"] == 1.5


def test_all_that_come_are_counted_although_most_are_never_served() -> None:
    jobs = synthetic_workload("sharegpt").sample(600, 20.0, seed=1)
    figures, last = live(StaticFleet(), iter(jobs), FleetSize(1, 1), 60.0)
    assert figures["requests"] == 600
    assert figures["failed"] > 50, "who waits too long goes"
    assert figures["attainment"] < 0.5
    assert figures["device_hours"] == round(120.0 / HOUR_S, 2)
    assert last == FleetSize(1, 1)


def test_lengths_of_a_trace_are_divided_and_cut_and_its_prefixes_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [Job(0.0, 40_000, 5, prefix=(1, 2)), Job(1.0, 800, 5000), Job(2.0, 3, 4)])
    found = [(job.prompt, job.output, job.prefix) for job in trace(str(path), 16.0)]
    assert found == [(MAX_PROMPT, 5, ()), (50, MAX_OUTPUT, ()), (1, 4, ())]


@pytest.mark.parametrize(
    ("name", "reactive", "times"),
    [("dynamo", False, 1.0), ("dynamo_load", True, 1.0), ("dynamo_load_spare0.5", True, 1.5)],
)
def test_the_rule_of_dynamo_is_set_by_name(name: str, reactive: bool, times: float) -> None:
    rule = dynamo(name)
    assert rule.reactive is reactive
    assert rule.demand(100.0) == pytest.approx(100.0 * times)
