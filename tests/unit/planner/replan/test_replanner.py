"""The replanner as a whole: from requests to actions, quiet where nothing changes, and the same again from its log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import pytest

from planner.replan.attainment_cache import FleetSize
from planner.replan.decide import (
    READY,
    STARTING,
    FleetAction,
    FleetDecision,
    FleetWorker,
    Flip,
    ReplanPolicy,
    Start,
    Stop,
    count_fleet,
)
from planner.replan.forecast import forecast_rate
from planner.replan.journal import Journal, read_journal
from planner.replan.replanner import Replanner, replay_decisions
from planner.replan.traffic_windows import TrafficBucket
from planner.types import DECODE, PREFILL, Job
from planner.workload.workload import synthetic_workload
from tests.unit.planner.replan.closed_form import Rates

POLICY = ReplanPolicy(
    budget=6, floor=6, window_s=60.0, bucket_s=2.0, settle_s=120.0, flip_s=2.0, start_s=10.0
)
EVALUATOR = Rates(
    read=3000.0, write=150.0
)  # HumanEval-like 4 rps: 0.23 readers, 2.6 writers; LongBench-like: 2.3 and 2.4


@dataclass
class Plant:
    """Workers that do at once what they are asked to, unless their names are in `stuck`."""

    workers: list[FleetWorker]
    stuck: set[str] = field(default_factory=set)
    done: list[tuple[float, FleetAction]] = field(default_factory=list)

    def act(self, decision: FleetDecision, replanner: Replanner) -> None:
        for action in decision.actions:
            self.done.append((decision.at_s, action))
            match action:
                case Flip(name, role) if name in self.stuck:
                    replanner.failed(decision.at_s, name, f"did not become {role}")
                case Flip(name, role):
                    self.workers = [replace_role(w, role) if w.name == name else w for w in self.workers]
                case Start(role, count):
                    self.workers += [FleetWorker(f"new-{len(self.workers) + n}", role) for n in range(count)]
                case Stop(name):
                    self.workers = [w for w in self.workers if w.name != name]


def replace_role(worker: FleetWorker, role: str) -> FleetWorker:
    return FleetWorker(worker.name, role, worker.state, worker.load)


def ready_workers(prefill: int, decode: int) -> list[FleetWorker]:
    return [FleetWorker(f"p{n}", PREFILL) for n in range(prefill)] + [
        FleetWorker(f"d{n}", DECODE) for n in range(decode)
    ]


def run(
    jobs: Iterator[Job], plant: Plant, replanner: Replanner, until_s: float, every_s: float = 1.0
) -> None:
    now_s = 0.0
    for job in jobs:
        while now_s + every_s <= min(job.at_s, until_s):
            now_s += every_s
            plant.act(replanner.tick(now_s, plant.workers), replanner)
        if job.at_s >= until_s:
            return
        replanner.arrived(job.at_s, job.prompt)
        replanner.ended(job.at_s, job.prompt, job.output, good=True)


def shifting_jobs(at_s: float, rate: float = 4.0) -> Iterator[Job]:
    first = (
        job
        for job in synthetic_workload("humaneval").sample(int(2 * at_s * rate), rate, 1)
        if job.at_s < at_s
    )
    return chain(
        first, (replace(job, at_s=job.at_s + at_s) for job in synthetic_workload("longbench").stream(rate, 2))
    )


def test_a_shift_from_humaneval_to_longbench_switches_workers_within_a_window() -> None:
    plant = Plant(ready_workers(1, 5))
    replanner = Replanner(POLICY, EVALUATOR)
    run(shifting_jobs(200.0), plant, replanner, 420.0)
    assert [alarm.at_s for alarm in replanner.alarms if alarm.at_s < 200.0] == []
    first = replanner.alarms[0]
    assert first.at_s <= 200.0 + POLICY.window_s / 4
    assert all(isinstance(action, Flip) for _, action in plant.done)
    assert 200.0 < plant.done[0][0] <= 200.0 + POLICY.window_s
    assert count_fleet(tuple(plant.workers), READY) == FleetSize(3, 3)  # the only split of six that keeps up


def test_stationary_traffic_changes_nothing_after_the_first_plan() -> None:
    plant = Plant(ready_workers(1, 5))
    replanner = Replanner(POLICY, EVALUATOR)
    run(synthetic_workload("humaneval").stream(4.0, 5), plant, replanner, 900.0)
    assert replanner.alarms == []
    assert plant.done == []


def test_a_flip_that_fails_is_not_asked_of_that_worker_again_soon() -> None:
    plant = Plant(ready_workers(1, 5), stuck={"d0", "d1"})
    replanner = Replanner(POLICY, EVALUATOR)
    run(shifting_jobs(200.0), plant, replanner, 420.0)
    asked = [action.worker for _, action in plant.done if isinstance(action, Flip)]
    assert asked[:2] == ["d0", "d1"]
    assert (asked.count("d0"), asked.count("d1")) == (1, 1)
    assert count_fleet(tuple(plant.workers), READY) == FleetSize(3, 3)


def test_a_worker_that_is_lost_is_replaced() -> None:
    plant = Plant(ready_workers(1, 5))
    replanner = Replanner(replace_policy(floor=0), EVALUATOR)
    jobs = synthetic_workload("humaneval").stream(6.0, 5)
    run(jobs, plant, replanner, 300.0)
    before = count_fleet(tuple(plant.workers), READY)
    plant.workers = [worker for worker in plant.workers if worker.name != plant.workers[-1].name]
    run(jobs, plant, replanner, 400.0)
    assert count_fleet(tuple(plant.workers), READY).decode >= before.decode


def replace_policy(**changes: object) -> ReplanPolicy:
    fields = {name: getattr(POLICY, name) for name in POLICY.__struct_fields__}
    return ReplanPolicy(**{**fields, **changes})


def test_lengths_that_are_not_known_yet_do_not_stop_a_loss_from_being_seen() -> None:
    """A few long prompts an hour: an alarm, and too little to know the new lengths by; then a worker is lost."""
    plant = Plant(ready_workers(1, 3))
    replanner = Replanner(replace_policy(floor=0), EVALUATOR)
    run(synthetic_workload("humaneval").stream(4.0, 5), plant, replanner, 300.0)
    for second in range(301, 900):
        if second % 20 == 0:
            replanner.arrived(second, 1700)
            replanner.ended(second, 1700, 90)
        if second == 700:
            plant.workers = [FleetWorker("p0", PREFILL)]
        plant.act(replanner.tick(float(second), plant.workers), replanner)
    assert replanner.alarms
    assert count_fleet(tuple(plant.workers), READY).can_serve


def test_between_buckets_nothing_happens_however_often_one_asks() -> None:
    few, many = Plant(ready_workers(1, 5)), Plant(ready_workers(1, 5))
    run(shifting_jobs(200.0), few, Replanner(POLICY, EVALUATOR), 260.0, every_s=2.0)
    run(shifting_jobs(200.0), many, Replanner(POLICY, EVALUATOR), 260.0, every_s=0.5)
    assert few.done == many.done


def test_answers_that_miss_although_the_evaluator_expects_better_call_for_more() -> None:
    plant, policy = Plant(ready_workers(1, 3)), replace_policy(floor=0)
    replanner, now_s = Replanner(policy, EVALUATOR), 0.0
    for job in synthetic_workload("humaneval").stream(4.0, 5):
        if job.at_s > 900.0:
            break
        while now_s + 1.0 <= job.at_s:
            now_s += 1.0
            plant.act(replanner.tick(now_s, plant.workers), replanner)
        replanner.arrived(job.at_s, job.prompt)
        replanner.ended(job.at_s, job.prompt, job.output, good=job.at_s % 1.0 < 0.5)
    assert any(isinstance(action, Start) for _, action in plant.done)
    assert len(plant.workers) <= policy.budget


def test_every_decision_comes_out_again_from_the_log(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    plant, journal = Plant(ready_workers(2, 4), stuck={"d0"}), Journal(path)
    run(shifting_jobs(150.0, 5.0), plant, Replanner(replace_policy(floor=0), EVALUATOR, journal), 420.0)
    journal.close()
    assert plant.done
    found = list(replay_decisions(read_journal(path)))
    assert len(found) >= 3
    assert all(again.same for again in found), [again for again in found if not again.same]
    again = list(replay_decisions(read_journal(path), EVALUATOR))
    assert all(one.same for one in again)


def test_a_log_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    journal = Journal(path)
    run(shifting_jobs(150.0), Plant(ready_workers(1, 5)), Replanner(POLICY, EVALUATOR, journal), 260.0)
    journal.close()
    text = path.read_text()
    assert '"role":"prefill"' in text
    path.write_text(text.replace('"type":"flip","worker":"d0"', '"type":"flip","worker":"d4"'))
    assert any(not again.same for again in replay_decisions(read_journal(path)))
    other = list(replay_decisions(read_journal(path), Rates(read=100.0)))
    assert any(not again.same for again in other)


def test_a_clock_may_begin_anywhere() -> None:
    start_s = 1_000_000.5
    plant, replanner = Plant(ready_workers(1, 5)), Replanner(POLICY, EVALUATOR, start_s=start_s)
    shifted = (replace(job, at_s=job.at_s + start_s) for job in shifting_jobs(200.0))
    now_s = start_s
    for job in shifted:
        while now_s + 1.0 <= job.at_s:
            now_s += 1.0
            plant.act(replanner.tick(now_s, plant.workers), replanner)
        if job.at_s > start_s + 420.0:
            break
        replanner.arrived(job.at_s, job.prompt)
        replanner.ended(job.at_s, job.prompt, job.output)
    assert count_fleet(tuple(plant.workers), READY) == FleetSize(3, 3)


def test_workers_that_start_are_waited_for() -> None:
    replanner = Replanner(replace_policy(floor=0), EVALUATOR)
    workers = [*ready_workers(1, 2), FleetWorker("new", DECODE, STARTING)]
    asked = 0
    for second in range(1, 300):
        for _ in range(4):
            replanner.arrived(second, 171)
            replanner.ended(second, 171, 98)
        asked += len(replanner.tick(float(second), workers).actions)
    assert asked == 0


@pytest.mark.parametrize("counts", [[5, 5, 5], [0] * 30, [7] * 40])
def test_a_forecast_of_steady_traffic_is_its_level(counts: list[int]) -> None:
    found = forecast_rate(
        [TrafficBucket(10.0 * n, 10.0, (("", 1, count),)) for n, count in enumerate(counts)], 60.0
    )
    assert found.slope == 0.0
    assert found.level == pytest.approx(counts[0] / 10.0)
    assert found.rate(60.0) <= found.level + 0.6


def test_a_forecast_follows_a_clear_rise_and_no_fall() -> None:
    rise = [
        TrafficBucket(0.0, 10.0, (("", 1, 100 - n),)) for n in range(40)
    ]  # the latest first: 0.01 rps each second
    found = forecast_rate(rise, 100.0)
    assert found.slope == pytest.approx(0.01, rel=0.01)
    assert found.rate(100.0) == pytest.approx(10.5, rel=0.03)
    fall = forecast_rate(rise[::-1], 100.0)
    assert fall.slope < 0
    assert fall.rate(100.0) == pytest.approx(fall.level + fall.error)
    assert forecast_rate(rise, 1000.0).slope == 0.0, "it would be followed for longer than it was seen"
    assert forecast_rate([], 1.0).rate(1.0) == 0.0
