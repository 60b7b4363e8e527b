"""Fits one cost to all steps together, for workers whose steps nearly all mix prefill and decode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from planner.costs.fit import FOLDS, FitError
from planner.costs.step import StepCost
from planner.types import StepBatch

StepSamples = Sequence[tuple[StepBatch, float]]


def fit_joint(points: StepSamples) -> StepCost:
    """Fits prefill line, decode line and the shared constant in one relative least squares, no coefficient below 0.

    The saving of a mixed step cannot exceed the smaller constant; a larger fitted value is cut to it.
    """
    table = np.asarray([_step_features(batch) for batch, _ in points], dtype=np.float64)
    seconds = np.asarray([time_s for _, time_s in points], dtype=np.float64)
    columns: NDArray[np.float64] = table / seconds[:, None]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    found = lsq_linear(columns / scale, np.ones(len(points)), (0.0, np.inf)).x / scale
    # The bounded solver may return values a rounding error below 0.
    a, b, c, d, e, f, saved = (max(0.0, float(number)) for number in found)
    least = min(a, d)
    return StepCost((a, b, c), ((d, e, f),), shared=min(1.0, saved / least) if least else 1.0)


def joint_fit_error(points: StepSamples) -> FitError:
    """Errors of `fit_joint` on all points, and on every fifth point when it is left out of the fit."""
    cost = fit_joint(points)
    errors = [_relative_error(cost, *point) for point in points]
    unseen = [
        _relative_error(fit_joint([one for i, one in enumerate(points) if i % FOLDS != k]), *point)
        for k in range(min(FOLDS, len(points)))
        for point in points[k::FOLDS]
    ]
    return FitError(float(np.mean(errors)), max(errors), float(np.mean(unseen)), max(unseen), len(points))


def _step_features(batch: StepBatch) -> tuple[float, ...]:
    """One row of the linear model: prefill (1, tokens, squares), decode (1, context, rows), and mixed (saving, -1)."""
    prefills, decodes = float(batch.tokens > 0), float(batch.rows > 0)
    return prefills, batch.tokens, batch.squares, decodes, batch.context, batch.rows, -prefills * decodes


def _relative_error(cost: StepCost, batch: StepBatch, seconds: float) -> float:
    return abs(cost.step_s(batch) / seconds - 1.0)
