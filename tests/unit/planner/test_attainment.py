"""Counting in bounded memory is the same as counting from the list, within the sketch's error."""

from __future__ import annotations

import math
import random

import pytest

from diptych.slo import Slo
from planner.attainment import (
    RELATIVE_ERROR,
    AttainmentCounter,
    QuantileSketch,
    joint_attainment,
    wilson_interval,
)
from planner.types import Job, JobResult

SLOS = {"chat": Slo(0.3, 0.05), "": Slo(1.0, 0.1)}


def served(n: int, seed: int = 1) -> list[JobResult]:
    chance = random.Random(seed)
    out = []
    for number in range(n):
        job = Job(number * 0.1, 10, chance.choice((1, 20)), chance.choice(("chat", "code", "other")))
        failed = "refused" if chance.random() < 0.02 else ""
        ttft_s, tpot_s = chance.expovariate(5.0), chance.expovariate(30.0) if job.output > 1 else 0.0
        if failed:
            out.append(JobResult(job, math.inf, math.inf, math.inf, failed))
        else:
            out.append(JobResult(job, ttft_s, tpot_s, job.at_s + ttft_s + tpot_s * (job.output - 1)))
    return out


def test_attainment_is_joint_and_exact() -> None:
    results = served(3000)
    tally = AttainmentCounter(SLOS)
    for one in results:
        tally.add(one)
    assert tally.attainment() == pytest.approx(joint_attainment(results, SLOS), abs=1e-12)
    chats = [one for one in results if one.job.kind == "chat"]
    assert tally.attainment("chat") == pytest.approx(joint_attainment(chats, SLOS), abs=1e-12)
    assert tally.attained() / tally.count() == tally.attainment()
    assert tally.failed == tally.reasons["refused"] == sum(bool(one.failed) for one in results)
    assert tally.kinds == ["chat", "code", "other"]
    assert math.isnan(tally.attainment("nobody"))
    assert tally.goodput_rps == pytest.approx(tally.attained() / (results[-1].job.at_s - results[0].job.at_s))
    assert tally.interval() == wilson_interval(tally.attained(), tally.count())


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.97])
def test_quantiles_are_within_the_stated_error(share: float) -> None:
    results = served(3000)
    tally = AttainmentCounter(SLOS)
    for one in results:
        tally.add(one)
    for what in ("ttft", "tpot", "e2e"):
        if what == "tpot":
            values = sorted(one.tpot_s for one in results if one.failed or one.job.output > 1)
        else:
            values = sorted(one.ttft_s if what == "ttft" else one.ended_s - one.job.at_s for one in results)
        truth = values[max(1, math.ceil(share * len(values))) - 1]
        assert tally.quantile(what, share) == pytest.approx(truth, rel=1.001 * RELATIVE_ERROR)
    assert tally.quantile("ttft", 1.0) == math.inf  # some failed
    assert math.isnan(tally.quantile("ttft", 0.5, "nobody"))


def test_memory_does_not_grow_with_requests() -> None:
    sketch, chance = QuantileSketch(), random.Random(1)
    sizes = []
    for _ in range(4):
        for _ in range(20_000):
            sketch.add(chance.lognormvariate(-2.0, 1.0))
        sizes.append(len(sketch))
    assert sizes[-1] < sizes[0] + 120 < 700
    assert sketch.count == 80_000


def test_two_halves_make_the_whole() -> None:
    results = served(1000)
    whole, halves = AttainmentCounter(SLOS), [AttainmentCounter(SLOS), AttainmentCounter(SLOS)]
    for number, one in enumerate(results):
        whole.add(one)
        halves[number % 2].add(one)
    halves[0].merge(halves[1])
    for what in ("ttft", "tpot", "e2e"):
        assert halves[0].quantile(what, 0.9) == whole.quantile(what, 0.9)
        assert halves[0].mean(what, "chat") == pytest.approx(whole.mean(what, "chat"))
    assert (halves[0].attained(), halves[0].failed) == (whole.attained(), whole.failed)
    assert halves[0].goodput_rps == whole.goodput_rps
    with pytest.raises(ValueError, match="different error"):
        QuantileSketch(0.01).merge(QuantileSketch(0.02))


def test_warm_up_is_cut_and_counted() -> None:
    results = served(100)
    early, first = AttainmentCounter(SLOS, warmup_s=5.0), AttainmentCounter(SLOS, warmup_n=30)
    for one in results:
        early.add(one)
        first.add(one)
    assert (early.skipped, early.count()) == (50, 50)
    assert (first.skipped, first.count()) == (30, 70)
    assert first.attainment() == pytest.approx(joint_attainment(results[30:], SLOS))


def test_zero_and_nothing() -> None:
    sketch = QuantileSketch()
    assert math.isnan(sketch.quantile(0.5)) and math.isnan(sketch.mean())
    sketch.add(0.0)
    assert sketch.quantile(0.5) == 0.0
    assert math.isnan(joint_attainment([], SLOS)) and math.isnan(AttainmentCounter(SLOS).goodput_rps)


def test_wilson_is_the_textbooks() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(90, 100) == pytest.approx((0.8256, 0.9448), abs=2e-4)
    assert wilson_interval(0, 10)[0] == 0.0 and wilson_interval(10, 10)[1] == 1.0
