"""Keeps statistics of recent traffic in bounded memory: arrivals and lengths, summed up in buckets of time.

A bucket counts arrivals, prompt lengths (when requests arrive) and (prompt, output) pairs (when answers end). Lengths
are put into bins of 1/8 octave, so a bin's centre is within 4.4 % of each length. No single request is kept. This
module reads no clock: each event carries its time, in seconds of one monotonic clock. Only closed buckets are used.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean

import msgspec

from planner.types import Job

# Number of length bins per factor of 2.
PER_OCTAVE = 8
# Most kinds of request that are distinguished. Further kinds are counted as "".
MAX_KINDS = 16
# Coefficients of variation of inter-arrival times that are distinguished.
BURST_LEVELS = (
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
)

PromptCounts = tuple[tuple[str, int, int], ...]  # (kind, bin of prompt length, count)
# (kind, bin of prompt length, bin of output length, count).
LengthPairCounts = tuple[tuple[str, int, int, int], ...]


def bin_of(tokens: int) -> int:
    """The number of the length bin that `tokens` falls into."""
    return round(PER_OCTAVE * math.log2(tokens)) if tokens > 1 else 0


def length_of(number: float) -> float:
    """The length in tokens at the centre of bin `number`; the inverse of `bin_of`."""
    return float(2 ** (number / PER_OCTAVE))


class TrafficBucket(msgspec.Struct, frozen=True):
    """The traffic of one time bucket: `seconds` from `at_s` on.

    `checked` counts ended requests with SLOs, `good` those of them that met the SLOs. Of the `read` prompt tokens of
    ended requests, `cached` were found in a prefix cache.
    """

    at_s: float
    seconds: float
    prompts: PromptCounts = ()
    pairs: LengthPairCounts = ()
    checked: int = msgspec.field(name="judged", default=0)
    good: int = 0
    read: int = 0
    cached: int = 0

    @property
    def arrivals(self) -> int:
        """Number of requests that arrived."""
        return sum(count for _, _, count in self.prompts)


class TrafficSummary(msgspec.Struct, frozen=True):
    """The sum of consecutive buckets. `dispersion` is variance / mean of arrivals per bucket (Poisson: 1)."""

    at_s: float
    seconds: float
    prompts: PromptCounts = ()
    pairs: LengthPairCounts = ()
    checked: int = msgspec.field(name="judged", default=0)
    good: int = 0
    cached_share: float = 0.0
    dispersion: float = 1.0
    buckets: int = 0

    @property
    def arrivals(self) -> int:
        """Number of requests that arrived."""
        return sum(count for _, _, count in self.prompts)

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        return self.arrivals / self.seconds if self.seconds else 0.0

    @property
    def attainment(self) -> float:
        """Share of ended requests with SLOs that met them; 1 if there were none."""
        return self.good / self.checked if self.checked else 1.0

    @property
    def burst(self) -> float:
        """The level of `BURST_LEVELS` that matches `dispersion`: a coefficient of variation of inter-arrival times."""
        # Three standard deviations of a Poisson process' dispersion.
        noise = 3 * math.sqrt(2 / max(self.buckets - 1, 1))
        if self.dispersion <= 1 + noise:
            return 1.0
        return min(BURST_LEVELS, key=lambda cv: abs(cv - math.sqrt(self.dispersion)))

    def kinds(self) -> Counter[str]:
        """Number of arrivals by kind of request."""
        counts: Counter[str] = Counter()
        for kind, _, count in self.prompts:
            counts[kind] += count
        return counts

    def mix(self) -> LengthMix:
        """The distribution of lengths: prompts of arrivals, with outputs of ended requests of similar prompt length.

        Pairs of ended requests alone would lag behind arrivals, since long answers end late.
        """
        return mix_lengths(self.prompts, self.pairs, self.cached_share)


class LengthMix(msgspec.Struct, frozen=True):
    """A joint distribution of prompt and output length per kind, as (kind, prompt bin, output bin, weight)."""

    weights: tuple[tuple[str, int, int, float], ...]
    cached_share: float = 0.0

    @property
    def prompt(self) -> float:
        """Mean prompt length in tokens."""
        return self._mean(1)

    @property
    def output(self) -> float:
        """Mean output length in tokens."""
        return self._mean(2)

    def _mean(self, place: int) -> float:
        total = sum(cell[3] for cell in self.weights)
        return sum(cell[3] * length_of(int(cell[place])) for cell in self.weights) / total if total else 0.0

    def jobs(self, count: int, rate: float, seed: int, cv: float = 1.0) -> list[Job]:
        """Draws `count` jobs at `rate` per second; inter-arrival times are gamma-distributed with variation `cv`."""
        draw = random.Random(seed)
        sums = list(accumulate(cell[3] for cell in self.weights))
        shape, scale = 1 / cv**2, cv**2 / rate
        jobs, now_s = [], 0.0
        for _ in range(count):
            now_s += draw.expovariate(rate) if cv == 1 else draw.gammavariate(shape, scale)
            kind, prompt, output, _ = self.weights[bisect(sums, draw.random() * sums[-1], 0, len(sums) - 1)]
            jobs.append(Job(now_s, _length_within(prompt, draw), _length_within(output, draw), kind))
        return jobs


def _length_within(number: int, draw: random.Random) -> int:
    """A random length in tokens within length bin `number`."""
    return max(1, round(length_of(number + draw.random() - 0.5)))


def mix_lengths(prompts: PromptCounts, pairs: LengthPairCounts, cached_share: float = 0.0) -> LengthMix:
    """Combines prompt lengths of arrivals with output lengths of ended requests; see `TrafficSummary.mix`.

    Prompts are matched by octave of their length; if no request of an octave has ended, the nearest octave is used.
    """
    outputs: dict[tuple[str, int], Counter[int]] = {}
    for kind, prompt, output, count in pairs:
        outputs.setdefault((kind, prompt // PER_OCTAVE), Counter())[output] += count
    cells: Counter[tuple[str, int, int]] = Counter()
    for kind, prompt, count in prompts:
        if not outputs:
            break
        place = kind, prompt // PER_OCTAVE
        near = min(outputs, key=lambda other: (other[0] != place[0], abs(other[1] - place[1]), other))
        whole = outputs[near].total()
        for output, ended in outputs[near].items():
            cells[kind, prompt, output] += count * ended / whole  # type: ignore[assignment]  # a Counter of floats
    return LengthMix(
        tuple((*cell, float(weight)) for cell, weight in sorted(cells.items())), round(cached_share, 2)
    )


@dataclass(slots=True)
class _OpenBucket:
    """The counts of the bucket that is being filled."""

    prompts: Counter[tuple[str, int]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    checked: int = 0
    good: int = 0
    read: int = 0
    cached: int = 0


class TrafficWindows:
    """The closed buckets of the last `keep_s` seconds, of `bucket_s` seconds each, and the bucket being filled."""

    def __init__(self, bucket_s: float = 10.0, keep_s: float = 3600.0, start_s: float = 0.0) -> None:
        self.bucket_s = bucket_s
        self._closed: deque[TrafficBucket] = deque(maxlen=max(1, math.ceil(keep_s / bucket_s)))
        self._open = _OpenBucket()
        self._kinds: set[str] = set()
        # The start of the first bucket, and the number of closed buckets.
        self._begin_s, self._number = start_s, 0

    @property
    def closed_s(self) -> float:
        """The end of the latest closed bucket, in seconds."""
        return self._begin_s + self._number * self.bucket_s

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None:
        """Counts a request with `prompt` tokens. An event that is reported late counts for the open bucket."""
        self._open.prompts[self._known_kind(kind), bin_of(prompt)] += 1

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None:
        """Counts a request that has ended.

        `good` says whether it met its SLOs (None: it has none). `cached` of its prompt tokens came from a prefix cache.
        """
        bucket = self._open
        bucket.pairs[self._known_kind(kind), bin_of(prompt), bin_of(output)] += 1
        bucket.checked += good is not None
        bucket.good += bool(good)
        bucket.read += prompt
        bucket.cached += min(cached, prompt)

    def _known_kind(self, kind: str) -> str:
        """The kind itself, or "" if too many kinds are known already."""
        if kind not in self._kinds:
            if len(self._kinds) >= MAX_KINDS:
                return ""
            self._kinds.add(kind)
        return kind

    def close(self, now_s: float) -> list[TrafficBucket]:
        """Closes the buckets that have ended by `now_s`, including empty ones, and returns them."""
        fresh: list[TrafficBucket] = []
        while self.closed_s + self.bucket_s <= now_s:
            if fresh and (left := int((now_s - self.closed_s) / self.bucket_s)) > (self._closed.maxlen or 0):
                # The caller was away for very long. Buckets are skipped that would be dropped again at once.
                self._number += left - (self._closed.maxlen or 0)
            fresh.append(self._freeze_bucket())
            self.absorb_bucket(fresh[-1])
        return fresh

    def absorb_bucket(self, bucket: TrafficBucket) -> None:
        """Adds a closed bucket: one of this object or, in a replay, one from the journal."""
        self._closed.append(bucket)
        self._number = round((bucket.at_s - self._begin_s) / self.bucket_s) + 1

    def _freeze_bucket(self) -> TrafficBucket:
        """The open bucket as an immutable one; a new bucket is opened."""
        full, self._open = self._open, _OpenBucket()
        prompts = tuple((*cell, count) for cell, count in sorted(full.prompts.items()))
        pairs = tuple((*cell, count) for cell, count in sorted(full.pairs.items()))
        rest = full.checked, full.good, full.read, full.cached
        return TrafficBucket(self.closed_s, self.bucket_s, prompts, pairs, *rest)

    def buckets(self, start_s: float, end_s: float) -> list[TrafficBucket]:
        """Closed buckets that lie within [start_s, end_s], latest first."""
        slack = self.bucket_s * 1e-6
        found = []
        for bucket in reversed(self._closed):
            if bucket.at_s < start_s - slack:
                break
            if bucket.at_s + bucket.seconds <= end_s + slack:
                found.append(bucket)
        return found

    def traffic(self, start_s: float, end_s: float) -> TrafficSummary:
        """The sum of the closed buckets within [start_s, end_s]."""
        return sum_buckets(self.buckets(start_s, end_s))


def sum_buckets(buckets: Sequence[TrafficBucket]) -> TrafficSummary:
    """Sums up buckets; no buckets give a summary of 0 seconds."""
    prompts: Counter[tuple[str, int]] = Counter()
    pairs: Counter[tuple[str, int, int]] = Counter()
    for bucket in buckets:
        for kind, prompt, count in bucket.prompts:
            prompts[kind, prompt] += count
        for kind, prompt, output, count in bucket.pairs:
            pairs[kind, prompt, output] += count
    read = sum(bucket.read for bucket in buckets)
    return TrafficSummary(
        at_s=min((bucket.at_s for bucket in buckets), default=0.0),
        seconds=sum(bucket.seconds for bucket in buckets),
        prompts=tuple((*cell, count) for cell, count in sorted(prompts.items())),
        pairs=tuple((*cell, count) for cell, count in sorted(pairs.items())),
        checked=sum(bucket.checked for bucket in buckets),
        good=sum(bucket.good for bucket in buckets),
        cached_share=sum(bucket.cached for bucket in buckets) / read if read else 0.0,
        dispersion=arrival_dispersion([bucket.arrivals for bucket in buckets]),
        buckets=len(buckets),
    )


def arrival_dispersion(counts: Iterable[int]) -> float:
    """Variance / mean of the counts; 1, as for a Poisson process, if there are too few counts to estimate it.

    The variance is estimated from neighbours (half their mean squared difference, von Neumann 1941), so that a rate
    that rises or falls steadily does not count as bursty.
    """
    numbers = list(counts)
    mean = fmean(numbers) if numbers else 0.0
    if not mean or len(numbers) < 3:
        return 1.0
    return fmean((after - before) ** 2 for before, after in pairwise(numbers)) / 2 / mean
