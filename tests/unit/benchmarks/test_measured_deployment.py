"""The simulated twin: an instance for each worker, with what that one did."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest

from benchmarks.accuracy.measured_deployment import (
    measured_deployment,
    start_later,
    undisturbed_costs,
)
from diptych.config.options import Config
from planner.costs.model import find_model
from planner.costs.profile import CostProfile, Overheads
from planner.costs.profiler import MeasuredStep, WorkerTrace
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.sim.exact.simulate import simulate_exact
from planner.types import BOTH, DECODE, PREFILL, GatewayCpuCost, Job, LinkSpec, Parallelism, StepBatch
from services.bench.profile_run import Measurement, PoolSizes

COST = StepCost((2e-3, 1e-4, 0.0), ((1e-3, 0.0, 2e-4),))
WRITES, READS = StepBatch(0, 0.0, 1, 100), StepBatch(64, 4096.0)


def measured(*traces: WorkerTrace) -> Measurement:
    beside = Overheads(1e-3, 5e-4, 3e-4, LinkSpec(math.inf, 0.0))
    profile = CostProfile(
        find_model("embedded"),
        find_device("cpu"),
        {Parallelism(): COST},
        {Parallelism(): 40_000},
        "test",
        {},
        beside,
    )
    return Measurement(profile, 64, list(traces), [], {}, GatewayCpuCost(1e-4, 2e-5, 3e-3))


def life(worker: str, role: str, batch: StepBatch, ratio: float, gap_s: float) -> WorkerTrace:
    found = WorkerTrace(worker, role, 64 if role == "prefill" else 0)
    at_s = 0.0
    for number in range(20):
        now = StepBatch(0, 0.0, 1, 100 + number) if batch is WRITES else batch
        found.steps.append(MeasuredStep(at_s, at_s + ratio * COST.step_s(now), now))
        at_s = found.steps[-1].ended_s + gap_s
    return found


def test_prefill_and_decode_workers_are_in_pools_of_their_own_kind() -> None:
    traces = [life("decode-0", "decode", WRITES, 2.0, 1e-4), life("prefill-0", "prefill", READS, 3.0, 5.0)]
    made = measured_deployment(PoolSizes(), measured(*traces), COST, traces)
    assert [(pool.role, pool.count) for pool in made.placement.pools] == [(PREFILL, 1), (DECODE, 1)]
    reads, writes = made.instances
    assert reads.variation is not None and reads.variation.alone[1] == pytest.approx(3.0)
    assert writes.variation is not None and writes.variation.alone[0] == pytest.approx(2.0)
    assert writes.variation.alone[1] == pytest.approx(3.0), "it read nothing: as the other did"
    assert writes.step_s == pytest.approx(1e-4) and reads.step_s == pytest.approx(3e-4), (
        "the profile's, if none"
    )
    assert (reads.saturation_tokens, writes.saturation_tokens) == (64, 0), "as each worker has it"
    assert made.cpu_cost == GatewayCpuCost(1e-4, 2e-5, 3e-3) and made.cores == len(os.sched_getaffinity(0))
    assert (reads.max_num_seqs, reads.max_num_batched_tokens) == (
        Config().max_num_seqs,
        Config().max_num_batched_tokens,
    )


def test_of_two_colocated_workers_each_has_its_own_pace() -> None:
    traces = [life("decode-1", "decode", WRITES, 4.0, 1e-4), life("decode-0", "decode", WRITES, 1.0, 1e-4)]
    found = measured(*traces)
    made = measured_deployment(PoolSizes(0, 0, 2), found, COST, traces, tpot_s=0.02)
    assert [(pool.role, pool.count) for pool in made.placement.pools] == [(BOTH, 1), (BOTH, 1)]
    assert [machine.tpot_s for machine in made.instances] == [0.02, 0.02]
    first, second = (machine.variation for machine in made.instances)
    assert first is not None and second is not None
    assert second.alone[0] == pytest.approx(4.0 * first.alone[0])
    served = simulate_exact(made, [Job(0.0, 50, 40), Job(0.0, 50, 40)])
    assert len(served) == 2 and max(one.tpot_s for one in served) > 2.0 * min(one.tpot_s for one in served)


def test_a_twin_steps_at_the_cost_and_begins_at_the_start_that_it_is_given() -> None:
    own = StepCost((4e-3, 2e-4, 0.0), ((2e-3, 0.0, 4e-4),))
    traces = [life("decode-0", "decode", WRITES, 1.0, 1e-4)]
    traces[0].steps[10:] = [replace(step, ended_s=step.ended_s + 1e-3) for step in traces[0].steps[10:]]
    made = measured_deployment(PoolSizes(0, 0, 1), measured(*traces), own, traces)
    (machine,) = made.instances
    assert machine.cost == own and machine.variation is not None
    assert machine.variation.alone[0] * own.step_s(WRITES) == pytest.approx(COST.step_s(WRITES) + 5e-4)
    (moved,) = start_later(made, 0.5).instances
    assert moved.variation is not None
    assert moved.variation.tapes[0] == machine.variation.tapes[0][10:] + machine.variation.tapes[0][:10]
    plain = replace(made, instances=(replace(machine, variation=None),))
    assert start_later(plain, 0.5) == plain


def test_own_costs_are_fitted_to_the_steps_of_the_profile() -> None:
    reads, writes = WorkerTrace("prefill-0", "prefill", 64), WorkerTrace("decode-0", "decode", 0)
    for number in range(60):
        tokens, rows = 16 * (1 + number % 6), 1 + number % 5
        for found, batch in (
            (reads, StepBatch(tokens, float(tokens) ** 2)),
            (writes, StepBatch(0, 0.0, rows, 70 * rows * (1 + number % 3))),
        ):
            found.steps.append(MeasuredStep(float(number), number + 2.0 * COST.step_s(batch), batch))
    costs = undisturbed_costs(measured(reads, writes))
    # What all steps have in common is the cost's or the rhythm's: together they say what was seen.
    made = measured_deployment(PoolSizes(), measured(reads, writes), costs.cost, [reads, writes])
    for machine, batch, kind in ((made.instances[0], READS, 1), (made.instances[1], WRITES, 0)):
        assert machine.variation is not None
        factor = machine.variation.beside[kind]
        assert factor * costs.cost.step_s(batch) == pytest.approx(2.0 * COST.step_s(batch), rel=0.05)
    assert set(costs.errors) == {"prefill", "decode"}
