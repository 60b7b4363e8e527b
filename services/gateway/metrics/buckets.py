"""Bucket bounds of the histograms, in milliseconds, tokens or counts."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

# fmt: off
TTFT_BUCKETS_MS = (
    1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 250, 300, 400, 500, 750, 1e3, 2.5e3, 5e3, 7.5e3, 1e4, 2e4,
    4e4, 8e4, 1.6e5, 6.4e5,
)
ITL_BUCKETS_MS = (
    1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 25, 30, 40, 50, 60, 75, 100, 150, 200, 300, 400, 500, 750, 1e3, 2.5e3,
    5e3, 7.5e3, 1e4, 2e4, 4e4, 8e4,
)
REQUEST_BUCKETS_MS = (
    5, 10, 20, 50, 100, 200, 300, 500, 800, 1e3, 1.5e3, 2e3, 2.5e3, 5e3, 1e4, 1.5e4, 2e4, 3e4, 4e4, 5e4,
    6e4, 1.2e5, 2.4e5, 4.8e5, 9.6e5, 1.92e6, 7.68e6,
)
LAG_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 150, 200, 250, 500, 1000, 2000, 5000)
STAGE_BUCKETS_MS = (.05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 6e4, 6e5)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
# fmt: on
COUNT_BUCKETS = (1, 2, 3, 5, 8, 10, 20, 50, 100, 128)


def bucket_bounds_s(milliseconds: Iterable[float], *bounds_s: float | None) -> list[float]:
    """Sorted bucket bounds in seconds: `milliseconds` converted, and each of `bounds_s` that is not None."""
    merged = [bound / 1000 for bound in milliseconds]
    for bound in bounds_s:
        if bound is not None and bound not in merged:
            insort(merged, bound)
    return merged
