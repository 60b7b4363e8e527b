"""The simulator takes the decisions of the product: the same trace through both, plan by plan and order by order.

On one side stand the real loop, roles, leases, books and relay
(`tests/unit/planner/sim/product_deployment.py`), on the other the simulator. Every number of seconds is a
multiple of 2^-32, so that sums of them are exact and equal moments are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import pytest

import planner.sim.exact.engine
import planner.sim.exact.simulate
from diptych.eviction_spec import ADA, ZAP
from diptych.stats.tier_rates import TierRate
from engine.scheduling.scheduler import StepPlan
from engine.sequence import EngineLimits
from kvcache.eviction.kept_segments import count_segment_slabs
from planner.sim.exact.deployment import InstanceSpec, SimDeployment
from planner.sim.exact.segments import count_bag_slabs, cut_segments
from planner.sim.exact.simulate import ExactSimulation
from planner.sim.exact.tiers import SimTier
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    InstancePool,
    Job,
    JobResult,
    KvClass,
    KvClassWork,
    KvKeep,
    LinkSpec,
    Parallelism,
    Placement,
    StepBatch,
)
from tests.simulation.virtual_model import LAYOUT
from tests.unit.planner.sim.product_deployment import TOKEN_BYTES, Noted, NotedRelay, World

GRAIN = 2.0**-32
ZAP_RULE = f"{ZAP}@{0:016x}"


def grain(seconds: float) -> float:
    return round(seconds / GRAIN) * GRAIN


@dataclass(frozen=True)
class Plain:
    """So much per step and token, whoever reads or writes it."""

    base_s: float = grain(3.1234567e-3)
    token_s: float = grain(0.9876543e-4)
    context_s: float = 0.0

    def step_s(self, batch: StepBatch) -> float:
        return self.base_s + self.token_s * (batch.tokens + batch.rows) + self.context_s * batch.context

    def stage_s(self, batch: StepBatch) -> float:
        return self.step_s(batch)


def deployed(*pools: tuple[str, int], **rest: Any) -> SimDeployment:
    """Pools by role and count; `rest` goes to machines as far as it is theirs, else to the deployment."""
    own: dict[str, Any] = {
        "cost": Plain(),
        "kv_tokens": 64 * 200,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 16,
    }
    own |= {name: rest.pop(name) for name in list(rest) if name in InstanceSpec.__slots__}
    machine = InstanceSpec(**own)
    faster = replace(machine, cost=Plain(base_s=grain(2.7e-3)))
    placement = Placement(tuple(InstancePool(role, Parallelism(), count) for role, count in pools))
    settings: dict[str, Any] = {
        "token_bytes": TOKEN_BYTES,
        "link": LinkSpec(latency_s=grain(1.1e-3)),
        "gateway_s": grain(0.7e-3),
        "hop_s": grain(0.31e-3),
        "max_model_len": 1024,
        "pipelined": False,
    }
    machines = tuple(machine if role != DECODE else faster for role, _ in pools)
    return SimDeployment(placement, machines, **(settings | rest))


def trace(count: int, per_s: float, seed: int, shared: bool = False, spread: float = 0.9) -> list[Job]:
    draw, at_s, jobs = Random(seed), 0.0, []
    for _ in range(count):
        at_s = grain(at_s + draw.expovariate(per_s))
        prompt, output = (
            min(400, int(draw.lognormvariate(4.6, 0.9)) + 1),
            min(500, int(draw.lognormvariate(3.3, spread)) + 1),
        )
        prefix: tuple[int, ...] = ()
        if shared and draw.random() < 0.7:
            blocks = draw.choice([(1,), (1, 2), (1, 3), (4, 5, 6)])
            prefix, prompt = blocks, max(prompt, 64 * len(blocks) + draw.choice([0, 0, 30]))
        jobs.append(Job(at_s, prompt, output, prefix=prefix))
    return jobs


def longer_prefixes(jobs: list[Job], most: int = 1000) -> list[Job]:
    """The same with prefixes four times as long, without jobs of more than `most` tokens."""
    longer = [
        replace(
            job,
            prompt=job.prompt + 3 * 64 * len(job.prefix),
            prefix=tuple(10 * name + place for name in job.prefix for place in range(4)),
        )
        for job in jobs
    ]
    return [job for job in longer if job.prompt + job.output <= most]


def short_answers(jobs: list[Job]) -> list[Job]:
    """The same with answers that fill no chunk: the simulator has no names for these."""
    return [replace(job, output=min(job.output, 64 - job.prompt % 64)) for job in jobs]


@dataclass
class Simulated:
    plans: list[tuple[str, float, StepPlan]]
    orders: list[tuple[float, str, str, str, int]]
    served: list[JobResult]
    num_preempted: int
    num_overdrafts: int
    # Tokens that decode workers read back instead of pulling them.
    num_unpulled: int


def simulated(deployment: SimDeployment, jobs: list[Job], skips: bool = False) -> Simulated:
    plans: list[tuple[str, float, StepPlan]] = []
    served: list[JobResult] = []
    roles = [
        DECODE if pool.role == BOTH else pool.role
        for pool in deployment.placement.pools
        for _ in range(pool.count)
    ]
    names = iter([f"{role}-{roles[:place].count(role)}" for place, role in enumerate(roles)])
    simulation = ExactSimulation(deployment, served.append, skips)

    def scheduler(limits: EngineLimits) -> Noted:
        name = next(names)
        return Noted(limits, lambda plan: plans.append((name, simulation.events.now_s, plan)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner.sim.exact.engine, "Scheduler", scheduler)
        patch.setattr(planner.sim.exact.simulate, "Relay", NotedRelay)
        simulation.run(jobs)
    (gate,) = simulation.gateways
    assert isinstance(gate.relay, NotedRelay)
    patience = gate.relay.pairs.patience
    num_overdrafts = patience.num_in_time + patience.num_late
    num_unpulled = sum(
        worker.stats.tier_hits for name, worker in gate.workers.items() if name.startswith(DECODE)
    )
    return Simulated(
        plans, gate.relay.noted, served, simulation.preempted.total(), num_overdrafts, num_unpulled
    )


def in_classes(deployment: SimDeployment, jobs: list[Job]) -> tuple[SimDeployment, list[Job]]:
    """The same with two classes of KV, for which work costs other times; a third of the jobs asks for none."""
    classes = (
        KvClass("fp16", 0.5, TOKEN_BYTES / 2, 1.0, KvClassWork(1.5, 1.0, 0.5)),
        KvClass("raw", 0.5, TOKEN_BYTES, 0.5),
    )
    costs = Plain(context_s=grain(2e-6))
    machines = tuple(replace(machine, cost=costs) for machine in deployment.instances)
    asked = ("fp16", "raw", "")
    coded = [replace(job, kv_class=asked[number % 3]) for number, job in enumerate(jobs)]
    return replace(deployment, instances=machines, kv_classes=classes), coded


def evicting(
    deployment: SimDeployment, jobs: list[Job], share: float = 0.33, rule: str = ADA
) -> tuple[SimDeployment, list[Job]]:
    """The same with requests that all keep a share of their KV; decisions and steps on it have times of their own."""
    keep = KvKeep(0.95, share, grain(2e-6), grain(1e-6), KvClassWork(1.25, 1.0, 0.5), rule)
    machines = tuple(replace(machine, cost=Plain(context_s=grain(2e-6))) for machine in deployment.instances)
    return replace(deployment, instances=machines, keep=keep), jobs


def tiered(
    deployment: SimDeployment, *tiers: tuple[str, int, float, float], slabs: int = 14, small: str = PREFILL
) -> SimDeployment:
    """The same with tiers (name, chunks, delay and seconds of a chunk) below pools, of which those of the role `small`
    are.
    """
    below = tuple(
        SimTier(
            name, chunks * LAYOUT.chunk_bytes, TierRate(grain(delay_s), LAYOUT.chunk_bytes / grain(chunk_s))
        )
        for name, chunks, delay_s, chunk_s in tiers
    )
    machines = tuple(
        replace(machine, kv_tokens=64 * slabs) if pool.role == small else machine
        for pool, machine in zip(deployment.placement.pools, deployment.instances, strict=True)
    )
    return replace(deployment, instances=machines, tiers=below, prefix_caching=True)


# A chunk takes about 2 ms.
SLOW_LINK = LinkSpec(LAYOUT.chunk_bytes / 2e-3, 1e-3)

CASES: dict[str, tuple[SimDeployment, list[Job]]] = {
    "1P1D": (deployed((PREFILL, 1), (DECODE, 1)), trace(120, 25.0, 1)),
    "1P1D, hardly any room": (
        deployed((PREFILL, 1), (DECODE, 1), kv_tokens=64 * 15),
        trace(80, 40.0, 2, spread=1.6),
    ),
    "2P3D": (deployed((PREFILL, 2), (DECODE, 3)), trace(160, 60.0, 3)),
    "2P2D, L_m": (deployed((PREFILL, 2), (DECODE, 2), saturation_tokens=64), trace(120, 60.0, 4)),
    "slow link": (
        deployed((PREFILL, 2), (DECODE, 2), link=LinkSpec(4e5, 1e-3), beat_s=1e9),
        trace(100, 40.0, 5),
    ),
    "shared prefixes": (
        deployed((PREFILL, 2), (DECODE, 2), prefix_caching=True),
        trace(120, 50.0, 6, shared=True),
    ),
    "1P1D, a tier in host memory": (
        tiered(deployed((PREFILL, 1), (DECODE, 1)), ("host", 10**6, 1.3e-3, 0.4e-3)),
        trace(120, 25.0, 31, shared=True),
    ),
    "2P2D, two tiers": (
        tiered(
            deployed((PREFILL, 2), (DECODE, 2)), ("host", 5, 0.3e-3, 0.4e-3), ("disk", 10**6, 1e-3, 3.1e-3)
        ),
        trace(120, 50.0, 32, shared=True),
    ),
    "2P2D, a tier that is hardly faster than computing": (
        tiered(deployed((PREFILL, 2), (DECODE, 2)), ("disk", 10**6, 2.5e-3, 5.9e-3)),
        trace(120, 60.0, 33, shared=True),
    ),
    "2P2D, two classes, a tier": in_classes(
        tiered(deployed((PREFILL, 2), (DECODE, 2)), ("host", 10**6, 0.3e-3, 0.4e-3), slabs=28),
        trace(120, 50.0, 34, shared=True),
    ),
    "2P2D, eviction, a tier": evicting(
        tiered(deployed((PREFILL, 2), (DECODE, 2)), ("host", 10**6, 0.3e-3, 0.4e-3)),
        trace(120, 50.0, 35, shared=True),
    ),
    "1P1D, slow link, a tier": (
        tiered(
            deployed((PREFILL, 1), (DECODE, 1), link=SLOW_LINK, beat_s=1e9),
            ("host", 10**6, 1.3e-3, 0.4e-3),
            slabs=24,
            small=DECODE,
        ),
        short_answers(longer_prefixes(trace(120, 25.0, 38, shared=True))),
    ),
    "2P2D, slow link, two tiers": (
        tiered(
            deployed((PREFILL, 2), (DECODE, 2), link=SLOW_LINK, beat_s=1e9),
            ("host", 20, 0.3e-3, 0.4e-3),
            ("disk", 10**6, 1e-3, 1.1e-3),
            slabs=24,
            small=DECODE,
        ),
        short_answers(longer_prefixes(trace(120, 50.0, 39, shared=True))),
    ),
    "2P2D, first tokens by decode workers": (
        deployed((PREFILL, 2), (DECODE, 2), prefix_caching=True, traits=()),
        trace(120, 50.0, 18, shared=True),
    ),
    "1P1D, first tokens by decode workers, hardly any room": (
        deployed((PREFILL, 1), (DECODE, 1), kv_tokens=64 * 15, traits=()),
        trace(80, 40.0, 19, spread=1.6),
    ),
    "2P1D, overdraft": (
        deployed((PREFILL, 2), (DECODE, 1), kv_tokens=64 * 15, overdraft=True),
        trace(120, 60.0, 20, spread=0.4),
    ),
    "2P2D, overdraft": (
        deployed((PREFILL, 2), (DECODE, 2), kv_tokens=64 * 15, overdraft=True),
        trace(120, 90.0, 21),
    ),
    "1P1D, overdraft, eviction": evicting(
        deployed((PREFILL, 1), (DECODE, 1), kv_tokens=64 * 14, overdraft=True),
        [job for job in trace(80, 40.0, 27, spread=1.6) if job.prompt + job.output < 64 * 11],
        0.9,
    ),
    "colocated": (deployed((BOTH, 2)), trace(120, 30.0, 7)),
    "colocated, hardly any room": (deployed((BOTH, 1), kv_tokens=64 * 15), trace(60, 30.0, 8, spread=1.6)),
    "colocated, tight TPOT": (deployed((BOTH, 2), tpot_s=8e-3), trace(100, 30.0, 9)),
    "colocated, whole prompts": (deployed((BOTH, 1), chunked_prefill=False), trace(80, 15.0, 10)),
    "2P2D, two classes": in_classes(deployed((PREFILL, 2), (DECODE, 2)), trace(120, 50.0, 11)),
    "1P1D, two classes, hardly any room": in_classes(
        deployed((PREFILL, 1), (DECODE, 1), kv_tokens=64 * 26), trace(80, 40.0, 12, spread=1.6)
    ),
    "1P2D, eviction": evicting(deployed((PREFILL, 1), (DECODE, 2)), trace(120, 25.0, 14, spread=1.3)),
    "1P1D, eviction, hardly any room": evicting(
        deployed((PREFILL, 1), (DECODE, 1), kv_tokens=64 * 14),
        [job for job in trace(80, 40.0, 27, spread=1.6) if job.prompt + job.output < 64 * 11],
        0.9,
    ),
    "2P2D, eviction, shared prefixes": evicting(
        deployed((PREFILL, 2), (DECODE, 2), prefix_caching=True), trace(120, 50.0, 16, shared=True)
    ),
    "1P2D, segments": evicting(
        deployed((PREFILL, 1), (DECODE, 2)), trace(120, 25.0, 14, spread=1.3), rule=ZAP_RULE
    ),
    "2P2D, segments, shared prefixes, slow link": evicting(
        deployed((PREFILL, 2), (DECODE, 2), prefix_caching=True, link=LinkSpec(4e6, 1e-3), beat_s=1e9),
        longer_prefixes(trace(120, 50.0, 16, shared=True)),
        rule=ZAP_RULE,
    ),
    "1P1D, segments, shared prefixes, hardly any room": evicting(
        deployed((PREFILL, 1), (DECODE, 1), kv_tokens=64 * 18, prefix_caching=True),
        longer_prefixes(trace(80, 40.0, 28, shared=True, spread=1.6), 64 * 15),
        0.6,
        ZAP_RULE,
    ),
    "1P1D, segments, a tier": evicting(
        tiered(deployed((PREFILL, 1), (DECODE, 1)), ("host", 10**6, 0.3e-3, 0.4e-3), slabs=20),
        longer_prefixes(trace(120, 50.0, 36, shared=True)),
        rule=ZAP_RULE,
    ),
    "colocated, segments": evicting(
        deployed((BOTH, 2), prefix_caching=True),
        longer_prefixes(trace(60, 30.0, 37, shared=True)),
        rule=ZAP_RULE,
    ),
    "colocated, eviction, hardly any room": evicting(
        deployed((BOTH, 1), kv_tokens=64 * 15, tpot_s=12e-3), trace(60, 30.0, 17, spread=1.6), 0.9
    ),
    "colocated, two classes, shared prefixes": in_classes(
        deployed((BOTH, 2), kv_tokens=64 * 60, prefix_caching=True), trace(100, 30.0, 13, shared=True)
    ),
}


@cache
def simulated_case(name: str, skips: bool = False) -> Simulated:
    """A case's run, which several tests look at."""
    return simulated(*CASES[name], skips)


@pytest.mark.parametrize("name", CASES)
def test_the_simulator_decides_as_the_product_does(name: str) -> None:
    deployment, jobs = CASES[name]
    world = World(deployment)
    world.run(jobs)
    there = simulated_case(name)
    assert len(there.served) == len(jobs) == len(world.ended_s)
    assert there.orders == world.relay.noted
    assert sorted(there.plans, key=lambda plan: plan[:2]) == sorted(world.plans, key=lambda plan: plan[:2])
    ended = {str(number): job for number, job in enumerate(jobs)}
    by_job = {id(served.job): served for served in there.served}
    for request, job in ended.items():
        served = by_job[id(job)]
        assert served.ended_s == world.ended_s[request]
        assert served.ttft_s == world.first_s[request] - job.at_s


@pytest.mark.parametrize("name", CASES)
def test_skipping_steps_changes_nothing(name: str) -> None:
    each, some = simulated_case(name), simulated_case(name, skips=True)
    assert some.orders == each.orders
    assert some.served == each.served


@pytest.mark.parametrize("seed", range(8))
def test_skipping_steps_changes_nothing_for_any_seed(seed: int) -> None:
    """Long answers, so that runs are long and cross what the relay has booked; beats at odd moments; KV sent ahead."""
    pools = ((PREFILL, 1), (DECODE, 2)) if seed % 2 else ((BOTH, 2),)
    room = 64 * (18 + 40 * (seed % 3))
    deployment = deployed(*pools, kv_tokens=room, beat_s=0.0371, max_num_batched_tokens=256)
    if seed > 3:
        deployment = replace(deployment, pipelined=True, link=LinkSpec(1e6, 1e-4))
    jobs = trace(40, 12.0 + 4.0 * seed, 100 + seed, spread=1.6)
    each, some = (simulated(deployment, jobs, skips) for skips in (False, True))
    assert (some.orders, some.served) == (each.orders, each.served)
    assert len(some.plans) < 0.8 * len(each.plans)


def count_shared_pulls(name: str) -> int:
    """How many requests pulled fewer slabs than they had when their prompt ended."""
    deployment, _ = CASES[name]
    assert deployment.keep is not None
    count = 0
    for one in simulated_case(name).served:
        segments = cut_segments(deployment.keep, one.job.prompt)
        held = count_segment_slabs(segments) + count_bag_slabs(deployment.keep, segments, one.job.prompt)
        count += 0 < one.moved_bytes < held * LAYOUT.chunk_bytes
    return count


def test_the_cases_are_hard() -> None:
    """Preemption, chunks and whole prompts do happen in them."""
    names = "colocated, hardly any room", "colocated, whole prompts", "slow link"
    tight, whole, many = (simulated_case(name, skips=True).plans for name in names)
    assert any(plan.preempted is not None for _, _, plan in tight)
    for name in ("1P1D, eviction, hardly any room", "colocated, eviction, hardly any room"):
        assert simulated_case(name).num_preempted, name
    for name in [name for name in CASES if "overdraft" in name]:
        assert simulated_case(name).num_overdrafts, name
    for name in [name for name in CASES if "slow link, " in name and "tier" in name]:
        assert simulated_case(name).num_unpulled >= 10 * 64, name
    for name in [name for name in CASES if "segments, shared prefixes" in name]:
        assert count_shared_pulls(name) >= 10, name
    assert max(part.count for _, _, plan in whole for part in plan.prefill) > 128
    assert any(len(plan.prefill) > 1 for _, _, plan in many)
