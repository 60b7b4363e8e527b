"""DistServe's fitted coefficients as monotone costs.

The artefact has two decode lines, one for batches below 95 rows and one above, and jumps where they meet; one of its
prefill fits has a negative square. Here both are fitted again, on the artefact's own measuring grid, as lines that
cannot fall; the difference is told as the error. (`planner.simdistserve` uses the coefficients as they are.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.cost import Line, StepCost
from planner.fit import fit_decode, fit_prefill
from planner.terms import Cost, Split

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192)
LENGTHS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 284, 512, 768, 1024, 1536, 2020)
LIMIT = 60_000  # tokens of one measured batch: about what the A100 had room for
PREFILL_LIMIT = 16_384


def costs_of(table: Mapping[str, Any]) -> tuple[dict[Split, Cost], dict[str, float]]:
    """`tp -> {prefill, decoding_smallbs, decoding_largebs, decoding_large_small_bs_threshold}` in ms, as costs in s.

    Returns the costs by split, and their largest and mean relative difference from the artefact on its grid.

    Raises:
        KeyError: a key of that layout is missing.
    """
    costs: dict[Split, Cost] = {}
    worst: dict[str, float] = {}
    for tp, fits in table.items():
        prefill, decode, errors = _monotone(fits)
        costs[Split(int(tp))] = StepCost(prefill, decode)
        worst = {name: max(worst.get(name, 0.0), error) for name, error in errors.items()}
    return costs, worst


def artefact_decode_s(fits: Mapping[str, Any], context: float, rows: float) -> float:
    """Seconds of a decode step as the artefact has it, cliff and all."""
    small = rows < fits["decoding_large_small_bs_threshold"]
    a, b, c = fits["decoding_smallbs" if small else "decoding_largebs"]
    return float(a + b * context + c * rows) / 1e3


def _monotone(fits: Mapping[str, Any]) -> tuple[Line, tuple[Line, ...], dict[str, float]]:
    grid = [(batch, length) for batch in BATCHES for length in LENGTHS if batch * length <= LIMIT]
    points = [(n * length, float(n), artefact_decode_s(fits, n * length, n)) for n, length in grid]
    found = fit_decode(points)
    a, b, c = fits["prefill"]
    prefill: Line = (a / 1e3, b / 1e3, c / 1e3)
    errors = {
        "decode_mean": found.error.mean,
        "decode_max": found.error.largest,
        "prefill_max": 0.0,
        "prefill_mean": 0.0,
    }
    if min(prefill) < 0:
        shape = [(n * m, n * m * m) for n, m in grid if n * m <= PREFILL_LIMIT]
        again = fit_prefill([(x, y, (a + b * x + c * y) / 1e3) for x, y in shape])
        prefill = again.lines[0]
        errors |= {"prefill_mean": again.error.mean, "prefill_max": again.error.largest}
    return prefill, found.lines, errors
