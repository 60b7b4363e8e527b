"""What a placement would do with more of one resource: the same site, with that resource multiplied."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.placement.bounds import PlacementSite, saturation_rates
from planner.placement.problem import Problem
from planner.placement.search import measure_goodput
from planner.types import CostModel, InstancePool, LinkSpec, Parallelism, Placement, StepBatch

RESOURCES = ("prefill", "decode", "link", "memory")
RESOURCE_GROWTH = 1.25  # factor by which a resource is enlarged to see whether goodput grows


@dataclass(frozen=True, slots=True)
class EnlargedCost:
    """A step cost with prefill and decode work divided by a factor each: the cost if that resource were larger."""

    cost: CostModel
    prefill: float = 1.0
    decode: float = 1.0

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of a step with the larger resource."""
        return self._quicker(batch, self.cost.step_s)

    def stage_s(self, batch: StepBatch) -> float:
        """Seconds in the slowest stage with the larger resource."""
        return self._quicker(batch, self.cost.stage_s)

    def _quicker(self, batch: StepBatch, of: Callable[[StepBatch], float]) -> float:
        """In a mixed step, decode counts with the time that it takes alone, and prefill with the rest."""
        if not batch.rows:
            return of(batch) / self.prefill
        rows_s = of(StepBatch(0, 0.0, batch.rows, batch.context))
        return rows_s / self.decode + ((of(batch) - rows_s) / self.prefill if batch.tokens else 0.0)


def enlarge_resource(site: PlacementSite, resource: str, by: float) -> PlacementSite:
    """`site` with `by` times as much of a resource: "prefill", "decode", "link" or "memory"."""
    if resource == "link":

        def wider(placement: Placement) -> LinkSpec:
            link = site.link(placement)
            return LinkSpec(link.bytes_per_s * by, link.latency_s)

        return replace(site, link=wider)
    if resource == "memory":
        return replace(site, kv_tokens=lambda pool: math.floor(site.kv_tokens(pool) * by))
    prefill, decode = (by, 1.0) if resource == "prefill" else (1.0, by)
    made: dict[tuple[str, Parallelism, int], CostModel] = {}

    def cost(pool: InstancePool, nodes: int = 1) -> CostModel:
        key = (pool.device, pool.parallelism, nodes)
        if key not in made:
            made[key] = EnlargedCost(site.cost(pool, nodes), prefill, decode)
        return made[key]

    return replace(site, cost=cost)


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Mean utilisation of a resource at a candidate's rate, and relative `gain` of goodput from 25 % more of it."""

    resource: str
    utilisation: float | None
    gain: float


def resource_uses(
    problem: Problem, placement: Placement, searched_rps: float, rate_rps: float
) -> tuple[ResourceUse, ...]:
    """Utilisation of each resource of a deployment at a rate, and the gain in goodput from 25 % more of it."""
    trial = problem.trial(placement)
    jobs = [job for sample in trial.samples for job in sample]
    full = saturation_rates(problem.site, jobs, problem.slos, placement)
    base = measure_goodput(trial, placement, searched_rps)
    found = []
    for resource in RESOURCES:
        if resource == "link" and placement.colocated:
            continue
        larger = problem.again(trial, enlarge_resource(problem.site, resource, RESOURCE_GROWTH))
        gain = measure_goodput(larger, placement, base) / base - 1.0 if base else 0.0
        carried = full.get(resource, full.get("compute") if resource in ("prefill", "decode") else None)
        found.append(ResourceUse(resource, rate_rps / carried if carried else None, gain))
    return tuple(found)
