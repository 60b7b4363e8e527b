"""How many cuts there are, and what each obeys."""

from __future__ import annotations

import pytest

from planner.placement.candidates import (
    ClusterGrid,
    colocated_units,
    combine_placements,
    enumerate_splits,
    family_of,
    make_colocated,
    make_pair,
    pairs_across_nodes,
    pairs_within_nodes,
    replicate_unit,
    with_counts,
)
from planner.types import BOTH, DECODE, PREFILL, InstancePool, Parallelism

OPT_13B, OPT_66B = (40, 40), (64, 72)  # layers, heads


@pytest.mark.parametrize(
    ("nodes", "per_node", "small", "large"),
    [(1, 4, 9, 11), (1, 8, 48, 61), (2, 8, 96, 122), (4, 8, 133, 183)],
)
def test_low_affinity_counts_are_those_of_the_papers_artefact(
    nodes: int, per_node: int, small: int, large: int
) -> None:
    for (layers, heads), expected in ((OPT_13B, small), (OPT_66B, large)):
        found = list(pairs_within_nodes(ClusterGrid(layers, heads, nodes, per_node)))
        assert len(found) == len(set(found)) == expected


@pytest.mark.parametrize(("nodes", "small", "large"), [(2, 208, 229), (4, 569, 613)])
def test_high_affinity_counts_are_those_of_the_papers_artefact(nodes: int, small: int, large: int) -> None:
    for (layers, heads), expected in ((OPT_13B, small), (OPT_66B, large)):
        found = list(pairs_across_nodes(ClusterGrid(layers, heads, nodes, 8), within_node=False))
        assert len(found) == len(set(found)) == expected


def test_a_stage_stays_on_a_node_unless_asked() -> None:
    grid = ClusterGrid(64, 72, 2, 8)
    assert max(split.tp for split in enumerate_splits(grid)) == 8
    assert max(split.tp for split in enumerate_splits(grid, within_node=False)) == 12


def test_low_affinity_pairs_fit_their_nodes() -> None:
    for one in pairs_within_nodes(ClusterGrid(96, 96, 4, 8)):
        assert sum(pool.parallelism.devices // one.cross for pool in one.pools) <= 8
        assert all(
            pool.parallelism.pp % one.cross == 0 and 96 % pool.parallelism.pp == 0 for pool in one.pools
        )


def test_two_copies_of_the_largest_model_need_more_than_one_node() -> None:
    """OPT-175B in the paper is TP3 PP3 | TP4 PP3: three nodes of 3 + 4 devices."""
    assert make_pair(Parallelism(3, 3), Parallelism(4, 3), "low", 3) in set(
        pairs_within_nodes(ClusterGrid(96, 96, 4, 8))
    )


def test_units_multiply_and_stand_side_by_side() -> None:
    unit, whole = make_pair(Parallelism(4), Parallelism(2, 2), "low"), make_colocated(Parallelism(2))
    assert [pool.count for pool in replicate_unit(unit, 3).pools] == [3, 3]
    assert with_counts(unit, (3, 2)).devices == 3 * 4 + 2 * 4
    side = combine_placements((replicate_unit(unit, 2), whole, whole))
    assert side.pools == (
        InstancePool(PREFILL, Parallelism(4), 2),
        InstancePool(DECODE, Parallelism(2, 2), 2),
        InstancePool(BOTH, Parallelism(2), 2),
    )
    assert side.affinity == "low" and combine_placements((whole, unit)).affinity == "low"
    assert [family_of(one) for one in (unit, whole, side)] == ["disaggregated", "colocated", "hybrid"]


def test_colocated_instances_fit_the_cluster() -> None:
    found = [one.pools[0].parallelism for one in colocated_units(ClusterGrid(40, 40, 1, 4))]
    assert found == [
        Parallelism(1, 1),
        Parallelism(1, 2),
        Parallelism(1, 4),
        Parallelism(2, 1),
        Parallelism(2, 2),
        Parallelism(4, 1),
    ]
