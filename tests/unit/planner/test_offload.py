"""The placement programme: its optimum and its limits."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from diptych.errors import ConfigError
from planner.costs.model import ModelDims
from planner.offload.machines import OffloadMachine
from planner.offload.programme import (
    evaluate_shares,
    least_memory,
    search_placement,
    solve_shares,
)
from planner.offload.terms import BlockShape, OffloadModel
from tests.unit.planner.offload_samples import HOST, LLAMA, WORK, brute_force

MIB = 1 << 20
BLOCKS = [BlockShape(rows, batches) for rows in (1, 2, 4, 8, 16, 32) for batches in (1, 2, 4, 8)]
GRID = np.arange(21) / 20


@pytest.mark.parametrize("block", [BlockShape(4, 4), BlockShape(16, 8), BlockShape(32, 2)])
@pytest.mark.parametrize("memory", [200e6, 400e6, 700e6, 4e9])
def test_it_is_as_good_as_a_grid_on_a_cpu(block: BlockShape, memory: float) -> None:
    machine = replace(HOST, memory_bytes=memory)
    found, grid = solve_shares(machine, LLAMA, WORK, block), brute_force(machine, LLAMA, WORK, block, 20)
    assert (found is None) <= (grid == float("inf"))
    if found is not None:
        # The grid misses what lies between its points, so it may be worse, but never better.
        assert found.seconds <= grid * 1.0001
        assert all(found.memory[name] <= cap * 1.0001 for name, cap in capacities(machine, block).items())


def capacities(machine: OffloadMachine, block: BlockShape) -> dict[str, float]:
    return {one.name: one.capacity for one in machine.block_costs(LLAMA, WORK, block).memories}


def test_the_programme_never_says_less_than_its_shares_take() -> None:
    chance = random.Random(5)
    for _ in range(40):
        machine = replace(
            HOST,
            memory_bytes=chance.uniform(1e8, 2e9),
            disk_read=chance.uniform(5e7, 2e9),
            attention=chance.uniform(1e9, 2e10),
            overlap=chance.random() < 0.5,
        )
        block = chance.choice(BLOCKS)
        found = solve_shares(machine, LLAMA, WORK, block)
        if found is None:
            continue
        costs = machine.block_costs(LLAMA, WORK, block)
        again = evaluate_shares(costs, LLAMA, WORK, block, found.shares)
        assert again.seconds == pytest.approx(found.seconds)
        assert np.allclose(found.shares.reshape(3, 3).sum(1), 1)
        for one in costs.memories:
            assert one.needed.evaluate(found.shares) <= one.capacity * (1 + 1e-6)


def test_more_of_anything_is_never_worse() -> None:
    best = search_placement(HOST, [LLAMA], WORK, BLOCKS)
    more = [
        replace(HOST, memory_bytes=600e6),
        replace(HOST, disk_read=400e6, disk_write=400e6),
        replace(HOST, attention=16e9),
    ]
    for machine in more:
        assert search_placement(machine, [LLAMA], WORK, BLOCKS).tokens_per_s >= best.tokens_per_s
    assert search_placement(replace(HOST, overlap=False), [LLAMA], WORK, BLOCKS).seconds >= best.seconds


def test_it_says_what_a_block_waits_for() -> None:
    assert search_placement(replace(HOST, disk_read=20e6), [LLAMA], WORK, BLOCKS).binding == "disk"
    fast = replace(HOST, disk_read=50e9, disk_write=50e9)
    assert search_placement(fast, [LLAMA], WORK, BLOCKS).binding == "compute"


def test_four_bits_are_chosen_where_the_disk_binds() -> None:
    dense = LLAMA.with_bytes(4.5 / 8, 4.5 / 8)
    slow, fast = replace(HOST, disk_read=50e6, disk_write=50e6), replace(HOST, memory_bytes=64e9)
    gain = (
        search_placement(slow, [LLAMA, dense], WORK, BLOCKS).tokens_per_s
        / search_placement(slow, [LLAMA], WORK, BLOCKS).tokens_per_s
    )
    assert gain >= 2
    assert search_placement(slow, [LLAMA, dense], WORK, BLOCKS).model is dense
    everything = search_placement(fast, [LLAMA], WORK, BLOCKS)
    assert everything.shares[0] + everything.shares[3] == pytest.approx(2)


def test_what_does_not_fit_names_the_memory_and_the_least() -> None:
    with pytest.raises(ConfigError) as caught:
        search_placement(replace(HOST, memory_bytes=30e6), [LLAMA], WORK, BLOCKS)
    error = caught.value
    assert "too little memory" in str(error.what)
    costs = HOST.block_costs(LLAMA, WORK, BlockShape(1, 1))
    needed = least_memory(costs, costs.memories[0])
    assert needed is not None
    assert f"{needed / MIB:.1f} MiB of memory" in error.why
    assert error.fix == f"use --bulk-memory {math.ceil(needed / MIB)}MiB, or shorter sequences"
    assert len(error.lines()) <= 6
    assert search_placement(replace(HOST, memory_bytes=needed * 1.001), [LLAMA], WORK, BLOCKS)
    with pytest.raises(ConfigError, match="too little memory or disk"):
        search_placement(replace(HOST, disk_bytes=1e6), [LLAMA], WORK, BLOCKS)


def test_dimensions_of_a_model_give_its_bytes() -> None:
    dims = ModelDims("m", 2, 64, 4, 2, 16, 96, 3, 1000, 512, weight_bytes=2.0, kv_bytes=4.0)
    model = OffloadModel.from_dims(dims)
    assert model.layer_weights == 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96 == dims.layer_matrix
    assert model.token_kv_bytes == 2 * 2 * 16 * 4
    assert model.end_bytes == 1000 * 64 * (4 + 2)
