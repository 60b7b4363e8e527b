"""What an answer says of itself, and the file that it becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from diptych.errors import ConfigError
from planner.explain import advantage, disaggregate, explain, headline, plan_file, stages, told
from planner.placement import Answer, place
from planner.plan_file import load, pools_of, save, slo_of
from planner.terms import Placement, Pool, Slo, Split
from planner.verify import taken_on
from tests.unit.planner.planned import question


@cache
def answered() -> Answer:
    return place(question())


def test_the_headline_and_the_reasons() -> None:
    answer = answered()
    lines = headline(answer)
    assert (
        str(answer.best.placement) in lines[0]
        and "goodput" in lines[1]
        and answer.binding.resource in lines[2]
    )
    text = "\n".join(explain(answer))
    assert all(
        word in text for word in ("what limits it", "where the time goes", "elsewhere", "disaggregate")
    )
    assert all(str(one.placement) in text for one in answer.others)


def test_the_sentence_follows_the_answer() -> None:
    """Whatever the ratio, nobody is told to disaggregate below an answer that does not."""
    answer = answered()
    found = [answer.best, *answer.others]
    for best in found:
        others = tuple(one for one in found if one is not best)
        turned = replace(answer, best=best, others=others)
        ratio, said = advantage(turned), disaggregate(turned)
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
    option = answer.best
    served = answer.request.trial(option.placement).serve(option.placement, option.rate_rps, 0)
    whole_s = sum(one.ended_s - one.job.at_s for one in served) / len(served)
    assert sum(mean_s for mean_s, _ in stages(answer.request, option).values()) == pytest.approx(whole_s)


def test_all_of_it_is_json() -> None:
    answer = answered()
    figures = json.loads(json.dumps(told(answer)))
    assert figures["best"]["goodput_rps"] == answer.best.goodput_rps
    assert figures["disaggregated_over_colocated"] == advantage(answer)


def test_the_plans_file_says_what_was_answered(tmp_path: Path) -> None:
    answer = answered()
    file = plan_file(answer, "small")
    save(tmp_path / "plan.json", file)
    found = load(tmp_path / "plan.json")
    assert found == file and found.placement == answer.best.placement
    assert found.promises == dict(answer.request.slos)
    assert found.predicted.goodput_rps == answer.best.goodput_rps and found.layers == 8
    assert slo_of(Slo()).ttft_s is None and replace(found_slo(found.promises)) == Slo(0.2, 0.03, 0.9)


def found_slo(promises: dict[str, Slo]) -> Slo:
    return promises[""]


def test_pools_are_written_as_they_are() -> None:
    placement = Placement(
        (Pool("prefill", Split(2, 1), 3, "H100"), Pool("decode", Split(1, 2), 1, "H100")), "low"
    )
    assert [(one.role, one.tp, one.pp, one.count, one.device) for one in pools_of(placement)] == [
        ("prefill", 2, 1, 3, "H100"), ("decode", 1, 2, 1, "H100"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [("version", 2), ("model", ""), ("pools", []), ("layers", 7), ("affinity", "near"), ("more", 1),
     ("pools", [{"role": "cook"}]), ("pools", [{"role": "prefill"}]), ("devices_per_node", 0), ("cross", 0),
     ("local_prefill", "sometimes"), ("slos", {"": {"ttft_s": -0.2}}), ("slos", {"": {"attainment": 1.5}})],
)  # fmt: skip
def test_what_is_no_plan_is_told(tmp_path: Path, name: str, value: object) -> None:
    plan = plan_file(answered(), "small")
    assert plan.steps == taken_on(answered().request, plan.placement)
    pools = (msgspec.structs.replace(plan.pools[0], pp=2), *plan.pools[1:])
    raw = msgspec.to_builtins(msgspec.structs.replace(plan, pools=pools))
    (tmp_path / "plan.json").write_text(json.dumps({**raw, name: value}))
    with pytest.raises(ConfigError) as told:
        load(tmp_path / "plan.json")
    assert len(told.value.lines()) <= 6
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match="not a plan"):
        load(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.json")
