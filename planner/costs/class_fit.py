"""Fits what steps on KV of one class cost, over what they would cost on KV of the class that a cost was fitted to; and
what it costs to decide which KV is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from planner.costs.fit import FOLDS, FitError
from planner.costs.joint_fit import StepSamples
from planner.costs.step import StepCost
from planner.types import KvClassWork, StepBatch

# How much a ratio is drawn to 1. A term that takes less than about this share of every step cannot be told from noise.
PRIOR = 0.1
# Smallest ratio that is fitted.
MIN_RATIO = 1e-2

FloatArray = NDArray[np.float64]


def fit_class_work(
    points: StepSamples, cost: StepCost, only_context: bool = False
) -> tuple[KvClassWork, FitError]:
    """Fits the ratios of a class by least squares of the relative error, and their error over all and held-out points.

    Constants of a step and the time per row are those of `cost`: they do not depend on the class.

    Args:
        points: batches of steps whose KV is all of the class, and their mean seconds; at least one.
        cost: of steps on KV of the profile's own codec.
        only_context: whether prompts cost the same in the class, so that only the ratio of context is fitted.
    """
    work = _fit_ratios(points, cost, only_context)
    errors = [_relative_error(cost, work, *point) for point in points]
    unseen = [
        _relative_error(cost, _fit_ratios(seen, cost, only_context), *point)
        for k in range(min(FOLDS, len(points)))
        if (seen := [one for i, one in enumerate(points) if i % FOLDS != k])
        for point in points[k::FOLDS]
    ] or errors
    return work, FitError(
        float(np.mean(errors)), max(errors), float(np.mean(unseen)), max(unseen), len(points)
    )


def fit_decisions(samples: Sequence[tuple[float, int, int]]) -> tuple[float, float]:
    """Seconds of a decision for each token of a prompt that has ended, and of an answer at a later point.

    Args:
        samples: (seconds, tokens of prompts, tokens of answers) of the decisions of each step.
    """
    if not samples:
        return 0.0, 0.0
    data = np.asarray(samples, dtype=np.float64)
    columns = data[:, 1:]
    # Only the tokens that occur are fitted: without any long answer nothing is known of the second number.
    scale = np.maximum(columns.max(axis=0), 1.0)
    prompt, answer = nnls(columns / scale, data[:, 0])[0] / scale
    return float(prompt), float(answer)


def class_batch(batch: StepBatch, work: KvClassWork) -> StepBatch:
    """The batch whose cost is that of `batch` if all its KV is of the class."""
    return StepBatch(
        batch.tokens * work.token, batch.squares * work.square, batch.rows, batch.context * work.context
    )


def _fit_ratios(points: StepSamples, cost: StepCost, only_context: bool) -> KvClassWork:
    rows = [_linear_terms(batch, cost) for batch, _ in points]
    seconds = np.asarray([time_s for _, time_s in points], dtype=np.float64)
    known = 3 if only_context else 1
    fixed = np.asarray([sum(row[:known]) for row in rows], dtype=np.float64)
    columns: FloatArray = np.asarray([row[known:] for row in rows], dtype=np.float64) / seconds[:, None]
    prior = PRIOR * np.eye(columns.shape[1])
    left = np.concatenate([columns, prior])
    right = np.concatenate([1.0 - fixed / seconds, np.diag(prior)])
    found: Sequence[float] = nnls(left, right)[0]
    token, square, context = [1.0] * (known - 1) + [max(MIN_RATIO, float(ratio)) for ratio in found]
    return KvClassWork(token, square, context)


def _linear_terms(batch: StepBatch, cost: StepCost) -> tuple[float, float, float, float]:
    """Seconds of a step that do not depend on the class, and those of tokens, squares and context at a ratio of 1."""
    first, per_token, per_square = cost.prefill
    constant, per_context, per_row = max(
        cost.decode, key=lambda line: line[0] + line[1] * batch.context + line[2] * batch.rows
    )
    fixed = first * (batch.tokens > 0) + (constant + per_row * batch.rows) * (batch.rows > 0)
    if batch.tokens and batch.rows:
        fixed -= cost.shared * min(first, constant)
    token_s = (per_token + cost.cross * batch.rows) * batch.tokens
    return fixed, token_s, per_square * batch.squares, per_context * batch.context


def _relative_error(cost: StepCost, work: KvClassWork, batch: StepBatch, seconds: float) -> float:
    return abs(cost.step_s(class_batch(batch, work)) / seconds - 1.0)
