"""SLOs may be as tight as in the paper's figures 8 and 9."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.planner import PAPER, SCALES, least_scale
from planner.sim.fast import distserve_compat
from planner.types import Parallelism
from tests.unit.planner.paper_runs import (
    CHAT,
    CODING,
    LARGE,
    LONG,
    PAPER_LARGE,
    PAPER_SMALL,
    SEEDS,
    SMALL,
    fits,
    lengths,
)


@pytest.mark.parametrize(
    ("row", "model", "splits", "lengths_of", "low", "high"),
    [
        ("13b_sharegpt", SMALL, PAPER_SMALL, CHAT, 0.9, 1.1),
        ("66b_sharegpt", LARGE, PAPER_LARGE, CHAT, 0.9, 1.1),
        ("66b_humaneval", LARGE, PAPER_LARGE, CODING, 0.9, 1.1),
        (
            "66b_longbench",
            LARGE,
            PAPER_LARGE,
            LONG,
            0.5,
            0.7,
        ),  # measured, one in twenty misses whatever is promised
    ],
)
def test_objectives_may_be_as_tight_as_in_figures_8_and_9(
    row: str, model: str, splits: tuple[Parallelism, ...], lengths_of: str, low: float, high: float
) -> None:
    """The least multiple of both that 90 % keep at the rate of the figure, over the paper's."""
    rate, requests, crossing = SCALES[row]
    devices, slo = sum(split.devices for split in splits), PAPER[row][2]
    found = []
    for seed in SEEDS:
        jobs = lengths(lengths_of).sample(requests, rate * devices, seed)
        served = distserve_compat.simulate_distserve(
            jobs, fits("distserve"), "distserve", model, splits[0], splits[-1]
        )
        found.append(least_scale(served, slo))
    assert low <= fmean(found) / crossing <= high
