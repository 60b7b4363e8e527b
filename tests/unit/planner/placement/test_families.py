"""Which whole deployments the search proposes."""

from __future__ import annotations

import pytest

from diptych.slo import Slo
from planner.placement import candidates
from planner.placement.families import FamilySearch
from planner.types import BOTH, DECODE, Parallelism, Placement
from tests.unit.planner.small_problems import question


def alike(placement: Placement) -> bool:
    """Whether all that decode are of one size and device."""
    return len({(pool.parallelism, pool.device) for pool in placement.role(DECODE, BOTH)}) == 1


@pytest.mark.parametrize(
    ("ttft_s", "per_node", "count"),
    # With five devices, a pair of three and another size on the rest would keep the promises, and nothing else would.
    [(0.1, 4, 1), (0.2, 4, 1), (0.05, 5, 0), (0.05, 6, 1)],
)
def test_hybrids_are_such_as_can_be_deployed(ttft_s: float, per_node: int, count: int) -> None:
    """One deployment has decode workers of one size, so colocated instances beside pairs are of that size."""
    request = question(per_node=per_node, span_s=2.0, families=("hybrid",), slos={"": Slo(ttft_s, 0.012)})
    found = [one.placement for one in FamilySearch(request).finalists()]
    assert len(found) == count
    assert all(candidates.family_of(one) == "hybrid" and alike(one) for one in found)


def test_fewer_pairs_for_a_rate_get_instances_that_can_be_deployed_beside_them() -> None:
    request = question(nodes=4, span_s=2.0, rate=8.0, families=("hybrid",))
    pairs = candidates.replicate_unit(
        candidates.make_pair(Parallelism(1), Parallelism(2), "low", 1, "made", "made"), 2
    )
    (found,) = FamilySearch(request)._fewer_pairs(pairs, 8.0)
    assert candidates.family_of(found) == "hybrid" and alike(found)
    assert found.devices < pairs.devices
