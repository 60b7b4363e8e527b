"""The last word: what the product's own decisions are asked about a placement, and what becomes of their answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner.verify
from diptych.errors import ConfigError
from planner import candidates
from planner.explain import advantage, elsewhere, explain, headline, plan_file, told
from planner.placement import Answer, place, uses
from planner.plan_file import load, save
from planner.profile import Overheads
from planner.request import Request
from planner.simulator import Deployment, simulate
from planner.terms import Job, Placement, Served, Slo, Split
from planner.verify import LONGER, STEP, _trial, confirmed, judge, limits, verify
from tests.unit.planner.planned import profile, question

ONE = Split()
PAIR = candidates.pair(ONE, ONE, "low", 1, "made", "made")
ALONE = candidates.alone(ONE, "made")
HYBRID = candidates.both((PAIR, ALONE))
SLO = Slo(0.2, 0.03, 0.9)
# Reading takes long and nobody minds long steps: a decode instance that reads as well helps.
READING = question(per_node=2, slos={"": Slo(0.6, 0.5, 0.9)}, measured=profile(prefill=4.0, decode=0.3))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Deployment]:
    """What is simulated by the product's own decisions."""
    seen: list[Deployment] = []

    def look(deployment: Deployment, jobs: Sequence[Job]) -> Sequence[Served]:
        seen.append(deployment)
        return simulate(deployment, jobs)

    monkeypatch.setattr(planner.verify, "simulate", look)
    return seen


def test_a_hybrid_is_verified_as_what_is_started_of_it(started: list[Deployment]) -> None:
    request = question(per_node=3, limits=limits([SLO], 512))
    assert verify(request, HYBRID, 1.0, climb=False).local_prefill == "auto"
    (one,) = started
    assert [pool.role for pool in one.placement.pools] == ["prefill", "decode", "decode"]
    assert one.local_prefill == "auto"
    assert [machine.tpot_s for machine in one.machines] == [None, 0.03, 0.03]
    assert {(machine.max_num_batched_tokens, machine.chunked_prefill) for machine in one.machines} == {
        (512, True)
    }


def test_only_prompts_that_are_cut_are_read_within_the_objective(started: list[Deployment]) -> None:
    for chunk_tokens, tpot_s in ((512, 0.03), (0, None)):
        verify(question(limits=limits([SLO], chunk_tokens)), ALONE, 1.0, climb=False)
        (machine,) = started.pop().machines
        assert (machine.chunked_prefill, machine.tpot_s) == (chunk_tokens > 0, tpot_s)
    verify(question(slos={"": Slo(0.2)}, limits=limits([Slo(0.2)])), ALONE, 1.0, climb=False)
    assert started.pop().machines[0].tpot_s is None, "without an objective there is nothing to keep within"


def test_a_verdict_is_about_one_rate() -> None:
    request = question()
    high = verify(request, PAIR, 60.0, climb=False)
    assert high.goodput_rps == 0.0 and high.rate_rps == high.fails_rps == 60.0 and high.attainment < 0.9
    found = verify(request, PAIR, 60.0, climb=True)
    assert 0.0 < found.goodput_rps == found.rate_rps and found.attainment >= 0.9
    assert found.fails_rps == pytest.approx(found.goodput_rps * STEP)
    assert verify(request, PAIR, found.goodput_rps, climb=False).attainment == found.attainment


def test_a_goodput_is_confirmed_by_a_longer_run() -> None:
    request = question()
    short = verify(request, PAIR, 14.0, climb=True)
    high = replace(short, goodput_rps=2.0 * short.goodput_rps)
    found = confirmed(request, PAIR, high)
    assert found.requests == LONGER * short.requests
    assert 0.0 < found.goodput_rps < high.goodput_rps and found.attainment >= 0.9
    assert found.fails_rps == pytest.approx(found.goodput_rps * STEP)
    kept = confirmed(request, PAIR, replace(short, goodput_rps=0.5 * short.goodput_rps))
    assert (kept.goodput_rps, kept.fails_rps) == (0.5 * short.goodput_rps, short.fails_rps)


def test_a_pair_is_tried_with_prompts_read_by_decode_instances_too() -> None:
    plain, found = verify(READING, PAIR, 6.0, climb=True), judge(READING, PAIR, 6.0, climb=True)
    assert (plain.local_prefill, found.local_prefill) == ("never", "auto")
    assert found.goodput_rps >= plain.goodput_rps * STEP
    rate = found.goodput_rps
    assert verify(READING, PAIR, rate, climb=False).goodput_rps == 0.0
    assert judge(READING, PAIR, rate, climb=False).goodput_rps == rate


def test_a_tie_leaves_reading_to_prefill_instances() -> None:
    request = question(per_node=2, slos={"": Slo(0.6, 0.012, 0.9)})
    assert judge(request, PAIR, 5.0, climb=True) == verify(request, PAIR, 5.0, climb=True)
    assert judge(request, ALONE, 5.0, climb=True) == verify(request, ALONE, 5.0, climb=True)


@cache
def reading() -> Answer:
    return place(
        replace(READING, families=("disaggregated",), verified=True, limits=limits([*READING.slos.values()]))
    )


def test_a_plan_says_who_reads_prompts() -> None:
    answer = reading()
    assert answer.best.local_prefill == plan_file(answer, "small").local_prefill == "auto"
    assert "decode instances read prompts where that is sooner" in headline(answer)[0]
    assert told(answer)["best"]["local_prefill"] == "auto"


def slow(**more: Any) -> Request:
    """A question where messages take a time that only the product's own decisions know of."""
    measured = replace(profile(), overheads=Overheads(hop_s=0.06))
    given: dict[str, Any] = {
        "per_node": 2,
        "verified": True,
        "limits": limits([SLO]),
        "measured": measured,
    } | more
    return question(**given)


@cache
def slowed() -> Answer:
    return place(slow())


def test_what_is_promised_is_what_the_product_s_decisions_keep(tmp_path: Path) -> None:
    answer = slowed()
    best, verdict = answer.best, answer.verdict
    assert verdict is not None and best.fast.verdict is None
    assert best.goodput_rps == verdict.goodput_rps < best.fast.goodput_rps
    assert (best.attainment, best.rate_rps) == (verdict.attainment, verdict.goodput_rps)
    assert best.interval_rps == (verdict.goodput_rps, verdict.fails_rps)
    assert best.requests == verdict.requests == LONGER * answer.request.requests
    low, high = best.fast.interval_rps
    assert low <= best.fast.goodput_rps <= high
    per_hour = best.goodput_rps * best.attainment * 3600.0
    tokens = best.price_per_hour * 1e6 / best.cost_per_million / per_hour
    jobs = answer.request.samples(answer.request.requests)[0]
    assert tokens == pytest.approx(sum(job.output for job in jobs) / len(jobs))
    lines = headline(answer)
    assert f"goodput {best.goodput_rps:.3g} requests/s (by the product's" in lines[1]
    assert f"searched: {best.fast.goodput_rps:.3g} requests/s" in lines[3]
    save(tmp_path / "plan.json", plan_file(answer, "small"))
    predicted = load(tmp_path / "plan.json").predicted
    assert (predicted.goodput_rps, predicted.searched_rps) == (best.goodput_rps, best.fast.goodput_rps)
    assert predicted.attainment == verdict.attainment and predicted.interval_rps == best.interval_rps
    plain = told(answer)["best"]
    assert plain["verified"]["goodput_rps"] == plain["goodput_rps"] < plain["searched"]["goodput_rps"]


def test_runners_up_are_compared_by_one_judge() -> None:
    answer = slowed()
    judged = [one for one in (answer.best, *answer.others) if one.verdict]
    assert {one.family for one in judged} == {"colocated", "disaggregated"}
    assert [one.goodput_rps for one in judged] == sorted((one.goodput_rps for one in judged), reverse=True)
    best = {one.family: one.per_device_rps for one in reversed(judged)}
    assert advantage(answer) == pytest.approx(best["disaggregated"] / best["colocated"])
    searched = [one for one in answer.others if not one.verdict]
    lines = elsewhere(answer)[1:]
    assert [line.endswith("(as searched)") for line in lines] == [not one.verdict for one in answer.others]
    for one, line in zip(answer.others, lines, strict=True):
        base = answer.best if one.verdict else answer.best.fast
        assert f"goodput {one.goodput_rps / base.goodput_rps - 1:+.0%}" in line
    assert searched, "there is one that only the search has seen"


def test_for_a_rate_goodput_is_what_was_asked() -> None:
    answer = place(slow(per_node=4, rate=5.0, span_s=5.0))
    best, verdict = answer.best, answer.verdict
    assert verdict is not None and best.goodput_rps == best.rate_rps == verdict.goodput_rps == 5.0
    assert best.attainment == verdict.attainment >= 0.9 and best.fast.goodput_rps > 5.0
    assert "as asked, more was not tried" in headline(answer)[1]
    refuted = [one for one in answer.others if one.verdict]
    assert all(one.goodput_rps == 0.0 and one.attainment < 0.9 for one in refuted)
    for one, line in zip(answer.others, elsewhere(answer)[1:], strict=True):
        assert ("keep both objectives at" in line) == bool(one.verdict)


def test_what_is_started_of_placements() -> None:
    for placement in (PAIR, ALONE):
        assert candidates.deployed(placement) == placement
        assert candidates.local_prefill(placement) == "never"
    assert candidates.local_prefill(HYBRID) == "auto"
    assert [pool.role for pool in candidates.deployed(HYBRID).pools] == ["prefill", "decode", "decode"]
    assert [pool.role for pool in candidates.reading(PAIR).pools] == ["prefill", "both"]
    assert candidates.both((PAIR, Placement((candidates.companion(PAIR),)))) == HYBRID


def test_a_run_cut_short_of_its_horizon_promises_no_more_than_is_sustained() -> None:
    """2,000 requests at a rate a third too high end within a minute of waiting: all keep a TTFT of a minute."""
    request = question(per_node=1, span_s=60.0, slos={"": Slo(60.0, 10.0, 0.9)})
    rate = 1.3 * request.sustained_rps(ALONE)
    assert rate * request.horizon_s > 2000 and not request.open_ended
    verdict = verify(request, ALONE, rate, False)
    assert verdict.attainment >= 0.9 and verdict.goodput_rps == 0.0


def test_what_is_sustained_counts_decode_instances_that_read() -> None:
    request = replace(READING, slos={"": Slo(math.inf, 0.5, 0.9)})
    alone, helped = (_trial(request, PAIR, 1.0, reads).most_rps(PAIR) for reads in ("never", "auto"))
    assert alone == request.sustained_rps(PAIR) and helped > 1.1 * alone


def test_a_hybrid_needs_three_devices() -> None:
    with pytest.raises(ConfigError) as caught:
        place(question(per_node=2, families=("hybrid",)))
    assert "take 3 devices" in caught.value.why


def test_what_the_search_has_measured_is_told_at_its_own_rate() -> None:
    answer = slowed()
    assert answer.best.fast.rate_rps != answer.best.rate_rps
    assert answer.uses == uses(answer.request, answer.best.fast)
    limits = next(line for line in explain(answer) if line.startswith("what limits it"))
    assert f"at {answer.best.fast.rate_rps:.3g} requests/s, as searched" in limits
