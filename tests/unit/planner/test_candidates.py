"""How many cuts there are, and what each obeys."""

from __future__ import annotations

import pytest

from planner.candidates import Grid, alone, both, colocated, counted, family, high, low, pair, splits, times
from planner.terms import BOTH, DECODE, PREFILL, Pool, Split

OPT_13B, OPT_66B = (40, 40), (64, 72)  # layers, heads


@pytest.mark.parametrize(
    ("nodes", "per_node", "small", "large"),
    [(1, 4, 9, 11), (1, 8, 48, 61), (2, 8, 96, 122), (4, 8, 133, 183)],
)
def test_low_affinity_counts_are_those_of_the_papers_artefact(
    nodes: int, per_node: int, small: int, large: int
) -> None:
    for (layers, heads), expected in ((OPT_13B, small), (OPT_66B, large)):
        found = list(low(Grid(layers, heads, nodes, per_node)))
        assert len(found) == len(set(found)) == expected


@pytest.mark.parametrize(("nodes", "small", "large"), [(2, 208, 229), (4, 569, 613)])
def test_high_affinity_counts_are_those_of_the_papers_artefact(nodes: int, small: int, large: int) -> None:
    for (layers, heads), expected in ((OPT_13B, small), (OPT_66B, large)):
        found = list(high(Grid(layers, heads, nodes, 8), within_node=False))
        assert len(found) == len(set(found)) == expected


def test_a_stage_stays_on_a_node_unless_asked() -> None:
    grid = Grid(64, 72, 2, 8)
    assert max(split.tp for split in splits(grid)) == 8
    assert max(split.tp for split in splits(grid, within_node=False)) == 12


def test_low_affinity_pairs_fit_their_nodes() -> None:
    for one in low(Grid(96, 96, 4, 8)):
        assert sum(pool.split.devices // one.cross for pool in one.pools) <= 8
        assert all(pool.split.pp % one.cross == 0 and 96 % pool.split.pp == 0 for pool in one.pools)


def test_two_copies_of_the_largest_model_need_more_than_one_node() -> None:
    """OPT-175B in the paper is TP3 PP3 | TP4 PP3: three nodes of 3 + 4 devices."""
    assert pair(Split(3, 3), Split(4, 3), "low", 3) in set(low(Grid(96, 96, 4, 8)))


def test_units_multiply_and_stand_side_by_side() -> None:
    unit, whole = pair(Split(4), Split(2, 2), "low"), alone(Split(2))
    assert [pool.count for pool in times(unit, 3).pools] == [3, 3]
    assert counted(unit, (3, 2)).devices == 3 * 4 + 2 * 4
    side = both((times(unit, 2), whole, whole))
    assert side.pools == (Pool(PREFILL, Split(4), 2), Pool(DECODE, Split(2, 2), 2), Pool(BOTH, Split(2), 2))
    assert side.affinity == "low" and both((whole, unit)).affinity == "low"
    assert [family(one) for one in (unit, whole, side)] == ["disaggregated", "colocated", "hybrid"]


def test_colocated_instances_fit_the_cluster() -> None:
    found = [one.pools[0].split for one in colocated(Grid(40, 40, 1, 4))]
    assert found == [Split(1, 1), Split(1, 2), Split(1, 4), Split(2, 1), Split(2, 2), Split(4, 1)]
