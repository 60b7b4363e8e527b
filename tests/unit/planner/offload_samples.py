"""A machine, a model and a workload for offload plans, and a search over a grid beside the programme."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from planner.offload.machines import HostMachine, OffloadMachine
from planner.offload.terms import BlockShape, OffloadModel, OffloadWorkload, TimedResource

# A Llama of some 300 M parameters: grouped queries, a gated MLP.
LLAMA = OffloadModel(24, 1024, 16, 4, 64, 2816, 3, 2.0, 4.0, 4.0, 24e6)
HOST = HostMachine(
    memory_bytes=400e6,
    disk_bytes=20e9,
    disk_read=200e6,
    disk_write=200e6,
    measured_weights=11e6,
    pass_s=4e-3,
    row_s=0.3e-3,
    attention=8e9,
    prompt_attention=40e9,
)
WORK = OffloadWorkload(256, 32)


def simplex(closed: tuple[int, ...], kind: int, step: int = 1) -> list[tuple[float, float, float]]:
    """Shares of one kind over three tiers, in steps of 5 % (times `step`), without closed tiers."""
    found = []
    for a, b in itertools.product(range(0, 21, step), repeat=2):
        shares = (a / 20, b / 20, (20 - a - b) / 20)
        if a + b <= 20 and not any(shares[tier] and 3 * kind + tier in closed for tier in range(3)):
            found.append(shares)
    return found


def brute_force(
    machine: OffloadMachine, model: OffloadModel, work: OffloadWorkload, block: BlockShape, coarse: int
) -> float:
    """The least seconds over a grid of shares that fit; infinite if none fits."""
    costs = machine.block_costs(model, work, block)
    kinds = [simplex(costs.closed, kind, coarse if kind == 2 else 1) for kind in range(3)]
    every = np.array([[*a, *b, *c] for a in kinds[0] for b in kinds[1] for c in kinds[2]])
    fits = np.ones(len(every), bool)
    for one in costs.memories:
        fits &= every @ one.needed.slopes + one.needed.constant <= one.capacity * (1 + 1e-9)
    if not fits.any():
        return float("inf")
    chosen = every[fits]

    def busiest(phase: tuple[TimedResource, ...]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.max(
            [chosen @ one.seconds.slopes + one.seconds.constant for one in phase], axis=0
        )
        return found

    steps = work.output_tokens - 1
    seconds = model.layers * (busiest(costs.prefill) + steps * busiest(costs.decode))
    return float(seconds.min()) + costs.prefill_end_s + steps * costs.decode_end_s
