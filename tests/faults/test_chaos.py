"""A short while of random faults under streams of coded KV, and batches; `make faults` does three minutes of raw KV."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.faults.run import run_scenario
from tests.faults.scenario import SCENARIO_FOLDER, ScenarioChecks, read_scenario
from tests.faults.toy_model import CODED


@pytest.mark.timeout(600)
def test_random_faults_break_no_invariant() -> None:
    scenario = read_scenario(SCENARIO_FOLDER / "chaos.yaml")
    load = msgspec.structs.replace(scenario.load, seconds=12.0, pause_s=2.5, streams=12)
    # So few slabs that streams take back those of batches.
    coded = replace(scenario.deployment, codec=CODED, bulk_lines=20, num_slabs=64)
    checks = ScenarioChecks()
    result = run_scenario(msgspec.structs.replace(scenario, load=load, checks=checks, deployment=coded))
    assert not result.broken, "\n".join(result.broken)
    assert result.figures["faults"] >= 1
    assert result.summary.whole >= 0.9 * result.summary.asked, result.summary
