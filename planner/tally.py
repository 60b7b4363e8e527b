"""Counts how requests fared, in memory that does not grow with them.

Times go into histograms whose cells grow geometrically (DDSketch, Masson et al. 2019): a quantile read off is within
`RELATIVE_ERROR` of a value that was seen. Joint attainment is counted exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from planner.terms import Served, Slo

RELATIVE_ERROR = 0.01
LEAST_S = 1e-6  # anything shorter is counted as 0

Slos = Mapping[str, Slo]
FREE = Slo()


def slo_of(slos: Slos, kind: str) -> Slo:
    """The promise of a kind; that of "" if it has none of its own; else no promise but an answer."""
    return slos.get(kind) or slos.get("") or FREE


class Sketch:
    """A histogram of seconds with a bounded number of cells, for any number of values."""

    def __init__(self, error: float = RELATIVE_ERROR) -> None:
        self.error, self.count, self.total = error, 0, 0.0
        self._growth = math.log((1.0 + error) / (1.0 - error))
        self._cells: Counter[float] = Counter()  # by exponent; -inf is 0 s, +inf never

    def add(self, seconds: float) -> None:
        self.count += 1
        if seconds == math.inf:
            self._cells[math.inf] += 1
            return
        self.total += seconds
        self._cells[math.ceil(math.log(seconds) / self._growth) if seconds > LEAST_S else -math.inf] += 1

    def merge(self, other: Sketch) -> None:
        """Take over what another of the same error has counted."""
        if other.error != self.error:
            raise ValueError("sketches of unlike error cannot be merged")
        self.count, self.total = self.count + other.count, self.total + other.total
        self._cells.update(other._cells)

    def quantile(self, share: float) -> float:
        """The smallest value that at least `share` of all do not exceed; nan if there is none."""
        rank = max(1, math.ceil(share * self.count - 1e-9))
        for exponent in sorted(self._cells):
            rank -= self._cells[exponent]
            if rank <= 0:
                return self._value(exponent)
        return math.nan

    def mean(self) -> float:
        """Of those that were finite."""
        finite = self.count - self._cells[math.inf]
        return self.total / finite if finite else math.nan

    def __len__(self) -> int:
        return len(self._cells)

    def _value(self, exponent: float) -> float:
        if math.isinf(exponent):
            return 0.0 if exponent < 0 else math.inf
        return math.exp(exponent * self._growth) * (1.0 - self.error)


@dataclass(slots=True)
class _Kind:
    count: int = 0
    attained: int = 0
    failed: int = 0
    sketches: dict[str, Sketch] = field(
        default_factory=lambda: {name: Sketch() for name in ("ttft", "tpot", "e2e")}
    )


class Tally:
    """How requests fared, kind by kind.

    The first `warmup_n` that are told of, and those that came before `warmup_s`, are counted in `skipped` only. A
    failed request attains nothing, and its times are infinite. An answer of one token has no TPOT: it keeps any, and is
    not in the quantiles of it.
    """

    def __init__(self, slos: Slos, warmup_s: float = 0.0, warmup_n: int = 0) -> None:
        self.slos, self.warmup_s, self.warmup_n = slos, warmup_s, warmup_n
        self.skipped, self.first_s, self.last_s = 0, math.inf, -math.inf
        self._kinds: dict[str, _Kind] = {}
        self._why: Counter[str] = Counter()

    def add(self, served: Served) -> None:
        job = served.job
        if self.skipped < self.warmup_n or job.at_s < self.warmup_s:
            self.skipped += 1
            return
        kind = self._kinds.get(job.kind) or self._kinds.setdefault(job.kind, _Kind())
        kind.count += 1
        kind.attained += served.attains(slo_of(self.slos, job.kind))
        self.first_s, self.last_s = min(self.first_s, job.at_s), max(self.last_s, job.at_s)
        if served.failed:
            kind.failed += 1
            self._why[served.failed] += 1
        kind.sketches["ttft"].add(math.inf if served.failed else served.ttft_s)
        kind.sketches["e2e"].add(math.inf if served.failed else served.ended_s - job.at_s)
        if served.failed or job.output > 1:
            kind.sketches["tpot"].add(math.inf if served.failed else served.tpot_s)

    def merge(self, other: Tally) -> None:
        """Take over what another has counted, of another part of the same run."""
        for name, theirs in other._kinds.items():
            ours = self._kinds.setdefault(name, _Kind())
            ours.count, ours.attained = ours.count + theirs.count, ours.attained + theirs.attained
            ours.failed += theirs.failed
            for what, sketch in ours.sketches.items():
                sketch.merge(theirs.sketches[what])
        self.skipped += other.skipped
        self.first_s, self.last_s = min(self.first_s, other.first_s), max(self.last_s, other.last_s)
        self._why.update(other._why)

    @property
    def kinds(self) -> list[str]:
        return sorted(self._kinds)

    def count(self, kind: str | None = None) -> int:
        return sum(one.count for one in self._of(kind))

    def attained(self, kind: str | None = None) -> int:
        """How many kept both objectives."""
        return sum(one.attained for one in self._of(kind))

    def attainment(self, kind: str | None = None) -> float:
        """Their share, of one kind or of all (each under its own promise); nan if none came."""
        count = self.count(kind)
        return self.attained(kind) / count if count else math.nan

    def interval(self, kind: str | None = None) -> tuple[float, float]:
        """95 % interval of the attainment, as if requests fared independently."""
        return wilson(self.attained(kind), self.count(kind))

    @property
    def failed(self) -> int:
        return sum(one.failed for one in self._kinds.values())

    @property
    def reasons(self) -> dict[str, int]:
        """Why requests failed, and how many did so."""
        return dict(self._why)

    def quantile(self, what: str, share: float, kind: str | None = None) -> float:
        """Of "ttft", "tpot" or "e2e", in seconds; failed requests count as infinite; nan if none came."""
        whole = Sketch()
        for one in self._of(kind):
            whole.merge(one.sketches[what])
        return whole.quantile(share)

    def mean(self, what: str, kind: str | None = None) -> float:
        """Of those that did not fail."""
        whole = Sketch()
        for one in self._of(kind):
            whole.merge(one.sketches[what])
        return whole.mean()

    @property
    def goodput_rps(self) -> float:
        """Requests that kept their promise, a second between the first and the last arrival; nan for less than two."""
        span_s = self.last_s - self.first_s
        return self.attained() / span_s if span_s > 0.0 else math.nan

    def _of(self, kind: str | None) -> Iterable[_Kind]:
        return self._kinds.values() if kind is None else filter(None, [self._kinds.get(kind)])


def joint(served: Iterable[Served], slos: Slos) -> float:
    """The share that kept both objectives, each under its kind's promise; nan if there is none."""
    kept = [one.attains(slo_of(slos, one.job.kind)) for one in served]
    return sum(kept) / len(kept) if kept else math.nan


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share k / n; (0, 1) of nothing. `z` = 1.96 is 95 %."""
    if n == 0:
        return 0.0, 1.0
    share, slack = k / n, z * z / n
    middle = (share + slack / 2.0) / (1.0 + slack)
    half = z * math.sqrt(share * (1.0 - share) / n + slack / (4.0 * n)) / (1.0 + slack)
    return max(0.0, middle - half), min(1.0, middle + half)
