"""Forecasts the arrival rate some minutes ahead: the recent level, plus its trend where that exceeds the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from planner.replan.traffic_windows import TrafficBucket, arrival_dispersion

# A trend counts only if it exceeds this many standard errors.
CLEAR_SLOPE = 2.5
# Share of the trend that is extrapolated, since no rise lasts for ever.
SLOPE_DAMPING = 0.5


class RateForecast(msgspec.Struct, frozen=True):
    """The rate now (`level`, requests/s), its trend (`slope`, requests/s²), and the standard error of the level."""

    level: float
    slope: float
    error: float

    def rate(self, lead_s: float) -> float:
        """The forecast in `lead_s` seconds, one standard error higher for safety. A falling trend is ignored."""
        return max(self.level + SLOPE_DAMPING * max(self.slope, 0.0) * lead_s + self.error, 0.0)


def forecast_rate(buckets: Sequence[TrafficBucket], lead_s: float) -> RateForecast:
    """Fits a line to the counts of consecutive buckets (latest first) by least squares; one bucket gives a level.

    The slope is 0 unless it is significant and was observed for longer than `lead_s`, the time to extrapolate.
    """
    counts = [bucket.arrivals for bucket in buckets]
    if not counts:
        return RateForecast(0.0, 0.0, 0.0)
    seconds, number = buckets[0].seconds, len(counts)
    mean = sum(counts) / number
    # Standard deviation of one bucket's count.
    noise = math.sqrt(max(arrival_dispersion(counts), 1.0) * max(mean, 0.5))
    flat = RateForecast(mean / seconds, 0.0, noise / math.sqrt(number) / seconds)
    if number < 6 or number * seconds <= lead_s:
        return flat
    middle = (number - 1) / 2
    squares = number * (number * number - 1) / 12
    # Change of the count from one bucket to the next.
    slope = sum((middle - at) * count for at, count in enumerate(counts)) / squares
    rest = math.sqrt(
        sum((c - mean - slope * (middle - at)) ** 2 for at, c in enumerate(counts)) / (number - 2)
    )
    noise = max(rest, math.sqrt(max(mean, 0.5)))
    if abs(slope) < CLEAR_SLOPE * noise / math.sqrt(squares):
        return flat
    error = noise * math.sqrt(1 / number + middle**2 / squares)
    return RateForecast(max(mean + slope * middle, 0.0) / seconds, slope / seconds**2, error / seconds)
