"""The rate of arrivals some minutes from now: the level of late, and its slope where that is more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from planner.windows import Bucket, dispersion

CLEAR = 2.5  # standard errors from which on a slope is believed
DAMPED = 0.5  # share of it that is followed: what rises now does not rise for ever


class Outlook(msgspec.Struct, frozen=True):
    """`level` now and `slope` in requests per second (squared); `error` is the standard error of the level."""

    level: float
    slope: float
    error: float

    def rate(self, lead_s: float) -> float:
        """In `lead_s`, one standard error to the safe side. A fall is not counted on before it has come."""
        return max(self.level + DAMPED * max(self.slope, 0.0) * lead_s + self.error, 0.0)


def outlook(buckets: Sequence[Bucket], lead_s: float) -> Outlook:
    """A least-squares line through the counts of consecutive buckets, the latest first; one is enough for a level.

    There is a slope only if it is clear, and seen for longer than it is to be followed, `lead_s`.
    """
    counts = [bucket.arrivals for bucket in buckets]
    if not counts:
        return Outlook(0.0, 0.0, 0.0)
    seconds, number = buckets[0].seconds, len(counts)
    mean = sum(counts) / number
    noise = math.sqrt(max(dispersion(counts), 1.0) * max(mean, 0.5))  # of one bucket's count
    flat = Outlook(mean / seconds, 0.0, noise / math.sqrt(number) / seconds)
    if number < 6 or number * seconds <= lead_s:
        return flat
    middle = (number - 1) / 2
    squares = number * (number * number - 1) / 12
    slope = sum((middle - at) * count for at, count in enumerate(counts)) / squares  # count per bucket
    rest = math.sqrt(
        sum((c - mean - slope * (middle - at)) ** 2 for at, c in enumerate(counts)) / (number - 2)
    )
    noise = max(rest, math.sqrt(max(mean, 0.5)))
    if abs(slope) < CLEAR * noise / math.sqrt(squares):
        return flat
    error = noise * math.sqrt(1 / number + middle**2 / squares)
    return Outlook(max(mean + slope * middle, 0.0) / seconds, slope / seconds**2, error / seconds)
