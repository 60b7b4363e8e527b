"""Which unit of deployment has the highest goodput per device: a search that drops only what cannot win.

Rates are rungs of a ladder, a common factor apart, and the same for every candidate: goodput per weight (devices, or
their price) is a rung, two candidates on one rung are tied, and whether a candidate reaches a rung is one question to
the simulator. A candidate is dropped when a bound, or one run, shows that it does not come near the best so far; so the
search over all of them, without dropping, finds the same (attainment falling with rate, as it does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from planner.bounds import ceiling
from planner.terms import Placement
from planner.trial import Trial

RATIO = 1.02  # of two neighbouring rungs: the precision of a goodput
LOWEST, HIGHEST = -700, 700  # rungs: 1e-6 to 1e6 requests per second and device
NEAR = 0.05  # of the best: closer candidates are told as ties

Trials = Callable[[Placement], Trial]  # the trial that a unit is put to
Bound = Callable[[Placement], dict[str, float]]
Weigh = Callable[[Placement], float]


@dataclass(frozen=True, slots=True)
class Scored:
    """A unit that was measured: goodput is `rate` requests per second, `per_weight` of that per device or price."""

    unit: Placement
    rung: int
    weight: float
    limits: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def per_weight(self) -> float:
        return RATIO**self.rung

    @property
    def rate(self) -> float:
        return self.per_weight * self.weight


@dataclass(frozen=True, slots=True)
class Result:
    """`scored`, best first: the best, and all within `near` of it. `dropped` counts the others by why.

    `impossible` are units that keep the promises at no rate, with the bounds that say so.
    """

    scored: tuple[Scored, ...]
    dropped: Mapping[str, int]
    impossible: tuple[tuple[Placement, Mapping[str, float]], ...]

    @property
    def best(self) -> Scored | None:
        return self.scored[0] if self.scored else None

    @property
    def ties(self) -> tuple[Scored, ...]:
        """Others that are as good, as far as a rung tells."""
        return tuple(one for one in self.scored[1:] if one.rung >= self.scored[0].rung - 1)


def rung_of(per_weight: float) -> int:
    """The highest rung not above a rate per weight."""
    if per_weight <= 0.0:
        return LOWEST - 1
    if math.isinf(per_weight):
        return HIGHEST
    return max(LOWEST - 1, min(HIGHEST, math.floor(math.log(per_weight) / math.log(RATIO) + 1e-9)))


def preferred(one: Scored) -> tuple[float, float, str]:
    """Best first: the higher rung, then fewer devices, then by name."""
    return -one.rung, one.weight, str(one.unit)


def search(
    units: Iterable[Placement],
    trials: Trials,
    bound: Bound,
    weigh: Weigh,
    near: float = NEAR,
    exhaustive: bool = False,
) -> Result:
    """The best of `units`, and those within `near` of it. `exhaustive` measures every one that no promise forbids."""
    slack = 0 if near <= 0.0 else math.ceil(-math.log1p(-near) / math.log(RATIO))
    waiting = [(unit, bound(unit), weigh(unit)) for unit in units]
    # High bounds first: the sooner a good one is known, the less the others cost. No bound sorts last but for its name.
    waiting.sort(key=lambda one: (-_reach(one[1], one[2]), one[2], str(one[0])))
    found: list[Scored] = []
    dropped: dict[str, int] = {}
    impossible = []
    best = LOWEST
    for unit, limits, weight in waiting:
        top = rung_of(ceiling(limits) / weight)
        floor = LOWEST if exhaustive else max(LOWEST, best - slack)
        if top < LOWEST:
            impossible.append((unit, limits))
        elif top < floor:
            _count(dropped, min(limits, key=lambda name: limits[name]))
        else:
            rung = climb(trials(unit), unit, weight, floor, top, best if found else None)
            if rung is None:
                _count(dropped, "simulated")
            else:
                found.append(Scored(unit, rung, weight, limits))
                best = max(best, rung)
    kept = found if exhaustive else [one for one in found if one.rung >= best - slack]
    _count(dropped, "simulated", len(found) - len(kept))
    return Result(tuple(sorted(kept, key=preferred)), dropped, tuple(impossible))


def climb(
    trial: Trial, unit: Placement, weight: float, floor: int, top: int, guess: int | None = None
) -> int | None:
    """The highest rung within [floor, top] at which `unit` passes; None if it does not even at `floor`.

    Gallops from `guess` (by default two thirds of the highest rate) to a bracket, and bisects it.
    """

    def good(rung: int) -> bool:
        return trial.passes(unit, RATIO**rung * weight)

    if guess is None:
        guess = top - 20 if top < HIGHEST else 0
    low, high = floor - 1, top + 1  # passes below everything, fails above everything
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


def _reach(limits: Mapping[str, float], weight: float) -> float:
    top = ceiling(dict(limits)) / weight
    return top if math.isfinite(top) else 0.0


def _count(into: dict[str, int], why: str, more: int = 1) -> None:
    if more:
        into[why] = into.get(why, 0) + more
