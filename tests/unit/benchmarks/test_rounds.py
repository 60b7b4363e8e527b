"""Benchmarks that compare deployments measure them in turn."""

from __future__ import annotations

import gc
import subprocess

import pytest

from benchmarks.load.deployment import ServedDeployment
from benchmarks.load.rounds import Measure, measure_rounds, no_garbage_collection


async def test_every_deployment_is_measured_in_every_round_and_the_warm_up_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[tuple[str, int]] = []
    monkeypatch.setattr(ServedDeployment, "rest", lambda self: events.append(("rest", self.port)))
    process = subprocess.Popen.__new__(subprocess.Popen)
    process.returncode, process.args = 0, []
    deployments = {name: ServedDeployment(port, process) for port, name in enumerate("abc")}
    rounds: list[int] = []

    def prepare_round() -> Measure[int]:
        number = len(rounds)
        rounds.append(number)

        async def measure(deployment: ServedDeployment) -> int:
            assert not gc.isenabled()
            events.append(("measure", deployment.port))
            return 10 * number + deployment.port

        return measure

    found = await measure_rounds(deployments, 2, prepare_round)
    assert found == {"a": [10, 20], "b": [11, 21], "c": [12, 22]} and rounds == [0, 1, 2]
    order = [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert events == [(kind, port) for port in order for kind in ("measure", "rest")]


def test_the_garbage_collector_runs_again_after_a_failure() -> None:
    with pytest.raises(KeyError), no_garbage_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
