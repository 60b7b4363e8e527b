"""Equations 1 to 3 of the paper against the simulator, and the loads at which they cross (S4)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from statistics import fmean

import pytest

from planner.sim.fast import cluster
from planner.sim.fast.instance import InstanceLimits
from planner.types import PREFILL, InstancePool, Job, Parallelism, Placement, StepBatch
from tests.unit.planner.sim import queueing

SERVICE_S = 0.1
# Where stages become better than devices side by side, by their speed-up (computed from the equations).
CROSSINGS = {
    1.2: 0.434,
    1.3: 0.611,
    1.4: 0.776,
    1.5: 0.936,
    1.6: 1.095,
    1.7: 1.257,
    1.8: 1.429,
    1.9: 1.626,
    1.95: 1.749,
}


@dataclass(frozen=True)
class Constant:
    """A step takes the same time whatever is in it."""

    seconds: float
    stages: int = 1

    def step_s(self, batch: StepBatch) -> float:
        return self.seconds

    def stage_s(self, batch: StepBatch) -> float:
        return self.seconds / self.stages


def mean_ttft(load: float, seconds: float, split: Parallelism, requests: int, count: int = 1) -> float:
    """Of a prefill pool without batching; `load` is in units of SERVICE_S."""
    chance, at_s, jobs = random.Random(f"{load} {split} {count}"), 0.0, []
    for _ in range(requests):
        at_s += chance.expovariate(load / SERVICE_S)
        jobs.append(Job(at_s, 512, 1))
    served = cluster.simulate_fast(
        Placement((InstancePool(PREFILL, split, count),)),
        {split: Constant(seconds, split.pp)},
        jobs,
        limits=InstanceLimits(prefill_tokens=512),
    )
    return fmean(one.ttft_s for one in served)


@pytest.mark.parametrize("load", [0.2, 0.4, 0.6, 0.8])
def test_one_instance_is_an_md1_queue(load: float) -> None:
    found = mean_ttft(load, SERVICE_S, Parallelism(), 25_000)
    assert found == pytest.approx(queueing.mean_ttft_single(load / SERVICE_S, SERVICE_S), rel=0.03)


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8, 1.4])
def test_two_stages_queue_for_half_the_time(load: float) -> None:
    found = mean_ttft(load, SERVICE_S, Parallelism(1, 2), 25_000)
    assert found == pytest.approx(queueing.mean_ttft_inter_op(load / SERVICE_S, SERVICE_S), rel=0.03)


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8, 1.1])
def test_two_devices_side_by_side_are_a_faster_one(load: float) -> None:
    found = mean_ttft(load, SERVICE_S / 1.5, Parallelism(2), 25_000)
    assert found == pytest.approx(queueing.mean_ttft_intra_op(load / SERVICE_S, SERVICE_S, 1.5), rel=0.03)


def test_the_equations_are_those_of_the_paper() -> None:
    rate, service_s, speedup = 6.0, 0.1, 1.6
    load = rate * service_s
    assert queueing.mean_ttft_inter_op(rate, service_s) == pytest.approx(
        service_s + rate * service_s**2 / (4 * (2 - load))
    )
    expected = service_s / speedup + rate * service_s**2 / (2 * speedup * (speedup - load))
    assert queueing.mean_ttft_intra_op(rate, service_s, speedup) == pytest.approx(expected)
    assert queueing.mean_ttft_replicas(rate, service_s, 2) == queueing.mean_ttft_single(rate / 2, service_s)


def test_what_is_overloaded_waits_for_ever() -> None:
    assert queueing.mean_ttft_single(10.0, 0.1) == inf
    assert queueing.mean_ttft_intra_op(16.0, 0.1, 1.6) == inf


@pytest.mark.parametrize(("speedup", "load"), CROSSINGS.items())
def test_stages_win_from_this_load_on(speedup: float, load: float) -> None:
    assert queueing.crossing_load(speedup) == pytest.approx(load, abs=0.03)


@pytest.mark.parametrize("speedup", [0.9, 1.0, 2.0])
def test_no_crossing_where_one_is_always_better(speedup: float) -> None:
    with pytest.raises(ValueError, match="times as fast"):
        queueing.crossing_load(speedup)
