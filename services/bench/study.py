"""Several runs, and what they say together: attainment by rate, and the largest rate that keeps the objectives.

Runs of a search end early when they are hopeless. Each is preceded by a wait until the server is at rest, so that none
begins on the queue that another left.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from diptych.errors import ConfigError, StartError
from planner.goodput import Found, Goodput, find_rate, spread
from planner.tally import wilson
from planner.terms import Job
from planner.workload import Workload
from services.bench.drive import Drive, Plan, Run, Watch
from services.bench.options import LONG_S
from services.bench.target import Target, rest

CALM_S = 0.5  # a small request's time that is taken for rest, if none was measured
LONGEST_REST_S = 120.0
PRECISION = 0.05  # of a goodput, as a share of it
TOUCHES = 3
FACTOR = 2.0  # between the rates that look for a bracket


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: a workload, how it arrives, and for how long (`seconds`, or `requests` if that is given).

    `replay` keeps the trace's own order and shape, and sends all of it unless one is given. Else gaps are gamma with
    `cv`, of which 1 is Poisson, and a run lasts `LONG_S` unless one is given. `warmup_s` is the part of each run that
    is not counted; by default a tenth.
    """

    workload: Workload
    replay: bool = False
    cv: float = 1.0
    seconds: float | None = None
    requests: int | None = None
    warmup_s: float | None = None

    def jobs(self, rate: float | None, seed: int) -> list[Job]:
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
        n = self.requests or max(1, round((self.seconds or LONG_S) * rate))
        return self.workload.sample(n, rate, seed, self.cv)

    def warmup(self, jobs: Sequence[Job]) -> float:
        return self.warmup_s if self.warmup_s is not None else 0.1 * jobs[-1].at_s

    @property
    def whole(self) -> int | None:
        """Requests of the trace that is replayed, of which a run may send fewer; None where they are drawn."""
        return len(self.workload.jobs) if self.replay else None


def _from_zero(jobs: Sequence[Job]) -> list[Job]:
    return [replace(job, at_s=job.at_s - jobs[0].at_s) for job in jobs]


@dataclass(slots=True)
class Point:
    """All runs at one rate. `low` and `high` are a 95 % interval of the attainment, as if requests fared independently.

    With `hopeless`, a run was given up: `attainment` is then an upper bound.
    """

    rate: float
    attainment: float
    low: float
    high: float
    runs: list[Run]
    hopeless: bool


class Study:
    """Runs against one target. `told` hears of each run when it has ended, `watch` of its progress."""

    def __init__(
        self,
        target: Target,
        load: Load,
        plan: Plan,
        told: Callable[[Run], None] = lambda run: None,
        watch: Watch | None = None,
    ) -> None:
        self.runs: list[Run] = []
        self._target, self._load, self._plan = target, load, plan
        self._told, self._watch = told, watch
        self._calm_s = CALM_S

    async def prepare(self) -> None:
        """Measure how long the smallest request takes while nothing else is asked."""
        began_s = asyncio.get_running_loop().time()
        for _ in range(TOUCHES):
            await self._target.touch()
        self._calm_s = max((asyncio.get_running_loop().time() - began_s) / TOUCHES, 0.01)

    async def run(self, rate: float | None, seed: int, hopeless: bool = False) -> Run:
        """One run at `rate` (None: as the trace has it).

        Raises:
            ConfigError: nothing is left after the warm-up.
            StartError: every single request failed.
        """
        jobs = self._load.jobs(rate, seed)
        warmup_s = self._load.warmup(jobs) if jobs else 0.0
        if not jobs or jobs[-1].at_s < warmup_s:
            why = f"{len(jobs)} requests, the last one due at {jobs[-1].at_s if jobs else 0:.1f} s"
            raise ConfigError(
                "a run has no request after its warm-up", why, "a longer run, or a shorter --warmup"
            )
        rested = await rest(self._target, self._calm_s, LONGEST_REST_S)
        told = rate if rate is not None else len(jobs) / max(jobs[-1].at_s, 1e-9)
        run = Run(told, seed, len(jobs), warmup_s, rested=rested)
        plan = replace(self._plan, warmup_s=warmup_s, hopeless=hopeless)
        await Drive(self._target, jobs, plan, run, self._watch).go()
        self.runs.append(run)
        if run.seen and all(one.served.failed for one in run.seen) and not run.hopeless:
            worst = run.seen[0]
            raise StartError(
                f"not one of {len(run.seen)} requests was answered",
                f"{worst.served.failed}: {worst.told}"[:300],
            )
        self._told(run)
        return run

    async def curve(self, rates: Sequence[float | None], seeds: Sequence[int]) -> None:
        """Every rate with every seed."""
        for rate in rates:
            for seed in seeds:
                await self.run(rate, seed)

    def size(self, rate: float) -> tuple[int, int]:
        """The requests of a run at `rate`, and how many of them come before it counts."""
        jobs = self._load.jobs(rate, 0) if rate else []
        warmup_s = self._load.warmup(jobs) if jobs else 0.0
        return len(jobs), sum(job.at_s < warmup_s for job in jobs)

    async def attained(self, rate: float, seed: int) -> float:
        """The joint attainment of a run, or an upper bound below the objective."""
        kept, of = (await self.run(rate, seed, hopeless=True)).attained(self._plan.slo)
        return kept / of if of else 0.0

    def points(self) -> list[Point]:
        """By rate, over all seeds."""
        rates = sorted({run.rate for run in self.runs})
        return [self._point(rate, [run for run in self.runs if run.rate == rate]) for rate in rates]

    def _point(self, rate: float, runs: list[Run]) -> Point:
        counts = [run.attained(self._plan.slo) for run in runs]
        kept, of = sum(kept for kept, _ in counts), sum(of for _, of in counts)
        low, high = wilson(kept, of)
        return Point(rate, kept / of if of else math.nan, low, high, runs, any(run.hopeless for run in runs))


@dataclass(slots=True)
class Bracket:
    """Rates of one seed that kept the objectives, and that did not; what lies below the one or above the other is not
    tried again.
    """

    good: float = 0.0
    bad: float = math.inf
    seen: dict[float, float] = field(default_factory=dict)

    def known(self, rate: float) -> float | None:
        """Attainment as far as it follows: 1 below a good rate, 0 above a bad one."""
        if rate in self.seen:
            return self.seen[rate]
        if rate < self.good:
            return 1.0
        return 0.0 if rate > self.bad else None

    def note(self, rate: float, attained: float, target: float) -> None:
        self.seen[rate] = attained
        if attained >= target:
            self.good = max(self.good, rate)
        else:
            self.bad = min(self.bad, rate)


class Search:
    """Finds the goodput: the largest rate, in steps of `width`, at which the objectives are kept. A seed at a time.

    `attained(rate, seed)` does a run. Without `width`, steps are `PRECISION` of the rate where the first seed's bracket
    begins to fail.
    """

    def __init__(
        self, attained: Callable[[float, int], float], target: float, width: float | None = None
    ) -> None:
        self._attained, self._target, self._width = attained, target, width

    def goodput(
        self, seeds: Sequence[int], start: float, highest: float, size: Callable[[float], tuple[int, int]]
    ) -> Goodput:
        """The mean over seeds. `start` is where the first seed begins to look; `size` tells of a rate the requests of a
        run, and how many of them are not counted.
        """
        found: list[Found] = []
        for seed in seeds:
            bracket = Bracket()
            self._enclose(bracket, found[-1].rate or start if found else start, highest, seed)
            top = min(bracket.bad, highest)
            width = self._width = self._width or _rounded(PRECISION * top)
            found.append(
                find_rate(
                    lambda rate, seed=seed, bracket=bracket: self._at(rate, seed, bracket),  # type: ignore[misc]
                    self._target,
                    min(width, highest),
                    highest,
                )
            )
        rates = tuple(one.rate for one in found)
        rate = sum(rates) / len(rates)
        return Goodput(rate, spread(rates), *size(rate), tuple(seeds), rates, tuple(found))

    def _enclose(self, bracket: Bracket, start: float, highest: float, seed: int) -> None:
        """Double or halve from `start` until a rate is good and the next is not."""
        rate, least = min(start, highest), self._width or start / 1024
        while self._at(rate, seed, bracket) >= self._target and rate < highest:
            rate = min(rate * FACTOR, highest)
        while bracket.good == 0.0 and rate > least:
            rate /= FACTOR
            self._at(rate, seed, bracket)

    def _at(self, rate: float, seed: int, bracket: Bracket) -> float:
        known = bracket.known(rate)
        if known is None:
            known = self._attained(rate, seed)
            bracket.note(rate, known, self._target)
        return known


def _rounded(value: float) -> float:
    """To two digits: 0.0437 is 0.044."""
    return float(f"{value:.2g}")
