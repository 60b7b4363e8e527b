"""The smallest fleet that attains enough is what trying all finds."""

from __future__ import annotations

import itertools

from benchmarks.replanning.elastic_fleet import smallest_fleet
from planner.replan.attainment_cache import AttainmentCache, FleetSize
from tests.unit.planner.replan.closed_form import Rates
from tests.unit.planner.replan.length_mixes import LONG, POLICY, SHORT


def test_least_is_what_trying_all_finds() -> None:
    for mix, rate in itertools.product((SHORT, LONG), (0.5, 1.7, 3.1, 4.4)):
        rates = Rates()
        fleets = [FleetSize(p, d) for p, d in itertools.product(range(1, 8), repeat=2) if p + d <= 8]
        good = [fleet for fleet in fleets if rates.attainment(fleet, mix, rate, 1.0) >= 0.92]
        found = smallest_fleet(POLICY, AttainmentCache(Rates()), mix, rate)
        if good:
            assert POLICY.held(found) == min(map(POLICY.held, good)), (rate, found)
            assert found in good
    assert smallest_fleet(POLICY, AttainmentCache(Rates()), SHORT, 4.0, colocated=True) == FleetSize(both=3)
    assert POLICY.held(smallest_fleet(POLICY, AttainmentCache(Rates()), SHORT, 99.0)) == 8
