"""What traffic has been like lately, in a memory that does not grow: arrivals and lengths by buckets of time.

A bucket counts arrivals, prompts by length when they arrive, and (prompt, output) pairs when answers end, in bins of an
eighth of an octave (lengths are within 4.4 % of their bin's). Nothing of a single request is kept. Free of clocks: each
event brings its moment, in seconds of one monotonic clock, and only whole buckets are ever looked at.
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

from planner.terms import Job

PER_OCTAVE = 8
MAX_KINDS = 16  # kinds of request that are told apart; what comes after them counts as ""
BURSTS = (
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
)  # coefficients of variation of the times between arrivals that are told apart

Prompts = tuple[tuple[str, int, int], ...]  # (kind, bin of prompt length, count)
Pairs = tuple[tuple[str, int, int, int], ...]  # (kind, bin of prompt length, bin of output length, count)


def bin_of(tokens: int) -> int:
    return round(PER_OCTAVE * math.log2(tokens)) if tokens > 1 else 0


def length_of(number: float) -> float:
    return float(2 ** (number / PER_OCTAVE))


class Bucket(msgspec.Struct, frozen=True):
    """What came within `seconds` from `at_s` on. `judged` answers ended of which one knows whether they kept their
    objective, `good` of them did; `cached` of `read` prompt tokens of ended requests were in a prefix cache."""

    at_s: float
    seconds: float
    prompts: Prompts = ()
    pairs: Pairs = ()
    judged: int = 0
    good: int = 0
    read: int = 0
    cached: int = 0

    @property
    def arrivals(self) -> int:
        return sum(count for _, _, count in self.prompts)


class Traffic(msgspec.Struct, frozen=True):
    """Consecutive buckets, summed up. `dispersion` is the variance over mean of arrivals per bucket (Poisson: 1)."""

    at_s: float
    seconds: float
    prompts: Prompts = ()
    pairs: Pairs = ()
    judged: int = 0
    good: int = 0
    cached_share: float = 0.0
    dispersion: float = 1.0
    buckets: int = 0

    @property
    def arrivals(self) -> int:
        return sum(count for _, _, count in self.prompts)

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        return self.arrivals / self.seconds if self.seconds else 0.0

    @property
    def attainment(self) -> float:
        """Share of the judged answers that kept their objective; 1 where none was judged."""
        return self.good / self.judged if self.judged else 1.0

    @property
    def burst(self) -> float:
        """A coefficient of variation of the times between arrivals, one of `BURSTS`, that explains `dispersion`."""
        noise = 3 * math.sqrt(
            2 / max(self.buckets - 1, 1)
        )  # of a Poisson process' dispersion: three deviations
        if self.dispersion <= 1 + noise:
            return 1.0
        return min(BURSTS, key=lambda cv: abs(cv - math.sqrt(self.dispersion)))

    def kinds(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for kind, _, count in self.prompts:
            counts[kind] += count
        return counts

    def mix(self) -> Mix:
        """Lengths as they arrive: prompts of the arrivals, each with outputs of ended requests of about its length.

        Long answers end late: pairs alone would lag behind arrivals, and tell of what was before a change.
        """
        return mixed(self.prompts, self.pairs, self.cached_share)


class Mix(msgspec.Struct, frozen=True):
    """A joint distribution of prompt and output length per kind, as weights of pairs of bins."""

    weights: tuple[tuple[str, int, int, float], ...]
    cached_share: float = 0.0

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return self._mean(1)

    @property
    def output(self) -> float:
        """Mean tokens of an answer."""
        return self._mean(2)

    def _mean(self, place: int) -> float:
        total = sum(cell[3] for cell in self.weights)
        return sum(cell[3] * length_of(int(cell[place])) for cell in self.weights) / total if total else 0.0

    def jobs(self, count: int, rate: float, seed: int, cv: float = 1.0) -> list[Job]:
        """`count` resampled jobs that come at `rate` per second, with gamma times between them that vary by `cv`."""
        draw = random.Random(seed)
        sums = list(accumulate(cell[3] for cell in self.weights))
        shape, scale = 1 / cv**2, cv**2 / rate
        jobs, now_s = [], 0.0
        for _ in range(count):
            now_s += draw.expovariate(rate) if cv == 1 else draw.gammavariate(shape, scale)
            kind, prompt, output, _ = self.weights[bisect(sums, draw.random() * sums[-1], 0, len(sums) - 1)]
            jobs.append(Job(now_s, _within(prompt, draw), _within(output, draw), kind))
        return jobs


def _within(number: int, draw: random.Random) -> int:
    return max(1, round(length_of(number + draw.random() - 0.5)))


def mixed(prompts: Prompts, pairs: Pairs, cached_share: float = 0.0) -> Mix:
    """See `Traffic.mix`. Prompts of an octave of which none has ended take the nearest octave's outputs."""
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
    return Mix(
        tuple((*cell, float(weight)) for cell, weight in sorted(cells.items())), round(cached_share, 2)
    )


@dataclass(slots=True)
class _Open:
    """The bucket that is being filled."""

    prompts: Counter[tuple[str, int]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    judged: int = 0
    good: int = 0
    read: int = 0
    cached: int = 0


class Windows:
    """The buckets of the last `keep_s`, of `bucket_s` each."""

    def __init__(self, bucket_s: float = 10.0, keep_s: float = 3600.0, start_s: float = 0.0) -> None:
        self.bucket_s = bucket_s
        self._closed: deque[Bucket] = deque(maxlen=max(1, math.ceil(keep_s / bucket_s)))
        self._open = _Open()
        self._kinds: set[str] = set()
        self._begin_s, self._number = start_s, 0  # of the clock; how many buckets have been closed

    @property
    def closed_s(self) -> float:
        """Until when buckets are closed."""
        return self._begin_s + self._number * self.bucket_s

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None:
        """A request with `prompt` tokens came. Events that come late count as of now."""
        self._open.prompts[self._kind(kind), bin_of(prompt)] += 1

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None:
        """A request was answered. `good`: whether it kept its objective, None if that is not to be counted.

        `cached` of its prompt's tokens were not computed.
        """
        bucket = self._open
        bucket.pairs[self._kind(kind), bin_of(prompt), bin_of(output)] += 1
        bucket.judged += good is not None
        bucket.good += bool(good)
        bucket.read += prompt
        bucket.cached += min(cached, prompt)

    def _kind(self, kind: str) -> str:
        if kind not in self._kinds:
            if len(self._kinds) >= MAX_KINDS:
                return ""
            self._kinds.add(kind)
        return kind

    def close(self, now_s: float) -> list[Bucket]:
        """Close the buckets that have ended by `now_s`, also empty ones, and tell them."""
        fresh: list[Bucket] = []
        while self.closed_s + self.bucket_s <= now_s:
            if fresh and (left := int((now_s - self.closed_s) / self.bucket_s)) > (self._closed.maxlen or 0):
                self._number += left - (self._closed.maxlen or 0)  # nobody looked for very long
            fresh.append(self._freeze())
            self.absorb(fresh[-1])
        return fresh

    def absorb(self, bucket: Bucket) -> None:
        """Add a bucket that was closed here or, in a replay, elsewhere."""
        self._closed.append(bucket)
        self._number = round((bucket.at_s - self._begin_s) / self.bucket_s) + 1

    def _freeze(self) -> Bucket:
        full, self._open = self._open, _Open()
        prompts = tuple((*cell, count) for cell, count in sorted(full.prompts.items()))
        pairs = tuple((*cell, count) for cell, count in sorted(full.pairs.items()))
        rest = full.judged, full.good, full.read, full.cached
        return Bucket(self.closed_s, self.bucket_s, prompts, pairs, *rest)

    def buckets(self, start_s: float, end_s: float) -> list[Bucket]:
        """Closed buckets that lie between two moments, the latest first."""
        slack = self.bucket_s * 1e-6
        found = []
        for bucket in reversed(self._closed):
            if bucket.at_s < start_s - slack:
                break
            if bucket.at_s + bucket.seconds <= end_s + slack:
                found.append(bucket)
        return found

    def traffic(self, start_s: float, end_s: float) -> Traffic:
        return summed(self.buckets(start_s, end_s))


def summed(buckets: Sequence[Bucket]) -> Traffic:
    """Buckets as one; of none, traffic of no seconds."""
    prompts: Counter[tuple[str, int]] = Counter()
    pairs: Counter[tuple[str, int, int]] = Counter()
    for bucket in buckets:
        for kind, prompt, count in bucket.prompts:
            prompts[kind, prompt] += count
        for kind, prompt, output, count in bucket.pairs:
            pairs[kind, prompt, output] += count
    read = sum(bucket.read for bucket in buckets)
    return Traffic(
        at_s=min((bucket.at_s for bucket in buckets), default=0.0),
        seconds=sum(bucket.seconds for bucket in buckets),
        prompts=tuple((*cell, count) for cell, count in sorted(prompts.items())),
        pairs=tuple((*cell, count) for cell, count in sorted(pairs.items())),
        judged=sum(bucket.judged for bucket in buckets),
        good=sum(bucket.good for bucket in buckets),
        cached_share=sum(bucket.cached for bucket in buckets) / read if read else 0.0,
        dispersion=dispersion([bucket.arrivals for bucket in buckets]),
        buckets=len(buckets),
    )


def dispersion(counts: Iterable[int]) -> float:
    """Variance over mean; 1, as of a Poisson process, where there is too little to tell.

    The variance is that of neighbours (half their mean squared difference, von Neumann 1941): a rate that rises or
    falls over the whole is no burst.
    """
    numbers = list(counts)
    mean = fmean(numbers) if numbers else 0.0
    if not mean or len(numbers) < 3:
        return 1.0
    return fmean((after - before) ** 2 for before, after in pairwise(numbers)) / 2 / mean
