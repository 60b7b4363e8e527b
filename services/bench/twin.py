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

from diptych.config import Config
from planner.cost import StepCost
from planner.profiler import Costs, Life, between_steps
from planner.rhythm import fit_apart, rhythm
from planner.simulator import Deployment, Machine
from planner.simulator import deployment as simulated
from planner.terms import BOTH, Placement, Pool, Split
from services.bench.measure import Measured, Pools

USUAL = Config()  # what `diptych serve` does if it is told nothing else
BEAT_S = 0.5  # `diptych.config.GatewaySpec.beat_s`


def own_costs(found: Measured) -> Costs:
    """What steps cost apart from what workers do to each other; the profile's cost is a mean in which that is."""
    (cost,) = found.profile.costs.values()
    assert isinstance(cost, StepCost)
    return fit_apart(found.lives, cost)


def twin(pools: Pools, found: Measured, own: StepCost, lives: Sequence[Life], **options: Any) -> Deployment:
    """A deployment like `pools`, in which each worker steps as it did in `lives`.

    Args:
        own: of `own_costs`.
        lives: one of each worker of `pools`.
        options: as `planner.simulator.deployment` has them; L_m is that of the lives.
    """
    workers = sorted(lives, key=lambda life: (life.role != "prefill", life.worker))
    if len(workers) != pools.prefill + pools.decode and len(workers) != pools.colocated:
        raise ValueError(f"{len(workers)} workers' steps are no {pools}")
    roles = [BOTH if pools.colocated else life.role for life in workers]
    placement = Placement(
        tuple(Pool(role, Split()) for role in roles), affinity="none" if pools.colocated else "high"
    )
    usual: dict[str, Any] = {
        "max_num_seqs": USUAL.max_num_seqs,
        "max_num_batched_tokens": USUAL.max_num_batched_tokens,
        "beat_s": BEAT_S,
        "handling": found.handling,
        "cores": len(os.sched_getaffinity(0)),
    }
    plain = simulated(placement, found.profile, **(usual | options))

    def paced(machine: Machine, life: Life) -> Machine:
        others = [other for other in workers if other is not life]
        step_s = between_steps([life]) or machine.step_s
        return replace(
            machine,
            cost=own,
            rhythm=rhythm(own, life, others),
            step_s=step_s,
            saturation_tokens=life.saturation_tokens,  # a worker measures it anew whenever it starts
        )

    machines = tuple(paced(machine, life) for machine, life in zip(plain.machines, workers, strict=True))
    return replace(plain, machines=machines)


def after(deployment: Deployment, start: float) -> Deployment:
    """The same twin, beginning after that part (0 to 1) of what was noted of the steps; the rest comes first then."""

    def moved(machine: Machine) -> Machine:
        return machine if machine.rhythm is None else replace(machine, rhythm=machine.rhythm.after(start))

    return replace(deployment, machines=tuple(moved(machine) for machine in deployment.machines))
