"""Several runs, and what they say together: attainment by rate, and the largest rate that meets the SLOs.

Runs of a search end early when they are hopeless. Each is preceded by a wait until the server is at rest, so that none
begins on the queue that another left.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from diptych.errors import ConfigError, StartError
from planner.attainment import wilson_interval
from planner.types import Job
from planner.workload.workload import Workload
from services.bench.goodput import GoodputEstimate, RateBracket, find_rate, mean_interval
from services.bench.load_generator import LoadGenerator, LoadRun, OnProgress, RunOptions
from services.bench.options import DEFAULT_RUN_S
from services.bench.server import BenchServer, wait_for_rest

# Seconds that the smallest request is assumed to take on an idle server, until it has been measured.
CALM_S = 0.5
MAX_REST_S = 120.0
# Precision of a goodput, as a share of it.
PRECISION = 0.05
TOUCHES = 3
# Ratio of two neighbouring rates while the search looks for a bracket.
BRACKET_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """The load of a run: a workload, its arrivals, and its length (`seconds`, or `requests` if given).

    `replay` keeps the trace's own order and shape, and sends all of it unless one is given. Else gaps are gamma with
    `cv`, of which 1 is Poisson, and a run lasts `DEFAULT_RUN_S` unless one is given. `warmup_s` is the part
    of each run that is not counted; by default a tenth.
    """

    workload: Workload
    replay: bool = False
    cv: float = 1.0
    seconds: float | None = None
    requests: int | None = None
    warmup_s: float | None = None

    def make_jobs(self, rate: float | None, seed: int) -> list[Job]:
        """The requests of one run, from 0 s on; `rate` None is a trace's own.

        Raises ConfigError if a formula is to be replayed.
        """
        if self.replay:
            own = _from_zero(self.workload.jobs)
            jobs = own if rate is None and own else self.workload.scaled(rate or 1.0)
            if self.requests is None and self.seconds is not None:
                return [job for job in jobs if job.at_s <= self.seconds]
            return jobs[: self.requests]
        assert rate is not None
        n = self.requests or max(1, round((self.seconds or DEFAULT_RUN_S) * rate))
        return self.workload.sample(n, rate, seed, self.cv)

    def warmup_of(self, jobs: Sequence[Job]) -> float:
        """How many seconds at the start of a run are not counted; `jobs` is what the run sends."""
        return self.warmup_s if self.warmup_s is not None else 0.1 * jobs[-1].at_s

    @property
    def trace_requests(self) -> int | None:
        """Requests of the trace that is replayed, of which a run may send fewer; None where they are drawn."""
        return len(self.workload.jobs) if self.replay else None


def _from_zero(jobs: Sequence[Job]) -> list[Job]:
    return [replace(job, at_s=job.at_s - jobs[0].at_s) for job in jobs]


@dataclass(slots=True)
class RatePoint:
    """All runs at one rate. `low` and `high` are a 95 % interval of the attainment, as if requests fared independently.

    With `hopeless`, a run was given up: `attainment` is then an upper bound.
    """

    rate: float
    attainment: float
    low: float
    high: float
    runs: list[LoadRun]
    hopeless: bool


class RateStudy:
    """Runs against one server. `on_run_ended` is called with each run that has ended, `watch` with its progress."""

    def __init__(
        self,
        server: BenchServer,
        load: BenchLoad,
        options: RunOptions,
        on_run_ended: Callable[[LoadRun], None] = lambda run: None,
        watch: OnProgress | None = None,
    ) -> None:
        self.runs: list[LoadRun] = []
        self._server, self._load, self._options = server, load, options
        self._on_run_ended, self._watch = on_run_ended, watch
        self._idle_latency_s = CALM_S

    async def measure_idle_latency(self) -> None:
        """Measure how long the smallest request takes while nothing else is asked."""
        began_s = asyncio.get_running_loop().time()
        for _ in range(TOUCHES):
            await self._server.send_smallest()
        self._idle_latency_s = max((asyncio.get_running_loop().time() - began_s) / TOUCHES, 0.01)

    async def run_rate(self, rate: float | None, seed: int, hopeless: bool = False) -> LoadRun:
        """One run at `rate` (None: as the trace has it).

        Raises:
            ConfigError: nothing is left after the warm-up.
            StartError: every single request failed.
        """
        jobs = self._load.make_jobs(rate, seed)
        warmup_s = self._load.warmup_of(jobs) if jobs else 0.0
        if not jobs or jobs[-1].at_s < warmup_s:
            why = f"{len(jobs)} requests, the last one due at {jobs[-1].at_s if jobs else 0:.1f} s"
            raise ConfigError(
                "a run has no request after its warm-up", why, "a longer run, or a shorter --warmup"
            )
        rested = await wait_for_rest(self._server, self._idle_latency_s, MAX_REST_S)
        offered = rate if rate is not None else len(jobs) / max(jobs[-1].at_s, 1e-9)
        run = LoadRun(offered, seed, len(jobs), warmup_s, began_idle=rested)
        options = replace(self._options, warmup_s=warmup_s, give_up_hopeless=hopeless)
        await LoadGenerator(self._server, jobs, options, run, self._watch).run_load()
        self.runs.append(run)
        if run.records and all(one.result.failed for one in run.records) and not run.given_up:
            worst = run.records[0]
            raise StartError(
                f"not one of {len(run.records)} requests was answered",
                f"{worst.result.failed}: {worst.error_text}"[:300],
            )
        self._on_run_ended(run)
        return run

    async def run_rates(self, rates: Sequence[float | None], seeds: Sequence[int]) -> None:
        """Run every rate with every seed."""
        for rate in rates:
            for seed in seeds:
                await self.run_rate(rate, seed)

    def run_size(self, rate: float) -> tuple[int, int]:
        """The requests of a run at `rate`, and how many of them come before it counts."""
        jobs = self._load.make_jobs(rate, 0) if rate else []
        warmup_s = self._load.warmup_of(jobs) if jobs else 0.0
        return len(jobs), sum(job.at_s < warmup_s for job in jobs)

    async def measure_attainment(self, rate: float, seed: int) -> float:
        """The joint attainment of a run, or an upper bound below the wanted one."""
        attained, of = (await self.run_rate(rate, seed, hopeless=True)).count_attained(self._options.slo)
        return attained / of if of else 0.0

    def rate_points(self) -> list[RatePoint]:
        """The results by rate, over all seeds."""
        rates = sorted({run.rate for run in self.runs})
        return [self._rate_point(rate, [run for run in self.runs if run.rate == rate]) for rate in rates]

    def _rate_point(self, rate: float, runs: list[LoadRun]) -> RatePoint:
        counts = [run.count_attained(self._options.slo) for run in runs]
        attained, of = sum(met for met, _ in counts), sum(of for _, of in counts)
        low, high = wilson_interval(attained, of)
        return RatePoint(
            rate, attained / of if of else math.nan, low, high, runs, any(run.given_up for run in runs)
        )


@dataclass(slots=True)
class SearchBracket:
    """The rates of one seed that met the SLOs, and those that did not.

    Rates below one that met them, or above one that did not, are not tried again.
    """

    good: float = 0.0
    bad: float = math.inf
    attained_at: dict[float, float] = field(default_factory=dict)

    def known_attainment(self, rate: float) -> float | None:
        """The attainment at `rate`, measured or inferred: 1 below a good rate, 0 above a bad one. Else None."""
        if rate in self.attained_at:
            return self.attained_at[rate]
        if rate < self.good:
            return 1.0
        return 0.0 if rate > self.bad else None

    def record_run(self, rate: float, attained: float, target: float) -> None:
        """Note that a run at `rate` requests/s reached the attainment `attained`; it is good from `target` on."""
        self.attained_at[rate] = attained
        if attained >= target:
            self.good = max(self.good, rate)
        else:
            self.bad = min(self.bad, rate)


class GoodputSearch:
    """Finds the goodput: the largest rate, in steps of `width`, at which the SLOs are met. A seed at a time.

    `attained(rate, seed)` does a run. Without `width`, steps are `PRECISION` of the rate where the first seed's bracket
    begins to fail.
    """

    def __init__(
        self, attained: Callable[[float, int], float], target: float, width: float | None = None
    ) -> None:
        self._attained, self._target, self._width = attained, target, width

    def find_goodput(
        self, seeds: Sequence[int], start: float, highest: float, size: Callable[[float], tuple[int, int]]
    ) -> GoodputEstimate:
        """The mean over seeds. `start` is where the first seed begins to look; `size` tells of a rate the requests of a
        run, and how many of them are not counted.
        """
        brackets: list[RateBracket] = []
        for seed in seeds:
            bracket = SearchBracket()
            self._find_bracket(bracket, brackets[-1].rate or start if brackets else start, highest, seed)
            top = min(bracket.bad, highest)
            width = self._width = self._width or _two_digits(PRECISION * top)
            brackets.append(
                find_rate(
                    lambda rate, seed=seed, bracket=bracket: self._attainment_at(rate, seed, bracket),  # type: ignore[misc]
                    self._target,
                    min(width, highest),
                    highest,
                )
            )
        rates = tuple(one.rate for one in brackets)
        rate = sum(rates) / len(rates)
        return GoodputEstimate(rate, mean_interval(rates), *size(rate), tuple(seeds), rates, tuple(brackets))

    def _find_bracket(self, bracket: SearchBracket, start: float, highest: float, seed: int) -> None:
        """Double or halve from `start` until a rate is good and the next is not."""
        rate, least = min(start, highest), self._width or start / 1024
        while self._attainment_at(rate, seed, bracket) >= self._target and rate < highest:
            rate = min(rate * BRACKET_FACTOR, highest)
        while bracket.good == 0.0 and rate > least:
            rate /= BRACKET_FACTOR
            self._attainment_at(rate, seed, bracket)

    def _attainment_at(self, rate: float, seed: int, bracket: SearchBracket) -> float:
        known = bracket.known_attainment(rate)
        if known is None:
            known = self._attained(rate, seed)
            bracket.record_run(rate, known, self._target)
        return known


def _two_digits(value: float) -> float:
    """`value` rounded to two digits: 0.0437 becomes 0.044."""
    return float(f"{value:.2g}")
