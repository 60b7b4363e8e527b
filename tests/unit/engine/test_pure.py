"""The small pure parts of scheduling: fairness, growth, pace, saturation."""

from __future__ import annotations

import random

import pytest

from engine import saturation
from engine.fairness import Service
from engine.growth import Rate, Ratio, parks
from engine.pace import SMALLEST_BUDGET, Pace
from engine.work import Work
from kvcache.holdings import Holdings
from kvcache.slabs import Slabs

# ---- fairness


def test_who_comes_back_starts_at_the_least_of_those_present() -> None:
    service = Service()
    for tenant in ("a", "b"):
        service.enter(tenant)
    service.charge("a", 1000)
    service.charge("b", 400)
    service.enter("new")
    assert service.of("new") == 400  # no credit for having been away
    service.leave("a")
    service.charge("b", 100)
    service.enter("a")
    assert service.of("a") == 1000  # and no forgetting of what was had
    service.leave("new")
    service.charge("b", 3000)
    service.enter("new")
    assert service.of("new") == 1000


def test_a_tenant_is_present_while_any_of_its_sequences_is() -> None:
    service = Service()
    service.enter("other")
    service.enter("a")
    service.enter("a")
    service.charge("a", 10)
    service.leave("a")
    assert service.of("a") == 10
    service.leave("a")
    with pytest.raises(KeyError):
        service.of("a")


def test_absent_tenants_are_remembered_within_bounds() -> None:
    service = Service(limit=3)
    service.enter("stays")
    for i in range(10):
        service.enter(f"t{i}")
        service.charge(f"t{i}", 100)
        service.leave(f"t{i}")
    service.enter("t9")
    service.enter("t0")
    assert (service.of("t9"), service.of("t0")) == (100, 0)


# ---- growth


def test_ratio_stays_within_bounds() -> None:
    ratio = Ratio(0.5, lowest=0.1, fall=0.01, jump=0.3)
    for _ in range(100):
        ratio.calm()
    assert ratio.value == 0.1
    for _ in range(100):
        ratio.tight()
    assert ratio.value == 1.0


def test_the_cheaper_way_is_taken() -> None:
    read, copy = 5000.0, 5e9
    assert parks(1000, 1000 * 6144, read, copy)  # 2.5 ms both ways against 200 ms
    assert not parks(1000, 1000 * 6144, read, 1e7)
    assert not parks(0, 6144, read, copy)


def test_a_rate_follows_what_was_measured() -> None:
    rate = Rate(1.0)
    rate.note(500, 0.5)
    assert rate.value == 1000
    for _ in range(100):
        rate.note(500, 0.25)
    assert rate.value == pytest.approx(2000, rel=1e-3)


# ---- pace


def test_pace_learns_what_steps_cost_and_keeps_within_a_bound() -> None:
    draw, pace = random.Random(3), Pace()
    for _ in range(400):
        rows, tokens = draw.randint(0, 16), draw.choice([0, 0, 32, 128, 400])
        pace.note(rows, tokens, (5e-3 + 3e-4 * rows + 8e-5 * tokens) * draw.uniform(0.9, 1.1))
    assert pace.seconds(8, 100) == pytest.approx(5e-3 + 2.4e-3 + 8e-3, rel=0.05)
    assert pace.budget(8, 30e-3) == pytest.approx((30e-3 - 7.4e-3) / 8e-5, rel=0.1)
    assert pace.budget(8, 1e-3) == SMALLEST_BUDGET


def test_pace_follows_a_machine_that_becomes_slower() -> None:
    pace = Pace()
    for factor in (1.0, 3.0):
        for i in range(500):
            pace.note(4, 64 * (i % 3), factor * (1e-3 + 1e-4 * 64 * (i % 3)))
    assert pace.seconds(4, 128) == pytest.approx(3 * (1e-3 + 1e-4 * 128), rel=0.05)


def test_pace_without_variety_still_fits_what_it_sees() -> None:
    pace = Pace()
    for _ in range(50):
        pace.note(8, 0, 4e-3)
    assert pace.seconds(8, 0) == pytest.approx(4e-3, rel=0.05)
    assert pace.budget(8, 20e-3) > SMALLEST_BUDGET


# ---- saturation


def test_the_shortest_that_is_busy_enough() -> None:
    curve = [(16, 0.010), (32, 0.011), (64, 0.013), (128, 0.0205), (256, 0.040), (512, 0.080)]
    assert saturation.shortest(curve) == 128  # 6,095 tokens/s of 6,360, 0.5 ms per step included
    assert saturation.shortest(curve, share=0.5) == 64
    assert saturation.shortest([]) == 0


def test_the_curve_is_measured_within_its_time_and_memory() -> None:
    now_s, ran = 0.0, []

    def run(batch: list[Work]) -> None:
        nonlocal now_s
        (work,) = batch
        assert len(work.slabs) * 64 >= len(work.tokens)
        ran.append(len(work.tokens))
        now_s += 1e-3 + 1e-4 * len(work.tokens)

    holdings = Holdings(Slabs(20))
    curve = saturation.measure(run, holdings, 2048, lambda: now_s)
    assert [tokens for tokens, _ in curve] == [
        16,
        32,
        64,
        128,
        256,
        512,
        1024,
    ]  # 20 slabs have room for no more
    assert dict(curve)[128] == pytest.approx(14.3e-3) and holdings.used == 0
    now_s, ran = 0.0, []
    curve = saturation.measure(run, holdings, 2048, lambda: now_s, patience_s=0.1)
    assert now_s <= 0.1 and max(ran) == 128
