"""Counts requests, SLO attainment and latency quantiles, in memory that does not grow with the number of requests.

Latencies go into histograms whose cells grow geometrically (DDSketch, Masson et al. 2019): a quantile is within
`RELATIVE_ERROR` of a value that was seen. Attainment of TTFT and TPOT together is counted exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych.slo import Slos, slo_for
from planner.types import JobResult

RELATIVE_ERROR = 0.01
# Latencies below this many seconds are counted as 0 s.
MIN_SECONDS = 1e-6


class QuantileSketch:
    """A histogram of seconds with a bounded number of cells, for any number of values."""

    def __init__(self, error: float = RELATIVE_ERROR) -> None:
        self.error, self.count, self.total = error, 0, 0.0
        self._growth = math.log((1.0 + error) / (1.0 - error))
        # Number of values in each cell. The key is the cell's exponent: -inf holds 0 s, +inf failed requests.
        self._cells: Counter[float] = Counter()

    def add(self, seconds: float) -> None:
        """Counts one value in seconds; infinity stands for a failed request."""
        self.count += 1
        if seconds == math.inf:
            self._cells[math.inf] += 1
            return
        self.total += seconds
        self._cells[math.ceil(math.log(seconds) / self._growth) if seconds > MIN_SECONDS else -math.inf] += 1

    def merge(self, other: QuantileSketch) -> None:
        """Adds the counts of another sketch. Raises ValueError if its error bound differs."""
        if other.error != self.error:
            raise ValueError("sketches with different error bounds cannot be merged")
        self.count, self.total = self.count + other.count, self.total + other.total
        self._cells.update(other._cells)

    def quantile(self, share: float) -> float:
        """The smallest value that at least `share` (0 to 1) of all values do not exceed; nan without values."""
        rank = max(1, math.ceil(share * self.count - 1e-9))
        for exponent in sorted(self._cells):
            rank -= self._cells[exponent]
            if rank <= 0:
                return self._value(exponent)
        return math.nan

    def mean(self) -> float:
        """Mean of the finite values (failed requests are infinite and left out); nan without any."""
        finite = self.count - self._cells[math.inf]
        return self.total / finite if finite else math.nan

    def __len__(self) -> int:
        return len(self._cells)

    def _value(self, exponent: float) -> float:
        """The seconds that stand for all values of a cell: its middle, within the relative error of each."""
        if math.isinf(exponent):
            return 0.0 if exponent < 0 else math.inf
        return math.exp(exponent * self._growth) * (1.0 - self.error)


@dataclass(slots=True)
class _KindCounts:
    """Counts and latency sketches of the requests of one kind."""

    count: int = 0
    attained: int = 0
    failed: int = 0
    sketches: dict[str, QuantileSketch] = field(
        default_factory=lambda: {name: QuantileSketch() for name in ("ttft", "tpot", "e2e")}
    )


class AttainmentCounter:
    """Counts requests, attainment, failures and latencies, separately for each kind of request.

    The first `warmup_n` requests, and those that arrived before `warmup_s`, are only counted in `skipped`. A failed
    request misses its SLOs, and its times are infinite. An answer of one token has no TPOT: it meets every TPOT SLO,
    and the TPOT quantiles leave it out.
    """

    def __init__(self, slos: Slos, warmup_s: float = 0.0, warmup_n: int = 0) -> None:
        self.slos, self.warmup_s, self.warmup_n = slos, warmup_s, warmup_n
        self.skipped, self.first_s, self.last_s = 0, math.inf, -math.inf
        self._kinds: dict[str, _KindCounts] = {}
        self._why: Counter[str] = Counter()

    def add(self, result: JobResult) -> None:
        """Counts one request that has ended, well or not."""
        job = result.job
        if self.skipped < self.warmup_n or job.at_s < self.warmup_s:
            self.skipped += 1
            return
        kind = self._kinds.get(job.kind) or self._kinds.setdefault(job.kind, _KindCounts())
        kind.count += 1
        kind.attained += result.meets_slo(slo_for(self.slos, job.kind))
        self.first_s, self.last_s = min(self.first_s, job.at_s), max(self.last_s, job.at_s)
        if result.failed:
            kind.failed += 1
            self._why[result.failed] += 1
        kind.sketches["ttft"].add(math.inf if result.failed else result.ttft_s)
        kind.sketches["e2e"].add(math.inf if result.failed else result.ended_s - job.at_s)
        if result.failed or job.output > 1:
            kind.sketches["tpot"].add(math.inf if result.failed else result.tpot_s)

    def merge(self, other: AttainmentCounter) -> None:
        """Adds the counts of another counter, for example that of another part of the same run."""
        for name, theirs in other._kinds.items():
            ours = self._kinds.setdefault(name, _KindCounts())
            ours.count, ours.attained = ours.count + theirs.count, ours.attained + theirs.attained
            ours.failed += theirs.failed
            for what, sketch in ours.sketches.items():
                sketch.merge(theirs.sketches[what])
        self.skipped += other.skipped
        self.first_s, self.last_s = min(self.first_s, other.first_s), max(self.last_s, other.last_s)
        self._why.update(other._why)

    @property
    def kinds(self) -> list[str]:
        """The kinds of request that were counted, sorted by name."""
        return sorted(self._kinds)

    def count(self, kind: str | None = None) -> int:
        """Number of requests counted, of one kind or (None) of all."""
        return sum(one.count for one in self._counts_of(kind))

    def attained(self, kind: str | None = None) -> int:
        """Number of requests that met both SLOs, of one kind or (None) of all."""
        return sum(one.attained for one in self._counts_of(kind))

    def attainment(self, kind: str | None = None) -> float:
        """Share of requests that met both SLOs of their kind, of one kind or (None) of all; nan if none came."""
        count = self.count(kind)
        return self.attained(kind) / count if count else math.nan

    def interval(self, kind: str | None = None) -> tuple[float, float]:
        """95 % confidence interval of the attainment, assuming that requests meet their SLOs independently."""
        return wilson_interval(self.attained(kind), self.count(kind))

    @property
    def failed(self) -> int:
        """Number of requests of all kinds that failed."""
        return sum(one.failed for one in self._kinds.values())

    @property
    def reasons(self) -> dict[str, int]:
        """Number of failed requests by reason of the failure."""
        return dict(self._why)

    def quantile(self, what: str, share: float, kind: str | None = None) -> float:
        """The `share` quantile in seconds of `what`: "ttft", "tpot" or "e2e". Failed requests count as infinite.

        `kind` None takes all kinds together; the result is nan if no request was counted.
        """
        whole = QuantileSketch()
        for one in self._counts_of(kind):
            whole.merge(one.sketches[what])
        return whole.quantile(share)

    def mean(self, what: str, kind: str | None = None) -> float:
        """Mean in seconds of `what` ("ttft", "tpot" or "e2e") over the requests that did not fail."""
        whole = QuantileSketch()
        for one in self._counts_of(kind):
            whole.merge(one.sketches[what])
        return whole.mean()

    @property
    def goodput_rps(self) -> float:
        """Requests per second that met their SLOs, between the first and the last arrival; nan for fewer than two."""
        span_s = self.last_s - self.first_s
        return self.attained() / span_s if span_s > 0.0 else math.nan

    def _counts_of(self, kind: str | None) -> Iterable[_KindCounts]:
        return self._kinds.values() if kind is None else filter(None, [self._kinds.get(kind)])


def joint_attainment(result: Iterable[JobResult], slos: Slos) -> float:
    """The share of requests that met both the TTFT and the TPOT SLO of their kind; nan without requests."""
    met = [one.meets_slo(slo_for(slos, one.job.kind)) for one in result]
    return sum(met) / len(met) if met else math.nan


def wilson_interval(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for the share k / n; (0, 1) if n is 0. `z` = 1.96 gives 95 % confidence."""
    if n == 0:
        return 0.0, 1.0
    share, slack = k / n, z * z / n
    middle = (share + slack / 2.0) / (1.0 + slack)
    half = z * math.sqrt(share * (1.0 - share) / n + slack / (4.0 * n)) / (1.0 + slack)
    return max(0.0, middle - half), min(1.0, middle + half)
