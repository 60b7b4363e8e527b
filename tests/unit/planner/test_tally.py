"""Counting in bounded memory is the same as counting from the list, within the sketch's error."""

from __future__ import annotations

import math
import random

import pytest

from planner.tally import RELATIVE_ERROR, Sketch, Tally, joint, wilson
from planner.terms import Job, Served, Slo

SLOS = {"chat": Slo(0.3, 0.05), "": Slo(1.0, 0.1)}


def served(n: int, seed: int = 1) -> list[Served]:
    chance = random.Random(seed)
    out = []
    for number in range(n):
        job = Job(number * 0.1, 10, chance.choice((1, 20)), chance.choice(("chat", "code", "other")))
        failed = "refused" if chance.random() < 0.02 else ""
        ttft_s, tpot_s = chance.expovariate(5.0), chance.expovariate(30.0) if job.output > 1 else 0.0
        if failed:
            out.append(Served(job, math.inf, math.inf, math.inf, failed))
        else:
            out.append(Served(job, ttft_s, tpot_s, job.at_s + ttft_s + tpot_s * (job.output - 1)))
    return out


def test_attainment_is_joint_and_exact() -> None:
    told = served(3000)
    tally = Tally(SLOS)
    for one in told:
        tally.add(one)
    assert tally.attainment() == pytest.approx(joint(told, SLOS), abs=1e-12)
    chats = [one for one in told if one.job.kind == "chat"]
    assert tally.attainment("chat") == pytest.approx(joint(chats, SLOS), abs=1e-12)
    assert tally.attained() / tally.count() == tally.attainment()
    assert tally.failed == tally.reasons["refused"] == sum(bool(one.failed) for one in told)
    assert tally.kinds == ["chat", "code", "other"]
    assert math.isnan(tally.attainment("nobody"))
    assert tally.goodput_rps == pytest.approx(tally.attained() / (told[-1].job.at_s - told[0].job.at_s))
    assert tally.interval() == wilson(tally.attained(), tally.count())


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.97])
def test_quantiles_are_within_the_stated_error(share: float) -> None:
    told = served(3000)
    tally = Tally(SLOS)
    for one in told:
        tally.add(one)
    for what in ("ttft", "tpot", "e2e"):
        if what == "tpot":
            values = sorted(one.tpot_s for one in told if one.failed or one.job.output > 1)
        else:
            values = sorted(one.ttft_s if what == "ttft" else one.ended_s - one.job.at_s for one in told)
        truth = values[max(1, math.ceil(share * len(values))) - 1]
        assert tally.quantile(what, share) == pytest.approx(truth, rel=1.001 * RELATIVE_ERROR)
    assert tally.quantile("ttft", 1.0) == math.inf  # some failed
    assert math.isnan(tally.quantile("ttft", 0.5, "nobody"))


def test_memory_does_not_grow_with_requests() -> None:
    sketch, chance = Sketch(), random.Random(1)
    sizes = []
    for _ in range(4):
        for _ in range(20_000):
            sketch.add(chance.lognormvariate(-2.0, 1.0))
        sizes.append(len(sketch))
    assert sizes[-1] < sizes[0] + 120 < 700
    assert sketch.count == 80_000


def test_two_halves_make_the_whole() -> None:
    told = served(1000)
    whole, halves = Tally(SLOS), [Tally(SLOS), Tally(SLOS)]
    for number, one in enumerate(told):
        whole.add(one)
        halves[number % 2].add(one)
    halves[0].merge(halves[1])
    for what in ("ttft", "tpot", "e2e"):
        assert halves[0].quantile(what, 0.9) == whole.quantile(what, 0.9)
        assert halves[0].mean(what, "chat") == pytest.approx(whole.mean(what, "chat"))
    assert (halves[0].attained(), halves[0].failed) == (whole.attained(), whole.failed)
    assert halves[0].goodput_rps == whole.goodput_rps
    with pytest.raises(ValueError, match="unlike"):
        Sketch(0.01).merge(Sketch(0.02))


def test_warm_up_is_cut_and_counted() -> None:
    told = served(100)
    early, first = Tally(SLOS, warmup_s=5.0), Tally(SLOS, warmup_n=30)
    for one in told:
        early.add(one)
        first.add(one)
    assert (early.skipped, early.count()) == (50, 50)
    assert (first.skipped, first.count()) == (30, 70)
    assert first.attainment() == pytest.approx(joint(told[30:], SLOS))


def test_zero_and_nothing() -> None:
    sketch = Sketch()
    assert math.isnan(sketch.quantile(0.5)) and math.isnan(sketch.mean())
    sketch.add(0.0)
    assert sketch.quantile(0.5) == 0.0
    assert math.isnan(joint([], SLOS)) and math.isnan(Tally(SLOS).goodput_rps)


def test_wilson_is_the_textbooks() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(90, 100) == pytest.approx((0.8256, 0.9448), abs=2e-4)
    assert wilson(0, 10)[0] == 0.0 and wilson(10, 10)[1] == 1.0
