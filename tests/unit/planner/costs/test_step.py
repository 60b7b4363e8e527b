"""Costs never fall when a batch grows, whatever the coefficients; stages divide the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.costs.model import BUILT_IN_MODELS, find_model
from planner.costs.profile_file import built_in_profile
from planner.costs.roofline import roofline_cost
from planner.costs.step import CostLine, StepCost
from planner.hardware import DEVICES, find_device
from planner.types import CostModel, Parallelism, StepBatch

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
    StepBatch, st.integers(0, 4096), st.floats(0, 1e8), st.integers(0, 512), st.integers(0, 1 << 20)
)
rooflines = st.builds(
    roofline_cost,
    st.sampled_from(list(BUILT_IN_MODELS.values())),
    st.sampled_from([Parallelism(), Parallelism(2), Parallelism(8), Parallelism(2, 2)]),
    st.sampled_from(list(DEVICES.values())),
)


@given(costs | rooflines, batches, batches)
def test_a_larger_batch_never_costs_less(cost: CostModel, batch: StepBatch, more: StepBatch) -> None:
    larger = StepBatch(
        batch.tokens + more.tokens,
        batch.squares + more.squares,
        batch.rows + more.rows,
        batch.context + more.context,
    )
    slack = 1e-9 * cost.step_s(larger)  # rounding
    assert cost.step_s(larger) >= cost.step_s(batch) - slack
    assert cost.stage_s(larger) >= cost.stage_s(batch) - slack


@given(costs | rooflines, batches)
def test_no_stage_is_longer_than_the_step(cost: CostModel, batch: StepBatch) -> None:
    assert 0 <= cost.stage_s(batch) <= cost.step_s(batch) * (1 + 1e-12)


def test_an_empty_step_costs_nothing() -> None:
    cost = StepCost((1, 1, 1), ((1, 1, 1),), pp=2, hop_s=1)
    assert cost.step_s(StepBatch()) == cost.stage_s(StepBatch()) == 0
    assert (
        roofline_cost(find_model("OPT-13B"), Parallelism(2, 2), find_device("A100-80G")).step_s(StepBatch())
        == 0
    )


def test_constants_are_paid_once_and_work_adds() -> None:
    cost = StepCost((10, 1, 0.5), ((8, 0.25, 2),))
    both = StepBatch(tokens=4, squares=16, rows=3, context=40)
    assert cost.step_s(both) == 10 + 4 + 8 + 10 + 6
    assert replace(cost, shared=0).step_s(both) == 10 + 4 + 8 + 10 + 6 + 8
    assert replace(cost, cross=1).step_s(both) == 10 + 4 + 8 + 10 + 6 + 12


def test_stages_divide_the_work_and_add_their_hops() -> None:
    cost = StepCost((12, 0, 0), ((1, 0, 0),), pp=3, hop_s=0.5)
    batch = StepBatch(tokens=1, squares=1)
    assert cost.step_s(batch) == 12 + 3 * 0.5 and cost.stage_s(batch) == 12 / 3 + 0.5


@pytest.mark.parametrize(
    ("prefill", "decode"), [((-1, 0, 0), ((0, 0, 0),)), ((0, 0, 0), ((0, 0, -1),)), ((0, 0, 0), ())]
)
def test_costs_that_could_fall_are_refused(prefill: CostLine, decode: tuple[CostLine, ...]) -> None:
    with pytest.raises(ValueError):
        StepCost(prefill, decode)


def test_the_cliff_at_95_rows_is_gone() -> None:
    cost = built_in_profile("OPT-66B", "A100-80G").cost(
        Parallelism(2)
    )  # the artefact: 131 ms at 94 rows, 93 ms at 95
    steps = [cost.step_s(StepBatch(rows=rows, context=800 * rows)) for rows in range(1, 200)]
    assert steps == sorted(steps)
    assert steps[93] == pytest.approx(0.131, rel=0.15)


@pytest.mark.parametrize(("model", "split"), [("OPT-13B", Parallelism(1)), ("OPT-66B", Parallelism(4))])
def test_data_sheets_alone_come_near_the_measured_a100(model: str, split: Parallelism) -> None:
    measured = built_in_profile(model, "A100-80G").cost(split)
    computed = roofline_cost(find_model(model), split, find_device("A100-80G"))
    for batch in (
        StepBatch(512, 512.0**2),
        StepBatch(2048, 2048.0**2),
        StepBatch(rows=1, context=800),
        StepBatch(rows=32, context=25600),
    ):
        assert computed.step_s(batch) == pytest.approx(measured.step_s(batch), rel=0.25)


def test_a_token_is_cheaper_on_more_devices_and_a_step_never_reads_less_than_the_weights() -> None:
    shape, h100 = find_model("Llama-3.1-70B"), find_device("H100")
    steps = [
        roofline_cost(shape, Parallelism(tp), h100).step_s(StepBatch(rows=8, context=8000))
        for tp in (2, 4, 8)
    ]
    assert steps == sorted(steps, reverse=True)
    assert all(
        s > shape.weights_bytes(Parallelism(tp)) / h100.bytes_per_s
        for s, tp in zip(steps, (2, 4, 8), strict=True)
    )
