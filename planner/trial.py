"""Whether a placement keeps its promises at a rate: the same requests, faster or slower, over several seeds.

Every placement meets the same samples (common random numbers): lengths and the pattern of arrivals are those of a seed,
and a rate only scales the moments. So two placements differ by what they are, and hardly by chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.terms import Job, Placement, Served, Slo

Run = Callable[[Placement, Sequence[Job]], Sequence[Served]]
EPSILON = 1e-9  # attainment is a ratio of counts: 0.9 of 10 is 9
WARMUP = 0.1  # of the requests that a measurement begins with: they find less to do than those after them


def endless(placement: Placement) -> float:
    """No rate is too high."""
    return math.inf


@dataclass(slots=True)
class Effort:
    """How much was simulated."""

    runs: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """Samples of a workload, one for each seed, whose arrivals come at one request per second on average.

    `run` simulates a placement; `slos` has an objective for each kind, or one under "" for all. The first `warmup` of
    each sample are served and not counted. `most_rps` is what a placement sustains at most, where the objectives do not
    tell: a queue may grow for ever without one of TTFT, and no finite run shows that.
    """

    samples: tuple[tuple[Job, ...], ...]
    slos: Mapping[str, Slo]
    run: Run
    warmup: int = 0
    effort: Effort = field(default_factory=Effort, compare=False)
    most_rps: Callable[[Placement], float] = field(default=endless, compare=False)

    def slo(self, kind: str) -> Slo:
        """The objective of a kind. Raises KeyError where there is none."""
        return self.slos[kind] if kind in self.slos else self.slos[""]

    def counting(self, sample: Sequence[Job]) -> Sequence[Job]:
        """The requests of a sample that count: those from the moment on at which the warm-up ends."""
        if not self.warmup:
            return sample
        return sample[bisect_left(sample, sample[self.warmup].at_s, key=lambda job: job.at_s) :]

    def jobs(self) -> Iterator[Job]:
        """All requests that count."""
        return (job for sample in self.samples for job in self.counting(sample))

    def counted(self) -> dict[str, int]:
        """Requests that count, by kind, over all samples."""
        found: dict[str, int] = {}
        for job in self.jobs():
            found[job.kind] = found.get(job.kind, 0) + 1
        return found

    def sustains(self, placement: Placement, rate: float) -> bool:
        """Whether `rate` is not above what `placement` sustains for ever."""
        return rate <= self.most_rps(placement) * (1.0 + EPSILON)

    def serve(self, placement: Placement, rate: float, seed: int) -> Sequence[Served]:
        """One sample at `rate` requests per second, in any order."""
        jobs = scaled(self.samples[seed], rate)
        self.effort.runs += 1
        self.effort.requests += len(jobs)
        return self.run(placement, jobs)

    def shares(self, placement: Placement, rate: float) -> dict[str, float]:
        """Joint attainment of each kind, over all samples."""
        kept: dict[str, int] = {}
        for seed in range(len(self.samples)):
            _add(kept, self._kept(placement, rate, seed))
        total = self.counted()
        return {kind: kept.get(kind, 0) / count for kind, count in total.items()}

    def passes(self, placement: Placement, rate: float) -> bool:
        """Whether each kind gets its attainment, at a rate that is sustained; ends as soon as the answer can no longer
        change.
        """
        if not self.sustains(placement, rate):
            return False
        total, kept, seen = self.counted(), dict[str, int](), dict[str, int]()
        needs = {
            kind: math.ceil(self.slo(kind).attainment * count - EPSILON) for kind, count in total.items()
        }
        for seed, sample in enumerate(self.samples):
            _add(kept, self._kept(placement, rate, seed))
            for job in self.counting(sample):
                seen[job.kind] = seen.get(job.kind, 0) + 1
            if all(kept.get(kind, 0) >= need for kind, need in needs.items()):
                return True
            if any(
                kept.get(kind, 0) + total[kind] - seen.get(kind, 0) < need for kind, need in needs.items()
            ):
                return False
        return False

    def _kept(self, placement: Placement, rate: float, seed: int) -> dict[str, int]:
        begun_s = self.samples[seed][self.warmup].at_s / rate if self.warmup else -math.inf
        kept: dict[str, int] = {}
        for one in self.serve(placement, rate, seed):
            kind = one.job.kind
            if one.job.at_s >= begun_s and one.attains(self.slo(kind)):
                kept[kind] = kept.get(kind, 0) + 1
        return kept


def scaled(jobs: Sequence[Job], rate: float) -> list[Job]:
    """The same jobs, `rate` times as fast."""
    return [replace(job, at_s=job.at_s / rate) for job in jobs]


def joint(shares: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """Attainment of all kinds together."""
    total = sum(counts.values())
    return sum(shares[kind] * count for kind, count in counts.items()) / total if total else 0.0


def _add(into: dict[str, int], more: Mapping[str, int]) -> None:
    for kind, count in more.items():
        into[kind] = into.get(kind, 0) + count
