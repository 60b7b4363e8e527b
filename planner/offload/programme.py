"""The linear programme: where the weights, KV and activations of a block lie, so that its tokens take the least time.

For one block the time is `layers * (prefill + (n - 1) * decode)`, and each of the two steps takes as long as its
busiest resource. That is linear in the nine shares and two times (FlexGen §4.3, appendix A.3). `search_placement`
solves it for every block shape and every kind of weights and KV, and takes the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from diptych.errors import ConfigError, show_bytes, size_setting
from planner.offload.machines import OffloadMachine
from planner.offload.terms import (
    NUM_SHARES,
    BlockCosts,
    BlockShape,
    BoundedMemory,
    OffloadModel,
    OffloadWorkload,
    ShareCosts,
    TimedResource,
)

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class OffloadPlacement:
    """Where a block lies, and what it is predicted to take.

    `shares` are [9]: weights, KV and activations, each over three tiers.
    """

    block: BlockShape
    model: OffloadModel
    shares: NDArray[np.float64]
    seconds: float
    tokens_per_s: float
    # The resource that a decode step waits for.
    binding: str
    # Bytes of each memory that the placement needs.
    memory: dict[str, float]


def evaluate_shares(
    costs: BlockCosts,
    model: OffloadModel,
    workload: OffloadWorkload,
    block: BlockShape,
    shares: NDArray[np.float64],
) -> OffloadPlacement:
    """The predicted time of a block with given shares, whether or not they fit."""
    prefill, _ = _busiest(costs.prefill, shares)
    decode, binding = _busiest(costs.decode, shares)
    steps = workload.output_tokens - 1
    seconds = model.layers * (prefill + steps * decode) + costs.prefill_end_s + steps * costs.decode_end_s
    rate = block.sequences * workload.output_tokens / seconds
    memory = {one.name: one.needed.evaluate(shares) for one in costs.memories}
    return OffloadPlacement(block, model, shares, seconds, rate, binding, memory)


def _busiest(resources: Sequence[TimedResource], shares: NDArray[np.float64]) -> tuple[float, str]:
    """How long the busiest resource takes, in seconds, and its name."""
    return max((one.seconds.evaluate(shares), one.name) for one in resources)


def solve_shares(
    machine: OffloadMachine, model: OffloadModel, workload: OffloadWorkload, block: BlockShape
) -> OffloadPlacement | None:
    """The shares with which a block takes the least time; None if it does not fit."""
    costs = machine.block_costs(model, workload, block)
    decode_steps = max(0, workload.output_tokens - 1)
    goal = np.zeros(NUM_SHARES + 2)
    goal[-2:] = 1.0, decode_steps
    rows: list[NDArray[np.float64]] = []
    bounds: list[float] = []
    for column, phase in enumerate((costs.prefill, costs.decode)):
        for one in phase:
            row = np.append(one.seconds.slopes, (0.0, 0.0))
            row[NUM_SHARES + column] = -1.0
            rows.append(row)
            bounds.append(-one.seconds.constant)
    for memory in costs.memories:
        rows.append(np.append(memory.needed.slopes, (0.0, 0.0)) / GIB)
        bounds.append((memory.capacity - memory.needed.constant) / GIB)
    found = linprog(
        goal, np.array(rows), bounds, *_whole_shares(2), bounds=[*_share_bounds(costs), (0, None), (0, None)]
    )
    if not found.success:
        return None
    return evaluate_shares(costs, model, workload, block, np.clip(found.x[:NUM_SHARES], 0.0, 1.0))


def _whole_shares(further: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The three equations that make the shares of weights, KV and activations whole, with `further` variables."""
    rows = np.zeros((3, NUM_SHARES + further))
    for kind in range(3):
        rows[kind, 3 * kind : 3 * kind + 3] = 1.0
    return rows, np.ones(3)


def _share_bounds(costs: BlockCosts) -> list[tuple[float, float]]:
    return [(0.0, 0.0 if share in costs.closed else 1.0) for share in range(NUM_SHARES)]


def least_memory(costs: BlockCosts, memory: BoundedMemory) -> float | None:
    """The least bytes of one memory with which a block fits into the others; None if it does not fit into those."""
    others = [one for one in costs.memories if one.name != memory.name]
    rows = [one.needed.slopes / GIB for one in others]
    limits = [(one.capacity - one.needed.constant) / GIB for one in others]
    found = linprog(
        memory.needed.slopes / GIB,
        np.array(rows).reshape(len(others), NUM_SHARES) if others else None,
        limits or None,
        *_whole_shares(0),
        bounds=_share_bounds(costs),
    )
    return found.fun * GIB + memory.needed.constant if found.success else None


def search_placement(
    machine: OffloadMachine,
    models: Iterable[OffloadModel],
    workload: OffloadWorkload,
    blocks: Sequence[BlockShape],
) -> OffloadPlacement:
    """The placement with the most tokens per second over all blocks and over `models`, one per kind of weights and KV.

    Raises:
        ConfigError: no block fits; the error names the memory that is too small, and the least that would do.
    """
    kinds = list(models)
    best_placement: OffloadPlacement | None = None
    every = (
        (model, block, machine.block_costs(model, workload, block)) for model in kinds for block in blocks
    )
    hopeful = [
        (_most_tokens_per_s(costs, model, workload, block), model, block) for model, block, costs in every
    ]
    for most, model, block in sorted(hopeful, key=lambda one: -one[0]):
        if not most or (best_placement is not None and most <= best_placement.tokens_per_s):
            break
        placement = solve_shares(machine, model, workload, block)
        if placement is not None and (
            best_placement is None or placement.tokens_per_s > best_placement.tokens_per_s
        ):
            best_placement = placement
    if best_placement is not None:
        return best_placement
    smallest = min(blocks, key=lambda one: (one.sequences, one.rows))
    raise _does_not_fit(min((machine.block_costs(m, workload, smallest) for m in kinds), key=_least_total))


def _most_tokens_per_s(
    costs: BlockCosts, model: OffloadModel, workload: OffloadWorkload, block: BlockShape
) -> float:
    """No placement of a block is faster than this; 0 if none fits. Each cost by itself is as low as it can be."""
    if any(_least_cost(one.needed, costs) > one.capacity for one in costs.memories):
        return 0.0
    prefill, decode = (
        max(_least_cost(one.seconds, costs) for one in phase) for phase in (costs.prefill, costs.decode)
    )
    steps = workload.output_tokens - 1
    seconds = model.layers * (prefill + steps * decode) + costs.prefill_end_s + steps * costs.decode_end_s
    return block.sequences * workload.output_tokens / seconds


def _least_cost(cost: ShareCosts, costs: BlockCosts) -> float:
    """The least value of a cost over all whole shares."""
    slopes = cost.slopes
    slopes[list(costs.closed)] = np.inf
    return cost.constant + float(slopes.reshape(3, 3).min(axis=1).sum())


def _least_total(costs: BlockCosts) -> float:
    return sum(least_memory(costs, one) or 0.0 for one in costs.memories)


def _does_not_fit(costs: BlockCosts) -> ConfigError:
    """The error for the smallest block: which memory binds, and the least of it with which the block fits."""
    remedies = [
        (one, needed)
        for one in costs.memories
        if (needed := least_memory(costs, one)) is not None and needed > one.capacity
    ]
    # Everything fits into enough of the fastest memory.
    assert remedies
    names = " or ".join(one.name for one, _ in remedies)
    needs = " or ".join(f"{show_bytes(size)} of {one.name}" for one, size in remedies)
    there = ", ".join(f"{one.name} {show_bytes(one.capacity)}" for one in costs.memories)
    flags = " or ".join(f"{one.flag or one.name} {size_setting(size)}" for one, size in remedies)
    return ConfigError(
        f"bulk work does not fit: too little {names}",
        f"the smallest block needs {needs}; there are: {there}",
        f"use {flags}, or shorter sequences",
    )
