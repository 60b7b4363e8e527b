"""Clients that go away in each of ten phases of a request: both sides are free (`make faults`: 200 times each)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.faults.run import run_scenario
from tests.faults.scenario import SCENARIO_FOLDER, read_scenario
from tests.faults.toy_model import CODED

EACH = 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", ["", CODED])
def test_whenever_a_client_leaves_nothing_of_its_request_is_kept(codec: str) -> None:
    scenario = read_scenario(SCENARIO_FOLDER / "leave.yaml")
    few = msgspec.structs.replace(
        scenario,
        deployment=replace(scenario.deployment, codec=codec),
        load=msgspec.structs.replace(scenario.load, each=EACH),
        checks=msgspec.structs.replace(scenario.checks, free_median_s=None, free_most_s=None),
    )
    result = run_scenario(few)
    assert not result.broken, "\n".join(result.broken)
    assert not result.missed
    assert {cell.phase: cell.requests for cell in result.cells} == dict.fromkeys(scenario.phases, EACH)
