"""One fit through all kinds of steps at once, for workers on which hardly a step only reads or only writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from planner.cost import StepCost
from planner.fit import FOLDS, Error
from planner.terms import Batch

Points = Sequence[tuple[Batch, float]]


def fit_joint(points: Points) -> StepCost:
    """Relative least squares of (reads, tokens, squares, writes, context, rows, does both), none below 0.

    What doing both saves is at most the smaller constant; if it comes out larger, it is that.
    """
    table = np.asarray([_features(batch) for batch, _ in points], dtype=np.float64)
    seconds = np.asarray([time_s for _, time_s in points], dtype=np.float64)
    columns: NDArray[np.float64] = table / seconds[:, None]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    found = lsq_linear(columns / scale, np.ones(len(points)), (0.0, np.inf)).x / scale
    # A bounded solver may end a rounding error outside.
    a, b, c, d, e, f, saved = (max(0.0, float(number)) for number in found)
    least = min(a, d)
    return StepCost((a, b, c), ((d, e, f),), shared=min(1.0, saved / least) if least else 1.0)


def error_of(points: Points) -> Error:
    """Errors of that fit, on all points and on every fifth left out in turn."""
    cost = fit_joint(points)
    seen = [_off(cost, *point) for point in points]
    unseen = [
        _off(fit_joint([one for i, one in enumerate(points) if i % FOLDS != k]), *point)
        for k in range(min(FOLDS, len(points)))
        for point in points[k::FOLDS]
    ]
    return Error(float(np.mean(seen)), max(seen), float(np.mean(unseen)), max(unseen), len(points))


def _features(batch: Batch) -> tuple[float, ...]:
    reads, writes = float(batch.tokens > 0), float(batch.rows > 0)
    return reads, batch.tokens, batch.squares, writes, batch.context, batch.rows, -reads * writes


def _off(cost: StepCost, batch: Batch, seconds: float) -> float:
    return abs(cost.step_s(batch) / seconds - 1.0)
