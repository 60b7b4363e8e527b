"""`diptych serve --plan`: what a plan becomes, what it may not contradict, and what must be on one node."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import planner.placement.validate
from diptych.config.load import LoadedConfig, load_config
from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.placement import candidates
from planner.placement.plan_file import (
    VERSION,
    PlanFile,
    PlanPool,
    PlanPrediction,
    PlanSlo,
    PlanStepLimits,
    PlanTraffic,
    load_plan,
    plan_pools,
    plan_slo,
    save_plan,
)
from planner.placement.validate import product_limits, step_limits
from planner.sim.exact.deployment import SimDeployment
from planner.types import Job, JobResult, Parallelism, Placement
from services.cli.dashboards import dashboards
from services.cli.serve.from_plan import apply_plan, apply_plan_slos, check_planned_model, node_groups
from services.cli.serve.launch import describe_plan
from services.cli.serve.specs import deployment_spec as deployment
from services.cli.serve.specs import worker_spec
from services.cli.simulate.deployment import simulated_deployment as simulated_of
from services.cli.simulate.options import SimulateOptions
from services.dashboard.rules import rule_file
from services.host.model_probe import ProbedModel
from tests.support.made_up_gpus import made_gpu, plug_in
from tests.unit.planner.small_problems import question

PREDICTED = PlanPrediction(
    goodput_rps=2.0,
    goodput_per_device_rps=1.0,
    interval_rps=(1.8, 2.1),
    attainment=0.93,
    requests=300,
    seeds=3,
)
MODEL = ProbedModel("/models/some", "a model", True, 512, 1 << 20, 6)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight, whatever the machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def made(*pools: PlanPool, **fields: Any) -> PlanFile:
    slos = {"chat": PlanSlo(ttft_s=0.5, tpot_s=0.05), "code": PlanSlo(ttft_s=0.2, tpot_s=None)}
    return PlanFile(
        version=VERSION,
        model=fields.get("model", "tiny"),
        layers=fields.get("layers", 6),
        devices_per_node=fields.get("devices_per_node", 8),
        pools=pools,
        affinity=fields.get("affinity", "high"),
        cross=1,
        slos=slos,
        traffic=PlanTraffic(name="sharegpt"),
        predicted=PREDICTED,
    )


def settle(tmp_path: Path, plan: PlanFile, given: Mapping[str, Any] | None = None) -> LoadedConfig:
    file = tmp_path / "plan.json"
    save_plan(file, plan)
    return apply_plan(load_config("serve", {"plan": str(file)} | dict(given or {}), {}))[0]


def refused(tmp_path: Path, plan: PlanFile, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settle(tmp_path, plan, given)
    assert len(caught.value.lines()) <= 6
    return "\n".join(caught.value.lines())


PAIR = (PlanPool(role="prefill", tp=2, count=2), PlanPool(role="decode", pp=2, count=1, device="cpu"))
APART, BESIDE = (
    candidates.make_pair(Parallelism(), Parallelism(), "low"),
    candidates.make_colocated(Parallelism()),
)


def test_a_plan_gives_model_pools_splits_and_objectives(tmp_path: Path) -> None:
    loaded = settle(tmp_path, made(*PAIR))
    config = loaded.config
    assert config.model == "tiny" and config.pools == (2, 1)
    assert (config.prefill_tp, config.prefill_pp, config.decode_tp, config.decode_pp) == (2, 1, 1, 2)
    assert config.slo_ttft_ms == pytest.approx(200) and config.slo_tpot_ms == pytest.approx(50)
    assert config.slo_target == 0.9
    assert "plan.json" in loaded.origin_of("prefill") and config.local_prefill == "fallback"


def test_dashboards_are_for_the_plan_s_objectives(tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.json", made(*PAIR))
    given = {"plan": str(tmp_path / "plan.json"), "slo_ttft_ms": "900"}
    config = apply_plan_slos(load_config("dashboards", given, {})).config
    assert (config.slo_ttft_ms, config.slo_target) == (900, 0.9)
    assert config.slo_tpot_ms == pytest.approx(50) and config.prefill_tp == 1
    settings = tmp_path / "deployment.yaml"
    settings.write_text(f"plan: {tmp_path / 'plan.json'}\nslo_target: 0.99\n")
    out = tmp_path / "out"
    dashboards(out, settings)
    assert yaml.safe_load((out / "diptych-rules.yml").read_text()) == rule_file(0.99)


def test_workers_take_on_in_a_step_what_was_planned_with(tmp_path: Path) -> None:
    steps = PlanStepLimits(max_num_seqs=256, max_num_batched_tokens=2048, chunked_prefill=False)
    plan = made(*PAIR).model_copy(update={"steps": steps})
    config = settle(tmp_path, plan).config
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.enable_chunked_prefill) == (
        256,
        2048,
        False,
    )
    same = {"max_num_seqs": "256", "max_num_batched_tokens": "2048", "enable_chunked_prefill": False}
    assert settle(tmp_path, plan, same).config == config
    for name, value in (
        ("max_num_seqs", "8"),
        ("max_num_batched_tokens", "512"),
        ("enable_chunked_prefill", True),
    ):
        assert f"{name} is {str(value).lower()}, and the plan" in refused(tmp_path, plan, **{name: value})
    assert settle(tmp_path, made(*PAIR), {"max_num_seqs": "8"}).config.max_num_seqs == 8
    assert settle(tmp_path, made(*PAIR)).config.max_num_batched_tokens == 512  # nobody has said
    impossible = PlanStepLimits.model_construct(max_num_seqs=64, max_num_batched_tokens=32)
    assert "not possible" in refused(tmp_path, plan.model_copy(update={"steps": impossible}))


def test_colocated_and_hybrid_plans_are_deployed_too(tmp_path: Path) -> None:
    assert settle(tmp_path, made(PlanPool(role="both", tp=2, count=3))).config.pools == (0, 3)
    hybrid = made(PlanPool(role="prefill"), PlanPool(role="decode"), PlanPool(role="both", count=2))
    config = settle(tmp_path, hybrid).config
    assert config.pools == (1, 3) and config.local_prefill == "auto"
    assert {bundle.worker for group in node_groups(hybrid) for bundle in group} == {
        "prefill-0", "decode-0", "decode-1", "decode-2"
    }  # fmt: skip


def test_colocated_instances_beside_pairs_are_like_those_that_decode(tmp_path: Path) -> None:
    """They are decode workers, and all of these are alike: others are refused, and the search proposes none."""
    unlike = made(PlanPool(role="prefill"), PlanPool(role="decode"), PlanPool(role="both", tp=2))
    assert "decode workers of different sizes" in refused(tmp_path, unlike)
    config = settle(
        tmp_path, made(PlanPool(role="prefill"), PlanPool(role="decode", tp=2), PlanPool(role="both", tp=2))
    ).config
    assert (config.pools, config.decode_tp, config.local_prefill) == ((1, 2), 2, "auto")


def test_a_plan_says_whether_decode_workers_read_prompts(tmp_path: Path) -> None:
    for planned, expected in (("never", "fallback"), ("auto", "auto")):
        plan = made(*PAIR).model_copy(update={"local_prefill": planned})
        assert settle(tmp_path, plan).config.local_prefill == expected
        for said in ("never", "fallback", "auto"):
            given = {"local_prefill": said}
            if (said == "auto") == (planned == "auto"):
                assert settle(tmp_path, plan, given).config.local_prefill == said
            else:
                assert f"local_prefill is {said}, and the plan" in refused(tmp_path, plan, **given)
    hybrid = made(PlanPool(role="prefill"), PlanPool(role="decode"), PlanPool(role="both"))
    assert "made with auto" in refused(tmp_path, hybrid, local_prefill="never")


@pytest.mark.parametrize("chunk_tokens", [0, 512])
@pytest.mark.parametrize(
    "placement", [APART, candidates.replicate_unit(BESIDE, 2), candidates.combine_placements((APART, BESIDE))]
)
@pytest.mark.parametrize("local_prefill", ["never", "auto"])
def test_what_is_verified_is_what_is_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    placement: Placement,
    chunk_tokens: int,
    local_prefill: str,
) -> None:
    """Roles, what a step takes on and within which time, and who reads prompts: in the simulation as in settings."""
    seen: list[SimDeployment] = []

    def look(what: SimDeployment, jobs: list[Job], *sink: Any) -> list[JobResult]:
        seen.append(what)
        return []

    monkeypatch.setattr(planner.placement.validate, "simulate_exact", look)
    slo = Slo(0.2, 0.03, 0.9)
    request = question(per_node=3, slos={"": slo}, limits=product_limits([slo], chunk_tokens))
    if candidates.family_of(placement) != "disaggregated":
        local_prefill = candidates.local_prefill_mode(placement)
    planner.placement.validate._ExactRunner(request, local_prefill)(placement, [])
    plan = made(*plan_pools(placement), layers=8, affinity=placement.affinity).model_copy(
        update={
            "slos": {"": plan_slo(slo)},
            "local_prefill": local_prefill,
            "steps": step_limits(request, placement),
        }
    )
    loaded = settle(tmp_path, plan)
    started = deployment(loaded, MODEL, tmp_path, tmp_path, 1, 2, (), plan)
    simulated = [
        (
            "prefill" if pool.role == "prefill" else "decode",
            machine.max_num_seqs,
            machine.max_num_batched_tokens,
            machine.chunked_prefill,
            machine.tpot_s and machine.tpot_s * 1e3,
        )
        for pool, machine in zip(seen[0].placement.pools, seen[0].instances, strict=True)
        for _ in range(pool.count)
    ]
    assert simulated == [
        (one.role, one.max_num_seqs, one.max_num_batched_tokens, one.chunked_prefill, one.tpot_ms)
        for one in started.workers
    ]
    assert (seen[0].local_prefill == "auto") == (started.gateway.local_prefill == "auto")
    assert any(pool.role == "both" for pool in seen[0].placement.pools) == (not started.gateway.num_prefill)


@pytest.mark.parametrize("words", ["1P + 1D", "2C"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("local", ["never", "fallback", "auto"])
def test_steps_are_kept_within_tpot_alike_when_served_simulated_and_verified(
    words: str, chunked: bool, local: str
) -> None:
    pools = {"colocated": "2"} if words == "2C" else {}
    config = load_config(
        "serve", pools | {"enable_chunked_prefill": chunked, "local_prefill": local}, {}
    ).config
    config = config.model_copy(update={"slo_tpot_ms": 30.0})
    options = SimulateOptions(
        model="opt-13b",
        placement=words,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
        local_prefill=config.local_prefill,
    )
    simulated = simulated_of(options, Slo(1.0, 0.03))
    product = planner.placement.validate._ExactRunner(question(slos={"": Slo(0.2, 0.03, 0.9)}), local)
    for pool, machine in zip(simulated.placement.pools, simulated.instances, strict=True):
        role = "decode" if pool.role == "both" else pool.role
        spec = worker_spec(config, MODEL, role, "one", "", "", None)
        assert machine.tpot_s == product._within_s(
            pool.role, PlanStepLimits(max_num_seqs=64, max_num_batched_tokens=512, chunked_prefill=chunked)
        )
        assert machine.tpot_s == (None if spec.tpot_ms is None else spec.tpot_ms / 1e3)
    options = dataclasses.replace(options, tpot_budget_ms=9.0)
    if any(machine.tpot_s for machine in simulated.instances):
        assert {machine.tpot_s for machine in simulated_of(options, Slo(1.0, 0.03)).instances} <= {None, 9e-3}
    else:
        with pytest.raises(ConfigError, match="has no effect here"):
            simulated_of(options, Slo(1.0, 0.03))


def test_kv_is_kept_as_it_was_planned_for(tmp_path: Path) -> None:
    plan = made(*PAIR).model_copy(update={"kv_cache_codec": "tq4"})
    assert settle(tmp_path, plan).config.kv_cache_codec == "tq4"
    assert settle(tmp_path, plan, {"kv_cache_codec": "tq4"}).config.kv_cache_codec == "tq4"
    assert settle(tmp_path, plan, {"kv_cache_codec": "tq4.s0"}).config.kv_cache_codec == "tq4.s0"
    assert "kv_cache_codec is tq4.s1" in refused(tmp_path, plan, kv_cache_codec="tq4.s1")
    assert "kv_cache_codec is int8, and the plan was made with tq4" in refused(
        tmp_path, plan, kv_cache_codec="int8"
    )
    assert "the plan was made with raw" in refused(tmp_path, made(*PAIR), kv_cache_codec="tq4")
    file = tmp_path / "plan.json"
    save_plan(file, made(*PAIR))
    before = json.loads(file.read_text())
    del before["kv_cache_codec"]
    file.write_text(json.dumps(before))
    assert load_plan(file).kv_cache_codec == "raw", "plans of before say nothing"
    file.write_text(json.dumps(before | {"kv_cache_codec": "int5"}))
    with pytest.raises(ConfigError, match="not a plan"):
        load_plan(file)


def test_classes_of_kv_are_kept_as_they_were_planned_for(tmp_path: Path) -> None:
    plan = made(*PAIR).model_copy(update={"kv_cache_codec": "raw:0.25,tq4:0.75"})
    assert settle(tmp_path, plan).config.kv_cache_codec == "raw:0.25,tq4:0.75"
    named = {"kv_cache_codec": "raw:0.25,tq4.s0"}
    assert settle(tmp_path, plan, named).config.kv_cache_codec == "raw:0.25,tq4.s0"
    for other in ("raw:0.5,tq4", "tq4:0.75,raw", "raw:0.25,int8", "tq4"):
        said = refused(tmp_path, plan, kv_cache_codec=other)
        assert f"kv_cache_codec is {other}, and the plan was made with raw:0.25,tq4:0.75" in said
    file = tmp_path / "plan.json"
    save_plan(file, plan)
    text = file.read_text()
    for wrong in ("raw:0.25,int5", "raw:0.9,tq4:0.9", "raw,raw"):
        file.write_text(text.replace("raw:0.25,tq4:0.75", wrong))
        with pytest.raises(ConfigError, match="not a plan"):
            load_plan(file)


def test_requests_evict_as_they_were_planned_for(tmp_path: Path) -> None:
    plan = made(*PAIR)
    assert settle(tmp_path, plan, {"kv_keep": "1"}).config.kv_keep == 1
    said = refused(tmp_path, plan, kv_keep="95%")
    assert "kv_keep is 0.95, and the plan was made with 1.0" in said and "plan.json" in said
    plan = plan.model_copy(update={"kv_keep": 0.95})
    for given in ({}, {"kv_keep": "95%"}):
        assert settle(tmp_path, plan, given).config.kv_keep == 0.95
    assert "the plan was made with 0.95" in refused(tmp_path, plan, kv_keep="0.9")


def test_what_is_set_otherwise_stays_where_it_does_not_contradict(tmp_path: Path) -> None:
    given = {"slo_ttft_ms": "900", "model": "models/../models/tiny"}
    assert settle(tmp_path, made(*PAIR), given).config.slo_ttft_ms == 900
    hub = made(*PAIR, model="Qwen2.5-0.5B")
    assert settle(tmp_path, hub, {"model": "Qwen/Qwen2.5-0.5B-Instruct"}).config.model.startswith("Qwen/")


@pytest.mark.parametrize(
    ("plan", "given", "said"),
    [
        (made(*PAIR), {"decode": "2"}, "the pools are given twice"),
        (made(*PAIR), {"model": "Qwen/Qwen2.5-0.5B"}, "the plan is for another model"),
        (made(PlanPool(role="both", device="H100")), {}, "1 devices of the kind H100"),
        (made(PlanPool(role="both", tp=2, count=5)), {}, "--colocated 5 --decode-tp 2"),
        (
            made(PlanPool(role="prefill"), PlanPool(role="prefill", tp=2), PlanPool(role="decode")),
            {},
            "different sizes",
        ),
    ],
)
def test_what_cannot_be_deployed_is_refused(tmp_path: Path, plan: PlanFile, given: Any, said: str) -> None:
    assert said in refused(tmp_path, plan, **given)


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        (PlanPool(role="both", device="H100", count=4), "this machine has 4 of the kind NVIDIA H200"),
        (PlanPool(role="both", device="cpu"), "workers compute on GPUs"),
        (PlanPool(role="both", device="H200", count=5), "the plan is for 5 GPUs"),
    ],
)
def test_a_plan_for_other_gpus_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: PlanPool, said: str
) -> None:
    plug_in(monkeypatch, tmp_path, *[made_gpu("NVIDIA H200")] * 4)
    assert said in refused(tmp_path, made(pool), device="cuda")
    fitting = PlanPool(role="both", device="H200", count=4)
    assert settle(tmp_path, made(fitting), {"device": "cuda"}).config.pools == (0, 4)
    plug_in(monkeypatch, tmp_path)
    assert "there is no device 'cuda' here" in refused(tmp_path, made(fitting), device="cuda")


def test_a_model_with_other_layers_is_another_model() -> None:
    check_planned_model(None, MODEL)
    check_planned_model(made(*PAIR), MODEL)
    with pytest.raises(ConfigError, match="another model"):
        check_planned_model(made(*PAIR, layers=12), MODEL)


def test_a_plan_tells_what_it_promises() -> None:
    text = describe_plan(Path("p.json"), made(*PAIR))
    assert "2 × prefill TP2 + 1 × decode TP1PP2" in text and "2 requests/s" in text and "93%" in text
    assert "TTFT" in text and "chat (TTFT 500 ms, TPOT 50 ms) and code (TTFT 200 ms)" in text
    assert "of sharegpt at 93%" in text and "(1.8 to 2.1)" in text, "what is not known is not claimed"
    traffic = PlanTraffic(
        name="chats", prompt_mean=220.4, output_mean=180.0, rate_rps=12.0, burstiness_cv=2.0
    )
    predicted = PlanPrediction(
        goodput_rps=12.0,
        goodput_per_device_rps=6.0,
        interval_rps=(12.0, 12.0),
        attainment=0.95,
        requests=300,
        seeds=1,
        searched_rps=14.0,
    )
    text = describe_plan(
        Path("p.json"), made(*PAIR).model_copy(update={"traffic": traffic, "predicted": predicted})
    )
    assert "carry 12 requests/s of chats (prompts of 220 and answers of 180 tokens on average" in text
    assert "12 requests/s asked for, burstiness 2)" in text and text.endswith("; searched 14")


def bundles(plan: PlanFile) -> list[dict[str, int]]:
    return [{bundle.worker: bundle.devices for bundle in group} for group in node_groups(plan)]


def test_with_high_affinity_each_worker_is_by_itself() -> None:
    assert bundles(made(*PAIR)) == [{"prefill-0": 2}, {"prefill-1": 2}, {"decode-0": 2}]


def test_with_low_affinity_a_pair_is_on_one_node() -> None:
    pools = PlanPool(role="prefill", tp=2, count=2), PlanPool(role="decode", count=4)
    assert bundles(made(*pools, affinity="low")) == [
        {"prefill-0": 2, "decode-0": 1, "decode-1": 1},
        {"prefill-1": 2, "decode-2": 1, "decode-3": 1},
    ]


def test_stages_of_a_worker_stay_together_whatever_their_groups() -> None:
    pools = PlanPool(role="prefill", pp=2), PlanPool(role="decode", pp=2)
    plan = made(*pools, affinity="low", devices_per_node=2)  # two groups of two, of the same two workers
    assert bundles(plan) == [{"prefill-0": 2, "decode-0": 2}]


def test_the_whole_deployment_has_workers_groups_and_a_budget(tmp_path: Path) -> None:
    plan = made(PlanPool(role="prefill"), PlanPool(role="decode", count=2), affinity="low")
    loaded = settle(tmp_path, plan, {"replan": "true", "replan_budget": "5"})
    what = deployment(loaded, MODEL, tmp_path, tmp_path, 1, 2, (), plan)
    assert [spec.worker for spec in what.workers] == ["prefill-0", "decode-0", "decode-1"]
    assert [len(group) for group in what.node_groups] == [3] and what.device_budget == 5
    assert what.gateway.replan and (what.gateway.num_prefill, what.gateway.num_decode) == (1, 2)
    plain = deployment(load_config("serve", {"prefill_tp": "2"}, {}), MODEL, tmp_path, tmp_path, 1, 2, ())
    assert [[bundle.devices for bundle in group] for group in plain.node_groups] == [[2], [1]]
    assert plain.device_budget == 3 and not plain.gateway.replan
