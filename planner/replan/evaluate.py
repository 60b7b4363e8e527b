"""Estimates the attainment of a fleet, by the fast simulator on requests resampled from a traffic window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from diptych.slo import Slos
from planner.attainment import joint_attainment
from planner.replan.attainment_cache import ROLES, FleetSize
from planner.replan.traffic_windows import LengthMix
from planner.sim.fast.cluster import simulate_fast
from planner.sim.fast.instance import InstanceLimits
from planner.types import (
    DECODE,
    PREFILL,
    CostModel,
    InstancePool,
    Job,
    KvClassWork,
    KvKeep,
    LinkSpec,
    Parallelism,
    Placement,
    StepBatch,
)

MIN_JOBS, MAX_JOBS = 300, 3000
# Share of the jobs that come first, fill the empty fleet, and are not counted.
WARMUP = 0.1
# Utilisation from which on a fleet is not simulated, since its queues would grow for ever.
HOPELESS_LOAD = 1.05
# Attainment that is assumed at HOPELESS_LOAD. At a higher utilisation less is assumed.
HOPELESS_ATTAINMENT = 0.1


@dataclass(frozen=True)
class FleetHardware:
    """The hardware of a fleet: by role, a worker's split, step costs and KV capacity in tokens; and the KV link.

    `keep` is what requests keep of their KV, if they evict; the costs then include their decisions.
    """

    splits: Mapping[str, Parallelism]
    costs: Mapping[str, CostModel]
    kv_tokens: Mapping[str, float] = field(default_factory=dict)
    link: LinkSpec = LinkSpec()
    token_bytes: float = 0.0
    limits: InstanceLimits = InstanceLimits()
    keep: KvKeep | None = None

    def pool(self, role: str, count: int) -> InstancePool:
        """A pool of `count` workers of `role`, with the split of that role."""
        return InstancePool(role, self.splits[role], count)

    def room(self, pool: InstancePool) -> float:
        """Tokens of KV that one worker of the pool holds; infinite if the profile gives no limit."""
        return self.kv_tokens.get(pool.role, inf)

    def cost(self, pool: InstancePool) -> CostModel:
        """The step cost of one worker of the pool."""
        return self.costs[pool.role]

    def placement(self, fleet: FleetSize) -> Placement:
        """The fleet as a placement; roles without workers are left out."""
        counts = ((role, getattr(fleet, role)) for role in ROLES)
        return Placement(tuple(self.pool(role, count) for role, count in counts if count))


class SimulatedEvaluator:
    """Estimates the attainment of a fleet by simulation (a `planner.replan.attainment_cache.FleetEvaluator`).

    Each run draws requests from the mix for at least `span_s` seconds and measures joint attainment. Cached prefixes
    are modelled by shorter prompts, which slightly underestimates KV transfer and attention. Equal inputs give equal
    results.
    """

    def __init__(
        self, hardware: FleetHardware, slos: Slos, span_s: float = 60.0, seeds: int = 1, about: str = ""
    ) -> None:
        self._hardware, self._slos, self._span_s, self._seeds = hardware, slos, span_s, seeds
        self._about = about
        self.runs = 0

    def describe(self) -> dict[str, Any]:
        """A description for the head of the replanner's journal."""
        slos = {kind: [slo.ttft_s, slo.tpot_s, slo.attainment] for kind, slo in self._slos.items()}
        return {"what": "simulated", "about": self._about, "slos": slos, "span_s": self._span_s}

    def attainment(self, fleet: FleetSize, mix: LengthMix, rate: float, cv: float) -> float:
        """See `planner.replan.attainment_cache.FleetEvaluator`."""
        if not mix.weights:
            return 1.0
        if (load := self.overload(fleet, mix, rate)) > HOPELESS_LOAD:
            return HOPELESS_ATTAINMENT * HOPELESS_LOAD / load
        count = min(max(MIN_JOBS, round(rate * self._span_s)), MAX_JOBS)
        found = [
            self._once(fleet, mix.jobs(count, rate, seed, cv), mix.cached_share)
            for seed in range(self._seeds)
        ]
        return sum(found) / len(found)

    def overload(self, fleet: FleetSize, mix: LengthMix, rate: float) -> float:
        """A lower bound on the utilisation of the busiest role. Above 1, queues grow for ever.

        Batches are assumed as large as possible: endless ones for prefill, and as many rows as KV fits for decode.
        """
        hardware, prompt, output = self._hardware, mix.prompt * (1 - mix.cached_share), mix.output
        loads, keep = dict.fromkeys(ROLES, 0.0), hardware.keep
        share, work = (1.0, KvClassWork()) if keep is None else (keep.share, keep.work)
        for role in ROLES:
            if not (count := getattr(fleet, role)):
                continue
            cost, most = hardware.costs[role], hardware.kv_tokens.get(role, inf) / share / (prompt + output)
            whole = StepBatch(round(prompt) * work.token, prompt**2 * work.square)
            stages = hardware.splits[role].pp
            if role != DECODE:
                # The cost that one more prompt adds to a batch. The constant part of a step is left out, since very
                # large batches share it.
                twice = StepBatch(2 * whole.tokens, 2 * whole.squares)
                loads[role] += rate / count * (cost.step_s(twice) - cost.step_s(whole)) / stages
            if role != PREFILL and most < inf:
                rows = max(1, int(most))
                context = round(rows * (prompt + output / 2)) * work.context
                step_s = cost.step_s(StepBatch(rows=rows, context=context)) / stages
                loads[role] += rate / count * (output - 1) * step_s / rows
        return max(loads.values())

    def _once(self, fleet: FleetSize, jobs: list[Job], cached: float) -> float:
        """Joint attainment of one simulated run, in which the share `cached` of each prompt is not computed."""
        hardware = self._hardware
        self.runs += 1
        if cached:
            jobs = [replace(job, prompt=max(1, round(job.prompt * (1 - cached)))) for job in jobs]
        results = simulate_fast(
            hardware.placement(fleet),
            hardware.cost,
            jobs,
            limits=hardware.limits,
            kv_tokens=hardware.room,
            link=hardware.link,
            token_bytes=hardware.token_bytes,
            keep=hardware.keep,
        )
        return joint_attainment(results[round(len(results) * WARMUP) :], self._slos)
