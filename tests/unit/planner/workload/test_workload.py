"""What is drawn again is like what was seen: lengths jointly, shared beginnings, arrivals."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.types import Job
from planner.workload.lengths import LognormalLengths, fit_lognormals
from planner.workload.prefixes import prefix_reuses
from planner.workload.workload import (
    SYNTHETIC,
    Workload,
    WorkloadMix,
    describe_kinds,
    find_workload,
    mean_arrival_rate,
    rescale_arrivals,
    synthetic_workload,
)
from tests.unit.planner.workload.sample_jobs import JOBS, talk

SHARED = Path(os.environ.get("DIPTYCH_SHARED", Path(__file__).resolve().parents[4] / ".." / "shared"))
MEANS = {"sharegpt": (755.5, 200.3), "humaneval": (171.3, 98.2), "longbench": (1738.3, 90.7)}


def prefix_hit_rate(jobs: Sequence[Job]) -> float:
    """The share of all named blocks that an unlimited prefix cache would hit; `jobs` are in order of arrival."""
    named = sum(len(job.prefix) for job in jobs)
    return sum(reuse.blocks for reuse in prefix_reuses(jobs)) / named if named else 0.0


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_lengths_have_the_means_of_figure_7(name: str) -> None:
    jobs = synthetic_workload(name).sample(20_000, rate=1.0, seed=3)
    assert statistics.fmean(job.prompt for job in jobs) == pytest.approx(MEANS[name][0], rel=0.02)
    assert statistics.fmean(job.output for job in jobs) == pytest.approx(MEANS[name][1], rel=0.03)
    assert max(job.prompt + job.output for job in jobs) <= 2048
    assert synthetic_workload(name).mean() == pytest.approx(MEANS[name], rel=0.02)


def test_lengths_are_resampled_jointly_and_by_seed() -> None:
    workload = Workload.of(JOBS)
    jobs = workload.sample(500, rate=2.0, seed=1)
    assert {(job.prompt, job.output) for job in jobs} == {(job.prompt, job.output) for job in JOBS}
    assert {job.kind for job in jobs} == {"chat"}
    assert workload.sample(500, 2.0, 1) == jobs != workload.sample(500, 2.0, 2)
    assert jobs[:100] == workload.sample(100, 2.0, 1)


def test_another_rate_has_the_same_requests_faster() -> None:
    slow, fast = (synthetic_workload("sharegpt").sample(200, rate, 5) for rate in (1.0, 4.0))
    assert [(job.prompt, job.output) for job in slow] == [(job.prompt, job.output) for job in fast]
    assert [job.at_s for job in slow] == pytest.approx([4.0 * job.at_s for job in fast])


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(cv: float) -> None:
    jobs = synthetic_workload("humaneval").sample(20_000, rate=5.0, seed=2, cv=cv)
    gaps = [after.at_s - before.at_s for before, after in zip(jobs, jobs[1:], strict=False)]
    assert jobs[0].at_s == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.08)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_a_fit_finds_the_lognormals_that_jobs_were_drawn_from() -> None:
    truth = LognormalLengths(5.0, 0.6, 4.0, 0.9, 0.5)
    found = fit_lognormals(Workload(truth).sample(20_000, 1.0, 1))
    for name in ("prompt_mean", "prompt_deviation", "output_mean", "output_deviation", "correlation"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), abs=0.03)


def test_a_fit_has_the_means_although_what_is_longest_is_cut() -> None:
    seen = Workload.of(synthetic_workload("sharegpt").sample(3000, 1.0, 1))
    assert seen.fitted().mean() == pytest.approx(seen.mean(), rel=0.02)


def test_a_fit_of_few_or_equal_requests_draws_the_like() -> None:
    for jobs in ([Job(0.0, 100, 10)], [Job(float(at), 100 * at + 1, 100 * at + 1) for at in range(5)]):
        drawn = Workload.of(jobs).fitted().sample(50, 1.0, 1)
        assert max(job.prompt + job.output for job in drawn) <= max(job.prompt + job.output for job in jobs)


def test_a_replay_keeps_order_and_burstiness_at_another_rate() -> None:
    burst = [Job(at_s, 5, 5) for at_s in (10.0, 10.1, 10.2, 30.0, 30.1)]
    replayed = Workload.of(burst).scaled(10.0)
    assert mean_arrival_rate(replayed) == pytest.approx(10.0)
    assert [job.at_s for job in replayed] == pytest.approx([(job.at_s - 10.0) * 0.4 / 20.1 for job in burst])
    with pytest.raises(ConfigError, match="replayed"):
        synthetic_workload("sharegpt").scaled(1.0)
    with pytest.raises(ConfigError, match="no arrival times"):
        rescale_arrivals([Job(0.0, 1, 1), Job(0.0, 1, 1)], 1.0)


def test_what_prompts_share_is_measured_against_all_before() -> None:
    jobs = [
        Job(0, 200, 1, "", (1, 2, 3)),
        Job(1, 130, 1, "", (1, 2)),
        Job(2, 200, 1, "", (1, 9, 3)),
        Job(3, 5, 1),
    ]
    assert [tuple(reuse) for reuse in prefix_reuses(jobs)] == [(0, 0), (2, 1), (1, 1), (0, 0)]
    assert prefix_hit_rate(jobs) == 3 / 8


@pytest.mark.parametrize("seed", [1, 2])
def test_resampled_prompts_share_as_much_as_those_seen(seed: int) -> None:
    jobs = talk(messages=8, clients=100)
    again = Workload.of(jobs).sample(len(jobs), rate=3.0, seed=seed)
    assert prefix_hit_rate(again) == pytest.approx(prefix_hit_rate(jobs), abs=0.03)
    assert all(len(job.prefix) == job.prompt // 64 for job in again)
    lags = [sorted(reuse.lag for reuse in prefix_reuses(one) if reuse.blocks) for one in (jobs, again)]
    assert lags[1][len(lags[1]) // 2] == pytest.approx(lags[0][len(lags[0]) // 2], rel=0.3)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_drawn_from_a_fit_shares_as_much_too(seed: int) -> None:
    jobs = talk(messages=8, clients=100)
    fitted = Workload.of(jobs, "talk").fitted()
    again = fitted.sample(2 * len(jobs), rate=3.0, seed=seed)
    assert {job.prompt for job in again} - {job.prompt for job in jobs}, "not the trace's own requests"
    assert prefix_hit_rate(again) == pytest.approx(prefix_hit_rate(jobs), abs=0.1)
    assert {job.kind for job in again} == {"talk"}
    small = fitted.shrunk(4.0).sample(200, 1.0, seed)
    assert prefix_hit_rate(small) > 0.3 and all(len(job.prefix) == job.prompt // 16 for job in small)
    assert fitted.longer(500).drawn and prefix_hit_rate(fitted.within(500).sample(200, 1.0, seed)) > 0.3
    with pytest.raises(ConfigError, match="nothing can be fitted"):
        synthetic_workload("sharegpt").fitted()


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs shared/data, which is not here")
def test_an_unbounded_cache_hits_as_often_as_on_the_mooncake_trace() -> None:
    workload = find_workload(str(SHARED / "data" / "mooncake" / "synthetic_trace.jsonl.gz"))
    truth = prefix_hit_rate(workload.jobs)
    for seed in (1, 2, 3):
        again = workload.sample(len(workload.jobs), rate=4.0, seed=seed)
        assert prefix_hit_rate(again) == pytest.approx(truth, abs=0.03)


def test_a_mix_keeps_shares_promises_and_prefixes_apart() -> None:
    parts = [
        ("chat", 3.0, Workload.of(talk(4, 10)), Slo(0.5, 0.1)),
        ("talk", 1.0, Workload.of(talk(4, 10)), Slo(2.0)),
    ]
    mix = WorkloadMix(parts)
    jobs = mix.sample(4000, rate=2.0, seed=1)
    chats = [job for job in jobs if job.kind == "chat"]
    assert len(chats) / len(jobs) == pytest.approx(0.75, abs=0.03)
    assert mix.slos["chat"] == Slo(0.5, 0.1)
    names = [{name for job in jobs if job.kind == kind for name in job.prefix} for kind in ("chat", "talk")]
    assert all(names) and not names[0] & names[1]
    assert mix.mean() == pytest.approx(Workload.of(talk(4, 10)).mean())
    for wrong in ([], parts[:1] * 2, [("x", 0.0, Workload.of(JOBS), Slo())]):
        with pytest.raises(ConfigError, match="mixed"):
            WorkloadMix(wrong)


def several() -> list[Job]:
    """A fifth is of kind "batch", two of a thousand each of two others, and the rest has no name."""
    kinds = ["batch" if at % 5 == 0 else "" for at in range(1000)]
    kinds[1:5] = ["rare", "rare", "odd", "odd"]
    return [Job(float(at), 500 if kind == "batch" else 50, 10, kind) for at, kind in enumerate(kinds)]


def test_requests_of_several_kinds_are_not_called_by_that_of_the_first() -> None:
    whole = Workload.of(several())
    assert whole.kind == "" and {job.kind for job in whole.sample(100, 1.0, 1)} == {""}
    assert whole.kinds() == {"": 796, "batch": 200, "rare": 2, "odd": 2}
    assert describe_kinds(whole.kinds()) == "unnamed (796), batch (200), rare (2), odd (2)"
    assert "and 3 more" in describe_kinds(Workload.of([Job(0.0, 1, 1, str(at)) for at in range(15)]).kinds())


def test_the_kinds_of_a_trace_become_a_mix_with_their_shares() -> None:
    slos = {"batch": Slo(5.0, 1.0), "rare": Slo(2.0, 1.0), "": Slo(0.5, 0.1)}
    mix = WorkloadMix.of(Workload.of(several()), slos)
    assert mix.shares == pytest.approx({"batch": 0.2, "rare": 0.002, "": 0.798})
    assert mix.slos == slos
    for drawn in (mix, mix.fitted()):
        jobs = drawn.sample(6000, 1.0, 1)
        assert {(job.kind, job.prompt) for job in jobs} == {("batch", 500), ("rare", 50), ("", 50)}


@pytest.mark.parametrize(
    ("slos", "said"),
    [
        ({"chat": Slo(1.0), "": Slo(1.0)}, "no requests of kind 'chat'"),
        ({"batch": Slo(1.0)}, "800 requests of the trace have no SLO"),
        (
            {"batch": Slo(1.0), "rare": Slo(1.0), "odd": Slo(1.0)},
            "796 requests of the trace have no SLO",
        ),
    ],
)
def test_kinds_without_a_match_are_named(slos: dict[str, Slo], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        WorkloadMix.of(Workload.of(several()), slos)
    assert "batch (200)" in caught.value.why and len(caught.value.lines()) <= 6


def test_the_kinds_of_a_trace_are_cut_to_a_context_each() -> None:
    jobs = [*several(), *(Job(2000.0 + at, 90, 11, "rare") for at in range(3)), Job(3000.0, 95, 9, "odd")]
    trace = Workload.of(jobs)
    with pytest.raises(ConfigError, match="no request of kind 'batch' fits a context of 100 tokens"):
        WorkloadMix.of(trace, {"batch": Slo(1.0), "": Slo(1.0)}, 100)
    with pytest.raises(ConfigError, match="799 requests of the trace have no SLO"):
        WorkloadMix.of(trace, {"rare": Slo(1.0)}, 104)
    with pytest.raises(ConfigError, match="no requests of kind 'chat'"):
        WorkloadMix.of(trace, {"chat": Slo(1.0)}, 100)
    with pytest.raises(ConfigError, match="no request fits a context of 5 tokens"):
        WorkloadMix.of(trace, {"batch": Slo(1.0), "": Slo(1.0)}, 5)
    mix = WorkloadMix.of(trace, {"rare": Slo(1.0), "": Slo(1.0)}, 100)
    assert mix.shares == pytest.approx({"rare": 2 / 800, "": 798 / 800})


def test_an_slo_for_nobody_and_kinds_of_a_formula_are_refused() -> None:
    batches = Workload.of(job for job in several() if job.kind == "batch")
    with pytest.raises(ConfigError, match="apply to no request"):
        WorkloadMix.of(batches, {"batch": Slo(1.0), "": Slo(1.0)})
    with pytest.raises(ConfigError, match="no requests of kind") as caught:
        WorkloadMix.of(synthetic_workload("sharegpt"), {"chat": Slo(1.0)})
    assert "formula" in caught.value.why
    formulas = WorkloadMix([("chat", 1.0, synthetic_workload("sharegpt"), Slo(1.0))])
    with pytest.raises(ConfigError, match="nothing can be fitted"):
        formulas.fitted()
    both = WorkloadMix(
        [("chat", 1.0, synthetic_workload("sharegpt"), Slo(1.0)), ("batch", 3.0, batches, Slo(1.0))]
    ).fitted()
    assert both.shares == {"chat": 0.25, "batch": 0.75} and not both.workloads["batch"].jobs


def test_a_smaller_model_gets_shorter_requests_that_share_as_many_blocks() -> None:
    small = Workload.of(talk(8, 20)).shrunk(4.0, most=300)
    assert small.block_tokens == 16
    jobs = small.sample(500, 1.0, 1)
    assert max(job.prompt + job.output for job in jobs) <= 300
    assert all(len(job.prefix) == job.prompt // 16 for job in jobs)
    assert prefix_hit_rate(jobs) > 0.3
    assert all(len(job.prefix) <= job.prompt // 16 for job in small.jobs)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="no workload"):
        synthetic_workload("poetry")
    with pytest.raises(ConfigError, match="no request"):
        Workload.of([])
    for rate, cv in ((0.0, 1.0), (math.nan, 1.0), (1.0, -1.0), (1.0, 1e-200), (1.0, 1e200), (1.0, math.nan)):
        with pytest.raises(ConfigError, match="arrivals"):
            synthetic_workload("sharegpt").sample(1, rate, 1, cv)


def test_requests_longer_than_a_context_are_counted_and_left_out() -> None:
    jobs = [Job(float(at), prompt, 20) for at, prompt in enumerate((10, 90, 300, 40))]
    trace = Workload.of(jobs)
    assert str(trace.longer(100)) == "2 of its 4 requests" and trace.longer(320).longer == 0
    assert trace.longer(100, by=10.0).longer == 0
    assert [job.prompt for job in trace.within(100).jobs] == [10, 40]
    assert max(job.prompt + job.output for job in trace.within(100).sample(50, 1.0, 0)) <= 100
    assert trace.within(320) is trace
    formula = synthetic_workload("sharegpt")
    assert formula.within(2048) is formula
    assert 0 < formula.longer(1000).longer < formula.longer(1000).out_of
    assert "about" in str(formula.longer(1000))
    cut = formula.within(1000).sample(200, 1.0, 0)
    assert max(job.prompt + job.output for job in cut) <= 1000
    for workload in (trace, formula):
        with pytest.raises(ConfigError, match="no request fits a context of 5 tokens"):
            workload.within(5)
