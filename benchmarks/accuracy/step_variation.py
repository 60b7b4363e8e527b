"""How one worker's steps differ from their cost on a machine that it shares: its rhythm, and a cost to go with it.

Steps are of `planner.costs.profiler`, as workers log them.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.costs.profiler import (
    FittedCosts,
    MeasuredStep,
    WorkerTrace,
    continues_directly,
    fit_costs,
    measured_ratio,
)
from planner.costs.step import RatiosBySize, StepCost, StepVariation, step_size_class
from planner.types import StepBatch

PAUSE_S = 0.01  # from then on a worker may have had nothing to do
PRIOR_STEPS = 16  # steps, by which one size of them is drawn towards what is expected
MIN_COMMON = 8  # steps in a state, from which on it is judged by them
# Of dividing steps by what their neighbours did to them, and fitting what is left: so often at most, and how little the
# mean of a state moves in the last round.
MAX_ROUNDS, SETTLED = 40, 1e-3


def fit_undisturbed_cost(traces: Sequence[WorkerTrace], cost: StepCost) -> FittedCosts:
    """The cost of a step without what goes on beside it, to be multiplied by a `measure_variation`. `cost` is
    the one with it.

    Many rows are written when all workers are busy. So a line through all steps takes for the rows what is the
    neighbours', and a rhythm adds it once more. Here each worker's steps of each state are divided by how much longer
    they took than the cost, and fitted again, until both agree.

    Raises:
        ConfigError: as `fit_costs`.
    """
    groups = [
        group
        for life in traces
        for group in _steps_by_state(life, [one for one in traces if one is not life])
    ]
    before = [math.inf] * len(groups)
    for _ in range(MAX_ROUNDS):
        longer = _time_ratios(cost, groups)
        even = [
            replace(step, ended_s=step.begun_s + step.seconds / times)
            for group, times in zip(groups, longer, strict=True)
            for step in group
        ]
        costs = fit_costs(even)
        cost = costs.cost
        if max((abs(now - then) for now, then in zip(longer, before, strict=True)), default=0.0) < SETTLED:
            break
        before = longer
    return costs


def _steps_by_state(life: WorkerTrace, others: Sequence[WorkerTrace]) -> list[list[MeasuredStep]]:
    """A worker's steps by their state."""
    found: dict[tuple[bool, bool], list[MeasuredStep]] = defaultdict(list)
    for state, step in zip(_step_states(life, others), life.steps, strict=True):
        found[state].append(step)
    return list(found.values())


def _time_ratios(cost: StepCost, groups: Sequence[Sequence[MeasuredStep]]) -> list[float]:
    """How many times longer than its cost each group's steps took.

    Steps that read, divided by these, take as long in all as they did, and so do those that write: nothing else would
    say what is the cost's and what is the state's, and both would drift from round to round.
    """
    found = [(measured_ratio(cost, group) or 1.0) if len(group) >= MIN_COMMON else 1.0 for group in groups]
    for reads in (False, True):
        own = [place for place, group in enumerate(groups) if bool(group[0].batch.tokens) == reads]
        whole_s = sum(step.seconds for place in own for step in groups[place])
        even_s = sum(step.seconds / found[place] for place in own for step in groups[place])
        for place in own:
            found[place] *= even_s / whole_s if whole_s else 1.0
    return found


def measure_variation(cost: StepCost, life: WorkerTrace, others: Sequence[WorkerTrace]) -> StepVariation:
    """How one worker's steps went while the others of its machine did theirs.

    A state that was rare is like the rest of its kind, and a kind that it had none of is as long as the others' were.
    """
    found = [(*state, step) for state, step in zip(_step_states(life, others), life.steps, strict=True)]
    elsewhere = [step for other in others for step in other.steps]

    def means(sizes: RatiosBySize) -> StepVariation:
        """With these sizes, and all steps of a state as long as they were."""
        like = StepVariation(sizes=sizes)

        def factor(reads: bool, beside: bool) -> float:
            kind = [step for one, _, step in found if one == reads]
            kind = kind or [step for step in elsewhere if bool(step.batch.tokens) == reads]
            some = [step for one, other, step in found if (one, other) == (reads, beside)]
            some = some if len(some) >= MIN_COMMON else kind
            expected_s = sum(cost.step_s(step.batch) * like.factor(step.batch, beside) for step in some)
            return sum(step.seconds for step in some) / expected_s if expected_s else 1.0

        return replace(
            like,
            alone=(factor(False, False), factor(True, False)),
            beside=(factor(False, True), factor(True, True)),
        )

    line = means(StepVariation().sizes)
    kinds: list[list[tuple[int, float, float]]] = [[], [], []]
    for _, other, step in found:
        kind, size = step_size_class(step.batch)
        kinds[kind].append((size, step.seconds, cost.step_s(step.batch) * line.factor(step.batch, other)))
    writes, reads, both = (_ratios_by_size(steps) for steps in kinds)
    stairs = means((writes, reads, both))

    def tape(reads: bool) -> tuple[float, ...]:
        left = [
            step.seconds / (cost.step_s(step.batch) * stairs.factor(step.batch, other))
            for one, other, step in found
            if one == reads
        ]
        # Small steps vary most, and in a simulation any step may get what was theirs: so the mean is 1.
        mean = statistics.fmean(left) if left else 1.0
        return tuple(ratio / mean for ratio in left) or (1.0,)

    return replace(stairs, tapes=(tape(False), tape(True)), gaps_s=_mean_gaps_by_rows(life))


def _mean_gaps_by_rows(life: WorkerTrace) -> tuple[float, ...]:
    """Mean seconds before a step that writes, by its rows, from 1 on, where some of them went on."""
    pairs = zip(life.steps, life.steps[1:], strict=False)
    gaps = [
        (after.batch.rows, max(0.0, after.begun_s - step.ended_s))
        for step, after in pairs
        if continues_directly(step.batch, after.batch)
        or (_may_go_on(step.batch, after.batch) and after.begun_s - step.ended_s < PAUSE_S)
    ]
    mean_s = statistics.fmean(gap_s for _, gap_s in gaps) if gaps else 0.0
    by_rows = _ratios_by_size((rows, gap_s, mean_s) for rows, gap_s in gaps) if mean_s else ()
    return tuple(ratio * mean_s for ratio in by_rows)


def _may_go_on(batch: StepBatch, after: StepBatch) -> bool:
    """Whether some of those that wrote may write on. One row after another one is another sequence."""
    return min(batch.rows, after.rows) > 0 and max(batch.rows, after.rows) > 1


def _ratios_by_size(steps: Iterable[tuple[int, float, float]]) -> tuple[float, ...]:
    """By size, from 1 on: seconds of its steps over what was expected of them, as if `PRIOR_STEPS` more had
    been as expected.

    A size that did not occur is like the next smaller one that did; below the smallest, as expected.
    """
    took: dict[int, float] = defaultdict(float)
    expected: dict[int, list[float]] = defaultdict(list)
    for size, seconds, expected_s in steps:
        took[size] += seconds
        expected[size].append(expected_s)
    found = [1.0]
    for size in range(1, max(took, default=1) + 1):
        if some := expected.get(size):
            more_s = PRIOR_STEPS * statistics.fmean(some)
            found.append((took[size] + more_s) / (sum(some) + more_s))
        else:
            found.append(found[-1])
    return tuple(found[1:])


def _step_states(life: WorkerTrace, others: Sequence[WorkerTrace]) -> list[tuple[bool, bool]]:
    """Of each step: whether it reads, and whether another worker was in a step when it began."""
    busy = _BusyTimes(others)
    return [(bool(step.batch.tokens), busy.at(step.begun_s)) for step in life.steps]


class _BusyTimes:
    """Whether any of some workers is in a step."""

    def __init__(self, traces: Sequence[WorkerTrace]) -> None:
        self._lives = [([step.begun_s for step in life.steps], life.steps) for life in traces]

    def at(self, at_s: float) -> bool:
        for begins, steps in self._lives:
            place = bisect_right(begins, at_s) - 1
            if place >= 0 and at_s < steps[place].ended_s:
                return True
        return False
