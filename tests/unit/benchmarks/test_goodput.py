"""The arithmetic of benchmarks/goodput.py: objectives, knees, ratios, and what the planner would choose."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks import goodput
from benchmarks.accuracy import goodput_columns as module
from benchmarks.accuracy.goodput_columns import (
    APART,
    ERROR,
    TOGETHER,
    Expected,
    Traffic,
    chosen,
    columns,
    predict_goodput,
    sites,
)
from benchmarks.accuracy.goodput_knee import (
    ABOVE,
    BELOW,
    STEP,
    STRIDE,
    TARGET,
    Goodput,
    Knee,
    Walk,
    counted,
    knee,
    knee_of,
    resampled,
)
from benchmarks.goodput import Bench, Cell, options_of, plans, regime_slo, report, wants
from benchmarks.load.measured_runs import MetServer
from diptych.slo import Slo
from planner.costs.model import find_model as shape
from planner.costs.profile import CostProfile
from planner.costs.profiler import MeasuredStep, WorkerTrace
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.types import Job, JobResult, Parallelism, StepBatch
from planner.workload.workload import synthetic_workload
from services.bench.profile_run import Measurement

SLO = Slo(1.0, 0.02)


def served(at_s: float, ttft_s: float, tpot_s: float = 0.01, failed: str = "") -> JobResult:
    return JobResult(Job(at_s, 8, 4), ttft_s, tpot_s, at_s + ttft_s, failed)


# ---- deployments


def test_slos_are_multiples_of_unloaded_times() -> None:
    assert regime_slo("tight_tpot", 0.0625, 0.25) == Slo(1.25, 0.5)
    assert regime_slo("tight_ttft", 0.0625, 0.25) == Slo(0.1875, 2.5)


def test_the_slo_is_given_to_those_that_keep_within_it() -> None:
    flags = {name: " ".join(one.flags) for name, one in columns(SLO).items()}
    assert flags == {
        "disaggregated": "--prefill 1 --decode 1",
        "colocated": "--colocated 2 --slo-tpot-ms 20",
        "unchunked": "--colocated 2 --no-enable-chunked-prefill",
        "local": "--prefill 1 --decode 1 --local-prefill auto --slo-tpot-ms 20",
    }


def test_a_deployment_that_knows_no_slo_is_up_once_and_checked_by_all() -> None:
    slos = {"tight": SLO, "loose": Slo(2.0, 0.04)}
    found = sites(slos, {"tight": ["disaggregated", "colocated"], "loose": ["disaggregated", "colocated"]})
    assert [(site.name, list(site.slos)) for site in found.values()] == [
        ("disaggregated", ["tight", "loose"]),
        ("colocated", ["tight"]),
        ("colocated", ["loose"]),
    ]


def test_nothing_is_deployed_that_is_not_asked_for() -> None:
    expected = {"disaggregated": 1.0, "colocated": 2.0, "unchunked": 1.0, "local": 3.0}
    assert wants(["disaggregated", "auto"], expected) == {"disaggregated": "disaggregated", "auto": "local"}
    assert wants(["unchunked"], expected) == {"unchunked": "unchunked"}


def test_of_those_that_tie_the_first_is_chosen() -> None:
    assert (
        chosen({"disaggregated": 9.1, "colocated": 10.0, "unchunked": 5.0, "local": 10.0}) == "disaggregated"
    )
    assert chosen({"disaggregated": 8.9, "colocated": 9.1, "unchunked": 5.0, "local": 10.0}) == "colocated"
    assert chosen({"disaggregated": 8.9, "colocated": 8.9, "unchunked": 5.0, "local": 10.0}) == "local"


def test_where_attainment_hardly_falls_a_choice_rests_on_more_than_the_target() -> None:
    """The one barely keeps the target far up, the other keeps it well, not quite so far: the first surely does less."""
    flat = {1.0: thousand(0.98), 2.0: thousand(0.92), 8.0: thousand(0.905), 16.0: thousand(0.2)}
    steep = {1.0: thousand(0.99), 6.0: thousand(0.98), 8.0: thousand(0.3)}
    assert knee_of(flat).rate > knee_of(steep).rate
    surely = {
        "disaggregated": knee_of(steep, TARGET + ERROR).rate,
        "colocated": knee_of(flat, TARGET + ERROR).rate,
    }
    assert surely["colocated"] < 2.0 and chosen(surely) == "disaggregated"


def thousand(kept: float) -> list[bool]:
    """Of 1,000 requests, of which that share kept the objective."""
    return [number < 1000 * kept for number in range(1000)]


# ---- knees

HALF = (1.0 * 2.0) ** 0.5  # halfway between the rates 1 and 2


@pytest.mark.parametrize(
    ("attained", "wanted"),
    [
        ([1.0, 1.0, 0.8, 0.0], Knee(2.0 * 2.0**0.5)),  # straight over the logarithm
        ([1.0, 0.8, 0.5, 0.1], Knee(HALF)),
        ([1.0, 0.9, 0.5, 0.1], Knee(2.0)),
        ([0.95, 0.9, 0.9, 0.1], Knee(4.0)),  # the last rate that keeps it
        ([1.0, 0.7, 0.9, 0.0], Knee(HALF)),  # noise: the middle two are 0.8
        ([0.9, 1.0, 0.85, 0.0], Knee(2.0 * 2.0**0.5)),  # and here the first two 0.95
        ([1.0, 1.0, 1.0, 0.9], Knee(8.0, ABOVE)),
        ([0.8, 0.8, 0.3, 0.0], Knee(0.5, BELOW)),  # half of what is missed at rate 1 is missed at half of it
        ([0.0, 0.0, 0.0, 0.0], Knee(0.1, BELOW)),
    ],
)
def test_goodput_is_where_attainment_crosses_the_target(attained: list[float], wanted: Knee) -> None:
    found = knee([1.0, 2.0, 4.0, 8.0], attained, [50, 50, 50, 50])
    assert found.censored == wanted.censored
    assert found.rate == pytest.approx(wanted.rate)


def test_runs_of_more_requests_weigh_more() -> None:
    many = knee([1.0, 2.0, 4.0], [1.0, 0.7, 0.95], [50, 10, 1000])
    few = knee([1.0, 2.0, 4.0], [1.0, 0.7, 0.95], [50, 1000, 10])
    assert (many.censored, few.censored) == (ABOVE, "") and few.rate < 2.0 < many.rate


def fates(knee_at: float, seed: int) -> dict[float, list[bool]]:
    """Runs of a machine that keeps 90 % at its knee."""
    draw = random.Random(seed)
    shares = {rate: 1.0 / (1.0 + (rate / knee_at) ** 6 / 9.0) for rate in (4.0, 4.8, 5.8, 6.9, 8.3, 12.0)}
    return {rate: [draw.random() < share for _ in range(120)] for rate, share in shares.items()}


def test_redrawn_requests_tell_how_sure_a_knee_is() -> None:
    seen = fates(6.0, 0)
    drawn = resampled(seen, 0)
    assert np.array_equal(drawn, resampled(seen, 0)), "the same seed, the same draws"
    low, high = np.percentile(drawn, (2.5, 97.5))
    assert low < knee_of(seen).rate < high and 5.0 < low < 6.0 < high < 7.3


def test_the_truth_is_mostly_within_the_interval() -> None:
    """Hardly less often than it says: between rates that are far apart a line is not the curve."""
    within = 0
    for trial in range(40):
        low, high = np.percentile(resampled(fates(6.0, trial), 0, 100), (2.5, 97.5))
        within += low <= 6.0 <= high
    assert within >= 30


def test_equal_runs_have_a_ratio_of_one_without_doubt() -> None:
    one = Goodput.of([fates(6.0, 1), fates(6.0, 2)])
    other = Goodput.of([fates(6.0, 1), fates(6.0, 2)])
    assert one.over([other])["interval"] == [1.0, 1.0] and one.over([other])["mean"] == 1.0


def test_seeds_that_differ_widen_the_interval() -> None:
    alike = Goodput((Knee(7.0), Knee(7.0)), np.full((2, 400), 7.0)).report_fields()
    unlike = Goodput((Knee(4.0), Knee(10.0)), np.repeat([[4.0], [10.0]], 400, axis=1)).report_fields()
    assert alike["interval"] == [7.0, 7.0] and unlike["interval"] == [4.0, 10.0] and unlike["mean"] == 7.0


def test_ratios_are_against_the_best_of_the_others_seed_by_seed() -> None:
    fields = good(2.0, 6.0).over([good(1.0, 1.0), good(2.0, 3.0)])
    assert fields["seeds"] == [1.0, 2.0] and fields["mean"] == 1.5 and fields["censored"] == 0


def test_ratios_of_what_was_not_enclosed_say_so() -> None:
    above = Goodput((Knee(2.0, ABOVE), Knee(2.0)), np.full((2, 3), 2.0))
    assert above.over([good(1.0, 1.0)])["censored"] == 1 and above.report_fields()["censored"] == 1


# ---- which rates are run


def walked(begin: int, knees: dict[str, float]) -> list[int]:
    """The powers that are run on a machine that keeps each objective up to a power, and of 0.7 beyond a step less."""
    names = list(knees)
    walk = Walk({name: Slo(number) for number, name in enumerate(names, 1)}, 1.0, begin, -9, 12)
    while (power := walk.next()) is not None:
        walk.runs[power] = []
        for number in range(100):
            lost = sum(number >= 100 * share(power - knees[name]) for name in names)
            walk.runs[power].append(served(float(number), lost + 0.5))
    return sorted(walk.runs)


def share(beyond: float) -> float:
    return 1.0 if beyond <= 0 else 0.7 / STEP**beyond


def test_a_walk_goes_up_until_all_is_lost_and_down_until_all_is_kept() -> None:
    """And then looks between."""
    assert walked(-2, {"one": 0.5}) == [-2, 0, 1, 2]
    assert walked(6, {"one": 0.5}) == [0, 1, 2, 4, 6]
    assert walked(0, {"loose": 5.5, "tight": -3.5}) == [-4, -3, -2, 0, 2, 4, 5, 6]


def test_a_walk_stays_within_its_bounds() -> None:
    assert walked(-20, {"never": -99}) == [-9]
    assert walked(0, {"never": -99}) == [-8, -6, -4, -2, 0]
    assert walked(8, {"always": 99}) == [8, 10, 12]


def test_a_walk_judges_its_runs_by_each_objective() -> None:
    walk = Walk({"tight": Slo(0.1), "loose": Slo(1.0)}, 2.0, 0, -9, 12)
    walk.runs[1] = [served(0.0, 0.05), served(1.0, 0.5), served(2.0, 0.5, failed="timeout")]
    assert walk.attained(1) == {"tight": pytest.approx(1 / 3), "loose": pytest.approx(2 / 3)}
    assert walk.fates("loose") == {2.0 * STEP: [True, True, False]}


def test_the_next_seed_begins_below_what_was_found() -> None:
    walk = Walk({"": Slo(1.0)}, 2.0, 0, -9, 12)
    for power in (0, 2, 4):  # kept up to 2 × 1.2², and half of it at 2 × 1.2⁴
        walk.runs[power] = [served(float(at), 0.5 if power < 4 or at % 2 else 2.0) for at in range(100)]
    again = walk.again()
    assert (again.begin, again.runs, again.centre) == (0, {}, 2.0)
    assert 0.85 * knee_of(walk.fates("")).rate < 2.0 * STEP**2


def test_the_warm_up_does_not_count() -> None:
    found = counted([served(10.0, 1.0), served(0.5, 1.0), served(1.0, 1.0)])
    assert [one.job.at_s for one in found] == [1.0, 10.0]


def test_runs_begin_somewhat_below_what_is_expected_to_fail_first() -> None:
    slos = {"tight": SLO, "loose": Slo(2.0, 0.04)}
    expected = {
        "tight": Expected({"disaggregated": 4.0, "colocated": 4.0}),
        "loose": Expected({"disaggregated": 9.0, "colocated": 9.0}),
    }
    needed = sites(slos, {regime: ["disaggregated", "colocated"] for regime in slos})
    found = {
        (needed[flags].name, *needed[flags].slos): walk for flags, walk in plans(needed, expected).items()
    }
    assert [walk.centre for walk in found.values()] == pytest.approx([6.0] * 3), "one grid"
    assert all(walk.begin % STRIDE == 0 for walk in found.values())
    for names, least in {
        ("disaggregated", "tight", "loose"): 4.0,
        ("colocated", "tight"): 4.0,
        ("colocated", "loose"): 9.0,
    }.items():
        begins = found[names].rate(found[names].begin)
        assert 0.85 * least / STEP**STRIDE < begins <= 0.85 * least


def test_one_deployment_is_up_at_a_time_and_each_seed_has_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, str]] = []
    up: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def serving(*flags: str) -> Iterator[Up]:
        assert not up, "another one takes a part of the cores"
        up.append(flags)
        yield Up()
        up.remove(flags)

    def step(self: Bench, met: MetServer, traffic: Traffic, walk: Walk, seed: int, name: str) -> None:
        assert up[0][0] == name
        steps.append((seed, name))
        power = walk.next()
        assert power is not None
        walk.runs[power] = [served(0.0, 0.5 if walk.rate(power) <= float(name) else 2.0)]

    class Runner:
        def run(self, coroutine: object) -> MetServer:
            coroutine.close()  # type: ignore[attr-defined]
            return MetServer(Quiet(), 0.1)  # type: ignore[arg-type]

    monkeypatch.setattr(Bench, "_step", step)
    monkeypatch.setattr(goodput, "serving_deployment", serving)
    plans_ = {(name,): Walk({"": SLO}, 1.0, 0, -9, 12) for name in ("1", "2")}
    found = Bench(Runner(), 2).walks(plans_, Traffic(synthetic_workload("sharegpt"), 1.0))  # type: ignore[arg-type]
    assert list(dict.fromkeys(steps)) == [(0, "1"), (0, "2"), (1, "2"), (1, "1")]
    assert [sorted(walk.runs) for walk in found[("1",)]] == [[0, 1, 2], [-2, 0, 1, 2]]


class Quiet:
    """A target that nobody asks."""

    @property
    def client(self) -> Quiet:
        return self

    def close_idle(self) -> None:
        pass


class Up:
    url = "http://127.0.0.1:1"

    def wait_ready(self) -> None:
        pass


# ---- the report


def good(*rates: float) -> Goodput:
    return Goodput(tuple(map(Knee, rates)), np.array(rates)[:, None] * np.array([[0.9, 1.0, 1.1]]))


def wide(rate: float) -> Goodput:
    """One whose intervals are not the same as those of `good`."""
    return Goodput((Knee(rate),), np.array([[rate * 0.8, rate, rate * 1.2]]))


EXPECTED = {"disaggregated": 3.0, "colocated": 2.0, "unchunked": 1.0, "local": 2.5}
SURELY = {"disaggregated": 1.5, "colocated": 1.8, "unchunked": 0.9, "local": 1.7}


def cell(**found: Goodput) -> Cell:
    return Cell(SLO, Expected(EXPECTED, SURELY), found, dict.fromkeys(found, 40))


def test_a_cell_says_how_the_columns_compare() -> None:
    fields = cell(
        disaggregated=good(6.0, 8.0), colocated=good(4.0, 4.0), unchunked=good(2.0, 2.0), auto=good(6.0, 8.0)
    ).report_fields()
    assert fields["ratio"]["mean"] == 1.75 and fields["ratio"]["seeds"] == [1.5, 2.0]
    assert fields["auto_ratio"]["mean"] == fields["auto_of_two"]["mean"] == 1.0 and fields["slo_ms"] == {
        "ttft": 1000.0,
        "tpot": 20.0,
    }
    assert fields["predicted"] == {
        "goodput": EXPECTED,
        "surely": SURELY,
        "ratio": 1.5,
        "auto": "colocated",
    }


def test_parts_of_a_cell_are_reported_without_ratios() -> None:
    fields = cell(disaggregated=good(6.0)).report_fields()
    assert not {"ratio", "auto_ratio", "auto_of_two"} & set(fields) and fields["foreseen"] is None


def test_the_report_says_where_disaggregation_loses_and_whether_that_was_foreseen() -> None:
    one = cell(disaggregated=good(6.0), colocated=good(4.0), unchunked=good(5.0), auto=good(6.0))
    other = cell(disaggregated=good(6.0), colocated=good(4.0), unchunked=good(8.0), auto=good(6.0))
    fields = report({"sharegpt": {"balanced": one, "tight_ttft": other}}, options_of(["--seeds", "1"]))
    assert fields["loses"] == ["sharegpt.tight_ttft"] and fields["auto_least"] == 0.75
    assert fields["auto_of_two_least"] == 1.0 and fields["auto_surely_less"] == []
    assert (fields["foreseen"], fields["foreseen_clear"], fields["seeds"]) == (0.5, 0.5, 1)
    assert [one["foreseen"] for one in fields["cells"]["sharegpt"].values()] == [True, False]


@pytest.mark.parametrize(("auto", "surely"), [(3.0, ["sharegpt.balanced"]), (5.6, []), (7.0, [])])
def test_the_report_says_where_auto_has_surely_less_than_the_better_of_the_two(
    auto: float, surely: list[str]
) -> None:
    one = cell(disaggregated=wide(6.0), colocated=good(4.0), unchunked=good(9.0), auto=good(auto))
    fields = report({"sharegpt": {"balanced": one}}, options_of(["--seeds", "1"]))
    assert fields["auto_surely_less"] == surely
    assert fields["auto_of_two_least"] == pytest.approx(auto / 6.0, abs=1e-3)
    assert fields["auto_least"] == pytest.approx(auto / 9.0, abs=1e-3), "whole prompts had more"


# ---- the simulator


def measured(roles: list[str]) -> Measurement:
    """A machine whose steps take what its cost says."""
    cost = StepCost((0.004, 16e-5, 0.0), ((0.0018, 0.0, 25e-5),))
    profile = CostProfile(
        shape("Llama-3.1-8B"), find_device("cpu"), {Parallelism(): cost}, {Parallelism(): 40_000}
    )
    batches = [StepBatch(16 * size, (16.0 * size) ** 2) for size in range(1, 7)]
    batches += [
        StepBatch(rows=rows, context=50 * rows * size) for rows in range(1, 5) for size in range(1, 4)
    ]
    traces = [
        WorkerTrace(
            f"{role}-{number}",
            role,
            0,
            [MeasuredStep(i, i + cost.step_s(one), one) for i, one in enumerate(batches)],
        )
        for number, role in enumerate(roles)
    ]
    return Measurement(profile, 0, traces, [], {})


def test_the_simulator_sees_what_objectives_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tight TPOT reading apart from writing pays, and with a loose one two that do both carry more."""
    monkeypatch.setattr(module, "SIMULATED", 60)
    monkeypatch.setattr(module, "STARTS", (0.0,))
    known = {APART: measured(["prefill", "decode"]), TOGETHER: measured(["decode", "decode"])}
    slos = {"tight": Slo(1.0, 0.005), "loose": Slo(0.1, 10.0)}
    found = predict_goodput(known, Traffic(synthetic_workload("sharegpt").shrunk(8, 512), 2.0), slos, 30.0)
    tight, loose = found["tight"].goodput, found["loose"].goodput
    assert tight["disaggregated"] > max(tight["colocated"], tight["unchunked"])
    assert loose["disaggregated"] < max(loose["colocated"], loose["unchunked"])
    assert set(loose) == set(tight) == {"disaggregated", "colocated", "unchunked", "local"}
    for one in found.values():
        assert set(one.surely) == set(one.goodput)
        assert all(one.surely[name] <= rate for name, rate in one.goodput.items())


def test_the_estimate_grows_with_what_is_asked_for() -> None:
    whole = goodput.estimate_s(options_of([]))
    part = goodput.estimate_s(options_of(["--workloads", "sharegpt", "--regimes", "balanced"]))
    assert 20 * 60 < whole < 90 * 60 and part < whole / 4
