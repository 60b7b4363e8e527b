"""Several classes of KV in both simulators: a pool for each, and work that costs what the class says."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from planner.sim.exact.deployment import InstanceSpec, SimDeployment
from planner.sim.exact.simulate import ExactSimulation, class_slabs, simulate_exact
from planner.sim.fast.cluster import simulate_fast
from planner.sim.fast.instance import InstanceLimits
from planner.types import (
    BOTH,
    InstancePool,
    Job,
    JobResult,
    KvClassWork,
    LinkSpec,
    Parallelism,
    Placement,
)
from planner.workload.kv_mix import draw_classes
from tests.unit.planner.sim.class_samples import CLASSES, CODED, COST, PAIR
from tests.unit.planner.sim.fast_samples import ODD, apart, jobs

COLOCATED = Placement((InstancePool(BOTH, Parallelism(), 2),))
ROOM = 40_000


def mixed(count: int, rate: float, seed: int = 1) -> list[Job]:
    return list(draw_classes(jobs(count, rate, seed), {"raw": 0.6, "tq4": 0.4}, seed))


def exact(placement: Placement, asked: list[Job], room: int = ROOM, **rest: Any) -> list[JobResult]:
    machines = tuple(InstanceSpec(COST, room) for _ in placement.pools)
    deployment = SimDeployment(placement, machines, kv_classes=CLASSES, **rest)
    return sorted(simulate_exact(deployment, asked), key=lambda one: one.job.at_s)


def fast(placement: Placement, asked: list[Job], room: float = ROOM, **rest: Any) -> list[JobResult]:
    return simulate_fast(
        placement, lambda pool: COST, asked, kv_tokens=lambda pool: room, kv_classes=CLASSES, **rest
    )


@pytest.mark.parametrize("placement", [PAIR, COLOCATED], ids=str)
def test_the_simulators_agree(placement: Placement) -> None:
    asked = mixed(150, 6.0)
    quick = fast(placement, asked, limits=InstanceLimits(chunk_tokens=2048))
    real = exact(placement, asked)
    assert not [one for one in (*quick, *real) if one.failed]
    for times in (lambda one: one.ttft_s, lambda one: one.tpot_s):
        assert fmean(map(times, quick)) == pytest.approx(fmean(map(times, real)), rel=0.06)


@pytest.mark.parametrize("placement", [PAIR, COLOCATED], ids=str)
def test_steps_taken_together_are_the_steps_one_by_one(placement: Placement) -> None:
    asked = mixed(80, 8.0, 3)
    one, other = (fast(placement, asked, 4000.0, link=ODD, single=single) for single in (False, True))
    assert apart(one, other) < 1e-9


def test_work_costs_what_the_class_says() -> None:
    """A prompt of 1,000 tokens and two tokens after it, alone, in either class."""
    for name, work in (("raw", KvClassWork()), ("tq4", CODED.work)):
        job = Job(0.0, 1000, 3, kv_class=name)
        ttft_s = 0.0101 + 1.02e-4 * 1000 * work.token + 1.01e-9 * 1e6 * work.square
        tpot_s = 0.0201 + 5.03e-7 * 1000.5 * work.context + 1.01e-4
        for (served,) in (fast(COLOCATED, [job]), exact(COLOCATED, [job])):
            assert served.ttft_s == pytest.approx(ttft_s, rel=1e-6)
            assert served.tpot_s == pytest.approx(tpot_s, rel=1e-3)


def test_each_class_has_its_room() -> None:
    """10 slabs of raw, 70 of the other: 3 and 23 streams of three slabs; a longer one fits the second class only."""
    machine = InstanceSpec(COST, 64 * 20)
    assert class_slabs(machine, CLASSES) == {"raw": 10, "tq4": 70}
    for name, streams in (("raw", 3), ("tq4", 23)):
        asked = [Job(0.0, 3 * 64 - 20, 19, kv_class=name)] * (2 * streams)
        served = exact(Placement((InstancePool(BOTH, Parallelism()),)), asked, 64 * 20)
        waited = sorted(one.ttft_s for one in served)
        assert waited[streams - 1] < waited[streams], "as many as fit begin at once"
        longer = [Job(0.0, 1000, 10, kv_class=name)]
        for results in (exact(PAIR, longer, 64 * 20), fast(PAIR, longer, 64 * 20.0)):
            assert bool(results[0].failed) is (name == "raw")


def test_a_full_class_keeps_no_other_waiting() -> None:
    """Raw KV has room for one; those of the other class are served as if the raw ones were not there."""
    raw = [Job(0.0, 200, 1500, kv_class="raw")] * 4
    coded = [Job(1.0 + at, 200, 5, kv_class="tq4") for at in range(4)]
    for serve in (exact, fast):
        for placement in (PAIR, Placement((InstancePool(BOTH, Parallelism()),))):
            served = serve(placement, [*raw, *coded], 64 * 60)
            assert not any(one.failed for one in served)
            ends = [one.ended_s for one in served if one.job.kv_class == "raw"]
            first = min(ends)
            assert max(ends) > 2.5 * first, "raw ones wait for each other"
            assert all(one.ended_s < first for one in served if one.job.kv_class == "tq4")


def test_kv_that_moves_has_the_bytes_of_its_class() -> None:
    asked = mixed(40, 3.0, 5)
    for served, chunk in ((fast(PAIR, asked), 1), (exact(PAIR, asked), 64)):
        for one in served:
            token_bytes = 700 if one.job.kv_class == "raw" else 100
            moved = -(-one.job.prompt // chunk) * chunk * token_bytes if one.job.output > 1 else 0
            assert one.moved_bytes == pytest.approx(moved)
    assert all(one.moved_bytes == 0 for one in exact(COLOCATED, asked))


def test_a_slow_link_is_slower_for_the_larger_class() -> None:
    for serve in (exact, fast):
        large, small = (
            serve(PAIR, [Job(0.0, 1000, 2, kv_class=name)], link=LinkSpec(1e6))[0].tpot_s
            for name in ("raw", "tq4")
        )
        # 600 bytes a token less, at a megabyte a second.
        assert large - small == pytest.approx(0.6, rel=0.1)


def test_preemptions_and_slabs_are_counted_by_class() -> None:
    machines = (InstanceSpec(COST, 64 * 20),)
    placement = Placement((InstancePool(BOTH, Parallelism()),))
    deployment = SimDeployment(placement, machines, kv_classes=CLASSES, max_model_len=600)
    served: list[JobResult] = []
    run = ExactSimulation(deployment, served.append)
    # The later ones come when the engine reckons with shorter answers.
    run.run([Job(at_s, 60, 500, kv_class=name) for at_s in (0.0, 4.0, 5.0) for name in ("raw", "tq4")])
    assert not any(one.failed for one in served)
    assert run.preempted["raw"] > 0 and not run.preempted["tq4"]
    assert run.most_used["raw"] == 10 and run.most_used["tq4"] > 10


def test_who_names_none_gets_the_first_and_a_class_that_is_not_there_is_an_error() -> None:
    for serve in (exact, fast):
        unsaid, raw = (serve(COLOCATED, [Job(0.0, 300, 4, kv_class=name)])[0] for name in ("", "raw"))
        assert replace(unsaid, job=raw.job) == raw
    assert fast(COLOCATED, [Job(0.0, 300, 4, kv_class="int8")])[0].failed == "kv"
    with pytest.raises(ValueError, match="int8"):
        exact(COLOCATED, [Job(0.0, 300, 4, kv_class="int8")])
