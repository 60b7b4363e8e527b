"""`diptych profile`: a small measurement of a deployment becomes a profile that the simulator takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.profile import load
from planner.simulator import deployment, simulate
from planner.terms import DECODE, PREFILL, Batch, Placement, Pool, Split
from planner.workload import synthetic
from tests.system.terminal import run

pytestmark = pytest.mark.timeout(600)


def test_a_deployment_is_measured_and_can_be_simulated(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    shrunk = ("--workload", "sharegpt", "--shrink", "8")
    told = run("profile", "--out", str(out), *shrunk, "--seconds", "4", "--depths", "1,6", "--json")
    assert told.returncode == 0, told.stderr
    figures = json.loads(told.stdout)
    assert figures["steps"]["prefill"] > 10 and figures["steps"]["decode"] > 100
    assert [stage["depth"] for stage in figures["stages"]] == [1, 6, None, None, None], "then as they like"
    assert [bool(stage["rate"]) for stage in figures["stages"]] == [False, False, True, True, True]
    assert sum(figures["gateway_processor_ms"].values()) > 0.0, "its processor did something"
    profile = load(out)
    cost = profile.cost(Split())
    assert 0.0 < cost.step_s(Batch(64, 64.0**2)) < cost.step_s(Batch(512, 512.0**2))
    assert profile.kv_tokens(Split()) > 1000 and profile.overheads.gateway_s >= 0.0
    assert profile.fit_error["decode_held_out_mean"] < 1.0
    pair = Placement((Pool(PREFILL, Split()), Pool(DECODE, Split())))
    served = simulate(deployment(pair, profile), synthetic("sharegpt").shrunk(8).sample(20, 1.0, 1))
    assert len(served) == 20 and not any(one.failed for one in served)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--depths", "0,4"), "--depths"),
        (("--out", "/nowhere/p.json"), "--out"),
        (("--out", "/proc/p.json"), "--out /proc/p.json cannot be written"),
        (("--workload", "/nowhere.csv"), "cannot be read"),
    ],
)
def test_a_mistake_is_told_in_a_few_lines(arguments: tuple[str, ...], why: str) -> None:
    told = run("profile", *arguments)
    lines = told.stderr.strip().splitlines()
    assert told.returncode == 2 and len(lines) <= 6 and why in told.stderr
    assert "Traceback" not in told.stderr
