"""`diptych serve --replan`: settings it cannot work with, what it may do, and what it reckons with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from diptych.config.load import LoadedConfig, load_config
from diptych.errors import ConfigError
from planner.costs.kv.eviction import DecidingCost
from planner.costs.model import find_model
from planner.costs.profile import CostProfile, Overheads
from planner.costs.profile_file import built_in_profile, load_profile, save_profile
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.replan.attainment_cache import FleetSize
from planner.replan.traffic_windows import TrafficWindows
from planner.types import BOTH, DECODE, PREFILL, KvKeep, LinkSpec, Parallelism, StepBatch
from services.cli.serve import replan_setup
from services.cli.serve.replan_checks import check_replan_settings
from services.cli.serve.replan_setup import (
    ReplanSession,
    fleet_hardware,
    replan_policy,
    replan_profile,
)
from services.cli.serve.specs import max_workers
from services.host.model_probe import ProbedModel
from services.replan.roster import Roster

ROOT = Path(__file__).parents[3]
MODEL = ProbedModel(str(ROOT / "models" / "tiny"), "a model", True, 2048, 64 << 20, 6)
COST = StepCost((0.001, 0.0, 0.0), ((0.002, 0.0, 0.0),))
OBJECTIVES = {"replan": "true", "slo_ttft_ms": "500", "slo_tpot_ms": "50"}


def loaded(given: Mapping[str, Any]) -> LoadedConfig:
    return load_config("serve", OBJECTIVES | dict(given), {})


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "profile.json"
    save_profile(
        CostProfile(find_model("embedded"), find_device("cpu"), {Parallelism(): COST}, source="a test"), file
    )
    return file


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replan": "false", "replan_budget": "4"}, "--replan-budget has no effect"),
        ({"slo_ttft_ms": None, "slo_tpot_ms": None}, "there is nothing to plan for"),
        ({"replan_budget": "2", "decode": "2"}, "its workers hold 3"),
        ({"replan_window_s": "3"}, "a window of 3 s is too short"),
        ({"replan_profile": "/absent/profile.json"}, "cannot be read"),
    ],
)
def test_what_it_cannot_work_with_is_refused(given: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_replan_settings(loaded(given))
    lines = caught.value.lines()
    assert said in "\n".join(lines) and len(lines) <= 6


def test_without_a_budget_only_roles_change_and_with_one_workers_come_and_go() -> None:
    check_replan_settings(loaded({}))
    plain = replan_policy(loaded({"decode": "2"}).config, 20.0)
    assert (plain.budget, plain.floor) == (3, 3)
    config = loaded({"replan_budget": "8", "prefill_tp": "2", "replan_window_s": "60"}).config
    free = replan_policy(config, 20.0, 0.95)
    assert (free.budget, free.floor, free.target) == (8, 0, 0.95)
    assert free.devices == {PREFILL: 2, DECODE: 1, BOTH: 1} and free.held(FleetSize(2, 3)) == 7
    assert (free.window_s, free.bucket_s, free.start_s, free.back_off_s) == (60, 2, 20, 60)
    assert replan_policy(config, 600.0).horizon_s == 2400, "a start can pay"
    assert max_workers(config) == 8 and max_workers(loaded({"decode": "2"}).config) == 3


def test_costs_are_measured_ones_or_those_of_a_data_sheet(profile: Path) -> None:
    config = loaded({"replan_profile": str(profile)}).config
    measured = fleet_hardware(config, MODEL, replan_profile(config, MODEL))
    assert measured.costs[PREFILL].step_s(StepBatch(100, 100.0)) == pytest.approx(0.001)
    slow = load_profile(profile)
    save_profile(replace(slow, overheads=Overheads(step_s=0.004)), profile)
    slower = fleet_hardware(config, MODEL, replan_profile(config, MODEL))
    assert slower.costs[PREFILL].step_s(StepBatch(100, 100.0)) == pytest.approx(0.005), (
        "and what is beside the model"
    )
    sheet = replan_profile(loaded({}).config, MODEL)
    assert sheet.source == "analytic" and sheet.model.kv_bytes == 4
    machine = fleet_hardware(loaded({}).config, MODEL, sheet)
    assert machine.kv_tokens[DECODE] == MODEL.kv_bytes / machine.token_bytes
    assert (machine.limits.chunk_tokens, machine.limits.decode_rows) == (0, 64)
    both = fleet_hardware(
        load_config("serve", {"colocated": "2", "slo_tpot_ms": "50"}, {}).config, MODEL, sheet
    ).limits
    assert both.chunk_tokens == 512 and both.step_s == pytest.approx(0.05)


def test_kv_takes_the_time_of_the_machine_s_own_link_where_none_was_measured(profile: Path) -> None:
    node = find_device("cpu").node
    assert fleet_hardware(loaded({}).config, MODEL, built_in_profile("tiny", "cpu")).link == node.intra
    wide = fleet_hardware(
        loaded({"prefill_tp": "2", "decode_tp": "2"}).config, MODEL, built_in_profile("tiny", "cpu")
    )
    assert wide.link == LinkSpec(2 * node.intra.bytes_per_s, node.intra.latency_s)
    measured = replace(load_profile(profile), overheads=Overheads(link=LinkSpec(5e8, 1e-3)))
    assert fleet_hardware(loaded({}).config, MODEL, measured).link == LinkSpec(5e8, 1e-3)


def test_a_profile_of_another_model_is_refused(profile: Path) -> None:
    config = loaded({"replan_profile": str(profile)}).config
    with pytest.raises(ConfigError, match="the profile is of another model"):
        replan_profile(config, msgspec.structs.replace(MODEL, num_layers=7))


def test_the_replanner_takes_no_list_of_codecs() -> None:
    """It would count the whole pool as room of the first class."""
    config = loaded({"kv_cache_codec": "raw:0.25,nuq4-1%"}).config
    with pytest.raises(ConfigError, match="knows one KV codec only") as caught:
        replan_profile(config, MODEL)
    assert len(caught.value.lines()) <= 6


def test_the_replanner_counts_what_eviction_keeps_if_the_profile_says_so(profile: Path) -> None:
    measured, given = load_profile(profile), {"kv_keep": "0.95", "replan_profile": str(profile)}
    for asked in ({"kv_keep": "0.95"}, given):
        with pytest.raises(ConfigError, match="not known how much KV stays") as caught:
            fleet_hardware(loaded(asked).config, MODEL, measured)
        text = "\n".join(caught.value.lines())
        assert len(caught.value.lines()) <= 6 and "--kv-keep 0.95" in text and "--replan-profile" in text
    keep = KvKeep(0.95, 0.4, 1e-6, 1e-6)
    hardware = fleet_hardware(loaded(given).config, MODEL, replace(measured, kv_keep=(keep,)))
    assert hardware.keep == keep and all(isinstance(cost, DecidingCost) for cost in hardware.costs.values())
    assert fleet_hardware(loaded({}).config, MODEL, measured).keep is None


def test_the_evaluator_simulates_this_deployment_until_it_is_asked_to_stop(
    profile: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "decisions.jsonl"
    given = {"replan_profile": str(profile), "replan_journal": str(journal)}
    assert ReplanSession.from_settings(load_config("serve", {}, {}).config, MODEL, None) is None
    replan = ReplanSession.from_settings(loaded(given).config, MODEL, None)
    assert replan is not None and journal.exists()
    windows = TrafficWindows(1.0, 10.0)
    windows.arrived(0.5, 100)
    windows.ended(0.6, 100, 10)
    windows.close(1.0)
    share = replan._evaluator.attainment(FleetSize(1, 1), windows.traffic(0.0, 1.0).mix(), 2.0, 1.0)
    assert 0.9 < share <= 1.0 and not math.isnan(share)
    asyncio.run(replan.end_steering())
    assert replan._evaluator.stop.is_set()


def test_workers_that_an_earlier_replanner_had_started_are_steered_too(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rosters = list[Roster]()

    class Steering:
        def __init__(self, replanner: Any, gateway: Any, scaler: Any, roster: Roster, **_: Any) -> None:
            rosters.append(roster)

        async def run_rounds(self) -> None:
            pass

    monkeypatch.setattr(replan_setup, "ReplanDriver", Steering)
    config = loaded({"replan_budget": "4", "replan_profile": str(profile)}).config
    replan = ReplanSession.from_settings(config, MODEL, None)
    assert replan is not None
    gateway = SimpleNamespace(admin_key="a", status_key=None, num_prefill=1, ssl_certfile=None)
    what: Any = SimpleNamespace(workers=(), gateway=gateway)
    plant: Any = SimpleNamespace(
        started_roles={"prefill-0": "prefill", "decode-0": "decode", "decode-7": "decode"}
    )

    async def story() -> None:
        replan.begin_steering(plant, what, "http://gateway", 3.0, lambda line: None)
        await replan.end_steering()

    asyncio.run(story())
    assert [worker.name for worker in rosters[0].workers()] == ["decode-0", "decode-7", "prefill-0"]
