"""Which devices must share a node, and where groups go, on nodes that are only numbers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import ConfigError
from planner.placement.candidates import make_colocated, make_pair, replicate_unit, with_counts
from planner.placement.packing import assign_nodes, device_groups, group_layers
from planner.types import PREFILL, InstancePool, Parallelism, Placement


def test_the_papers_largest_plan_is_three_groups_of_seven() -> None:
    found = device_groups(
        make_pair(Parallelism(3, 3), Parallelism(4, 3), "low", 3), layers=96, devices_per_node=8
    )
    assert [(group.devices, group.first_layer, group.last_layer) for group in found] == [
        (7, 0, 32), (7, 32, 64), (7, 64, 96),
    ]  # fmt: skip
    assert Counter(seat.role for seat in found[1].seats) == {"prefill": 3, "decode": 4}
    assert {seat.stage for seat in found[1].seats} == {1}
    assert assign_nodes(found, {"a": 8, "b": 8, "c": 8, "d": 8}) == ["a", "b", "c"]


def test_the_papers_middle_plan_is_one_group_of_eight() -> None:
    (found,) = device_groups(
        make_pair(Parallelism(4), Parallelism(2, 2), "low"), layers=64, devices_per_node=8
    )
    assert found.devices == 8
    assert Counter((seat.role, seat.stage) for seat in found.seats) == {
        ("prefill", 0): 4, ("decode", 0): 2, ("decode", 1): 2,
    }  # fmt: skip


def test_unequal_stages_meet_at_their_least_common_multiple() -> None:
    """Stages of 4 and of 6 layers: groups of 12, with three stages of the one and two of the other."""
    assert group_layers(24, 6, 4) == 12
    found = device_groups(
        make_pair(Parallelism(1, 6), Parallelism(1, 4), "low"), layers=24, devices_per_node=8
    )
    assert [Counter(seat.role for seat in group.seats) for group in found] == [
        {"prefill": 3, "decode": 2}
    ] * 2


def test_a_unit_of_unequal_counts_keeps_together_who_may_meet() -> None:
    found = device_groups(
        with_counts(make_pair(Parallelism(2), Parallelism(1), "low"), (4, 2)), layers=8, devices_per_node=8
    )
    assert [group.devices for group in found] == [5, 5]
    assert {seat.instance for seat in found[1].seats if seat.role == PREFILL} == {2, 3}


@pytest.mark.parametrize("affinity", ["high", "none"])
def test_without_low_affinity_only_ranks_of_a_stage_stay_together(affinity: str) -> None:
    placement = Placement(
        (InstancePool("prefill", Parallelism(8, 2), 1), InstancePool("decode", Parallelism(2, 2), 2)),
        affinity,
    )
    found = device_groups(placement, layers=64, devices_per_node=8)
    assert [group.devices for group in found] == [8, 8, 4, 4]  # an instance that fits a node is kept whole


def test_colocated_instances_are_groups_of_their_own() -> None:
    assert [
        group.devices for group in device_groups(replicate_unit(make_colocated(Parallelism(4)), 3), 40, 8)
    ] == [4, 4, 4]


@given(
    st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 4), st.integers(1, 4),
)  # fmt: skip
def test_every_rank_sits_in_exactly_one_group(
    prefill_pp: int, decode_pp: int, n: int, m: int, tp_p: int, tp_d: int
) -> None:
    placement = with_counts(
        make_pair(Parallelism(tp_p, prefill_pp), Parallelism(tp_d, decode_pp), "low"), (n, m)
    )
    found = device_groups(placement, layers=24, devices_per_node=1000)
    seats = [seat for group in found for seat in group.seats]
    assert len(seats) == len(set(seats)) == placement.devices
    for group in found:  # the same layers on both sides of every group
        for role, stages in (("prefill", prefill_pp), ("decode", decode_pp)):
            covered = {seat.stage for seat in group.seats if seat.role == role}
            per_stage = 24 // stages
            assert covered == set(range(group.first_layer // per_stage, group.last_layer // per_stage))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="must share a node"):
        device_groups(make_pair(Parallelism(8), Parallelism(8), "low"), layers=96, devices_per_node=8)
    with pytest.raises(ConfigError, match="do not fit the nodes") as caught:
        assign_nodes(
            device_groups(replicate_unit(make_pair(Parallelism(4), Parallelism(2), "low"), 2), 64, 8),
            {"a": 8, "b": 5},
        )
    assert len(caught.value.lines()) <= 6
    with pytest.raises(ConfigError, match="model's layers"):
        device_groups(make_pair(Parallelism(1, 5), Parallelism(1), "low"), layers=64, devices_per_node=8)
    with pytest.raises(ConfigError, match="one prefill and one decode"):
        device_groups(
            Placement((InstancePool("prefill", Parallelism(1)),), "low"), layers=64, devices_per_node=8
        )


def test_large_groups_come_first_so_that_small_ones_fill_what_is_left() -> None:
    found = device_groups(
        Placement((InstancePool("both", Parallelism(2), 2), InstancePool("both", Parallelism(6), 1)), "none"),
        12,
        8,
    )
    assert assign_nodes(found, {"a": 8, "b": 2}) == ["a", "b", "a"]
