"""Has traffic changed? Two-sample tests of the latest arrivals against those that the plan was made for.

Every time a bucket closes, the last stretches of several lengths are compared with a reference: the first buckets since
the traffic last changed, which then stay as they are, so that slow drift adds up. Rates are compared by the
Chernoff bound of the binomial distribution, widened by how bursty arrivals are; lengths of prompts and answers by the
bound of Dvoretzky, Kiefer, Wolfowitz and Massart (for two samples: Wei and Dudley 2012). Both hold for samples of any
size, so that the levels of all tests of a day add up to the false alarms that are allowed: no overlap between windows
and no small number makes it fire more often. What is certain but small is not an alarm either.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import msgspec

from planner.windows import Bucket, Traffic, Windows, length_of

DAY_S = 86_400.0
STRETCHES = (
    1 / 16,
    1 / 8,
    1 / 4,
    1 / 2,
    1,
    2,
    4,
)  # of a window: short ones see leaps at once, long ones small steps
REFERENCE = 4  # windows
TESTS = 4  # per stretch: rate of all and of one kind (more share its level), prompts, answers
LEAST_RATE, LEAST_LENGTHS = 0.15, 0.2  # changes that matter: of the rate, and of a distribution function


class Shift(msgspec.Struct, frozen=True):
    """Traffic is different since about `since_s`. `before` and `after` are means: requests per second, or tokens.

    `strength` is the test's statistic over its bound (1: just significant at its level).
    """

    what: str  # "rate", "prompt" or "output"
    kind: str
    at_s: float
    since_s: float
    before: float
    after: float
    strength: float

    def __str__(self) -> str:
        name = f"{self.what} of {self.kind!r}" if self.kind else self.what
        return f"{name} {self.before:.3g} → {self.after:.3g} since {self.at_s - self.since_s:.0f} s"


class Sums:
    """Arrivals and lengths of buckets that come and go: all that the tests ask about."""

    def __init__(self, buckets: Iterable[Bucket] = ()) -> None:
        self.prompts: Counter[int] = Counter()  # by bin of length
        self.outputs: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.seconds, self.arrivals, self._squares, self.buckets = 0.0, 0, 0, 0
        for bucket in buckets:
            self.add(bucket)

    def add(self, bucket: Bucket, times: int = 1) -> None:
        """`times` is -1 to take a bucket out again."""
        came = 0
        for kind, prompt, count in bucket.prompts:
            self.prompts[prompt] += times * count
            self.kinds[kind] += times * count
            came += count
        for _, _, output, count in bucket.pairs:
            self.outputs[output] += times * count
        self.seconds += times * bucket.seconds
        self.arrivals += times * came
        self._squares += times * came * came
        self.buckets += times

    @property
    def spread(self) -> float:
        """By how much counts of buckets vary more than Poisson's: 1 unless that is plain, and then with a margin."""
        mean = self.arrivals / self.buckets if self.buckets else 0.0
        if not mean or self.buckets < 3:
            return 1.0
        found = (self._squares / self.buckets - mean * mean) / mean
        error = math.sqrt(2 / (self.buckets - 1))  # of the estimate, for a Poisson process
        return 1.0 if found <= 1 + 3 * error else found * (1 + 2 * error)


class _Stretch:
    """The latest buckets of one length in time, and the reference before them."""

    def __init__(self, buckets: int) -> None:
        self._latest: deque[Bucket] = deque()
        self._most = buckets
        self.after, self.before, self.settled = Sums(), Sums(), Sums()

    @property
    def begin_s(self) -> float:
        return self._latest[0].at_s

    def push(self, bucket: Bucket, span: tuple[float, float, float]) -> None:
        """A bucket has closed; the oldest of the stretch, if it is full, may become a part of the reference."""
        self._latest.append(bucket)
        self.after.add(bucket)
        if len(self._latest) > self._most:
            old = self._latest.popleft()
            self.after.add(old, -1)
            self._refer(old, *span)

    def anchor(self, older: Sequence[Bucket], span: tuple[float, float, float]) -> None:
        """A new reference, from what is known of the time before the stretch."""
        self.before, self.settled = Sums(), Sums()
        for bucket in older:
            if self._latest and bucket.at_s < self.begin_s:
                self._refer(bucket, *span)

    def _refer(self, old: Bucket, since_s: float, settled_s: float, last_s: float) -> None:
        middle_s = old.at_s + old.seconds / 2
        if since_s < middle_s < last_s:
            self.before.add(old)
            if settled_s < middle_s:
                self.settled.add(old)


class Detector:
    """Compares each closed bucket and those before it with the reference that began at the last `anchor`."""

    def __init__(self, window_s: float, bucket_s: float, false_alarms_per_day: float, start_s: float) -> None:
        self._window_s, self.since_s = window_s, start_s
        sizes = sorted({max(1, round(window_s * part / bucket_s)) for part in STRETCHES})
        self._stretches = [_Stretch(size) for size in sizes]
        self._level = false_alarms_per_day / (DAY_S / bucket_s * len(sizes) * TESTS)

    def anchor(self, since_s: float, windows: Windows) -> None:
        """From now on, traffic is compared with what came from `since_s` on, as far as `windows` still knows."""
        self.since_s = since_s
        older = windows.buckets(since_s, windows.closed_s)
        for stretch in self._stretches:
            stretch.anchor(older, self._span())

    def _span(self) -> tuple[float, float, float]:
        """From when on buckets are in the reference, from when on answers in them count, and until when."""
        settled_s = self.since_s + self._window_s / 4  # the first answers to end are the short ones
        return self.since_s, settled_s, self.since_s + REFERENCE * self._window_s

    def look(self, buckets: Iterable[Bucket]) -> Shift | None:
        """Take buckets that have closed, each once and in order; the clearest change up to now, if there is one."""
        last: Bucket | None = None
        for bucket in buckets:
            last = bucket
            for stretch in self._stretches:
                stretch.push(bucket, self._span())
        if last is None:
            return None
        now_s, shifts = last.at_s + last.seconds, list[Shift]()
        for stretch in self._stretches:
            if stretch.before.seconds < self._window_s / 2 - last.seconds / 2:
                break
            found = chain(
                rates(stretch.before, stretch.after, self._level),
                lengths(stretch.settled, stretch.after, self._level),
            )
            for what, kind, was, now, strength in found:
                shifts.append(Shift(what, kind, now_s, stretch.begin_s, was, now, strength))
        return max(shifts, key=lambda shift: (shift.strength, shift.since_s), default=None)


Found = tuple[str, str, float, float, float]  # what, kind, before, after, strength


def rates(before: Sums, after: Sums, level: float) -> Iterator[Found]:
    """Changed rates, of all and of each kind, at `level` for each of the two questions."""
    if not before.seconds or not after.seconds:
        return
    kinds = sorted(kind for kind in {*before.kinds, *after.kinds} if before.kinds[kind] or after.kinds[kind])
    counts = [("", before.arrivals, after.arrivals, level)]
    if len(kinds) > 1:
        counts += [(kind, before.kinds[kind], after.kinds[kind], level / len(kinds)) for kind in kinds]
    for kind, first, second, its_level in counts:
        was, now = first / before.seconds, second / after.seconds
        if max(was, now) <= (1 + LEAST_RATE) * min(was, now):
            continue
        evidence = surprise(first, before.seconds, second, after.seconds) / before.spread
        if (strength := evidence / math.log(2 / its_level)) > 1:
            yield "rate", kind, was, now, round(strength, 3)


def surprise(first: int, first_s: float, second: int, second_s: float) -> float:
    """-ln of a bound on how likely two Poisson counts of one rate are to differ by as much, in one direction.

    Given the sum n, the second is binomial with p = second_s / (first_s + second_s): P <= exp(-n KL(second/n, p)).
    """
    whole, share = first + second, second_s / (first_s + second_s)
    return whole * divergence(second / whole, share) if whole else 0.0


def divergence(found: float, expected: float) -> float:
    """Kullback-Leibler divergence of two coins, in nats."""
    total = found * math.log(found / expected) if found else 0.0
    return total + ((1 - found) * math.log((1 - found) / (1 - expected)) if found < 1 else 0.0)


def lengths(before: Sums, after: Sums, level: float) -> Iterator[Found]:
    """Changed distributions of prompt and of output length, all kinds together, at `level` each."""
    yield from _distance("prompt", before.prompts, after.prompts, level)
    yield from _distance("output", before.outputs, after.outputs, level)


def _distance(what: str, old: Counter[int], new: Counter[int], level: float) -> Iterator[Found]:
    first, second = old.total(), new.total()
    if not first or not second:
        return
    gap = below_first = below_second = 0.0
    for number in sorted({*old, *new}):
        below_first += old[number] / first
        below_second += new[number] / second
        gap = max(gap, abs(below_first - below_second))
    bound = math.sqrt((first + second) / (2 * first * second) * math.log(math.e / level))
    if gap > max(bound, LEAST_LENGTHS):
        yield what, "", _mean(old), _mean(new), round((gap / bound) ** 2, 3)


def _mean(bins: Counter[int]) -> float:
    return sum(length_of(number) * count for number, count in bins.items()) / bins.total()


def short(traffic: Traffic, target: float, level: float) -> bool:
    """Whether fewer answers kept their objective than a true share of `target` explains, by Chernoff's bound."""
    if not traffic.judged or traffic.attainment >= target:
        return False
    return traffic.judged * divergence(traffic.attainment, target) > -math.log(level)


def busiest(buckets: list[Bucket], window_s: float) -> float:
    """The highest rate over any consecutive buckets that last `window_s` together, the latest bucket coming first."""
    if not buckets:
        return 0.0
    wide = max(1, round(window_s / buckets[0].seconds))
    counts = [bucket.arrivals for bucket in buckets]
    sums = [sum(counts[at : at + wide]) for at in range(max(1, len(counts) - wide + 1))]
    return max(sums) / (min(wide, len(counts)) * buckets[0].seconds)
