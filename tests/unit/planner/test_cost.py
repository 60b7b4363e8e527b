"""Costs never fall when a batch grows, whatever the coefficients; stages divide the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost import Line, StepCost
from planner.hardware import DEVICES, device
from planner.profile import built_in
from planner.roofline import roofline
from planner.shape import KNOWN, known
from planner.terms import Batch, Cost, Split

numbers = st.floats(0, 0.1, allow_subnormal=False)
lines = st.tuples(numbers, numbers, numbers)
costs = st.builds(
    StepCost,
    lines,
    st.lists(lines, min_size=1, max_size=3).map(tuple),
    st.integers(1, 4),
    numbers,
    st.floats(0, 1),
    numbers,
)
batches = st.builds(
    Batch, st.integers(0, 4096), st.floats(0, 1e8), st.integers(0, 512), st.integers(0, 1 << 20)
)
rooflines = st.builds(
    roofline,
    st.sampled_from(list(KNOWN.values())),
    st.sampled_from([Split(), Split(2), Split(8), Split(2, 2)]),
    st.sampled_from(list(DEVICES.values())),
)


@given(costs | rooflines, batches, batches)
def test_a_larger_batch_never_costs_less(cost: Cost, batch: Batch, more: Batch) -> None:
    larger = Batch(
        batch.tokens + more.tokens,
        batch.squares + more.squares,
        batch.rows + more.rows,
        batch.context + more.context,
    )
    slack = 1e-9 * cost.step_s(larger)  # rounding
    assert cost.step_s(larger) >= cost.step_s(batch) - slack
    assert cost.stage_s(larger) >= cost.stage_s(batch) - slack


@given(costs | rooflines, batches)
def test_no_stage_is_longer_than_the_step(cost: Cost, batch: Batch) -> None:
    assert 0 <= cost.stage_s(batch) <= cost.step_s(batch) * (1 + 1e-12)


def test_an_empty_step_costs_nothing() -> None:
    cost = StepCost((1, 1, 1), ((1, 1, 1),), pp=2, hop_s=1)
    assert cost.step_s(Batch()) == cost.stage_s(Batch()) == 0
    assert roofline(known("OPT-13B"), Split(2, 2), device("A100-80G")).step_s(Batch()) == 0


def test_constants_are_paid_once_and_work_adds() -> None:
    cost = StepCost((10, 1, 0.5), ((8, 0.25, 2),))
    both = Batch(tokens=4, squares=16, rows=3, context=40)
    assert cost.step_s(both) == 10 + 4 + 8 + 10 + 6
    assert replace(cost, shared=0).step_s(both) == 10 + 4 + 8 + 10 + 6 + 8
    assert replace(cost, cross=1).step_s(both) == 10 + 4 + 8 + 10 + 6 + 12


def test_stages_divide_the_work_and_add_their_hops() -> None:
    cost = StepCost((12, 0, 0), ((1, 0, 0),), pp=3, hop_s=0.5)
    batch = Batch(tokens=1, squares=1)
    assert cost.step_s(batch) == 12 + 3 * 0.5 and cost.stage_s(batch) == 12 / 3 + 0.5


@pytest.mark.parametrize(
    ("prefill", "decode"), [((-1, 0, 0), ((0, 0, 0),)), ((0, 0, 0), ((0, 0, -1),)), ((0, 0, 0), ())]
)
def test_costs_that_could_fall_are_refused(prefill: Line, decode: tuple[Line, ...]) -> None:
    with pytest.raises(ValueError):
        StepCost(prefill, decode)


def test_the_cliff_at_95_rows_is_gone() -> None:
    cost = built_in("OPT-66B", "A100-80G").cost(Split(2))  # the artefact: 131 ms at 94 rows, 93 ms at 95
    steps = [cost.step_s(Batch(rows=rows, context=800 * rows)) for rows in range(1, 200)]
    assert steps == sorted(steps)
    assert steps[93] == pytest.approx(0.131, rel=0.15)


@pytest.mark.parametrize(("model", "split"), [("OPT-13B", Split(1)), ("OPT-66B", Split(4))])
def test_data_sheets_alone_come_near_the_measured_a100(model: str, split: Split) -> None:
    measured = built_in(model, "A100-80G").cost(split)
    computed = roofline(known(model), split, device("A100-80G"))
    for batch in (
        Batch(512, 512.0**2),
        Batch(2048, 2048.0**2),
        Batch(rows=1, context=800),
        Batch(rows=32, context=25600),
    ):
        assert computed.step_s(batch) == pytest.approx(measured.step_s(batch), rel=0.25)


def test_a_token_is_cheaper_on_more_devices_and_a_step_never_reads_less_than_the_weights() -> None:
    shape, h100 = known("Llama-3.1-70B"), device("H100")
    steps = [roofline(shape, Split(tp), h100).step_s(Batch(rows=8, context=8000)) for tp in (2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert all(
        s > shape.weights_bytes(Split(tp)) / h100.bytes_per_s for s, tp in zip(steps, (2, 4, 8), strict=True)
    )
