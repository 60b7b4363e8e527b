"""The arithmetic of benchmarks/goodput.py: objectives, ratios, and what the planner would choose."""

from __future__ import annotations

import pytest

from benchmarks import goodput
from benchmarks.goodput import (
    APART,
    TOGETHER,
    Cell,
    Known,
    chosen,
    columns,
    objective,
    options_of,
    predicted,
    ratios,
    report,
)
from planner.cost import StepCost
from planner.hardware import device
from planner.profile import Profile
from planner.shape import known as shape
from planner.terms import Slo, Split
from planner.workload import synthetic
from services.bench.study import Load

SLO = Slo(1.0, 0.02)


def test_objectives_are_multiples_of_unloaded_times() -> None:
    assert objective("tight_tpot", 0.0625, 0.25) == Slo(1.25, 0.5)
    assert objective("tight_ttft", 0.0625, 0.25) == Slo(0.1875, 2.5)


def test_the_objective_is_told_to_those_that_keep_within_it() -> None:
    flags = {name: " ".join(one.flags) for name, one in columns(SLO).items()}
    assert flags == {
        "disaggregated": "--prefill 1 --decode 1",
        "colocated": "--colocated 2 --slo-tpot-ms 20",
        "unchunked": "--colocated 2 --no-enable-chunked-prefill",
        "local": "--prefill 1 --decode 1 --local-prefill auto --slo-tpot-ms 20",
    }


def test_ratios_are_against_the_best_of_the_others_seed_by_seed() -> None:
    assert ratios([2.0, 6.0], [[1.0, 1.0], [2.0, 3.0]]) == [1.0, 2.0]
    assert ratios([2.0, 6.0], [[0.0, 3.0]]) == [2.0], "no goodput, no ratio"


def cell(**rates: list[float]) -> Cell:
    return Cell(SLO, dict(rates), requests=dict.fromkeys(rates, 40))


def test_a_cell_says_how_the_columns_compare() -> None:
    told = cell(disaggregated=[6.0, 8.0], colocated=[4.0, 4.0], unchunked=[2.0, 2.0], auto=[6.0, 8.0]).told()
    assert told["ratio"]["mean"] == 1.75 and told["ratio"]["seeds"] == [1.5, 2.0]
    assert told["ratio"]["interval"][0] < 1.5 < 2.0 < told["ratio"]["interval"][1]
    assert told["auto_ratio"]["mean"] == 1.0 and told["slo_ms"] == {"ttft": 1000.0, "tpot": 20.0}


def test_parts_of_a_cell_are_told_without_ratios() -> None:
    told = cell(disaggregated=[6.0]).told()
    assert "ratio" not in told and told["goodput"]["disaggregated"]["interval"] is None


def test_it_is_foreseen_when_the_simulator_names_the_better_kind() -> None:
    expected = {"disaggregated": 3.0, "colocated": 2.0, "unchunked": 1.0, "local": 2.5}
    one = cell(disaggregated=[6.0], colocated=[4.0], unchunked=[5.0])
    other = cell(disaggregated=[6.0], colocated=[4.0], unchunked=[7.0])
    assert {one.foreseen, other.foreseen} == {None}
    one.expected = other.expected = expected
    assert (one.foreseen, other.foreseen, chosen(expected)) == (True, False, "disaggregated")
    options = options_of(["--seeds", "1"])
    assert report({"sharegpt": {"balanced": one, "tight_ttft": other}}, options)["foreseen"] == 0.5


def test_the_simulator_sees_what_objectives_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tight TPOT reading apart from writing pays, and with a loose one two that do both carry more."""
    monkeypatch.setattr(goodput, "LONG", 60)
    monkeypatch.setattr(goodput, "HIGHEST", 64.0)
    cost = StepCost((0.004, 16e-5, 0.0), ((0.0018, 0.0, 25e-5),))
    profile = Profile(shape("Llama-3.1-8B"), device("cpu"), {Split(): cost}, {Split(): 40_000})
    loads = Load(synthetic("sharegpt").shrunk(8, 512))
    known = dict.fromkeys((APART, TOGETHER), Known(profile, 0))
    tight = predicted(known, loads, Slo(1.0, 0.005), 1)
    loose = predicted(known, loads, Slo(0.1, 10.0), 1)
    assert tight["disaggregated"] > max(tight["colocated"], tight["unchunked"])
    assert loose["disaggregated"] < max(loose["colocated"], loose["unchunked"])
