"""Goodput: the largest request rate at which the SLOs are still met (DistServe section 4.1), and how sure that is.

Bisection between a rate that meets them and one that does not, on whole multiples of the width asked for. So the result
does not depend on the highest rate allowed, once that is above it. A figure comes with the number of requests, how many
were cut as warm-up, and how it varies over seeds, since short runs look better than long ones. The runs themselves are
made by `services.bench.rate_search`; `planner.placement.search` has the planner's own ladder of rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diptych.errors import ConfigError

# Two-sided 95 % points of Student's t by degrees of freedom. For more degrees of freedom the normal distribution is
# used.
STUDENT_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)


@dataclass(frozen=True, slots=True)
class RateBracket:
    """`rate` = `low` is the highest tried that attains, `high` the lowest that does not (inf: none up to the highest).

    `tried` are (rate, attained) in the order of trying. 0.0 was never tried and counts as attained.
    """

    rate: float
    low: float
    high: float
    tried: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class GoodputEstimate:
    """Mean of the seeds' rates, with a 95 % interval of it (the whole line for one seed), and what it rests on."""

    rate: float
    interval: tuple[float, float]
    n: int
    warmup: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    found: tuple[RateBracket, ...] = field(repr=False, default=())


def find_rate(attains: Callable[[float], float], target: float, width: float, highest: float) -> RateBracket:
    """The highest multiple of `width`, up to `highest`, at which `attains(rate)` is at least `target`.

    Rates are requests per second. Doubles from `width` until it fails, then bisects: about 2 log2(rate / width) runs.
    A rate above one that failed is never tried again, so the bracket only narrows, although runs are noisy.

    Raises:
        ConfigError: not 0 < `width` <= `highest` < infinity.
    """
    if not 0.0 < width <= highest < math.inf:
        raise ConfigError(
            "no rate can be searched", f"width {width}, highest {highest}", "give 0 < width <= highest"
        )
    tried: list[tuple[float, float]] = []

    def good(step: int) -> bool:
        tried.append((step * width, attains(step * width)))
        return tried[-1][1] >= target

    most = math.floor(highest / width * (1.0 + 1e-12))
    low, high = 0, 1
    while good(high):
        low = high
        if low == most:
            return RateBracket(low * width, low * width, math.inf, tuple(tried))
        high = min(2 * low, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return RateBracket(low * width, low * width, high * width, tuple(tried))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean, by Student's t; (-inf, inf) of one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    t = STUDENT_T[len(values) - 2] if len(values) - 2 < len(STUDENT_T) else 1.96
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    middle = statistics.fmean(values)
    return middle - half, middle + half
