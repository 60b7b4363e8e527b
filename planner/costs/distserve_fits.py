"""Fits cost lines to DistServe's published step costs such that a step never gets cheaper when its batch grows.

DistServe's artefact has two decode lines, for batches below and above 95 rows, which disagree where they meet; one of
its prefill fits has a negative square term. This module evaluates the artefact on its own measuring grid and fits
monotone lines to the values. The difference is reported as the error of the fit.
(`planner.sim.fast.distserve_compat` uses the original coefficients.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.costs.fit import fit_decode, fit_prefill
from planner.costs.step import CostLine, StepCost
from planner.types import CostModel, Parallelism

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192)
LENGTHS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 284, 512, 768, 1024, 1536, 2020)
# Most tokens (batch × length) of a grid point: about the KV that the A100 could hold.
MAX_BATCH_TOKENS = 60_000
MAX_PREFILL_TOKENS = 16_384


def costs_from_distserve(table: Mapping[str, Any]) -> tuple[dict[Parallelism, CostModel], dict[str, float]]:
    """Converts the artefact's coefficients (in ms) to cost models (in seconds), one per degree of tensor parallelism.

    Args:
        table: `tp -> {prefill, decoding_smallbs, decoding_largebs, decoding_large_small_bs_threshold}`.

    Returns the costs by split, and their largest and mean relative difference from the artefact on its grid.

    Raises:
        KeyError: one of these keys is missing.
    """
    costs: dict[Parallelism, CostModel] = {}
    worst: dict[str, float] = {}
    for tp, fits in table.items():
        prefill, decode, errors = _fit_monotone(fits)
        costs[Parallelism(int(tp))] = StepCost(prefill, decode)
        worst = {name: max(worst.get(name, 0.0), error) for name, error in errors.items()}
    return costs, worst


def distserve_decode_s(fits: Mapping[str, Any], context: float, rows: float) -> float:
    """Seconds of a decode step by the artefact's own formula, including the jump between its two lines."""
    small = rows < fits["decoding_large_small_bs_threshold"]
    a, b, c = fits["decoding_smallbs" if small else "decoding_largebs"]
    return float(a + b * context + c * rows) / 1e3


def _fit_monotone(fits: Mapping[str, Any]) -> tuple[CostLine, tuple[CostLine, ...], dict[str, float]]:
    """Prefill line, decode lines and relative errors of one tp. The prefill line is refitted only if it can fall."""
    grid = [(batch, length) for batch in BATCHES for length in LENGTHS if batch * length <= MAX_BATCH_TOKENS]
    points = [(n * length, float(n), distserve_decode_s(fits, n * length, n)) for n, length in grid]
    found = fit_decode(points)
    a, b, c = fits["prefill"]
    prefill: CostLine = (a / 1e3, b / 1e3, c / 1e3)
    errors = {
        "decode_mean": found.error.mean,
        "decode_max": found.error.largest,
        "prefill_max": 0.0,
        "prefill_mean": 0.0,
    }
    if min(prefill) < 0:
        shape = [(n * m, n * m * m) for n, m in grid if n * m <= MAX_PREFILL_TOKENS]
        again = fit_prefill([(x, y, (a + b * x + c * y) / 1e3) for x, y in shape])
        prefill = again.lines[0]
        errors |= {"prefill_mean": again.error.mean, "prefill_max": again.error.largest}
    return prefill, found.lines, errors
