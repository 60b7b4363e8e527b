"""Finds the unit with the highest goodput per device, and drops only candidates that cannot win.

Rates are rungs of a geometric ladder that all candidates share; a rung is a goodput per weight (devices, or their
price). Two candidates on the same rung are tied. The simulator answers one question: does this candidate reach this
rung? A candidate is dropped when an upper bound, or one run, shows that it stays well below the best so far. As
attainment falls with the rate, a search without dropping finds the same best unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from planner.placement.bounds import lowest_bound
from planner.placement.trial import Trial
from planner.types import Placement

# Ratio of two neighbouring rates (rungs) that the search tries. It is also the precision of a goodput.
RUNG_RATIO = 1.02
# Lowest and highest rung: 1e-6 and 1e6 requests per second and device.
MIN_RUNG, MAX_RUNG = -700, 700
# Candidates within this share of the best stay in the result.
NEAR_BEST = 0.05
# Gives the trial that a unit is simulated with.
TrialOf = Callable[[Placement], Trial]
BoundOf = Callable[[Placement], dict[str, float]]
WeightOf = Callable[[Placement], float]


@dataclass(frozen=True, slots=True)
class ScoredUnit:
    """A simulated unit. Its goodput is `rate` requests/s, or `per_weight` requests/s per device (or price)."""

    placement: Placement
    rung: int
    weight: float
    limits: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def per_weight(self) -> float:
        """Goodput in requests/s per unit of weight (a device, or its price)."""
        return RUNG_RATIO**self.rung

    @property
    def rate(self) -> float:
        """Goodput of the whole unit in requests/s."""
        return self.per_weight * self.weight


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search over units.

    `scored` holds the best unit and all within `near` of it, best first. `dropped` counts the others by reason.

    `impossible` are units that meet the SLOs at no rate, with the bounds that show this.
    """

    scored: tuple[ScoredUnit, ...]
    dropped: Mapping[str, int]
    impossible: tuple[tuple[Placement, Mapping[str, float]], ...]

    @property
    def best(self) -> ScoredUnit | None:
        """The unit with the highest goodput per weight; None if no unit reaches any rung."""
        return self.scored[0] if self.scored else None

    @property
    def ties(self) -> tuple[ScoredUnit, ...]:
        """Other units whose goodput is the same, or one rung lower, which is within the precision."""
        return tuple(unit for unit in self.scored[1:] if unit.rung >= self.scored[0].rung - 1)


def rung_of(per_weight: float) -> int:
    """The highest rung that is not above the given rate per weight."""
    if per_weight <= 0.0:
        return MIN_RUNG - 1
    if math.isinf(per_weight):
        return MAX_RUNG
    return max(MIN_RUNG - 1, min(MAX_RUNG, math.floor(math.log(per_weight) / math.log(RUNG_RATIO) + 1e-9)))


def preference_key(unit: ScoredUnit) -> tuple[float, float, str]:
    """Sort key, best first: the higher rung, then less weight, then by name."""
    return -unit.rung, unit.weight, str(unit.placement)


def search_units(
    placements: Iterable[Placement],
    trials: TrialOf,
    bound: BoundOf,
    weigh: WeightOf,
    near: float = NEAR_BEST,
    exhaustive: bool = False,
) -> SearchResult:
    """The best of `placements`, and those within `near` of it. `exhaustive` simulates each that can meet the SLOs."""
    # `near`, expressed as a number of rungs below the best.
    slack = 0 if near <= 0.0 else math.ceil(-math.log1p(-near) / math.log(RUNG_RATIO))
    waiting = [(placement, bound(placement), weigh(placement)) for placement in placements]
    # Units with high bounds come first: a good unit that is found early lets more of the others be dropped. Units
    # without a bound come last.
    waiting.sort(key=lambda one: (-_reachable_rung(one[1], one[2]), one[2], str(one[0])))
    found: list[ScoredUnit] = []
    dropped: dict[str, int] = {}
    impossible = []
    best = MIN_RUNG
    for unit, limits, weight in waiting:
        top = rung_of(lowest_bound(limits) / weight)
        floor = MIN_RUNG if exhaustive else max(MIN_RUNG, best - slack)
        if top < MIN_RUNG:
            impossible.append((unit, limits))
        elif top < floor:
            _count_dropped(dropped, min(limits, key=lambda name: limits[name]))
        else:
            rung = climb_ladder(trials(unit), unit, weight, floor, top, best if found else None)
            if rung is None:
                _count_dropped(dropped, "simulated")
            else:
                found.append(ScoredUnit(unit, rung, weight, limits))
                best = max(best, rung)
    kept = found if exhaustive else [one for one in found if one.rung >= best - slack]
    _count_dropped(dropped, "simulated", len(found) - len(kept))
    return SearchResult(tuple(sorted(kept, key=preference_key)), dropped, tuple(impossible))


def climb_ladder(
    trial: Trial, placement: Placement, weight: float, floor: int, top: int, guess: int | None = None
) -> int | None:
    """The highest rung within [floor, top] at which `placement` meets the SLOs; None if it misses them even at `floor`.

    Searches from `guess` with growing strides (by default from somewhat below `top`), then bisects.
    """

    def good(rung: int) -> bool:
        return trial.passes(placement, RUNG_RATIO**rung * weight)

    if guess is None:
        # Without a guess the search starts 20 rungs below the bound, at about two thirds of the rate.
        guess = top - 20 if top < MAX_RUNG else 0
    # `low` is the highest rung known to pass, and `high` the lowest rung known to fail.
    low, high = floor - 1, top + 1
    rung, stride = max(floor, min(top, guess)), 1
    if good(rung):
        low = rung
        while low < top and high == top + 1:
            rung = min(top, low + stride)
            low, high, stride = (rung, high, stride * 2) if good(rung) else (low, rung, stride)
    else:
        high = rung
        while high > floor and low == floor - 1:
            rung = max(floor, high - stride)
            low, high, stride = (rung, high, stride * 2) if good(rung) else (low, rung, stride * 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low if low >= floor else None


def measure_goodput(trial: Trial, placement: Placement, guess: float) -> float:
    """Goodput in requests/s: the highest rung that passes the trial, searched from `guess`; 0 if no rung passes."""
    rung = climb_ladder(trial, placement, 1.0, MIN_RUNG, rung_of(math.inf), rung_of(guess))
    return 0.0 if rung is None else ScoredUnit(placement, rung, 1.0).rate


def _reachable_rung(limits: Mapping[str, float], weight: float) -> float:
    """The bound on the rate per weight; 0 if there is none, so that the unit is tried last."""
    top = lowest_bound(dict(limits)) / weight
    return top if math.isfinite(top) else 0.0


def _count_dropped(into: dict[str, int], why: str, more: int = 1) -> None:
    """Adds `more` dropped candidates to the count of the reason `why`."""
    if more:
        into[why] = into.get(why, 0) + more
