"""The simulated twin of a deployment that was measured on this machine.

Every worker is an instance of its own, with the costs that were measured and the rhythm of its own steps: on a machine
that workers, gateway and client share, two equal workers are not equally fast. The gateway is
slower the more it has to do: its processor does one thing after the other, and longer while workers are in steps on all
cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.accuracy.step_variation import fit_undisturbed_cost, measure_variation
from diptych.config.options import Config
from planner.costs.profiler import FittedCosts, WorkerTrace, mean_step_gap_s
from planner.costs.step import StepCost
from planner.sim.exact.deployment import InstanceSpec, SimDeployment
from planner.sim.exact.deployment import build_deployment as simulated
from planner.types import BOTH, InstancePool, Parallelism, Placement
from services.bench.profile_run import Measurement, PoolSizes

DEFAULTS = Config()  # what `diptych serve` does with no other settings
BEAT_S = 0.5  # `diptych.specs.GatewaySpec.beat_s`


def undisturbed_costs(found: Measurement) -> FittedCosts:
    """What steps cost apart from what workers do to each other; the profile's cost is a mean in which that is."""
    (cost,) = found.profile.costs.values()
    assert isinstance(cost, StepCost)
    return fit_undisturbed_cost(found.traces, cost)


def measured_deployment(
    pools: PoolSizes, found: Measurement, own: StepCost, traces: Sequence[WorkerTrace], **options: Any
) -> SimDeployment:
    """A deployment like `pools`, in which each worker steps as it did in `traces`.

    Args:
        own: of `undisturbed_costs`.
        traces: one of each worker of `pools`.
        options: as `planner.sim.exact.deployment.build_deployment` has them; L_m is that of the traces.
    """
    workers = sorted(traces, key=lambda life: (life.role != "prefill", life.worker))
    if len(workers) != pools.prefill + pools.decode and len(workers) != pools.colocated:
        raise ValueError(f"{len(workers)} workers' steps are no {pools}")
    roles = [BOTH if pools.colocated else life.role for life in workers]
    placement = Placement(
        tuple(InstancePool(role, Parallelism()) for role in roles),
        affinity="none" if pools.colocated else "high",
    )
    usual: dict[str, Any] = {
        "max_num_seqs": DEFAULTS.max_num_seqs,
        "max_num_batched_tokens": DEFAULTS.max_num_batched_tokens,
        "beat_s": BEAT_S,
        "cpu_cost": found.cpu_cost,
        "cores": len(os.sched_getaffinity(0)),
    }
    plain = simulated(placement, found.profile, **(usual | options))

    def paced(machine: InstanceSpec, life: WorkerTrace) -> InstanceSpec:
        others = [other for other in workers if other is not life]
        step_s = mean_step_gap_s([life]) or machine.step_s
        return replace(
            machine,
            cost=own,
            variation=measure_variation(own, life, others),
            step_s=step_s,
            saturation_tokens=life.saturation_tokens,  # a worker measures it anew whenever it starts
        )

    machines = tuple(paced(machine, life) for machine, life in zip(plain.instances, workers, strict=True))
    return replace(plain, instances=machines)


def start_later(deployment: SimDeployment, start: float) -> SimDeployment:
    """The same twin, beginning after that part (0 to 1) of what was noted of the steps; the rest comes first then."""

    def moved(machine: InstanceSpec) -> InstanceSpec:
        return (
            machine
            if machine.variation is None
            else replace(machine, variation=machine.variation.after(start))
        )

    return replace(deployment, instances=tuple(moved(machine) for machine in deployment.instances))
