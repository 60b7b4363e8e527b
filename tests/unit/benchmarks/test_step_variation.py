"""Rhythms: how steps depend on their neighbours, on their size and on the moment is found and distinguished."""

from __future__ import annotations

import random

import pytest

from benchmarks.accuracy.step_variation import fit_undisturbed_cost, measure_variation
from planner.costs.profiler import MeasuredStep, WorkerTrace, fit_costs
from planner.costs.step import StepCost
from planner.types import StepBatch

TRUTH = StepCost((2e-3, 1e-4, 2e-8), ((1e-3, 2e-7, 1.5e-4),), shared=0.6)


def paced(
    worker: str, begun_s: float, batches: list[tuple[StepBatch, float]], pause_s: float = 0.0
) -> WorkerTrace:
    """One step after another, each so many times as long as `TRUTH` says."""
    life = WorkerTrace(worker, "decode", 0)
    for batch, ratio in batches:
        life.steps.append(MeasuredStep(begun_s, begun_s + ratio * TRUTH.step_s(batch), batch))
        begun_s = life.steps[-1].ended_s + pause_s
    return life


@pytest.mark.parametrize("most", [9, 8.2])  # rows of 8 are beside a busy worker in 89 %, 98 % of cases
def test_what_neighbours_do_is_not_taken_for_what_rows_cost(most: float) -> None:
    """Many rows are mostly written beside a busy worker, which makes all steps 1.5 times as long."""
    chance, life, other = (
        random.Random(3),
        WorkerTrace("decode-0", "decode", 0),
        WorkerTrace("prefill-0", "prefill", 128),
    )
    now_s = 0.0
    for _ in range(3000):
        rows = chance.choice((1, 2, 4, 8))
        batch = StepBatch(0, 0.0, rows, rows * chance.choice((50, 200, 900)))
        beside = chance.random() < rows / most
        seconds = TRUTH.step_s(batch) * (1.5 if beside else 1.0) * chance.uniform(0.9, 1.1)
        life.steps.append(MeasuredStep(now_s, now_s + seconds, batch))
        if beside:
            tokens, start = chance.choice((16, 40, 100, 256)), chance.choice((0, 64, 512))
            reads = StepBatch(tokens, float((start + tokens) ** 2 - start**2))
            other.steps.append(MeasuredStep(now_s, now_s + TRUTH.step_s(reads), reads))
        now_s += 0.1
    mixed = fit_costs(life.steps + other.steps).cost
    found = fit_undisturbed_cost([life, other], mixed)
    eight, one = StepBatch(0, 0.0, 8, 1600), StepBatch(0, 0.0, 1, 200)
    truth = TRUTH.step_s(eight) / TRUTH.step_s(one)
    assert mixed.step_s(eight) / mixed.step_s(one) > 1.1 * truth
    assert found.cost.step_s(eight) / found.cost.step_s(one) == pytest.approx(truth, rel=0.03)
    paces = measure_variation(found.cost, life, [other])
    assert paces.beside[False] / paces.alone[False] == pytest.approx(1.5, rel=0.03)
    assert found.errors["decode"].held_out < 0.05


READS, WRITES = StepBatch(64, 4096.0), StepBatch(0, 0.0, 3, 300)


def test_a_workers_rhythm_is_how_its_steps_went_alone_and_beside_others() -> None:
    """First it is by itself; then another is always in a step, and takes some of the machine."""
    own = paced("decode-0", 0.0, [(READS, 1.0), (WRITES, 0.9)] * 20 + [(READS, 1.5), (WRITES, 1.2)] * 20)
    busy_s = own.steps[40].begun_s
    other = WorkerTrace("decode-1", "decode", 0, [MeasuredStep(busy_s, own.steps[-1].ended_s, WRITES)])
    found = measure_variation(TRUTH, own, [other])
    assert found.alone == pytest.approx((0.9, 1.0))
    assert found.beside == pytest.approx((1.2, 1.5))
    assert all(tape == pytest.approx((1.0,) * 40) for tape in found.tapes)


def test_what_is_left_of_steps_keeps_its_order_and_does_not_change_the_mean() -> None:
    ratios = [1.0] * 10 + [3.0] * 10
    found = measure_variation(TRUTH, paced("decode-0", 0.0, [(WRITES, ratio) for ratio in ratios]), [])
    assert found.alone == pytest.approx((2.0, 1.0)), "nobody read, here or elsewhere"
    assert found.tapes[0] == pytest.approx([ratio / 2.0 for ratio in ratios]) and found.tapes[1] == (1.0,)
    assert found.after(0.5).tapes[0] == found.tapes[0][10:] + found.tapes[0][:10]
    assert found.after(0.0) == found


def test_a_stair_in_the_cost_of_rows_is_in_the_rhythm() -> None:
    """From three rows on steps take 1.5 times what a line says; a size that was rare is drawn towards the line."""
    batches = [(StepBatch(0, 0.0, rows, 100 * rows), 1.5 if rows >= 3 else 1.0) for rows in (1, 2, 4) * 200]
    own = paced("decode-0", 0.0, [*batches, (StepBatch(0, 0.0, 6, 600), 1.5)])
    found = measure_variation(TRUTH, own, [])
    one, two, three, four, five, six = (
        found.factor(StepBatch(0, 0.0, rows, 100), False) for rows in range(1, 7)
    )
    assert four / one == pytest.approx(1.5, rel=0.1) and two / one == pytest.approx(1.0, rel=0.02)
    assert three == two and five == four, "like the next smaller size that there was"
    assert one < six < four, "there was one"
    assert found.factor(StepBatch(0, 0.0, 60, 100), False) == six
    steps = sum(TRUTH.step_s(batch) * found.factor(batch, False) for batch, _ in batches)
    assert steps == pytest.approx(sum(step.seconds for step in own.steps[:-1]), rel=0.02)


def test_what_is_before_a_step_is_known_by_its_rows() -> None:
    """Before two rows 2 ms, before one 1 ms; where another row alone follows, nobody knows since when it was there."""
    own, at_s = WorkerTrace("decode-0", "decode", 0), 0.0
    for number in range(300):
        rows = 2 if number % 20 >= 10 else 1
        batch = StepBatch(0, 0.0, rows, 100 * rows + rows * number)
        own.steps.append(MeasuredStep(at_s, at_s + 1e-3, batch))
        at_s += 1e-3 + (2e-3 if (number + 1) % 20 >= 10 else 1e-3)
    found = measure_variation(TRUTH, own, [])
    assert found.gap_s(StepBatch(0, 0.0, 1, 5), 9.0) == pytest.approx(1e-3, rel=0.1)
    assert found.gap_s(StepBatch(0, 0.0, 7, 5), 9.0) == pytest.approx(2e-3, rel=0.1)
    assert found.gap_s(READS, 9.0) == 9.0, "of steps that write only"
    strangers = paced(
        "decode-0", 0.0, [(StepBatch(0, 0.0, 1, 100 + 7 * number), 1.0) for number in range(20)], 5e-3
    )
    assert measure_variation(TRUTH, strangers, []).gaps_s == ()
    pauses = paced(
        "decode-0", 0.0, [(StepBatch(0, 0.0, 2 + number % 2, 300), 1.0) for number in range(20)], 0.5
    )
    assert measure_variation(TRUTH, pauses, []).gaps_s == (), "nobody knows what it did in half a second"


def test_sizes_leave_the_time_of_all_steps_as_it_was() -> None:
    """A rare size that takes three times as long as the line says is drawn towards it; the others make up for that."""
    batches = [(StepBatch(0, 0.0, 1, 100), 1.0)] * 160 + [(StepBatch(0, 0.0, 2, 200), 3.0)] * 16
    own = paced("decode-0", 0.0, batches)
    found = measure_variation(TRUTH, own, [])
    predicted_s = sum(TRUTH.step_s(step.batch) * found.factor(step.batch, False) for step in own.steps)
    assert predicted_s == pytest.approx(sum(step.seconds for step in own.steps), rel=1e-6)


def test_a_rare_state_is_like_the_rest_and_a_kind_that_did_not_occur_is_as_elsewhere() -> None:
    own = paced("decode-0", 0.0, [(WRITES, 2.0)] * 20)
    other = WorkerTrace("prefill-0", "prefill", 0)
    for at in (3, 9):  # two of its steps begin while the other is in one
        begun_s = own.steps[at].begun_s
        other.steps.append(MeasuredStep(begun_s, begun_s + 1.7 * TRUTH.step_s(READS), READS))
    found = measure_variation(TRUTH, own, [other])
    assert found.alone == found.beside == pytest.approx((2.0, 1.7))
    assert measure_variation(TRUTH, WorkerTrace("x", "decode", 0), []).alone == (1.0, 1.0)
