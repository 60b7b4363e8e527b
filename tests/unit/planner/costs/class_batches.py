"""Batches of sequences of several KV classes, and what their steps cost."""

from __future__ import annotations

from random import Random

from planner.costs.step import StepCost
from planner.types import KvClassWork, StepBatch

COST = StepCost((2e-3, 1.5e-4, 1e-7), ((1e-3, 2e-6, 3e-4), (4e-3, 1e-6, 3e-4)), shared=0.8, cross=1e-7)
WORK = KvClassWork(token=1.25, square=0.7, context=1.8)


def batches(rng: Random, count: int = 120) -> list[StepBatch]:
    """Prefill, decode and mixed steps of many sizes."""
    found = []
    for number in range(count):
        tokens, rows = rng.randrange(32, 900), rng.randrange(1, 24)
        prefill = (tokens, float(tokens) ** 2) if number % 3 else (0, 0.0)
        decode = (rows, rows * rng.randrange(50, 1500)) if number % 3 != 1 else (0, 0)
        found.append(StepBatch(*prefill, *decode))
    return found
