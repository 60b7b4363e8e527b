"""The small pure parts of scheduling: fairness, growth, pace, saturation."""

from __future__ import annotations

import random

import pytest

from engine.scheduling import saturation
from engine.scheduling.fairness import CREDIT_TOKENS, VirtualTokenCounter
from engine.scheduling.new_token_ratio import MeasuredRate, NewTokenRatio, swap_is_cheaper
from engine.scheduling.step_time import MIN_PREFILL_TOKENS, StepTimeModel
from engine.step_work import StepWork
from kvcache.allocator import KvAllocator
from kvcache.slab_ledger import SlabLedger

# ---- fairness


def test_who_comes_back_starts_at_the_least_of_those_present() -> None:
    service = VirtualTokenCounter()
    for tenant in ("a", "b"):
        service.enter_tenant(tenant)
    service.charge_tokens("a", 1000)
    service.charge_tokens("b", 400 + int(CREDIT_TOKENS))
    service.enter_tenant("new")
    assert (
        service.served_tokens("new") == 400 - CREDIT_TOKENS
    )  # a little credit for having been away, however long
    service.leave_tenant("a")
    service.charge_tokens("b", 100)
    service.enter_tenant("a")
    assert service.served_tokens("a") == 1000  # and no forgetting of what was had
    service.leave_tenant("new")
    service.charge_tokens("b", 3000)
    service.enter_tenant("new")
    assert service.served_tokens("new") == 1000 - CREDIT_TOKENS
    service.charge_tokens("new", 1000)
    service.leave_tenant("new")
    service.enter_tenant("new")
    assert service.served_tokens("new") == 2000 - CREDIT_TOKENS  # and no more by coming and going


def test_those_who_come_one_after_the_other_do_not_undercut_each_other() -> None:
    service = VirtualTokenCounter()
    for name in ("stays", "first", "second", "third"):
        service.enter_tenant(name)
    assert {service.served_tokens(name) for name in ("first", "second", "third")} == {-CREDIT_TOKENS}


def test_a_tenant_is_present_while_any_of_its_sequences_is() -> None:
    service = VirtualTokenCounter()
    service.enter_tenant("other")
    service.enter_tenant("a")
    service.enter_tenant("a")
    service.charge_tokens("a", 10)
    service.leave_tenant("a")
    assert service.served_tokens("a") == 10 - CREDIT_TOKENS
    service.leave_tenant("a")
    with pytest.raises(KeyError):
        service.served_tokens("a")


def test_absent_tenants_are_remembered_within_bounds() -> None:
    service = VirtualTokenCounter(limit=3)
    service.enter_tenant("stays")
    for i in range(10):
        service.enter_tenant(f"t{i}")
        service.charge_tokens(f"t{i}", 100)
        service.leave_tenant(f"t{i}")
    service.enter_tenant("t9")
    service.enter_tenant("t0")
    assert (service.served_tokens("t9"), service.served_tokens("t0")) == (100 - CREDIT_TOKENS, -CREDIT_TOKENS)


# ---- growth


def test_ratio_stays_within_bounds() -> None:
    ratio = NewTokenRatio(0.5, lowest=0.1, fall=0.01, jump=0.3)
    for _ in range(100):
        ratio.decay_once()
    assert ratio.value == 0.1
    for _ in range(100):
        ratio.raise_for_preemption()
    assert ratio.value == 1.0


def test_the_cheaper_way_is_taken() -> None:
    read, copy = 5000.0, 5e9
    assert swap_is_cheaper(1000, 1000 * 6144, read, copy)  # 2.5 ms both ways against 200 ms
    assert not swap_is_cheaper(1000, 1000 * 6144, read, 1e7)
    assert not swap_is_cheaper(0, 6144, read, copy)


def test_a_rate_follows_what_was_measured() -> None:
    rate = MeasuredRate(1.0)
    rate.add_sample(500, 0.5)
    assert rate.value == 1000
    for _ in range(100):
        rate.add_sample(500, 0.25)
    assert rate.value == pytest.approx(2000, rel=1e-3)


# ---- pace


def test_pace_learns_what_steps_cost_and_keeps_within_a_bound() -> None:
    draw, pace = random.Random(3), StepTimeModel()
    for _ in range(400):
        rows, tokens = draw.randint(0, 16), draw.choice([0, 0, 32, 128, 400])
        pace.add_sample(rows, tokens, (5e-3 + 3e-4 * rows + 8e-5 * tokens) * draw.uniform(0.9, 1.1))
    assert pace.seconds(8, 100) == pytest.approx(5e-3 + 2.4e-3 + 8e-3, rel=0.05)
    assert pace.prefill_budget(8, 30e-3) == pytest.approx((30e-3 - 7.4e-3) / 8e-5, rel=0.1)
    assert pace.prefill_budget(8, 1e-3) == MIN_PREFILL_TOKENS
    whole = pace.prefill_budget(8, 30e-3)
    assert pace.prefill_budget(8, 30e-3, 500) == whole, "nothing is known of decisions"
    for tokens in (100, 1000, 300):
        pace.add_decisions(tokens, tokens * 1e-5)
    assert pace.decision_s(500) == pytest.approx(5e-3)
    assert pace.prefill_budget(8, 30e-3, 500) == pytest.approx(whole - 5e-3 / pace.token_s, abs=1)


def test_pace_follows_a_machine_that_becomes_slower() -> None:
    pace = StepTimeModel()
    for factor in (1.0, 3.0):
        for i in range(500):
            pace.add_sample(4, 64 * (i % 3), factor * (1e-3 + 1e-4 * 64 * (i % 3)))
    assert pace.seconds(4, 128) == pytest.approx(3 * (1e-3 + 1e-4 * 128), rel=0.05)


def test_pace_without_variety_still_fits_what_it_sees() -> None:
    pace = StepTimeModel()
    for _ in range(50):
        pace.add_sample(8, 0, 4e-3)
    assert pace.seconds(8, 0) == pytest.approx(4e-3, rel=0.05)
    assert pace.prefill_budget(8, 20e-3) > MIN_PREFILL_TOKENS


# ---- saturation


def test_the_shortest_that_is_busy_enough() -> None:
    curve = [(16, 0.010), (32, 0.011), (64, 0.013), (128, 0.0205), (256, 0.040), (512, 0.080)]
    assert saturation.saturation_length(curve) == 128  # 6,095 tokens/s of 6,360, 0.5 ms per step included
    assert saturation.saturation_length(curve, share=0.5) == 64
    assert saturation.saturation_length([]) == 0


def test_the_curve_is_measured_within_its_time_and_memory() -> None:
    now_s, ran = 0.0, []

    def run(batch: list[StepWork]) -> None:
        nonlocal now_s
        (work,) = batch
        assert len(work.slabs) * 64 >= len(work.tokens)
        ran.append(len(work.tokens))
        now_s += 1e-3 + 1e-4 * len(work.tokens)

    holdings = KvAllocator(SlabLedger(20))
    curve = saturation.measure_curve(run, holdings, 2048, lambda: now_s)
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
    curve = saturation.measure_curve(run, holdings, 2048, lambda: now_s, patience_s=0.1)
    assert now_s <= 0.1 and max(ran) == 128


def test_interruptions_do_not_make_the_shortest_look_best() -> None:
    now_s, chance = 0.0, random.Random(2)

    def run(batch: list[StepWork]) -> None:
        nonlocal now_s
        own_s = 1e-3 + 5e-5 * len(batch[0].tokens)
        now_s += own_s + (0.02 if chance.random() < 25 * own_s else 0.0)  # long ones seldom go through

    undisturbed = [(tokens, 1.5e-3 + 5e-5 * tokens) for tokens in (16, 32, 64, 128, 256, 512)]
    curve = saturation.measure_curve(run, KvAllocator(SlabLedger(20)), 512, lambda: now_s, patience_s=2.0)
    assert saturation.saturation_length(curve) == saturation.saturation_length(undisturbed) == 512
