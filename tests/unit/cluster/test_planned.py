"""`diptych serve --plan`: what a plan becomes, what it may not contradict, and what must be on one node."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import planner.verify
from diptych.errors import ConfigError
from diptych.load import Loaded, load
from planner import candidates
from planner.plan_file import (
    VERSION,
    PlanFile,
    PoolOf,
    Predicted,
    SloOf,
    StepsOf,
    Traffic,
    pools_of,
    save,
    slo_of,
)
from planner.simulator import Deployment
from planner.terms import Job, Placement, Served, Slo, Split
from planner.verify import limits, taken_on
from services.cli.model import Model
from services.cli.plan import plan as deployment
from services.cli.plan import worker_spec
from services.cli.planned import check_model, planned, together
from services.cli.serve import promise
from services.cli.simulated import deployed as simulated_of
from tests.unit.planner.planned import question

PREDICTED = Predicted(2.0, 1.0, (1.8, 2.1), 0.93, 300, 3)
MODEL = Model("/models/some", "a model", True, 512, 1 << 20, 6)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight, whatever the machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def made(*pools: PoolOf, **fields: Any) -> PlanFile:
    slos = {"chat": SloOf(0.5, 0.05), "code": SloOf(0.2, None)}
    return PlanFile(
        VERSION,
        fields.get("model", "tiny"),
        fields.get("layers", 6),
        fields.get("devices_per_node", 8),
        pools,
        fields.get("affinity", "high"),
        1,
        slos,
        Traffic("sharegpt"),
        PREDICTED,
    )


def settle(tmp_path: Path, plan: PlanFile, given: Mapping[str, Any] | None = None) -> Loaded:
    file = tmp_path / "plan.json"
    save(file, plan)
    return planned(load("serve", {"plan": str(file)} | dict(given or {}), {}))[0]


def refused(tmp_path: Path, plan: PlanFile, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settle(tmp_path, plan, given)
    assert len(caught.value.lines()) <= 6
    return "\n".join(caught.value.lines())


PAIR = (PoolOf("prefill", tp=2, count=2), PoolOf("decode", pp=2, count=1, device="cpu"))
APART, BESIDE = candidates.pair(Split(), Split(), "low"), candidates.alone(Split())


def test_a_plan_gives_model_pools_splits_and_objectives(tmp_path: Path) -> None:
    loaded = settle(tmp_path, made(*PAIR))
    config = loaded.config
    assert config.model == "tiny" and config.pools == (2, 1)
    assert (config.prefill_tp, config.prefill_pp, config.decode_tp, config.decode_pp) == (2, 1, 1, 2)
    assert config.slo_ttft_ms == pytest.approx(200) and config.slo_tpot_ms == pytest.approx(50)
    assert "plan.json" in loaded.origin("prefill") and config.local_prefill == "fallback"


def test_workers_take_on_in_a_step_what_was_planned_with(tmp_path: Path) -> None:
    steps = StepsOf(256, 2048, chunked_prefill=False)
    plan = msgspec.structs.replace(made(*PAIR), steps=steps)
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
    assert "not possible" in refused(tmp_path, msgspec.structs.replace(plan, steps=StepsOf(64, 32)))


def test_colocated_and_hybrid_plans_are_deployed_too(tmp_path: Path) -> None:
    assert settle(tmp_path, made(PoolOf("both", tp=2, count=3))).config.pools == (0, 3)
    hybrid = made(PoolOf("prefill"), PoolOf("decode"), PoolOf("both", count=2))
    config = settle(tmp_path, hybrid).config
    assert config.pools == (1, 3) and config.local_prefill == "auto"
    assert {bundle.worker for group in together(hybrid) for bundle in group} == {
        "prefill-0", "decode-0", "decode-1", "decode-2"
    }  # fmt: skip


def test_colocated_instances_beside_pairs_are_like_those_that_decode(tmp_path: Path) -> None:
    """They are decode workers, and all of these are alike: others are refused, and the search proposes none."""
    unlike = made(PoolOf("prefill"), PoolOf("decode"), PoolOf("both", tp=2))
    assert "decode workers of different sizes" in refused(tmp_path, unlike)
    config = settle(tmp_path, made(PoolOf("prefill"), PoolOf("decode", tp=2), PoolOf("both", tp=2))).config
    assert (config.pools, config.decode_tp, config.local_prefill) == ((1, 2), 2, "auto")


def test_a_plan_says_whether_decode_workers_read_prompts(tmp_path: Path) -> None:
    for told, expected in (("never", "fallback"), ("auto", "auto")):
        plan = msgspec.structs.replace(made(*PAIR), local_prefill=told)
        assert settle(tmp_path, plan).config.local_prefill == expected
        for said in ("never", "fallback", "auto"):
            given = {"local_prefill": said}
            if (said == "auto") == (told == "auto"):
                assert settle(tmp_path, plan, given).config.local_prefill == said
            else:
                assert f"local_prefill is {said}, and the plan" in refused(tmp_path, plan, **given)
    hybrid = made(PoolOf("prefill"), PoolOf("decode"), PoolOf("both"))
    assert "made with auto" in refused(tmp_path, hybrid, local_prefill="never")


@pytest.mark.parametrize("chunk_tokens", [0, 512])
@pytest.mark.parametrize("placement", [APART, candidates.times(BESIDE, 2), candidates.both((APART, BESIDE))])
@pytest.mark.parametrize("local_prefill", ["never", "auto"])
def test_what_is_verified_is_what_is_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    placement: Placement,
    chunk_tokens: int,
    local_prefill: str,
) -> None:
    """Roles, what a step takes on and within which time, and who reads prompts: in the simulation as in settings."""
    seen: list[Deployment] = []

    def look(what: Deployment, jobs: list[Job]) -> list[Served]:
        seen.append(what)
        return []

    monkeypatch.setattr(planner.verify, "simulate", look)
    slo = Slo(0.2, 0.03, 0.9)
    request = question(per_node=3, slos={"": slo}, limits=limits([slo], chunk_tokens))
    if candidates.family(placement) != "disaggregated":
        local_prefill = candidates.local_prefill(placement)
    planner.verify._Product(request, local_prefill)(placement, [])
    plan = msgspec.structs.replace(
        made(layers=8), pools=pools_of(placement), affinity=placement.affinity, slos={"": slo_of(slo)},
        local_prefill=local_prefill, steps=taken_on(request, placement),
    )  # fmt: skip
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
        for pool, machine in zip(seen[0].placement.pools, seen[0].machines, strict=True)
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
    config = load("serve", pools | {"enable_chunked_prefill": chunked, "local_prefill": local}, {}).config
    config = dataclasses.replace(config, slo_tpot_ms=30.0)
    unset: dict[str, Any] = dict.fromkeys(("profile", "link", "tpot_budget_ms"))
    options = dataclasses.asdict(config) | unset
    options |= {"model": "opt-13b", "device": "A100-80G", "placement": words}
    simulated = simulated_of(options, (), 0.03)
    product = planner.verify._Product(question(slos={"": Slo(0.2, 0.03, 0.9)}), local)
    for pool, machine in zip(simulated.placement.pools, simulated.machines, strict=True):
        role = "decode" if pool.role == "both" else pool.role
        spec = worker_spec(config, MODEL, role, "one", "", "", None)
        assert machine.tpot_s == product._within_s(pool.role, StepsOf(64, 512, chunked))
        assert machine.tpot_s == (None if spec.tpot_ms is None else spec.tpot_ms / 1e3)
    options["tpot_budget_ms"] = 9.0
    if any(machine.tpot_s for machine in simulated.machines):
        assert {machine.tpot_s for machine in simulated_of(options, (), 0.03).machines} <= {None, 9e-3}
    else:
        with pytest.raises(ConfigError, match="has no effect here"):
            simulated_of(options, (), 0.03)


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
        (made(PoolOf("both", device="H100")), {}, "1 devices of the kind H100"),
        (made(PoolOf("both", tp=2, count=5)), {}, "--colocated 5 --decode-tp 2"),
        (made(PoolOf("prefill"), PoolOf("prefill", tp=2), PoolOf("decode")), {}, "different sizes"),
    ],
)
def test_what_cannot_be_deployed_is_told(tmp_path: Path, plan: PlanFile, given: Any, said: str) -> None:
    assert said in refused(tmp_path, plan, **given)


def test_a_model_with_other_layers_is_another_model() -> None:
    check_model(None, MODEL)
    check_model(made(*PAIR), MODEL)
    with pytest.raises(ConfigError, match="another model"):
        check_model(made(*PAIR, layers=12), MODEL)


def test_a_plan_tells_what_it_promises() -> None:
    told = promise(Path("p.json"), made(*PAIR))
    assert "2 × prefill TP2 + 1 × decode TP1PP2" in told and "2 requests/s" in told and "93%" in told
    assert "TTFT" in told and "chat (TTFT 500 ms, TPOT 50 ms) and code (TTFT 200 ms)" in told
    assert "of sharegpt at 93%" in told and "(1.8 to 2.1)" in told, "what is not known is not told"
    traffic = Traffic("chats", 220.4, 180.0, 12.0, 2.0)
    predicted = Predicted(12.0, 6.0, (12.0, 12.0), 0.95, 300, 1, searched_rps=14.0)
    told = promise(Path("p.json"), msgspec.structs.replace(made(*PAIR), traffic=traffic, predicted=predicted))
    assert "carry 12 requests/s of chats (prompts of 220 and answers of 180 tokens on average" in told
    assert "12 requests/s asked for, burstiness 2)" in told and told.endswith("; searched 14")


def bundles(plan: PlanFile) -> list[dict[str, int]]:
    return [{bundle.worker: bundle.devices for bundle in group} for group in together(plan)]


def test_with_high_affinity_each_worker_is_by_itself() -> None:
    assert bundles(made(*PAIR)) == [{"prefill-0": 2}, {"prefill-1": 2}, {"decode-0": 2}]


def test_with_low_affinity_a_pair_is_on_one_node() -> None:
    pools = PoolOf("prefill", tp=2, count=2), PoolOf("decode", count=4)
    assert bundles(made(*pools, affinity="low")) == [
        {"prefill-0": 2, "decode-0": 1, "decode-1": 1},
        {"prefill-1": 2, "decode-2": 1, "decode-3": 1},
    ]


def test_stages_of_a_worker_stay_together_whatever_their_groups() -> None:
    pools = PoolOf("prefill", pp=2), PoolOf("decode", pp=2)
    plan = made(*pools, affinity="low", devices_per_node=2)  # two groups of two, of the same two workers
    assert bundles(plan) == [{"prefill-0": 2, "decode-0": 2}]


def test_the_whole_deployment_has_workers_groups_and_a_budget(tmp_path: Path) -> None:
    plan = made(PoolOf("prefill"), PoolOf("decode", count=2), affinity="low")
    loaded = settle(tmp_path, plan, {"replan": "true", "replan_budget": "5"})
    what = deployment(loaded, MODEL, tmp_path, tmp_path, 1, 2, (), plan)
    assert [spec.worker for spec in what.workers] == ["prefill-0", "decode-0", "decode-1"]
    assert [len(group) for group in what.groups] == [3] and what.budget == 5
    assert what.gateway.replan and (what.gateway.num_prefill, what.gateway.num_decode) == (1, 2)
    plain = deployment(load("serve", {"prefill_tp": "2"}, {}), MODEL, tmp_path, tmp_path, 1, 2, ())
    assert [[bundle.devices for bundle in group] for group in plain.groups] == [[2], [1]]
    assert plain.budget == 3 and not plain.gateway.replan
