"""From runs at a few rates to the rate at which an SLO is just attained, and how sure that is.

Attainment is made to fall with the rate (isotonic regression, weighted by the requests that count), and its crossing
of the target is found by a straight line over the logarithm of the rate. One run of some seconds is noisy, and so is
where a search that believes each run would end; here every run has its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from diptych.slo import Slos
from planner.types import JobResult

TARGET = 0.9
SURE, LOST = 0.95, 0.7  # the lowest rate is low enough from here on, the highest is high enough below
STEP, STRIDE = 1.2, 2  # between neighbouring rates, and how many steps a walk goes before it looks closer
FIRST = 0.85  # of a knee that is expected, where a walk begins
WARMUP = 0.1  # of a run: what comes in it does not count
DRAWS = 400  # of requests, for an interval
BELOW, ABOVE = "below", "above"  # all rates were too high; all of them were kept

Floats = NDArray[np.float64]
# By rate: whether each request met its SLO, in the order of arrival.
Fates = Mapping[float, Sequence[bool]]


@dataclass(frozen=True, slots=True)
class Knee:
    """A rate, in requests a second. `censored` says that the rates which were run do not enclose it."""

    rate: float
    censored: str = ""


def knee(
    rates: Sequence[float], attained: Sequence[float] | Floats, counted: Sequence[int], target: float = TARGET
) -> Knee:
    """Where attainment falls below `target`; `rates` rise, and `counted` requests stand behind each.

    If even the lowest rate fails, the line from there to rate 0, where everything is attained; if none does, the
    highest rate.
    """
    falling = _falling(attained, counted)
    first = _failing(falling, target)
    if first == len(falling):
        return Knee(rates[-1], ABOVE)
    if first == 0:
        return Knee(rates[0] * (1.0 - target) / (1.0 - float(falling[0])), BELOW)
    good, bad = float(falling[first - 1]), float(falling[first])
    share = max(0.0, good - target) / (good - bad)
    return Knee(rates[first - 1] * (rates[first] / rates[first - 1]) ** share)


def _falling(attained: Sequence[float] | Floats, counted: Sequence[int]) -> Floats:
    return np.asarray(isotonic_regression(attained, weights=counted, increasing=False).x)


def _failing(falling: Floats, target: float) -> int:
    """The place of the first that is below the target; their number if none is."""
    return int(np.count_nonzero(falling >= target - 1e-9))


def knee_of(fates: Fates, target: float = TARGET) -> Knee:
    """The knee of what was seen."""
    rates = sorted(fates)
    runs = [fates[rate] for rate in rates]
    return knee(rates, [sum(run) / len(run) for run in runs], [len(run) for run in runs], target)


def resampled(fates: Fates, seed: int, draws: int = DRAWS) -> Floats:
    """Knees of `draws` other runs that could have been seen: requests are drawn anew within each run, in blocks.

    Blocks, since neighbours share a queue. With the same seed the same places of a run are drawn, so that deployments
    which were sent the same requests are compared with the same of them.
    """
    rates = sorted(fates)
    attained = np.stack([_attained(fates[rate], [seed, round(1e6 * rate)], draws) for rate in rates], axis=1)
    counted = [len(fates[rate]) for rate in rates]
    return np.array([knee(rates, row, counted).rate for row in attained])


def _attained(fate: Sequence[bool], seed: Sequence[int], draws: int) -> Floats:
    """Attainment of each draw."""
    kept = np.asarray(fate, dtype=np.float64)
    size = math.ceil(math.sqrt(len(kept)))
    begins = np.random.default_rng(seed).integers(len(kept), size=(draws, math.ceil(len(kept) / size), 1))
    places = ((begins + np.arange(size)) % len(kept)).reshape(draws, -1)[:, : len(kept)]
    return np.asarray(kept[places].mean(axis=1))


# ---- over seeds


@dataclass(frozen=True, slots=True)
class Goodput:
    """Knees of one deployment under one SLO, one for each seed, and their redrawn likes: seeds × draws."""

    knees: tuple[Knee, ...]
    drawn: Floats

    @classmethod
    def of(cls, runs: Sequence[Fates]) -> Goodput:
        """Of the runs of each seed."""
        drawn = np.stack([resampled(fates, seed) for seed, fates in enumerate(runs)])
        return cls(tuple(knee_of(fates) for fates in runs), drawn)

    @property
    def mean(self) -> float:
        return sum(one.rate for one in self.knees) / len(self.knees)

    def report_fields(self) -> dict[str, Any]:
        return _interval_fields(self.rates, self.drawn, [one.censored for one in self.knees])

    @property
    def rates(self) -> list[float]:
        return [one.rate for one in self.knees]

    def over(self, others: Sequence[Goodput]) -> dict[str, Any]:
        """The ratio to that of the others which has most, seed by seed and draw by draw."""
        best = max(others, key=lambda one: one.mean)
        ratios = [one / other for one, other in zip(self.rates, best.rates, strict=True)]
        censored = [one.censored or two.censored for one, two in zip(self.knees, best.knees, strict=True)]
        return _interval_fields(ratios, self.drawn / best.drawn, censored)


def _interval_fields(values: Sequence[float], drawn: Floats, censored: Sequence[str]) -> dict[str, Any]:
    seeds, draws = drawn.shape  # seeds are drawn anew as well: they saw the machine at other times
    picked = np.random.default_rng(0).integers(seeds, size=(seeds, draws))
    low, high = np.percentile(drawn[picked, np.arange(draws)].mean(axis=0), (2.5, 97.5))
    return {
        "mean": round(sum(values) / len(values), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
        "seeds": [round(one, 3) for one in values],
        "censored": sum(map(bool, censored)),
    }


# ---- which rates to run


@dataclass(slots=True)
class Walk:
    """Runs of one deployment with one seed, at rates `centre` × STEP to whole powers, each judged by all of `slos`.

    It begins with the power `begin` and goes up while some SLO is not lost, then down until all are surely
    kept, within `lowest` and `highest`; then it looks between the rates that enclose a knee. `runs` are by power.
    """

    slos: Slos
    centre: float
    begin: int
    lowest: int
    highest: int
    runs: dict[int, list[JobResult]] = field(default_factory=dict)

    def toward(self, rates: Iterable[float]) -> Walk:
        """A walk on the same grid that has done nothing yet and begins below the least of these knees."""
        power = math.floor(math.log(FIRST * min(rates) / self.centre, STEP**STRIDE))
        return replace(self, begin=STRIDE * power, runs={})

    def again(self) -> Walk:
        """One that begins below what this one found."""
        return self.toward([knee_of(self.fates(name)).rate for name in self.slos])

    def next(self) -> int | None:
        """The power of the next run, if there is one to do."""
        if not self.runs:
            return min(max(self.begin, self.lowest), self.highest)
        top, bottom = max(self.runs), min(self.runs)
        if top + STRIDE <= self.highest and max(self.attained(top).values()) >= LOST:
            return top + STRIDE
        if bottom - STRIDE >= self.lowest and min(self.attained(bottom).values()) < SURE:
            return bottom - STRIDE
        return next((power for name in self.slos if (power := self._between(name)) is not None), None)

    def _between(self, regime: str) -> int | None:
        """A power between those that enclose this knee, if there is one that was not run."""
        powers = sorted(self.runs)
        shares = [self.attained(power)[regime] for power in powers]
        first = _failing(_falling(shares, [len(self.runs[power]) for power in powers]), TARGET)
        if not 0 < first < len(powers) or powers[first] - powers[first - 1] < STRIDE:
            return None
        return (powers[first - 1] + powers[first]) // 2

    def rate(self, power: int) -> float:
        return self.centre * STEP**power

    def attained(self, power: int) -> dict[str, float]:
        """By regime."""
        served = self.runs[power]
        return {
            name: sum(one.meets_slo(slo) for one in served) / len(served) for name, slo in self.slos.items()
        }

    def fates(self, regime: str) -> Fates:
        slo = self.slos[regime]
        return {
            self.rate(power): [one.meets_slo(slo) for one in served] for power, served in self.runs.items()
        }


def counted(served: Sequence[JobResult]) -> list[JobResult]:
    """Those that came after the warm-up, in the order of arrival."""
    ordered = sorted(served, key=lambda one: one.job.at_s)
    return [one for one in ordered if one.job.at_s >= WARMUP * ordered[-1].job.at_s]
