"""Jobs for the fast simulator, and how far two results are apart."""

from __future__ import annotations

import random

from planner.types import (
    Job,
    JobResult,
    LinkSpec,
)

ODD = LinkSpec(2.0137e8, 0.00113)  # nothing ends just when something else does


def jobs(count: int, rate: float, seed: int = 1, prompt: int = 900, output: int = 120) -> list[Job]:
    """Poisson arrivals, some of them several at a time; lengths uniform up to these."""
    chance, at_s, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(rate) if chance.random() < 0.9 else 0.0
        made.append(Job(at_s, chance.randint(1, prompt), chance.randint(1, output)))
    return made


def apart(one: list[JobResult], other: list[JobResult]) -> float:
    """The largest difference of any time."""
    return max(
        max(abs(a.ttft_s - b.ttft_s), abs(a.tpot_s - b.tpot_s), abs(a.ended_s - b.ended_s))
        for a, b in zip(one, other, strict=True)
    )
