"""The figures behind the plots: of the families asked for, on no more than the hardware, with the answer itself."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from diptych.slo import Slo
from planner.placement.families import FamilySearch
from planner.placement.problem import Problem
from planner.placement.solve import Solution, solve_placement
from planner.report import curves
from planner.report.curves import attainment_by_rate, draw_plots, gain_by_slo, goodput_by_devices
from planner.report.explain import disaggregation_gain
from planner.report.plots import Curve, CurvePoint, plot_attainment, plot_break_even
from planner.report.whatif import apply_change, with_slos
from planner.workload.workload import WorkloadMix
from tests.unit.planner.small_problems import CHAT, DEVICE, question, two_kinds

TIGHT, LOOSE = Slo(0.2, 0.03, 0.9), Slo(1.0, 0.06, 0.8)


@cache
def answered(families: tuple[str, ...] = ("colocated", "disaggregated"), affinity: str = "auto") -> Solution:
    return solve_placement(question(per_node=2, families=families, affinity=affinity))


def alone(request: Problem) -> Solution:
    """An answer to `request`, of which only the request matters."""
    return replace(answered(), problem=request)


def line(drawn: list[Curve], name: str) -> dict[float, float]:
    (found,) = (one for one in drawn if one.name.startswith(name))
    return {point.x: point.y for point in found.points}


def names(drawn: list[Curve]) -> set[str]:
    return {one.name.split(":")[0] for one in drawn}


@pytest.mark.parametrize(
    ("families", "affinity", "drawn"),
    [
        (("colocated",), "auto", {"colocated"}),
        (("colocated", "disaggregated"), "high", {"colocated", "disaggregated (high affinity)"}),
        (("disaggregated",), "low", {"disaggregated (low affinity)"}),
        (("disaggregated",), "auto", {"disaggregated (low affinity)", "disaggregated (high affinity)"}),
    ],
)
def test_what_was_asked_for_is_drawn_and_the_answer(
    families: tuple[str, ...], affinity: str, drawn: set[str]
) -> None:
    answer = answered(families, affinity)
    found = goodput_by_devices(answer)
    assert names(found) == drawn | {"the answer"}
    assert line(found, "the answer") == {
        answer.best_candidate.placement.devices: answer.best_candidate.goodput_rps
    }
    for one in found[:-1]:
        ys = [point.y for point in one.points]
        assert ys == sorted(ys) and ys[0] > 0.0, "more devices never give less"
    assert {one.name for one in attainment_by_rate(answer)} >= {
        f"{curves._family_of(answer.best_candidate.placement)}: {answer.best_candidate.placement}"
    }


def test_hybrids_have_a_line_of_their_own() -> None:
    request = question(per_node=4, families=("hybrid",), requests=30)
    (mixed, _) = goodput_by_devices(alone(request))
    assert mixed.name == "hybrid"
    assert min(point.x for point in mixed.points) >= 3.0, "a pair, and one beside it"


def test_no_more_units_are_drawn_than_the_nodes_take() -> None:
    """Twelve devices on nodes of four take three units of three, not four."""
    request = question(nodes=3, per_node=4, families=("disaggregated",), affinity="low", requests=30)
    scored = [one for one in curves._scored_units(request, "low") if one.placement.devices == 3]
    assert scored
    for one in scored:
        assert max(curves._replicated_rates(request, [one])) == 9


def test_devices_of_one_kind_are_not_counted_for_another() -> None:
    request = two_kinds(families=("colocated",), requests=30)
    rates = curves._replicated_rates(request, curves._scored_units(request, "colocated"))
    assert max(rates) == 2, "two of each kind, and a deployment is of one"


def test_high_affinity_lines_pack_what_they_measure() -> None:
    request = question(
        nodes=2,
        per_node=3,
        families=("disaggregated",),
        affinity="high",
        requests=30,
        node_link=DEVICE.node.intra,
    )
    pairs = curves._pair_blends(request)
    proposed = [
        one
        for most in curves._device_steps(request.devices)
        for one in curves._best_blends(request, pairs, most)
    ]
    assert proposed
    for expected, placement in proposed:
        assert expected > 0.0 and request.fits_on_nodes(placement) and placement.affinity == "high"
    mixed = two_kinds(families=("disaggregated",), affinity="high", node_link=DEVICE.node.intra)
    tried = {placement for _, placement in curves._best_blends(mixed, curves._pair_blends(mixed), 4)}
    assert tried & {one.placement for one in FamilySearch(mixed).finalists()}, (
        "what the search proposes is among them"
    )
    assert all(pool.count * pool.parallelism.devices <= 2 for placement in tried for pool in placement.pools)


def test_many_devices_are_drawn_at_few_points() -> None:
    assert curves._device_steps(8) == list(range(1, 9))
    assert len(curves._device_steps(1024)) == curves.DEVICE_STEPS and curves._device_steps(1024)[-1] == 1024


def test_what_disaggregation_gains_is_what_the_answer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "SCALES", (1.0, 2.0))
    answer = answered()
    found = gain_by_slo(answer)
    assert names(found) == {"TTFT scaled", "TPOT scaled", "the answer"}
    assert line(found, "the answer") == {1.0: disaggregation_gain(answer)}
    assert line(found, "TTFT scaled")[1.0] == line(found, "TPOT scaled")[1.0]
    assert line(found, "TTFT scaled")[1.0] == pytest.approx(disaggregation_gain(answer), rel=0.35), (
        "of short runs"
    )
    endless = with_slos(answer.problem, lambda slo: Slo(slo.ttft_s))
    assert names(gain_by_slo(alone(endless))) == {"TTFT scaled", "the answer"}
    assert gain_by_slo(alone(replace(answer.problem, families=("disaggregated",)))) == []


def test_attainment_is_drawn_by_kind_with_each_promise(tmp_path: Path) -> None:
    mix = WorkloadMix([("tight", 1.0, CHAT, TIGHT), ("loose", 1.0, CHAT, LOOSE)])
    request = question(per_node=1, source=mix, slos=mix.slos, families=("colocated",), requests=30)
    answer = solve_placement(request)
    found = attainment_by_rate(answer)
    assert {one.name.split(",")[0] for one in found} == {"tight", "loose"}
    assert all(0.0 <= point.y <= 1.0 for one in found for point in one.points)
    _, figures = plot_attainment(tmp_path / "attainment.png", found, request.slos)
    drawn = json.loads(figures.read_bytes())
    assert drawn["slos"] == {
        "tight": {"ttft_s": 0.2, "tpot_s": 0.03, "attainment": 0.9},
        "loose": {"ttft_s": 1.0, "tpot_s": 0.06, "attainment": 0.8},
    }


def test_the_word_of_the_product_is_a_mark_beside_the_lines() -> None:
    answer = solve_placement(question(per_node=1, families=("colocated",), requests=30, verified=True))
    assert answer.validation is not None
    found = attainment_by_rate(answer)
    assert found[-1].name == "the answer, by the product's scheduler and router"
    assert found[-1].points[0].y == next(iter(answer.validation.shares.values()))


def test_all_is_drawn_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "SCALES", (1.0,))
    files = draw_plots(answered(), tmp_path)
    assert [file.name for file in files] == [
        f"{name}.{end}" for name in ("attainment", "goodput", "break_even") for end in ("png", "json")
    ]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files[::2])
    assert all(json.loads(file.read_bytes())["curves"] for file in files[1::2])
    both = [Curve("none", ()), Curve("one", (CurvePoint(1.0, 1.0, 0.9, 1.1),))]
    png, figures = plot_break_even(tmp_path / "b", both, "objective")
    assert png.name == "b.png" and json.loads(figures.read_bytes())["knob"] == "objective"
    few = draw_plots(answered(("colocated",)), tmp_path / "few")
    assert {file.stem for file in few} == {"attainment", "goodput"}, "nothing to compare"


def test_a_changed_tpot_is_what_steps_are_kept_within() -> None:
    """Instances that cut prompts do so within the TPOT SLO; so a curve over SLOs, or a what-if, moves both."""
    request = question()
    within = replace(request, limits=replace(request.limits, chunk_tokens=512, step_s=0.03))
    assert apply_change(within, "tpot=x2").limits.step_s == pytest.approx(0.06)
    assert apply_change(within, "ttft=x2").limits.step_s == 0.03
    assert apply_change(request, "tpot=x2").limits == request.limits
