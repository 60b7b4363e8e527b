"""The machine and the models of FlexGen's Table 1: near the optimum, and near the paper's throughput."""

from __future__ import annotations

import pytest

from benchmarks.offload_table import (
    T4_MACHINE,
    TABLE_BLOCKS,
    TABLE_MODELS,
    TABLE_TOKENS_PER_S,
    TABLE_WORKLOAD,
)
from planner.offload.programme import (
    search_placement,
    solve_shares,
)
from planner.offload.terms import BlockShape
from tests.unit.planner.offload_samples import brute_force


def test_it_is_within_two_percent_of_a_grid_on_a_device() -> None:
    for name, block in (("OPT-30B", BlockShape(48, 3)), ("OPT-175B", BlockShape(32, 8))):
        model = TABLE_MODELS[name]
        found = solve_shares(T4_MACHINE, model, TABLE_WORKLOAD, block)
        assert found is not None
        grid = brute_force(T4_MACHINE, model, TABLE_WORKLOAD, block, 10)
        assert found.seconds <= grid * 1.0001


@pytest.mark.parametrize("name", TABLE_MODELS)
def test_the_paper_s_machine_gives_the_paper_s_throughput(name: str) -> None:
    found = search_placement(T4_MACHINE, [TABLE_MODELS[name]], TABLE_WORKLOAD, TABLE_BLOCKS)
    assert 0.7 <= found.tokens_per_s / TABLE_TOKENS_PER_S[name] <= 1.3
