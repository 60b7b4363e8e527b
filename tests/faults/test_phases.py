"""Clients that go away in each of ten phases of a request: both sides are free (`make faults`: 200 times each)."""

from __future__ import annotations

import msgspec
import pytest

from tests.faults.run import run
from tests.faults.scenario import FOLDER, read

EACH = 4


@pytest.mark.timeout(600)
def test_whenever_a_client_leaves_nothing_of_its_request_is_kept() -> None:
    scenario = read(FOLDER / "leave.yaml")
    few = msgspec.structs.replace(
        scenario,
        load=msgspec.structs.replace(scenario.load, each=EACH),
        checks=msgspec.structs.replace(scenario.checks, free_median_s=None, free_most_s=None),
    )
    result = run(few)
    assert not result.broken, "\n".join(result.broken)
    assert not result.missed
    assert {cell.phase: cell.requests for cell in result.cells} == dict.fromkeys(scenario.phases, EACH)
