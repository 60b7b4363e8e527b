"""The compiled fast simulator and the bounds on arrays give what the Python ones give, to the bit."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from diptych.kernels import cache as kernel_cache
from diptych.slo import Slo
from planner.costs.profile import analytic_profile
from planner.costs.profile_file import built_in_profile
from planner.costs.step import CostWithOverhead
from planner.hardware import find_device
from planner.placement import bounds
from planner.placement.enlarged import EnlargedCost
from planner.placement.problem import NodeGroup, Problem
from planner.placement.trial import JobSample
from planner.placement.validate import product_limits
from planner.sim.fast import compiled
from planner.sim.fast.cluster import simulate_fast
from planner.sim.fast.compiled import compile_cluster, tabulate_jobs
from planner.sim.fast.instance import InstanceLimits
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    CostModel,
    InstancePool,
    Job,
    JobResult,
    LinkSpec,
    Parallelism,
    Placement,
)
from planner.workload.workload import synthetic_workload
from tests.unit.planner.sim.fast_samples import ODD, jobs

A100 = find_device("A100-80G")
PROFILES = [built_in_profile("OPT-13B", A100), analytic_profile("Llama-3.1-8B", "H200")]


def wrapped(chance: random.Random, cost: CostModel) -> CostModel:
    """The cost, perhaps with an overhead, perhaps with more of a resource."""
    if chance.random() < 0.3:
        cost = CostWithOverhead(cost, 0.002)
    return EnlargedCost(cost, *chance.choice([(1.25, 1.0), (1.0, 1.25)])) if chance.random() < 0.3 else cost


def drawn(chance: random.Random) -> dict[str, Any]:
    """A placement of any roles and stages, with limits that matter."""
    chunk_tokens, profile = chance.choice([0, 512, 2048]), chance.choice(PROFILES)

    def split(most: int = 4) -> Parallelism:
        return Parallelism(chance.choice([1, 2, 4]), chance.choice([1, chance.randint(1, most)]))

    pools = {
        "p": InstancePool(PREFILL, split(), chance.randint(1, 3)),
        "d": InstancePool(DECODE, split(), chance.randint(1, 3)),
        "b": InstancePool(BOTH, split(4 if chunk_tokens else 1), chance.randint(1, 3)),
    }
    placement = Placement(tuple(pools[name] for name in chance.choice(["pd", "b", "pdb", "p", "d"])))
    costs = {pool: wrapped(chance, profile.cost(pool.parallelism)) for pool in pools.values()}
    room = float(chance.choice([2000, 5000, 20000, inf]))
    return {
        "placement": placement,
        "costs": costs.__getitem__,
        "limits": InstanceLimits(
            chance.choice([inf, 2048]), decode_rows=chance.choice([inf, 8, 64]), chunk_tokens=chunk_tokens,
            step_s=chance.choice([inf, 0.03, 0.1]),
        ),
        "kv_tokens": lambda pool: room,
        "link": chance.choice([LinkSpec(), ODD, LinkSpec(5e10, 1e-5)]),
        "token_bytes": chance.choice([0.0, 131072.0]),
    }  # fmt: skip


def compiled_results(given: dict[str, Any], asked: list[Job]) -> list[JobResult]:
    cluster = compile_cluster(**given)
    assert cluster is not None
    found = []
    moments_s = cluster.run(tabulate_jobs(asked), 1.0).moments_s.tolist()
    for job, (at_s, began_s, first_s, ready_s, moved_s, ended_s) in zip(asked, moments_s, strict=True):
        steps = job.output - 1
        tpot_s = (ended_s - first_s) / steps if steps and ended_s > first_s else 0.0
        edges_s = (at_s, began_s, first_s, ready_s, moved_s, ended_s)
        names = "queue", "prefill", "wait", "transfer", "decode"
        parts = {name: edges_s[place + 1] - edges_s[place] for place, name in enumerate(names)}
        failed = first_s == inf
        found.append(
            JobResult(job, inf, inf, ended_s, "kv")
            if failed
            else JobResult(job, first_s - at_s, tpot_s, ended_s, "", parts)
        )
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_moment_is_that_of_the_python_code(seed: int) -> None:
    chance = random.Random(seed)
    given, asked = drawn(chance), jobs(120, chance.choice([1.0, 5.0, 30.0, 200.0]), seed)
    others = {name: value for name, value in given.items() if name not in ("placement", "costs")}
    served = simulate_fast(given["placement"], given["costs"], asked, **others)
    assert compiled_results(given, asked) == [replace(one, moved_bytes=0.0) for one in served]


def asked_problem(**more: Any) -> Problem:
    """A question with samples long enough for machine code."""
    profile = PROFILES[0]
    given: dict[str, Any] = {"requests": 600, "span_s": 0.0, "limits": product_limits([Slo(0.25, 0.1)])}
    given |= more
    group = NodeGroup(A100, 1, 4)
    source, slos = synthetic_workload("sharegpt"), {"": Slo(0.25, 0.1)}
    return Problem(profile.model, (group,), {A100.name: profile}, source, slos, **given)


def plain(problem: Problem, placement: Placement, **more: Any) -> Any:
    """The same trial with samples that no machine code takes."""
    trial = problem.trial(placement, **more)
    return replace(trial, samples=tuple(tuple(sample) for sample in trial.samples))


def test_trials_answer_alike() -> None:
    problem = asked_problem()
    units = [next(iter(problem.units("low"))), next(iter(problem.units("colocated")))]
    for unit in units:
        quick, slow = problem.trial(unit, fresh=True), plain(problem, unit, fresh=True)
        assert isinstance(quick.samples[0], JobSample)
        rates = [share * problem.saturated_rps(unit) for share in (0.3, 0.7, 0.9, 1.1, 2.0)]
        assert [quick.passes(unit, rate) for rate in rates] == [slow.passes(unit, rate) for rate in rates]
        assert quick.shares(unit, rates[2]) == slow.shares(unit, rates[2])
        assert {name: sorted(one) for name, one in quick.stages(unit, rates[2], 0).items()} == {
            name: sorted(one) for name, one in slow.stages(unit, rates[2], 0).items()
        }
        assert list(map(sorted, quick.spans(unit, rates[2], 0))) == list(
            map(sorted, slow.spans(unit, rates[2], 0))
        )


@pytest.mark.parametrize("slo", [Slo(0.25, 0.1), Slo(0.05, 0.1), Slo(inf, 0.02), Slo(2.0, inf, 0.5)])
def test_bounds_on_arrays_are_those_on_requests(slo: Slo) -> None:
    problem = replace(asked_problem(), slos={"": slo})
    for family in ("low", "colocated"):
        for unit in problem.units(family):
            quick = bounds.rate_bounds(problem.trial(unit), problem.site, unit)
            assert quick == pytest.approx(
                bounds.rate_bounds(plain(problem, unit), problem.site, unit), rel=1e-12
            )


def test_unknown_costs_are_left_to_the_python_code() -> None:
    class Flat:
        """Seconds that do not depend on the batch."""

        def step_s(self, batch: object) -> float:
            return 0.01

        stage_s = step_s

    given = drawn(random.Random(1)) | {"costs": lambda pool: Flat()}
    assert compile_cluster(**given) is None
    rotating = drawn(random.Random(2)) | {"limits": InstanceLimits(batch_rows=4)}
    assert compile_cluster(**rotating) is None


@pytest.mark.parametrize(("writable", "stored"), [(True, False), (False, True), (False, False)])
def test_nobody_compiles_what_cannot_be_kept(
    writable: bool, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_DISABLE_JIT", raising=False)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    monkeypatch.setattr(kernel_cache, "is_stored", lambda kernel: stored)
    compiled.is_compiled.cache_clear()
    try:
        assert compiled.is_compiled() is (writable or stored)
        given = drawn(random.Random(0))
        assert (compile_cluster(**given) is not None) is (writable or stored)
    finally:
        compiled.is_compiled.cache_clear()
