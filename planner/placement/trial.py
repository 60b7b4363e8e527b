"""Measures whether a placement meets the SLOs at a rate, by simulating the same requests faster or slower.

All placements get the same samples (common random numbers): a seed fixes lengths and arrival pattern, and the rate only
scales arrival times. Differences between placements are therefore real, and hardly due to chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from diptych.slo import Slo, Slos, slo_for
from planner.placement.array_bounds import BoundArrays
from planner.sim.fast.compiled import (
    MIN_JOBS,
    CompiledCluster,
    JobTable,
    is_compiled,
    tabulate_jobs,
)
from planner.types import Job, JobResult, Placement
from planner.workload.workload import JobSource

# A runner with a method `compile`, from a placement to a `CompiledCluster` or None, also runs it as machine code; one
# with `serve_into` hands each result over as soon as there is one.
PlacementRunner = Callable[[Placement, Sequence[Job]], Sequence[JobResult]]
STAGES = ("queue", "prefill", "wait", "transfer", "decode")
# Tolerance for rounding, since attainment is a ratio of counts.
EPSILON = 1e-9
# Share of the requests at the beginning of a run that are not counted, since queues are still empty.
WARMUP = 0.1


class JobSample(tuple[Job, ...]):
    """Jobs in order of arrival, at one request per second, that many placements serve."""

    @cached_property
    def table(self) -> JobTable:
        """The jobs as arrays."""
        return tabulate_jobs(self)

    @cached_property
    def counts_from(self) -> dict[int, Counter[str]]:
        """Number of jobs by kind, of those from an index on, as far as that was asked."""
        return {}

    @cached_property
    def joined(self) -> dict[tuple[int, ...], BoundArrays]:
        """This and other samples together, as far as that was asked."""
        return {}


class JobDraws:
    """The jobs of a source by seed, each drawn once: a longer sample of a seed begins with its shorter one."""

    def __init__(self, source: JobSource, cv: float) -> None:
        self.source, self.cv = source, cv
        self._streams: dict[int, tuple[list[Job], Iterator[Job]]] = {}
        self._samples: dict[tuple[int, int], JobSample] = {}

    def sample(self, requests: int, seed: int) -> JobSample:
        """The first jobs of a seed, at one request per second."""
        key = requests, seed
        if key not in self._samples:
            if seed not in self._streams:
                self._streams[seed] = [], self.source.stream(1.0, seed, self.cv)
            drawn, following = self._streams[seed]
            drawn += islice(following, max(0, requests - len(drawn)))
            self._samples[key] = JobSample(drawn[:requests])
        return self._samples[key]


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
        return jobs[self.first_counted(jobs) :] if self.warmup else jobs

    def jobs(self) -> Iterator[Job]:
        """All counted requests of all samples."""
        return (job for sample in self.samples for job in self.counting(sample))

    def counted(self) -> dict[str, int]:
        """Number of counted requests by kind, over all samples."""
        found: Counter[str] = Counter()
        for sample in self.samples:
            found.update(self._counts(sample))
        return found

    def first_counted(self, sample: Sequence[Job]) -> int:
        """Index of the first request of a sample that is counted."""
        if not self.warmup:
            return 0
        return bisect_left(sample, sample[self.warmup].at_s, key=lambda job: job.at_s)

    def _counts(self, sample: Sequence[Job]) -> Counter[str]:
        """Number of counted requests of one sample, by kind."""
        first = self.first_counted(sample)
        known = sample.counts_from if isinstance(sample, JobSample) else {}
        if first not in known:
            known[first] = Counter(job.kind for job in sample[first:])
        return known[first]

    def sustains(self, placement: Placement, rate: float) -> bool:
        """Whether `rate` does not exceed the rate at which the placement's queues stop growing."""
        return rate <= self.most_rps(placement) * (1.0 + EPSILON)

    def serve(self, placement: Placement, rate: float, seed: int) -> Sequence[JobResult]:
        """Simulates one sample at `rate` requests per second; results come in any order."""
        jobs = speed_up_jobs(self.samples[seed], rate)
        self._count_run(seed)
        return self.run(placement, jobs)

    def arrays(self) -> BoundArrays | None:
        """All counted requests as arrays; None if they are too few, or there is no machine code."""
        samples = [sample for sample in self.samples if isinstance(sample, JobSample)]
        if len(samples) < len(self.samples) or min(map(len, samples)) < MIN_JOBS or not is_compiled():
            return None
        firsts = [self.first_counted(sample) for sample in samples]
        known, key = samples[0].joined, (*firsts, *map(id, samples))
        if key not in known:
            known[key] = BoundArrays([sample.table for sample in samples], firsts)
        return known[key]

    def _count_run(self, seed: int) -> None:
        self.effort.runs += 1
        self.effort.requests += len(self.samples[seed])

    def _compiled(self, placement: Placement, seed: int) -> tuple[CompiledCluster, JobTable] | None:
        """The placement as machine code, and a sample for it; None: the sample is too short, or it is not possible."""
        sample, compiling = self.samples[seed], getattr(self.run, "compile", None)
        if compiling is None or not isinstance(sample, JobSample) or len(sample) < MIN_JOBS:
            return None
        cluster: CompiledCluster | None = compiling(placement)
        return None if cluster is None else (cluster, sample.table)

    def stages(self, placement: Placement, rate: float, seed: int) -> dict[str, list[float]]:
        """Seconds by stage of each request that did not fail in one sample."""
        if (compiled := self._compiled(placement, seed)) is None:
            results = [one for one in self.serve(placement, rate, seed) if not one.failed]
            return {stage: [one.parts.get(stage, 0.0) for one in results] for stage in STAGES}
        self._count_run(seed)
        moments_s = compiled[0].run(compiled[1], rate).served_s
        return {
            stage: (moments_s[:, place + 1] - moments_s[:, place]).tolist()
            for place, stage in enumerate(STAGES)
        }

    def spans(self, placement: Placement, rate: float, seed: int) -> tuple[list[float], list[float]]:
        """Moments in seconds at which requests of one sample arrive, and at which they have ended, in any order."""
        if (compiled := self._compiled(placement, seed)) is None:
            results = self.serve(placement, rate, seed)
            return [one.job.at_s for one in results], [one.ended_s for one in results]
        self._count_run(seed)
        moments_s = compiled[0].run(compiled[1], rate).moments_s
        return moments_s[:, 0].tolist(), moments_s[:, -1].tolist()

    def shares(self, placement: Placement, rate: float) -> dict[str, float]:
        """The share of each kind of request that meets both its SLOs at `rate`, over all samples."""
        total, missed = self.counted(), Counter[str]()
        for seed in range(len(self.samples)):
            missed.update(self._count_missing(placement, rate, seed, total))
        return {kind: (count - missed[kind]) / count for kind, count in total.items()}

    def shares_if_met(self, placement: Placement, rate: float) -> dict[str, float] | None:
        """The shares if each kind reaches its attainment; else None, as soon as that is certain."""
        total, missed, spare = self.counted(), Counter[str](), self._most_missing()
        for seed in range(len(self.samples)):
            left = {kind: most - missed[kind] for kind, most in spare.items()}
            missed.update(self._count_missing(placement, rate, seed, left))
            if any(missed[kind] > most for kind, most in spare.items()):
                return None
        return {kind: (count - missed[kind]) / count for kind, count in total.items()}

    def _most_missing(self) -> dict[str, int]:
        """How many counted requests of each kind may miss their SLOs."""
        return {
            kind: count - math.ceil(self.slo(kind).attainment * count - EPSILON)
            for kind, count in self.counted().items()
        }

    def passes(self, placement: Placement, rate: float) -> bool:
        """Whether each kind reaches its attainment at `rate`; stops once further requests cannot change the answer."""
        if not self.sustains(placement, rate):
            return False
        total, spare = self.counted(), self._most_missing()
        met: Counter[str] = Counter()
        for seed, sample in enumerate(self.samples):
            missed = self._count_missing(placement, rate, seed, spare)
            spare = {kind: left - missed[kind] for kind, left in spare.items()}
            if any(left < 0 for left in spare.values()):
                return False
            met.update(self._counts(sample))
            met.subtract(missed)
            if all(met[kind] >= total[kind] - most for kind, most in self._most_missing().items()):
                return True
        return False

    def _count_missing(
        self, placement: Placement, rate: float, seed: int, spare: Mapping[str, int]
    ) -> Counter[str]:
        """Number of counted requests that missed an SLO in one sample, by kind; with more than `spare` perhaps not all
        of them.
        """
        sample = self.samples[seed]
        if (compiled := self._compiled(placement, seed)) is not None:
            cluster, table = compiled
            self._count_run(seed)
            limits = [(self.slo(kind).ttft_s, self.slo(kind).tpot_s) for kind in table.kinds]
            # Kinds of which no request counts have none to spare.
            allowed = [spare.get(kind, 0) for kind in table.kinds]
            left = cluster.run(table, rate, self.first_counted(sample), limits, allowed).spare
            return Counter(
                {kind: has - rest for kind, has, rest in zip(table.kinds, allowed, left, strict=True)}
            )
        begun_s = sample[self.warmup].at_s / rate if self.warmup else -math.inf
        counter, serving = _MissCounter(self.slos, begun_s, spare), getattr(self.run, "serve_into", None)
        if serving is None:
            for result in self.serve(placement, rate, seed):
                counter.count(result)
        else:
            self._count_run(seed)
            with suppress(TooManyMissed):
                serving(placement, speed_up_jobs(sample, rate), counter)
        return counter.missed


class TooManyMissed(Exception):
    """More requests of a run have missed their SLOs than may."""


class _MissCounter:
    """Counts requests that missed an SLO, of those that arrived from `begun_s` on."""

    def __init__(self, slos: Slos, begun_s: float, spare: Mapping[str, int]) -> None:
        self.slos, self.begun_s, self.spare = slos, begun_s, spare
        self.missed: Counter[str] = Counter()

    def count(self, result: JobResult) -> None:
        """Counts a request that has ended."""
        kind = result.job.kind
        if result.job.at_s >= self.begun_s and not result.meets_slo(slo_for(self.slos, kind)):
            self.missed[kind] += 1

    def add(self, result: JobResult) -> None:
        """Counts a request that has ended, and raises TooManyMissed if further ones cannot change the answer."""
        self.count(result)
        kind = result.job.kind
        if self.missed[kind] > self.spare.get(kind, 0):
            raise TooManyMissed


def speed_up_jobs(jobs: Sequence[Job], rate: float) -> list[Job]:
    """The same jobs with arrival times divided by `rate`."""
    return [replace(job, at_s=job.at_s / rate) for job in jobs]


def overall_attainment(shares: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """Attainment over all kinds, from the attainment (`shares`) and number of requests (`counts`) of each."""
    total = sum(counts.values())
    return sum(shares[kind] * count for kind, count in counts.items()) / total if total else 0.0
