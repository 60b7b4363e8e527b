"""From measured steps to cost lines: least squares of the relative error, coefficients not negative, error told.

Source: DistServe's artefact fits rows [1/T, x/T, y/T] -> 1; here with non-negative least squares, one or two decode
lines of which the larger holds, and the error on points that the fit has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from diptych.errors import ConfigError
from planner.cost import Line, StepCost
from planner.terms import Batch, Handling

FOLDS = 5
EARNS = 0.9  # a second line or a cross term stays if it brings the held-out error below this share of that without
ROUNDS = 25

Point = tuple[float, float, float]  # (x, y, seconds)
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors of a fit: on all points, and on each fold fitted without it (mean and largest)."""

    mean: float
    largest: float
    held_out: float
    held_out_largest: float
    points: int


@dataclass(frozen=True, slots=True)
class Lines:
    """Fitted lines (constant, per x, per y), of which the largest holds, and their error."""

    lines: tuple[Line, ...]
    error: Error

    def at(self, x: float, y: float) -> float:
        """Seconds for `x` and `y`."""
        return max(a + b * x + c * y for a, b, c in self.lines)


@dataclass(frozen=True, slots=True)
class Mixed:
    """How a step with prompts and rows relates to steps with either: see `StepCost.shared` and `StepCost.cross`."""

    shared: float
    cross: float
    error: Error


def fit_prefill(points: Sequence[Point]) -> Lines:
    """One line through (tokens, squares of lengths, seconds).

    Raises:
        ConfigError: fewer than four points, or a time that is not positive.
    """
    data = _checked(points, "prefill")
    return Lines((_line(data),), _error(data, lambda part: (_line(part),)))


def fit_decode(points: Sequence[Point]) -> Lines:
    """One line through (tokens of context, rows, seconds), or the larger of two where that is nearer on unseen points.

    Raises:
        ConfigError: fewer than four points, or a time that is not positive.
    """
    data = _checked(points, "decode")
    one = Lines((_line(data),), _error(data, lambda part: (_line(part),)))
    two = Lines(_two(data), _error(data, _two))
    return two if len(two.lines) > 1 and two.error.held_out < EARNS * one.error.held_out else one


def fit_mixed(points: Sequence[tuple[Batch, float]], prefill: Line, decode: tuple[Line, ...]) -> Mixed:
    """How much of the smaller constant steps with both kinds of work save, and whether a cross term earns its keep.

    Raises:
        ConfigError: no points, or a time that is not positive.
    """
    if not points or min(seconds for _, seconds in points) <= 0:
        raise ConfigError("mixed steps cannot be fitted", "there are no points, or a time is not positive")
    plain = _share(points, prefill, decode, 0.0)
    crossed = _crossed(points, prefill, decode)
    error, with_cross = _mixed_error(points, prefill, decode, 0.0), None
    if crossed > 0:
        with_cross = _mixed_error(points, prefill, decode, crossed)
    if with_cross is not None and with_cross.held_out < EARNS * error.held_out:
        return Mixed(_share(points, prefill, decode, crossed), crossed, with_cross)
    return Mixed(plain, 0.0, error)


def fit_handling(points: Sequence[tuple[float, float, float, float]]) -> Handling:
    """What a gateway's processor does, from (messages, tokens, requests, seconds of the processor) of some parts.

    Parts in which it took no time that could be measured say nothing; without any other it costs nothing.
    """
    data = np.asarray([point for point in points if point[3] > 0], dtype=np.float64).reshape(-1, 4)
    return Handling(*_relative(data[:, :3], data[:, 3])) if len(data) else Handling()


def _relative(columns: Array, seconds: Array) -> list[float]:
    """Relative least squares with coefficients of at least 0."""
    columns = columns / seconds[:, None]
    scale = np.maximum(
        np.abs(columns).max(axis=0), 1e-300
    )  # squares and counts differ by orders of magnitude
    return [float(number) for number in nnls(columns / scale, np.ones(len(seconds)))[0] / scale]


def _checked(points: Sequence[Point], what: str) -> Array:
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


def _line(data: Array) -> Line:
    constant, per_x, per_y = _relative(
        np.column_stack([np.ones(len(data)), data[:, 0], data[:, 1]]), data[:, 2]
    )
    return constant, per_x, per_y


def _two(data: Array) -> tuple[Line, ...]:
    """The larger of two lines: parts by rows, then each point to the line that is larger there, until nothing moves."""
    best: tuple[Line, ...] = (_line(data),)
    least = np.inf
    edges = np.unique(data[:, 1])
    for edge in edges[1:][:: max(1, len(edges) // 6)]:
        lines = _settle(data, data[:, 1] >= edge)
        wrong = float(_off(data, lines).mean())
        if wrong < least:
            best, least = lines, wrong
    return best


def _settle(data: Array, upper: NDArray[np.bool_]) -> tuple[Line, ...]:
    for _ in range(ROUNDS):
        if min(upper.sum(), (~upper).sum()) < 3:
            return (_line(data),)
        lines = (_line(data[~upper]), _line(data[upper]))
        values = _values(data, lines)
        moved = values[:, 1] > values[:, 0]
        if np.array_equal(moved, upper):
            break
        upper = moved
    return lines


def _values(data: Array, lines: tuple[Line, ...]) -> Array:
    """Seconds by line: [points, lines]."""
    table = np.asarray(lines, dtype=np.float64)
    return table[:, 0] + data[:, :1] * table[:, 1] + data[:, 1:2] * table[:, 2]


def _off(data: Array, lines: tuple[Line, ...]) -> Array:
    """Relative error of each point."""
    value: Array = _values(data, lines).max(axis=1)
    return np.abs(value / data[:, 2] - 1)


def _error(data: Array, fit: Callable[[Array], tuple[Line, ...]]) -> Error:
    """Errors on all points, and with every fifth point left out in turn."""
    fold = np.arange(len(data)) % min(FOLDS, len(data))
    seen = _off(data, fit(data))
    parts = [
        _off(data[fold == k], fit(data[fold != k])) for k in range(fold.max() + 1) if (fold != k).sum() >= 3
    ]
    unseen = np.concatenate(parts)
    return Error(float(seen.mean()), float(seen.max()), float(unseen.mean()), float(unseen.max()), len(data))


def _share(
    points: Iterable[tuple[Batch, float]], prefill: Line, decode: tuple[Line, ...], cross: float
) -> float:
    """The saved share of the smaller constant, 0 to 1, by relative least squares (the model is linear in it)."""
    paid = StepCost(prefill, decode, shared=0.0, cross=cross)
    once = StepCost(prefill, decode, shared=1.0, cross=cross)
    top = bottom = 0.0
    for batch, seconds in points:
        saving = (paid.work_s(batch) - once.work_s(batch)) / seconds
        top += saving * (paid.work_s(batch) / seconds - 1)
        bottom += saving * saving
    return min(1.0, max(0.0, top / bottom)) if bottom else 1.0


def _crossed(points: Iterable[tuple[Batch, float]], prefill: Line, decode: tuple[Line, ...]) -> float:
    """The cross coefficient that explains what is left when constants are paid once."""
    once = StepCost(prefill, decode)
    top = bottom = 0.0
    for batch, seconds in points:
        product = batch.tokens * batch.rows / seconds
        top += product * (1 - once.work_s(batch) / seconds)
        bottom += product * product
    return max(0.0, top / bottom) if bottom else 0.0


def _mixed_error(
    points: Sequence[tuple[Batch, float]], prefill: Line, decode: tuple[Line, ...], cross: float
) -> Error:
    def off(part: Sequence[tuple[Batch, float]], fitted: Sequence[tuple[Batch, float]]) -> list[float]:
        again = cross and _crossed(fitted, prefill, decode)
        cost = StepCost(prefill, decode, shared=_share(fitted, prefill, decode, again), cross=again)
        return [abs(cost.work_s(batch) / seconds - 1) for batch, seconds in part]

    seen = off(points, points)
    folds = min(FOLDS, len(points))
    unseen = [
        wrong
        for k in range(folds)
        for wrong in off(points[k::folds], [one for i, one in enumerate(points) if i % folds != k] or points)
    ]
    return Error(float(np.mean(seen)), max(seen), float(np.mean(unseen)), max(unseen), len(points))
