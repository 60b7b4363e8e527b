"""Small deployments for the exact simulator."""

from __future__ import annotations

from typing import Any

from planner.costs.step import StepCost
from planner.sim.exact.deployment import InstanceSpec, SimDeployment
from planner.types import (
    InstancePool,
    Parallelism,
    Placement,
)

COST = StepCost((5e-3, 5e-5, 2e-9), ((4e-3, 1e-7, 5e-5),))
MACHINE = InstanceSpec(COST, 64 * 400, max_num_batched_tokens=512, max_num_seqs=64)


def placed(*pools: tuple[str, int], split: Parallelism = Parallelism(), affinity: str = "high") -> Placement:  # noqa: B008
    return Placement(tuple(InstancePool(role, split, count) for role, count in pools), affinity)


def of(placement: Placement, machine: InstanceSpec = MACHINE, **rest: Any) -> SimDeployment:
    settings: dict[str, Any] = {"hop_s": 2e-4, "gateway_s": 1e-3, "max_model_len": 4096} | rest
    return SimDeployment(placement, tuple(machine for _ in placement.pools), **settings)
