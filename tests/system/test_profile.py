"""`diptych profile`: a small measurement of a deployment becomes a profile that the simulator takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.costs.kv.classes import plan_kv_classes
from planner.costs.profile_file import load_profile
from planner.sim.exact.deployment import build_deployment
from planner.sim.exact.simulate import simulate_exact
from planner.types import DECODE, PREFILL, InstancePool, Parallelism, Placement, StepBatch
from planner.workload.workload import synthetic_workload
from tests.support.terminal import run

pytestmark = pytest.mark.timeout(600)


def test_a_deployment_is_measured_and_can_be_simulated(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    shrunk = ("--workload", "sharegpt", "--shrink", "8")
    coded = ("--kv-cache-codec", "tq4:0.5,raw")
    result = run("profile", "--out", str(out), *shrunk, *coded, "--seconds", "4", "--depths", "1,6", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["steps"]["prefill"] > 10 and figures["steps"]["decode"] > 100
    assert [stage["depth"] for stage in figures["stages"]] == [1, 6, None, None, None], "then as they like"
    assert [bool(stage["rate"]) for stage in figures["stages"]] == [False, False, True, True, True]
    assert sum(figures["gateway_processor_ms"].values()) > 0.0, "its processor did something"
    profile = load_profile(out)
    cost = profile.cost(Parallelism())
    assert 0.0 < cost.step_s(StepBatch(64, 64.0**2)) < cost.step_s(StepBatch(512, 512.0**2))
    assert profile.kv_tokens(Parallelism()) > 1000 and profile.overheads.gateway_s >= 0.0
    assert profile.fit_error["decode_held_out_mean"] < 1.0
    assert profile.model.kv_codec == "" and list(profile.kv_classes) == ["tq4"], "costs are those of raw"
    assert figures["kv_classes"]["tq4"]["token"] > 0.0 and "kv_tq4_held_out_mean" in profile.fit_error
    raw, tq4 = sorted(plan_kv_classes(profile, "tq4:0.5,raw"), key=lambda one: one.name)
    assert tq4.work == profile.kv_classes["tq4"] and tq4.room / raw.room == pytest.approx(32 / 4.5)
    pair = Placement((InstancePool(PREFILL, Parallelism()), InstancePool(DECODE, Parallelism())))
    served = simulate_exact(
        build_deployment(pair, profile), synthetic_workload("sharegpt").shrunk(8).sample(20, 1.0, 1)
    )
    assert len(served) == 20 and not any(one.failed for one in served)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--depths", "0,4"), "--depths"),
        (("--out", "/nowhere/p.json"), "--out"),
        (("--out", "/proc/p.json"), "--out /proc/p.json cannot be written"),
        (("--workload", "/nowhere.csv"), "cannot be read"),
        (("--kv-cache-calibration", "/nowhere"), "--kv-cache-calibration"),
    ],
)
def test_a_mistake_is_explained_in_a_few_lines(arguments: tuple[str, ...], why: str) -> None:
    result = run("profile", *arguments)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2 and len(lines) <= 6 and why in result.stderr
    assert "Traceback" not in result.stderr
