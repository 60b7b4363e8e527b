"""A short while of random faults under streams; `make faults` does three minutes."""

from __future__ import annotations

import msgspec
import pytest

from tests.faults.run import run
from tests.faults.scenario import FOLDER, Checks, read


@pytest.mark.timeout(600)
def test_random_faults_break_no_invariant() -> None:
    scenario = read(FOLDER / "chaos.yaml")
    load = msgspec.structs.replace(scenario.load, seconds=12.0, pause_s=2.5, streams=12)
    result = run(msgspec.structs.replace(scenario, load=load, checks=Checks()))
    assert not result.broken, "\n".join(result.broken)
    assert result.figures["faults"] >= 1
    assert result.verdict.whole >= 0.9 * result.verdict.asked, result.verdict
