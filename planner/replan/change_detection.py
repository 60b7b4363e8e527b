"""Detects changes of traffic by two-sample tests of recent arrivals against the traffic that the plan was made for.

Whenever a time bucket closes, recent windows of several lengths are compared with a reference: the first buckets after
the last change. The reference stays fixed from then on, so that slow drift is detected too. Rates are compared with the
Chernoff bound of the binomial distribution, widened by the burstiness of arrivals. Lengths of prompts and answers are
compared with the bound of Dvoretzky, Kiefer, Wolfowitz and Massart (for two samples: Wei and Dudley 2012). Both bounds
hold for any sample size. The false-alarm probabilities of all tests of a day therefore add up to at most the allowed
number of false alarms, although windows overlap and samples may be small. A change that is statistically certain but
too small to matter raises no alarm.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import msgspec

from planner.replan.traffic_windows import (
    TrafficBucket,
    TrafficSummary,
    TrafficWindows,
    length_of,
)

DAY_S = 86_400.0
# Lengths of the recent windows, in units of the policy's window. Short ones detect large changes soon, long ones detect
# small changes.
WINDOW_SIZES = (
    1 / 16,
    1 / 8,
    1 / 4,
    1 / 2,
    1,
    2,
    4,
)
# Length of the reference, in units of the policy's window.
REFERENCE_WINDOWS = 4
# Number of tests per window: the rate of all requests, the rate of one kind (several kinds share its significance
# level), prompt lengths, and answer lengths.
NUM_TESTS = 4
# Smaller changes are ignored: of the rate relative to the rate before, and of lengths by the largest difference of
# the two distribution functions.
MIN_RATE_CHANGE, MIN_LENGTH_CHANGE = (
    0.15,
    0.2,
)


class TrafficShift(msgspec.Struct, frozen=True):
    """A detected change of traffic, which began at about `since_s`.

    `before` and `after` are mean requests per second, or mean tokens per prompt or output.

    `strength` is the test's statistic over its bound (1: just significant at its level).
    """

    # What has changed: "rate", "prompt" or "output".
    what: str
    kind: str
    at_s: float
    since_s: float
    before: float
    after: float
    strength: float

    def __str__(self) -> str:
        name = f"{self.what} of {self.kind!r}" if self.kind else self.what
        return f"{name} {self.before:.3g} → {self.after:.3g} since {self.at_s - self.since_s:.0f} s"


class BucketSums:
    """Sums of arrivals and lengths over a set of buckets, kept up to date as buckets are added and removed."""

    def __init__(self, buckets: Iterable[TrafficBucket] = ()) -> None:
        # Number of prompts by bin of length.
        self.prompts: Counter[int] = Counter()
        self.outputs: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.seconds, self.arrivals, self._squares, self.buckets = 0.0, 0, 0, 0
        for bucket in buckets:
            self.add(bucket)

    def add(self, bucket: TrafficBucket, times: int = 1) -> None:
        """Adds a bucket `times` times; -1 removes it again."""
        arrivals = 0
        for kind, prompt, count in bucket.prompts:
            self.prompts[prompt] += times * count
            self.kinds[kind] += times * count
            arrivals += count
        for _, _, output, count in bucket.pairs:
            self.outputs[output] += times * count
        self.seconds += times * bucket.seconds
        self.arrivals += times * arrivals
        self._squares += times * arrivals * arrivals
        self.buckets += times

    @property
    def spread(self) -> float:
        """How much bucket counts vary compared with a Poisson process: 1, unless clearly more, then with a margin."""
        mean = self.arrivals / self.buckets if self.buckets else 0.0
        if not mean or self.buckets < 3:
            return 1.0
        found = (self._squares / self.buckets - mean * mean) / mean
        # Standard error of the estimate for a Poisson process.
        error = math.sqrt(2 / (self.buckets - 1))
        return 1.0 if found <= 1 + 3 * error else found * (1 + 2 * error)


class _SlidingWindow:
    """One recent window: sums of its buckets (`after`), and of the reference (`before`).

    `settled` is the part of the reference whose answer lengths count: at first, only short answers have ended.
    """

    def __init__(self, buckets: int) -> None:
        self._latest_buckets: deque[TrafficBucket] = deque()
        self._most = buckets
        self.after, self.before, self.settled = BucketSums(), BucketSums(), BucketSums()

    @property
    def begin_s(self) -> float:
        return self._latest_buckets[0].at_s

    def push_bucket(self, bucket: TrafficBucket, span: tuple[float, float, float]) -> None:
        """Adds a closed bucket. The bucket that leaves the window may become part of the reference."""
        self._latest_buckets.append(bucket)
        self.after.add(bucket)
        if len(self._latest_buckets) > self._most:
            old = self._latest_buckets.popleft()
            self.after.add(old, -1)
            self._extend_reference(old, *span)

    def anchor(self, older_buckets: Sequence[TrafficBucket], span: tuple[float, float, float]) -> None:
        """Starts a new reference from those of the given older buckets that precede the window."""
        self.before, self.settled = BucketSums(), BucketSums()
        for bucket in older_buckets:
            if self._latest_buckets and bucket.at_s < self.begin_s:
                self._extend_reference(bucket, *span)

    def _extend_reference(
        self, bucket: TrafficBucket, since_s: float, settled_s: float, last_s: float
    ) -> None:
        """Adds a bucket to the reference if its middle lies within the reference's time."""
        middle_s = bucket.at_s + bucket.seconds / 2
        if since_s < middle_s < last_s:
            self.before.add(bucket)
            if settled_s < middle_s:
                self.settled.add(bucket)


class ChangeDetector:
    """Compares windows of recent traffic with a reference that starts at the last `anchor`."""

    def __init__(self, window_s: float, bucket_s: float, false_alarms_per_day: float, start_s: float) -> None:
        self._window_s, self.since_s = window_s, start_s
        sizes = sorted({max(1, round(window_s * part / bucket_s)) for part in WINDOW_SIZES})
        self._recent = [_SlidingWindow(size) for size in sizes]
        self._level = false_alarms_per_day / (DAY_S / bucket_s * len(sizes) * NUM_TESTS)

    def anchor(self, since_s: float, windows: TrafficWindows) -> None:
        """Starts a new reference at `since_s`, from the buckets that `windows` still holds, and later ones."""
        self.since_s = since_s
        older_buckets = windows.buckets(since_s, windows.closed_s)
        for window in self._recent:
            window.anchor(older_buckets, self._span())

    def _span(self) -> tuple[float, float, float]:
        """The reference's time: its start, the time from which answer lengths count in it, and its end."""
        # Answers count only from this time on, since those that end first are the short ones.
        settled_s = self.since_s + self._window_s / 4
        return self.since_s, settled_s, self.since_s + REFERENCE_WINDOWS * self._window_s

    def check_buckets(self, buckets: Iterable[TrafficBucket]) -> TrafficShift | None:
        """Adds closed buckets (each once, in order) and returns the most significant change, or None."""
        last_bucket: TrafficBucket | None = None
        for bucket in buckets:
            last_bucket = bucket
            for window in self._recent:
                window.push_bucket(bucket, self._span())
        if last_bucket is None:
            return None
        now_s, shifts = last_bucket.at_s + last_bucket.seconds, list[TrafficShift]()
        for window in self._recent:
            if window.before.seconds < self._window_s / 2 - last_bucket.seconds / 2:
                # The reference is still too short for this window, and so for the longer windows that follow.
                break
            found = chain(
                rate_changes(window.before, window.after, self._level),
                length_changes(window.settled, window.after, self._level),
            )
            for what, kind, was, now, strength in found:
                shifts.append(TrafficShift(what, kind, now_s, window.begin_s, was, now, strength))
        return max(shifts, key=lambda shift: (shift.strength, shift.since_s), default=None)


# (what changed: "rate", "prompt" or "output"; kind of request; mean before; mean after; strength of the evidence).
FoundChange = tuple[str, str, float, float, float]


def rate_changes(before: BucketSums, after: BucketSums, level: float) -> Iterator[FoundChange]:
    """Yields changes of the rate of all requests, and of the rate of each kind; each test group at level `level`."""
    if not before.seconds or not after.seconds:
        return
    kinds = sorted(kind for kind in {*before.kinds, *after.kinds} if before.kinds[kind] or after.kinds[kind])
    counts = [("", before.arrivals, after.arrivals, level)]
    if len(kinds) > 1:
        counts += [(kind, before.kinds[kind], after.kinds[kind], level / len(kinds)) for kind in kinds]
    for kind, first, second, its_level in counts:
        was, now = first / before.seconds, second / after.seconds
        if max(was, now) <= (1 + MIN_RATE_CHANGE) * min(was, now):
            continue
        evidence = poisson_surprise(first, before.seconds, second, after.seconds) / before.spread
        if (strength := evidence / math.log(2 / its_level)) > 1:
            yield "rate", kind, was, now, round(strength, 3)


def poisson_surprise(first: int, first_s: float, second: int, second_s: float) -> float:
    """-ln of an upper bound on the probability that two Poisson counts of equal rate differ this much in one direction.

    Given the sum n, the second count is binomial with p = second_s / (first_s + second_s):
    P <= exp(-n KL(second/n, p)).
    """
    whole, share = first + second, second_s / (first_s + second_s)
    return whole * bernoulli_divergence(second / whole, share) if whole else 0.0


def bernoulli_divergence(found: float, expected: float) -> float:
    """Kullback-Leibler divergence, in nats, of two coins with probabilities `found` and `expected`."""
    total = found * math.log(found / expected) if found else 0.0
    return total + ((1 - found) * math.log((1 - found) / (1 - expected)) if found < 1 else 0.0)


def length_changes(before: BucketSums, after: BucketSums, level: float) -> Iterator[FoundChange]:
    """Yields changes of the distributions of prompt and of output length, over all kinds, each at level `level`."""
    yield from _length_distance("prompt", before.prompts, after.prompts, level)
    yield from _length_distance("output", before.outputs, after.outputs, level)


def _length_distance(what: str, old: Counter[int], new: Counter[int], level: float) -> Iterator[FoundChange]:
    """Yields a change if the largest distance of the two distribution functions is significant and large enough."""
    first, second = old.total(), new.total()
    if not first or not second:
        return
    gap = below_first = below_second = 0.0
    for number in sorted({*old, *new}):
        below_first += old[number] / first
        below_second += new[number] / second
        gap = max(gap, abs(below_first - below_second))
    bound = math.sqrt((first + second) / (2 * first * second) * math.log(math.e / level))
    if gap > max(bound, MIN_LENGTH_CHANGE):
        yield what, "", _mean_of_bins(old), _mean_of_bins(new), round((gap / bound) ** 2, 3)


def _mean_of_bins(bins: Counter[int]) -> float:
    """Mean length in tokens of a histogram of length bins."""
    return sum(length_of(number) * count for number, count in bins.items()) / bins.total()


def attainment_is_short(traffic: TrafficSummary, target: float, level: float) -> bool:
    """Whether attainment is significantly below `target`, at significance `level`, by Chernoff's bound."""
    if not traffic.checked or traffic.attainment >= target:
        return False
    return traffic.checked * bernoulli_divergence(traffic.attainment, target) > -math.log(level)


def busiest_rate(buckets: list[TrafficBucket], window_s: float) -> float:
    """The highest rate over any consecutive buckets of `window_s` seconds in all; `buckets` are latest first."""
    if not buckets:
        return 0.0
    wide = max(1, round(window_s / buckets[0].seconds))
    counts = [bucket.arrivals for bucket in buckets]
    sums = [sum(counts[at : at + wide]) for at in range(max(1, len(counts) - wide + 1))]
    return max(sums) / (min(wide, len(counts)) * buckets[0].seconds)
