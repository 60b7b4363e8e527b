"""A simulated fleet that changes: nobody is lost, devices are paid until they are empty; and a simulating evaluator."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from benchmarks.replanning.baselines import (
    INTERVAL_S,
    DynamoPlanner,
    KalmanPredictor,
    LastValuePredictor,
    StaticFleet,
)
from benchmarks.replanning.elastic_fleet import ElasticFleet, WorkerGauge, smallest_fleet
from diptych.slo import Slo
from planner.attainment import joint_attainment
from planner.costs.profile_file import built_in_profile
from planner.replan.attainment_cache import AttainmentCache, FleetSize
from planner.replan.decide import (
    DRAINING,
    READY,
    STARTING,
    SWITCHING,
    FleetWorker,
    Flip,
    ReplanPolicy,
    Start,
    Stop,
    count_fleet,
)
from planner.replan.evaluate import FleetHardware, SimulatedEvaluator
from planner.replan.traffic_windows import LengthMix, bin_of
from planner.sim.fast.cluster import simulate_fast
from planner.sim.fast.instance import InstanceLimits
from planner.types import BOTH, DECODE, PREFILL, Job, JobResult, LinkSpec, Parallelism, StepBatch
from planner.workload.workload import synthetic_workload

ROLES = (PREFILL, DECODE, BOTH)
SPLIT = Parallelism(1, 1)
PROFILE = built_in_profile("OPT-13B", "A100-80G")
HARDWARE = FleetHardware(
    dict.fromkeys(ROLES, SPLIT),
    dict.fromkeys(ROLES, PROFILE.cost(SPLIT)),
    dict.fromkeys(ROLES, 60_000.0),
    LinkSpec(25e9, 1e-3),
    PROFILE.model.kv_token_bytes,
    InstanceLimits(prefill_tokens=2048),
)
SLO = Slo(0.5, 0.1)
CHAT = LengthMix((("", bin_of(512), bin_of(128), 1.0),))


class World:
    """A fleet, and who was served."""

    def __init__(self, jobs: list[Job], fleet: FleetSize, patience_s: float = math.inf) -> None:
        self.came: list[Job] = []
        self.served: list[JobResult] = []
        self.fleet = ElasticFleet(
            HARDWARE,
            fleet,
            jobs,
            arrived=self.came.append,
            served=self.served.append,
            flip_s=5.0,
            start_s=60.0,
            patience_s=patience_s,
        )

    def counts(self, *states: str) -> FleetSize:
        return count_fleet(self.fleet.workers(), *states)


def test_a_fleet_that_stays_is_the_fast_simulator() -> None:
    jobs = synthetic_workload("sharegpt").sample(300, 5.0, seed=1)
    world = World(jobs, FleetSize(2, 2))
    world.fleet.advance(1000.0)
    assert world.fleet.idle
    still = simulate_fast(
        HARDWARE.placement(FleetSize(2, 2)),
        HARDWARE.cost,
        jobs,
        limits=HARDWARE.limits,
        kv_tokens=HARDWARE.room,
        link=HARDWARE.link,
        token_bytes=HARDWARE.token_bytes,
    )
    assert sorted(world.served, key=lambda one: one.job.at_s) == still
    assert world.fleet.device_s() == pytest.approx(4000.0)


def test_a_worker_that_switches_ends_its_requests_first() -> None:
    world = World(synthetic_workload("sharegpt").sample(400, 6.0, seed=1), FleetSize(2, 2))
    world.fleet.advance(20.0)
    name = next(worker.name for worker in world.fleet.workers() if worker.role == DECODE)
    world.fleet.act([Flip(name, PREFILL)])
    assert world.counts(SWITCHING) == FleetSize(1, 0)
    assert world.counts(READY) == FleetSize(2, 1)
    world.fleet.advance(60.0)
    assert world.counts(READY) == FleetSize(3, 1)
    world.fleet.advance(1000.0)
    assert len(world.served) == 400
    assert not any(one.failed for one in world.served)


def test_devices_are_paid_from_the_order_until_they_are_empty() -> None:
    world = World(synthetic_workload("sharegpt").sample(400, 4.0, seed=1), FleetSize(1, 1))
    world.fleet.advance(10.0)
    world.fleet.act([Start(DECODE, 1)])
    assert world.counts(STARTING) == FleetSize(0, 1)
    world.fleet.advance(69.0)
    assert world.counts(READY) == FleetSize(1, 1)
    world.fleet.advance(80.0)
    assert world.counts(READY) == FleetSize(1, 2)
    assert world.fleet.device_s() == pytest.approx(10 * 2 + 70 * 3)
    world.fleet.act([Stop("worker-003")])
    world.fleet.advance(80.01)
    assert world.counts(DRAINING) == FleetSize(0, 1), "its requests are not done"
    world.fleet.advance(1000.0)
    assert world.counts(READY, DRAINING) == FleetSize(1, 1)
    assert 10 * 2 + 70 * 3 + 920 * 2 < world.fleet.device_s() < 10 * 2 + 70 * 3 + 920 * 2 + 60
    assert len(world.served) == 400


def test_one_that_is_stopped_before_it_has_started_never_serves() -> None:
    world = World(synthetic_workload("sharegpt").sample(100, 4.0, seed=1), FleetSize(1, 1))
    world.fleet.act([Start(PREFILL, 1)])
    world.fleet.advance(5.0)
    world.fleet.act([Stop("worker-003"), Stop("nobody"), Flip("worker-003", DECODE)])
    world.fleet.advance(500.0)
    assert world.counts(READY, STARTING, SWITCHING) == FleetSize(1, 1)


def test_who_has_waited_too_long_goes_and_a_backlog_does_not_stay() -> None:
    burst = [
        replace(job, at_s=job.at_s / 50) for job in synthetic_workload("longbench").sample(300, 5.0, seed=1)
    ]
    later = [
        replace(job, at_s=job.at_s + 40.0) for job in synthetic_workload("longbench").sample(40, 1.0, seed=2)
    ]
    patient, hurried = (
        World([*burst, *later], FleetSize(1, 1)),
        World([*burst, *later], FleetSize(1, 1), 10.0),
    )
    for second in range(0, 400, 5):
        for world in (patient, hurried):
            world.fleet.advance(float(second))
    assert len(patient.served) == len(hurried.served) == 340
    assert not any(one.failed for one in patient.served)
    gone = [one for one in hurried.served if one.failed]
    assert {one.failed for one in gone} == {"late"}
    assert all(10.0 < one.ended_s - one.job.at_s <= 15.0 for one in gone)
    stayed, cleared = (
        sum(one.meets_slo(SLO) for one in world.served if one.job.at_s >= 40.0)
        for world in (patient, hurried)
    )
    assert stayed < 10 < 30 < cleared
    assert hurried.fleet.idle


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_done_to_the_fleet_every_request_is_served_once(seed: int) -> None:
    draw = random.Random(seed)
    world = World(synthetic_workload("sharegpt").sample(400, 8.0, seed), FleetSize(3, 3))
    for second in range(1, 60):
        world.fleet.advance(float(second))
        ready = [worker for worker in world.fleet.workers() if worker.state == READY]
        worker = draw.choice(ready)
        if sum(one.role == worker.role for one in ready) > 1:
            other = DECODE if worker.role == PREFILL else PREFILL
            world.fleet.act([draw.choice((Flip(worker.name, other), Stop(worker.name), Start(other, 1)))])
    world.fleet.advance(2000.0)
    assert world.fleet.idle
    assert sorted(one.job.at_s for one in world.served) == [job.at_s for job in world.came]
    assert len(world.served) == 400


def test_a_colocated_fleet_changes_too() -> None:
    world = World(synthetic_workload("sharegpt").sample(200, 4.0, seed=3), FleetSize(both=2))
    world.fleet.advance(20.0)
    world.fleet.act([Stop("worker-001"), Start(BOTH, 1)])
    world.fleet.advance(1000.0)
    assert len(world.served) == 200
    assert world.counts(READY) == FleetSize(both=2)


def test_the_evaluator_finds_more_workers_better_and_more_traffic_worse() -> None:
    evaluator = SimulatedEvaluator(HARDWARE, {"": SLO}, span_s=30.0)
    assert evaluator.attainment(FleetSize(1, 1), CHAT, 2.0, 1.0) > 0.95
    assert evaluator.attainment(FleetSize(1, 1), CHAT, 2.0, 1.0) == evaluator.attainment(
        FleetSize(1, 1), CHAT, 2.0, 1.0
    )
    busy = evaluator.attainment(FleetSize(1, 1), CHAT, 14.0, 1.0)
    assert busy < 0.7
    assert evaluator.attainment(FleetSize(2, 2), CHAT, 14.0, 1.0) > busy
    assert evaluator.attainment(FleetSize(1, 1), LengthMix(()), 14.0, 1.0) == 1.0
    cached = LengthMix(CHAT.weights, 0.5)
    assert evaluator.attainment(FleetSize(1, 1), cached, 14.0, 1.0) > busy


def test_a_hopeless_fleet_is_not_simulated_but_ranked() -> None:
    evaluator = SimulatedEvaluator(HARDWARE, {"": SLO})
    one, two = (evaluator.attainment(FleetSize(n, 4), CHAT, 100.0, 1.0) for n in (1, 2))
    assert evaluator.runs == 0
    assert 0.0 < one < two <= 0.1
    assert (
        evaluator.overload(FleetSize(0, 0, 4), CHAT, 10.0)
        < 1.0
        < evaluator.overload(FleetSize(0, 0, 4), CHAT, 100.0)
    )


def test_the_bound_on_load_is_below_what_a_long_run_serves() -> None:
    """Where simulation of a long run keeps up, the bound is below 1."""
    evaluator = SimulatedEvaluator(HARDWARE, {"": SLO})
    kept_up = 0
    for rate in (2.0, 6.0, 10.0):
        served = simulate_fast(
            HARDWARE.placement(FleetSize(1, 1)),
            HARDWARE.cost,
            CHAT.jobs(1500, rate, 1),
            kv_tokens=HARDWARE.room,
        )
        if joint_attainment(served, {"": SLO}) > 0.8:
            kept_up += 1
            assert evaluator.overload(FleetSize(1, 1), CHAT, rate) <= 1.0
    assert kept_up, "none of these rates was served"


# --- others ---


def test_dynamo_sizes_by_means_without_queues() -> None:
    rule = DynamoPlanner(HARDWARE, SLO, ReplanPolicy(budget=16))
    for second in range(180):
        for _ in range(10):
            rule.arrived(second, 512)
            rule.ended(second, 512, 128)
    assert rule.tick(179.0, ()).actions == ()
    workers = (FleetWorker("p", PREFILL), FleetWorker("d", DECODE))
    decision = rule.tick(INTERVAL_S, workers)
    full_s = HARDWARE.costs[PREFILL].step_s(StepBatch(2048, 4 * 512.0 * 512))
    best = 4 / full_s  # as many as the engine batches; more are several batches
    assert full_s < SLO.ttft_s
    assert rule.prefill_rate(512.0) == pytest.approx(best)
    rows = int(60_000 / (512 + 128))  # of as much KV as is reserved
    step_s = HARDWARE.costs[DECODE].step_s(StepBatch(rows=rows, context=round(rows * (512 + 64))))
    assert rule.decode_rate(512.0, 128.0) == pytest.approx(rows / (128 * step_s))
    assert decision.target.prefill == -(-10 // best)
    assert decision.target.decode == -(-10 // rule.decode_rate(512.0, 128.0))
    assert rule.tick(INTERVAL_S + 1, workers).actions == ()


def seen_by(rule: DynamoPlanner, rate: int) -> DynamoPlanner:
    """An interval of requests of 512 tokens in and 128 out has come."""
    for second in range(180):
        for _ in range(rate):
            rule.arrived(second, 512)
            rule.ended(second, 512, 128)
    return rule


def test_dynamo_may_be_given_more_demand_than_there_is() -> None:
    workers = (FleetWorker("p", PREFILL), FleetWorker("d", DECODE))
    plain, roomy = (
        seen_by(DynamoPlanner(HARDWARE, SLO, ReplanPolicy(budget=16), spare=spare), 10).tick(
            INTERVAL_S, workers
        )
        for spare in (0.0, 1.0)
    )
    assert roomy.target.prefill > plain.target.prefill
    assert roomy.target.decode > plain.target.decode


def test_its_reactive_loop_grows_where_all_miss_and_shrinks_to_what_the_interval_wants() -> None:
    rule = seen_by(DynamoPlanner(HARDWARE, SLO, ReplanPolicy(budget=16), reactive=True), 5)
    workers = (
        FleetWorker("p", PREFILL),
        FleetWorker("q", PREFILL),
        FleetWorker("d", DECODE),
        FleetWorker("e", DECODE),
    )
    assert rule.tick(INTERVAL_S - 10, workers).actions == (), "nothing is known yet"
    late, idle = WorkerGauge(PREFILL, 20_000, 0, 0.0, 0.0), WorkerGauge(PREFILL, 0, 0, 0.0, 0.0)
    full, light = WorkerGauge(DECODE, 0, 400, 60_000.0, 120_000.0), WorkerGauge(DECODE, 0, 10, 6_000.0, 0.0)

    rule.gauges = lambda: (late, late, full, full)
    decision = rule.tick(INTERVAL_S, workers)
    assert decision.actions == (Start(PREFILL, 1), Start(DECODE, 1))
    waits = (*workers, FleetWorker("r", PREFILL, STARTING), FleetWorker("f", DECODE, STARTING))
    assert rule.tick(INTERVAL_S + 10, waits).actions == (), "one at a time"

    rule.gauges = lambda: (late, idle, full, light)
    assert rule.tick(INTERVAL_S + 20, workers).actions == (), "not all of them miss"

    rule.gauges = lambda: (idle, idle, light, light)
    decision = rule.tick(INTERVAL_S + 30, workers)
    assert decision.target == FleetSize(1, 1)
    assert rule.tick(INTERVAL_S + 40, (workers[0], workers[2])).actions == ()
    busy = seen_by(DynamoPlanner(HARDWARE, SLO, ReplanPolicy(budget=16), reactive=True), 25)
    busy.gauges = rule.gauges
    assert busy.tick(INTERVAL_S, workers).target >= FleetSize(2, 2), "no less than the interval wants"


def test_what_waits_is_counted_at_ready_workers() -> None:
    world = World(synthetic_workload("sharegpt").sample(300, 20.0, seed=1), FleetSize(1, 1))
    world.fleet.advance(10.0)
    world.fleet.act([Start(PREFILL, 1)])
    reader, writer = world.fleet.gauges()
    assert (reader.role, writer.role) == (PREFILL, DECODE)
    assert reader.waiting > 1000
    assert 0 < writer.kv <= 60_000
    assert writer.rows > 10
    world.fleet.advance(2000.0)
    assert [(one.waiting, one.rows, one.kv, one.queued_kv) for one in world.fleet.gauges()] == [
        (0, 0, 0.0, 0.0)
    ] * 3


def test_dynamo_stays_within_budget_and_steps() -> None:
    rule = DynamoPlanner(HARDWARE, SLO, ReplanPolicy(budget=6))
    for _ in range(180 * 100):
        rule.arrived(0.0, 512)
        rule.ended(0.0, 512, 128)
    workers = (FleetWorker("p", PREFILL), FleetWorker("d", DECODE), FleetWorker("e", DECODE))
    decision = rule.tick(180.0, workers)
    assert decision.target.prefill + decision.target.decode <= 6
    started = sum(action.count for action in decision.actions if isinstance(action, Start))
    assert len(workers) + started <= 6
    assert rule.tick(360.0, workers).actions == (), "nothing came: it stays"


def test_its_predictors_follow_a_trend_and_the_last_value() -> None:
    kalman, constant = KalmanPredictor(), LastValuePredictor()
    for value in range(0, 200, 10):
        kalman.observe(float(value))
        constant.observe(float(value))
    assert constant.predict() == 190.0
    assert kalman.predict() == pytest.approx(200.0, abs=8.0)


def test_a_static_plan_is_sized_once() -> None:
    evaluator = SimulatedEvaluator(HARDWARE, {"": SLO}, span_s=30.0)
    fleet = smallest_fleet(ReplanPolicy(budget=8), AttainmentCache(evaluator), CHAT, 12.0)
    assert evaluator.attainment(fleet, CHAT, 12.0, 1.0) >= 0.9
    assert StaticFleet().tick(5.0, (FleetWorker("p", PREFILL),)).actions == ()
