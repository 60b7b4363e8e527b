"""The largest rate at which the promises are still kept (DistServe section 4.1), with its horizon and its doubt.

Bisection between a rate that keeps them and one that does not, on whole multiples of the width asked for: what is
found does not depend on the highest rate allowed, once that is above it. A figure carries how many requests, which were
cut as warm-up, and how it varies over seeds, since short runs promise more than long ones keep.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from diptych.errors import ConfigError
from planner.tally import Slos, slo_of
from planner.terms import Served

Run = Callable[[float, int], Iterable[Served]]  # (rate, seed): how `n` requests at that rate fared

# Two-sided 95 % points of Student's t, by degrees of freedom; normal beyond.
STUDENT = (
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
class Found:
    """`rate` = `low` is the highest tried that attains, `high` the lowest that does not (inf: none up to the highest).

    `tried` are (rate, attained) in the order of trying. 0.0 was never tried and keeps every promise.
    """

    rate: float
    low: float
    high: float
    tried: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Goodput:
    """Mean of the seeds' rates, with a 95 % interval of it (the whole line for one seed), and what it rests on."""

    rate: float
    interval: tuple[float, float]
    n: int
    warmup: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    found: tuple[Found, ...] = field(repr=False, default=())


def find_rate(attains: Callable[[float], float], target: float, width: float, highest: float) -> Found:
    """The highest multiple of `width`, up to `highest`, at which `attains(rate)` is at least `target`.

    Doubles from `width` until it fails, then bisects: about 2 log2(rate / width) runs. A rate above one that failed is
    never tried again, so the bracket only narrows, though runs are noisy.
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
            return Found(low * width, low * width, math.inf, tuple(tried))
        high = min(2 * low, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return Found(low * width, low * width, high * width, tuple(tried))


def margin(served: Iterable[Served], slos: Slos, n: int, after_s: float = 0.0) -> float:
    """Attainment above (or below) its target, of the kind that is worst off; of requests that came after `after_s`.

    Stops reading once so many of `n` have missed that no kind's target can be met: then an upper bound, below 0.
    nan-free: where nothing was served, nothing was kept, which is -1.
    """
    counts: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    for one in served:
        if one.job.at_s < after_s:
            continue
        kind = one.job.kind
        slo = slo_of(slos, kind)
        counts[kind] += 1
        if not one.attains(slo):
            misses[kind] += 1
            if misses[kind] > (1.0 - slo.attainment) * n + 1e-9:
                return 1.0 - misses[kind] / n - slo.attainment
    return min(
        (1.0 - misses[kind] / counts[kind] - slo_of(slos, kind).attainment for kind in counts), default=-1.0
    )


def goodput(
    run: Run,
    slos: Slos,
    seeds: Sequence[int],
    n: int,
    warmup: int = 0,
    *,
    width: float,
    highest: float,
) -> Goodput:
    """Goodput over seeds: each kind attains its own target.

    Args:
        run: gives how `n` requests fared at (rate, seed); may be lazy: a hopeless run is not read to its end.
        warmup: requests cut at the begin: those of the first warmup / rate seconds.
        width, highest: requests a second, as in `find_rate`.
    """
    if not seeds or not 0 <= warmup < n:
        why = f"{len(seeds)} seeds, {warmup} of {n} requests as warm-up"
        raise ConfigError(
            "a goodput cannot be found", why, "give at least one seed, and fewer warm-up requests than n"
        )
    found = []
    for seed in seeds:

        def attains(rate: float, seed: int = seed) -> float:
            return margin(run(rate, seed), slos, n, warmup / rate)

        found.append(find_rate(attains, -1e-12, width, highest))
    rates = [one.rate for one in found]
    return Goodput(
        statistics.fmean(rates), spread(rates), n, warmup, tuple(seeds), tuple(rates), tuple(found)
    )


def spread(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean, by Student's t; (-inf, inf) of one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    t = STUDENT[len(values) - 2] if len(values) - 2 < len(STUDENT) else 1.96
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    middle = statistics.fmean(values)
    return middle - half, middle + half
