"""Fits cost lines to measured steps: least squares of the relative error, with coefficients that are not negative.

Source: DistServe's artefact fits rows [1/T, x/T, y/T] -> 1. This module does the same with non-negative least squares.
Decode steps get one line, or two of which the larger value counts. Errors are also measured on points held out of the
fit (cross validation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from diptych.errors import ConfigError
from planner.costs.step import CostLine, StepCost
from planner.types import GatewayCpuCost, StepBatch

FOLDS = 5
# A second line or a cross term is accepted only if it lowers the held-out error below this share of the simpler fit's.
MIN_IMPROVEMENT = 0.9
MAX_ROUNDS = 25

# (x, y, seconds).
FitPoint = tuple[float, float, float]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of a fit over `points` points.

    `mean` and `largest` are errors on the points that were fitted. `held_out` and `held_out_largest` are the mean and
    largest error on points that were left out of the fit (cross validation).
    """

    mean: float
    largest: float
    held_out: float
    held_out_largest: float
    points: int

    def name_all(self, what: str) -> dict[str, float]:
        """The errors of the fit of `what` under the names that a `CostProfile` uses."""
        return {
            f"{what}_mean": self.mean,
            f"{what}_max": self.largest,
            f"{what}_held_out_mean": self.held_out,
            f"{what}_held_out_max": self.held_out_largest,
        }


@dataclass(frozen=True, slots=True)
class FittedLines:
    """Fitted lines (constant, per x, per y) and their error. The cost is the largest value of all lines."""

    lines: tuple[CostLine, ...]
    error: FitError

    def at(self, x: float, y: float) -> float:
        """Predicted seconds at `x` and `y`."""
        return max(a + b * x + c * y for a, b, c in self.lines)


@dataclass(frozen=True, slots=True)
class MixedFit:
    """How the cost of a mixed step follows from prefill and decode costs: see `StepCost.shared`, `StepCost.cross`."""

    shared: float
    cross: float
    error: FitError


def fit_prefill(points: Sequence[FitPoint]) -> FittedLines:
    """Fits one line to prefill steps, given as (tokens, sum of squared lengths, seconds).

    Raises:
        ConfigError: fewer than four points, or a time that is not positive.
    """
    data = _check_points(points, "prefill")
    return FittedLines((_fit_line(data),), _cross_validate(data, lambda part: (_fit_line(part),)))


def fit_decode(points: Sequence[FitPoint]) -> FittedLines:
    """Fits one or two lines to decode steps, given as (tokens of context, rows, seconds).

    Two lines, of which the larger counts, are used only if they predict held-out points clearly better.

    Raises:
        ConfigError: fewer than four points, or a time that is not positive.
    """
    data = _check_points(points, "decode")
    one = FittedLines((_fit_line(data),), _cross_validate(data, lambda part: (_fit_line(part),)))
    two = FittedLines(_fit_two_lines(data), _cross_validate(data, _fit_two_lines))
    return two if len(two.lines) > 1 and two.error.held_out < MIN_IMPROVEMENT * one.error.held_out else one


def fit_mixed(
    timed_batches: Sequence[tuple[StepBatch, float]], prefill: CostLine, decode: tuple[CostLine, ...]
) -> MixedFit:
    """Fits how mixed steps (prefill and decode together) differ from the sum of a prefill and a decode step.

    Two effects are fitted: the share of the smaller constant that a mixed step saves, since weights are read once, and
    a cross term (per prompt token and row), which is used only if it predicts held-out points clearly better.

    Raises:
        ConfigError: no points, or a time that is not positive.
    """
    if not timed_batches or min(seconds for _, seconds in timed_batches) <= 0:
        raise ConfigError("mixed steps cannot be fitted", "there are no points, or a time is not positive")
    plain = _saved_share(timed_batches, prefill, decode, 0.0)
    crossed = _cross_coefficient(timed_batches, prefill, decode)
    error, with_cross = _mixed_error(timed_batches, prefill, decode, 0.0), None
    if crossed > 0:
        with_cross = _mixed_error(timed_batches, prefill, decode, crossed)
    if with_cross is not None and with_cross.held_out < MIN_IMPROVEMENT * error.held_out:
        return MixedFit(_saved_share(timed_batches, prefill, decode, crossed), crossed, with_cross)
    return MixedFit(plain, 0.0, error)


def fit_handling(points: Sequence[tuple[float, float, float, float]]) -> GatewayCpuCost:
    """Fits the gateway's CPU cost per message, token and request.

    Each point is (messages, tokens, requests, CPU seconds) of one part of a measurement. Points with no measurable CPU
    time are left out; without any other point the cost is 0.
    """
    data = np.asarray([point for point in points if point[3] > 0], dtype=np.float64).reshape(-1, 4)
    return (
        GatewayCpuCost(*_relative_least_squares(data[:, :3], data[:, 3])) if len(data) else GatewayCpuCost()
    )


def _relative_least_squares(columns: FloatArray, seconds: FloatArray) -> list[float]:
    """Coefficients >= 0 that minimise the squared relative error of `columns` times coefficients against `seconds`."""
    columns = columns / seconds[:, None]
    # Columns such as squared lengths and row counts differ by orders of magnitude, so they are scaled before the
    # solver runs.
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    return [float(number) for number in nnls(columns / scale, np.ones(len(seconds)))[0] / scale]


def _check_points(points: Sequence[FitPoint], what: str) -> FloatArray:
    """The points as an array; raises ConfigError if they are too few or have an unusable time."""
    data = np.asarray(points, dtype=np.float64).reshape(-1, 3)
    if len(data) < 4:
        raise ConfigError(
            f"the {what} cost cannot be fitted",
            f"there are {len(data)} points, and a line has three coefficients",
            "measure at least four batches of different sizes",
        )
    if not np.all(np.isfinite(data)) or data[:, 2].min() <= 0:
        raise ConfigError(
            f"the {what} cost cannot be fitted", "a measured time is not positive and finite", "measure again"
        )
    return data


def _fit_line(data: FloatArray) -> CostLine:
    constant, per_x, per_y = _relative_least_squares(
        np.column_stack([np.ones(len(data)), data[:, 0], data[:, 1]]), data[:, 2]
    )
    return constant, per_x, per_y


def _fit_two_lines(data: FloatArray) -> tuple[CostLine, ...]:
    """Two lines whose maximum fits the points best; a single line if no split into two groups of points works.

    Each start splits the points by their number of rows and then improves the split (`_reassign_points`).
    """
    best: tuple[CostLine, ...] = (_fit_line(data),)
    least = np.inf
    edges = np.unique(data[:, 1])
    for edge in edges[1:][:: max(1, len(edges) // 6)]:
        lines = _reassign_points(data, data[:, 1] >= edge)
        wrong = float(_relative_errors(data, lines).mean())
        if wrong < least:
            best, least = lines, wrong
    return best


def _reassign_points(data: FloatArray, upper: NDArray[np.bool_]) -> tuple[CostLine, ...]:
    """Fits a line to each group of points, moves points to the line that is larger there, until no point moves."""
    for _ in range(MAX_ROUNDS):
        if min(upper.sum(), (~upper).sum()) < 3:
            return (_fit_line(data),)
        lines = (_fit_line(data[~upper]), _fit_line(data[upper]))
        values = _line_values(data, lines)
        moved = values[:, 1] > values[:, 0]
        if np.array_equal(moved, upper):
            break
        upper = moved
    return lines


def _line_values(data: FloatArray, lines: tuple[CostLine, ...]) -> FloatArray:
    """Predicted seconds of each line at each point: [points, lines]."""
    table = np.asarray(lines, dtype=np.float64)
    return table[:, 0] + data[:, :1] * table[:, 1] + data[:, 1:2] * table[:, 2]


def _relative_errors(data: FloatArray, lines: tuple[CostLine, ...]) -> FloatArray:
    """Relative error of the larger line at each point."""
    value: FloatArray = _line_values(data, lines).max(axis=1)
    return np.abs(value / data[:, 2] - 1)


def _cross_validate(data: FloatArray, fit: Callable[[FloatArray], tuple[CostLine, ...]]) -> FitError:
    """Errors of `fit` on all points, and on each fifth of the points when it is left out of the fit."""
    fold = np.arange(len(data)) % min(FOLDS, len(data))
    errors = _relative_errors(data, fit(data))
    parts = [
        _relative_errors(data[fold == k], fit(data[fold != k]))
        for k in range(fold.max() + 1)
        if (fold != k).sum() >= 3
    ]
    unseen = np.concatenate(parts)
    return FitError(
        float(errors.mean()), float(errors.max()), float(unseen.mean()), float(unseen.max()), len(data)
    )


def _saved_share(
    timed_batches: Iterable[tuple[StepBatch, float]],
    prefill: CostLine,
    decode: tuple[CostLine, ...],
    cross: float,
) -> float:
    """The share (0 to 1) of the smaller constant that mixed steps save, by relative least squares.

    The predicted time is linear in this share, so the best share has a closed form.
    """
    twice = StepCost(prefill, decode, shared=0.0, cross=cross)
    once = StepCost(prefill, decode, shared=1.0, cross=cross)
    top = bottom = 0.0
    for batch, seconds in timed_batches:
        saving = (twice.work_s(batch) - once.work_s(batch)) / seconds
        top += saving * (twice.work_s(batch) / seconds - 1)
        bottom += saving * saving
    return min(1.0, max(0.0, top / bottom)) if bottom else 1.0


def _cross_coefficient(
    timed_batches: Iterable[tuple[StepBatch, float]], prefill: CostLine, decode: tuple[CostLine, ...]
) -> float:
    """The cross coefficient (seconds per prompt token and row) that explains time left over if constants count once."""
    once = StepCost(prefill, decode)
    top = bottom = 0.0
    for batch, seconds in timed_batches:
        product = batch.tokens * batch.rows / seconds
        top += product * (1 - once.work_s(batch) / seconds)
        bottom += product * product
    return max(0.0, top / bottom) if bottom else 0.0


def _mixed_error(
    timed_batches: Sequence[tuple[StepBatch, float]],
    prefill: CostLine,
    decode: tuple[CostLine, ...],
    cross: float,
) -> FitError:
    """Errors of the mixed-step fit on all points, and on every fifth point when it is left out of the fit."""

    def relative_errors(
        held_out_batches: Sequence[tuple[StepBatch, float]], fitted_batches: Sequence[tuple[StepBatch, float]]
    ) -> list[float]:
        """Errors on `held_out_batches` of a fit to `fitted_batches`; refits a cross term only if `cross` is not 0."""
        refitted = cross and _cross_coefficient(fitted_batches, prefill, decode)
        cost = StepCost(
            prefill, decode, shared=_saved_share(fitted_batches, prefill, decode, refitted), cross=refitted
        )
        return [abs(cost.work_s(batch) / seconds - 1) for batch, seconds in held_out_batches]

    errors = relative_errors(timed_batches, timed_batches)
    folds = min(FOLDS, len(timed_batches))
    unseen = [
        wrong
        for k in range(folds)
        for wrong in relative_errors(
            timed_batches[k::folds],
            [one for i, one in enumerate(timed_batches) if i % folds != k] or timed_batches,
        )
    ]
    return FitError(
        float(np.mean(errors)), max(errors), float(np.mean(unseen)), max(unseen), len(timed_batches)
    )
