"""What an answer says of itself, and the file that it becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.placement.plan_file import load_plan, plan_pools, plan_slo, save_plan
from planner.placement.solve import Solution, solve_placement
from planner.placement.validate import step_limits
from planner.report.explain import (
    disaggregation_gain,
    explain_disaggregation,
    explain_solution,
    is_deployable,
    list_notes,
    make_plan_file,
    serve_command,
    solution_headline,
    solution_json,
    stage_seconds,
)
from planner.types import InstancePool, Parallelism, Placement
from tests.unit.planner.small_problems import DEVICE, profile, question


@cache
def answered() -> Solution:
    return solve_placement(question())


def test_the_headline_and_the_reasons() -> None:
    answer = answered()
    lines = solution_headline(answer)
    assert (
        str(answer.best_candidate.placement) in lines[0]
        and "goodput" in lines[1]
        and answer.binding.resource in lines[2]
    )
    text = "\n".join(explain_solution(answer))
    assert all(
        word in text for word in ("what limits it", "where the time goes", "elsewhere", "disaggregate")
    )
    assert all(str(one.placement) in text for one in answer.others)


def split_workers(solution: Solution, tp: int) -> Solution:
    """The solution, if its workers were split over so many devices."""
    best = solution.best_candidate
    pools = tuple(replace(pool, parallelism=Parallelism(tp)) for pool in best.placement.pools)
    return replace(solution, best_candidate=replace(best, placement=replace(best.placement, pools=pools)))


def test_a_device_that_workers_cannot_use_is_said_in_words_and_as_json() -> None:
    unknown = replace(profile(), device=replace(DEVICE, name="MI300X"))
    answer = solve_placement(question(measured=unknown))
    (refused,) = [note for note in list_notes(answer) if "refuses this plan" in note]
    assert "workers do not compute on MI300X" in refused and f"note: {refused}" in explain_solution(answer)
    shown = solution_json(answer)
    assert refused in shown["notes"] and shown["deployable"] is False
    assert serve_command(answer, Path("p.json")) is None
    gpus = split_workers(answered(), 1)
    assert any("on made use" in note and "--device cuda" in note for note in list_notes(gpus))
    assert solution_json(gpus)["deployable"] is True
    assert serve_command(gpus, Path("p.json")) == "diptych serve --plan p.json --device cuda"
    cores = replace(profile(), device=replace(DEVICE, name="cpu"))
    served = solve_placement(question(measured=cores))
    assert solution_json(served)["deployable"] is True
    assert serve_command(served, Path("p.json")) == "diptych serve --plan p.json"
    assert not any("refuses" in note or "GPU" in note for note in list_notes(served))


def test_a_worker_that_is_split_over_gpus_cannot_be_deployed() -> None:
    split = split_workers(answered(), 2)
    assert any("a worker computes on one GPU, so" in note for note in list_notes(split))
    assert not is_deployable(split)


def test_the_sentence_follows_the_answer() -> None:
    """Whatever the ratio, nobody is advised to disaggregate below an answer that does not."""
    answer = answered()
    found = [answer.best_candidate, *answer.others]
    for best in found:
        others = tuple(one for one in found if one is not best)
        swapped = replace(answer, best_candidate=best, others=others)
        ratio, said = disaggregation_gain(swapped), explain_disaggregation(swapped)
        assert ratio is not None
        apart = best.family != "colocated"
        assert said.startswith("disaggregate" if apart else "do not disaggregate")
        assert ("although" in said) == (apart != (ratio > 1))
    assert {one.family == "colocated" for one in found} == {True, False}


def test_binding_is_what_helps_most() -> None:
    answer = answered()
    assert answer.binding.gain == max(use.gain for use in answer.uses) >= 0.0
    assert all(use.utilisation is None or 0.0 < use.utilisation < 1.5 for use in answer.uses)


def test_stages_add_up_to_what_requests_saw() -> None:
    answer = answered()
    option = answer.best_candidate
    served = answer.problem.trial(option.placement).serve(option.placement, option.rate_rps, 0)
    whole_s = sum(one.ended_s - one.job.at_s for one in served) / len(served)
    assert sum(mean_s for mean_s, _ in stage_seconds(answer.problem, option).values()) == pytest.approx(
        whole_s
    )


def test_all_of_it_is_json() -> None:
    answer = answered()
    figures = json.loads(json.dumps(solution_json(answer)))
    assert figures["best"]["goodput_rps"] == answer.best_candidate.goodput_rps
    assert figures["disaggregated_over_colocated"] == disaggregation_gain(answer)


def test_the_plans_file_says_what_was_answered(tmp_path: Path) -> None:
    answer = answered()
    file = make_plan_file(answer, "small")
    save_plan(tmp_path / "plan.json", file)
    found = load_plan(tmp_path / "plan.json")
    assert found == file and found.placement == answer.best_candidate.placement
    assert found.slos_by_kind == dict(answer.problem.slos)
    assert found.predicted.goodput_rps == answer.best_candidate.goodput_rps and found.layers == 8
    assert plan_slo(Slo()).ttft_s is None and replace(found_slo(found.slos_by_kind)) == Slo(0.2, 0.03, 0.9)


def found_slo(promises: dict[str, Slo]) -> Slo:
    return promises[""]


def test_pools_are_written_as_they_are() -> None:
    placement = Placement(
        (
            InstancePool("prefill", Parallelism(2, 1), 3, "H100"),
            InstancePool("decode", Parallelism(1, 2), 1, "H100"),
        ),
        "low",
    )
    assert [(one.role, one.tp, one.pp, one.count, one.device) for one in plan_pools(placement)] == [
        ("prefill", 2, 1, 3, "H100"), ("decode", 1, 2, 1, "H100"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2), ("version", True), ("version", 1.0),
        ("model", ""), ("pools", []), ("layers", 7), ("affinity", "near"), ("more", 1),
     ("pools", [{"role": "cook"}]), ("pools", [{"role": "prefill"}]), ("devices_per_node", 0), ("cross", 0),
     ("local_prefill", "sometimes"), ("slos", {"": {"ttft_s": -0.2}}), ("slos", {"": {"attainment": 1.5}})],
)  # fmt: skip
def test_what_is_no_plan_is_refused(tmp_path: Path, name: str, value: object) -> None:
    plan = make_plan_file(answered(), "small")
    assert plan.steps == step_limits(answered().problem, plan.placement)
    pools = (plan.pools[0].model_copy(update={"pp": 2}), *plan.pools[1:])
    raw = plan.model_copy(update={"pools": pools}).model_dump(mode="json")
    (tmp_path / "plan.json").write_text(json.dumps({**raw, name: value}))
    with pytest.raises(ConfigError) as caught:
        load_plan(tmp_path / "plan.json")
    assert len(caught.value.lines()) <= 6
    assert name in caught.value.why and str(tmp_path / "plan.json") in caught.value.what
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match="not a plan"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_plan(tmp_path / "none.json")
