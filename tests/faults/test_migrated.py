"""Streams that go on at another worker, token by token what an undisturbed one writes (`make faults`: a thousand)."""

from __future__ import annotations

import msgspec
import pytest

from tests.faults.run import run_scenario
from tests.faults.scenario import SCENARIO_FOLDER, StreamLoad, read_scenario


@pytest.mark.timeout(600)
def test_streams_of_every_kind_survive_the_death_of_their_writer() -> None:
    scenario = read_scenario(SCENARIO_FOLDER / "migrate.yaml")
    load = StreamLoad(streams=40, seconds=240.0, answer=60, prompt=(8, 200), migrated=10, pause_s=1.0)
    checks = msgspec.structs.replace(scenario.checks, migrated=load.migrated)
    result = run_scenario(msgspec.structs.replace(scenario, load=load, checks=checks))
    assert not result.broken, "\n".join(result.broken)
    assert result.summary.failures == 0 and result.summary.migrated >= 10
