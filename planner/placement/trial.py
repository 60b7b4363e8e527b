"""Measures whether a placement meets the SLOs at a rate, by simulating the same requests faster or slower.

All placements get the same samples (common random numbers): a seed fixes lengths and arrival pattern, and the rate only
scales arrival times. Differences between placements are therefore real, and hardly due to chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from diptych.slo import Slo, Slos, slo_for
from planner.types import Job, JobResult, Placement

PlacementRunner = Callable[[Placement, Sequence[Job]], Sequence[JobResult]]
# Tolerance for rounding, since attainment is a ratio of counts.
EPSILON = 1e-9
# Share of the requests at the beginning of a run that are not counted, since queues are still empty.
WARMUP = 0.1


def no_rate_limit(placement: Placement) -> float:
    """Infinity: the default for `Trial.most_rps`."""
    return math.inf


@dataclass(slots=True)
class SimulationEffort:
    """How many simulations were run, and with how many requests in all."""

    runs: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """Samples of a workload, one for each seed, with a mean of one arrival per second.

    `run` simulates a placement. `slos` has an entry for each kind, or one under "" for all. The first `warmup` requests
    of each sample are served but not counted. `most_rps` caps the rate of a placement where SLOs cannot: without a TTFT
    SLO a queue may grow for ever, and no finite run shows it.
    """

    samples: tuple[tuple[Job, ...], ...]
    slos: Slos
    run: PlacementRunner
    warmup: int = 0
    effort: SimulationEffort = field(default_factory=SimulationEffort, compare=False)
    most_rps: Callable[[Placement], float] = field(default=no_rate_limit, compare=False)

    def slo(self, kind: str) -> Slo:
        """The SLOs of a kind of request. Raises KeyError if there are none."""
        return slo_for(self.slos, kind)

    def counting(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """The requests of a sample that are counted: those that arrive after the warm-up."""
        if not self.warmup:
            return jobs
        return jobs[bisect_left(jobs, jobs[self.warmup].at_s, key=lambda job: job.at_s) :]

    def jobs(self) -> Iterator[Job]:
        """All counted requests of all samples."""
        return (job for sample in self.samples for job in self.counting(sample))

    def counted(self) -> dict[str, int]:
        """Number of counted requests by kind, over all samples."""
        found: dict[str, int] = {}
        for job in self.jobs():
            found[job.kind] = found.get(job.kind, 0) + 1
        return found

    def sustains(self, placement: Placement, rate: float) -> bool:
        """Whether `rate` does not exceed the rate at which the placement's queues stop growing."""
        return rate <= self.most_rps(placement) * (1.0 + EPSILON)

    def serve(self, placement: Placement, rate: float, seed: int) -> Sequence[JobResult]:
        """Simulates one sample at `rate` requests per second; results come in any order."""
        jobs = speed_up_jobs(self.samples[seed], rate)
        self.effort.runs += 1
        self.effort.requests += len(jobs)
        return self.run(placement, jobs)

    def shares(self, placement: Placement, rate: float) -> dict[str, float]:
        """The share of each kind of request that meets both its SLOs at `rate`, over all samples."""
        met: dict[str, int] = {}
        for seed in range(len(self.samples)):
            _add_counts(met, self._count_meeting(placement, rate, seed))
        total = self.counted()
        return {kind: met.get(kind, 0) / count for kind, count in total.items()}

    def passes(self, placement: Placement, rate: float) -> bool:
        """Whether each kind reaches its attainment at `rate`; stops once further samples cannot change the answer."""
        if not self.sustains(placement, rate):
            return False
        total, met, counts = self.counted(), dict[str, int](), dict[str, int]()
        needs = {
            kind: math.ceil(self.slo(kind).attainment * count - EPSILON) for kind, count in total.items()
        }
        for seed, jobs in enumerate(self.samples):
            _add_counts(met, self._count_meeting(placement, rate, seed))
            for job in self.counting(jobs):
                counts[job.kind] = counts.get(job.kind, 0) + 1
            if all(met.get(kind, 0) >= need for kind, need in needs.items()):
                return True
            if any(
                met.get(kind, 0) + total[kind] - counts.get(kind, 0) < need for kind, need in needs.items()
            ):
                return False
        return False

    def _count_meeting(self, placement: Placement, rate: float, seed: int) -> dict[str, int]:
        """Number of counted requests that met their SLOs in one sample, by kind."""
        begun_s = self.samples[seed][self.warmup].at_s / rate if self.warmup else -math.inf
        met: dict[str, int] = {}
        for one in self.serve(placement, rate, seed):
            kind = one.job.kind
            if one.job.at_s >= begun_s and one.meets_slo(self.slo(kind)):
                met[kind] = met.get(kind, 0) + 1
        return met


def speed_up_jobs(jobs: Sequence[Job], rate: float) -> list[Job]:
    """The same jobs with arrival times divided by `rate`."""
    return [replace(job, at_s=job.at_s / rate) for job in jobs]


def overall_attainment(shares: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """Attainment over all kinds, from the attainment (`shares`) and number of requests (`counts`) of each."""
    total = sum(counts.values())
    return sum(shares[kind] * count for kind, count in counts.items()) / total if total else 0.0


def _add_counts(into: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds the counts of `more` to `into`."""
    for kind, count in more.items():
        into[kind] = into.get(kind, 0) + count
