"""Remembers simulated attainment and infers nearby answers from it, because simulations are slow.

More workers of a role never lower attainment, and more traffic never raises it. So if a fleet reached the target, this
fleet and all larger ones also reach it with less traffic. If a fleet missed the target, this fleet and all smaller ones
also miss it with more traffic.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from planner.replan.traffic_windows import LengthMix
from planner.types import BOTH, DECODE, PREFILL

ROLES = (PREFILL, DECODE, BOTH)


class FleetSize(msgspec.Struct, frozen=True, order=True):
    """Number of workers of each role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    def __str__(self) -> str:
        counts = (f"{getattr(self, role)} × {role}" for role in ROLES if getattr(self, role))
        return " + ".join(counts) or "nothing"

    @property
    def can_serve(self) -> bool:
        """Whether the fleet can answer requests: a colocated worker, or both a prefill and a decode worker."""
        return bool(self.both or (self.prefill and self.decode))

    def with_more(self, role: str, count: int) -> FleetSize:
        """A copy with `count` more workers of `role` (fewer if negative)."""
        return msgspec.structs.replace(self, **{role: getattr(self, role) + count})

    def within(self, other: FleetSize) -> bool:
        """Whether `other` has at least as many of each role."""
        return self.prefill <= other.prefill and self.decode <= other.decode and self.both <= other.both


class FleetEvaluator(Protocol):
    """Estimates the attainment of a fleet, for example by simulation."""

    def attainment(self, fleet: FleetSize, mix: LengthMix, rate: float, cv: float) -> float:
        """Share of requests that meet their SLOs when `rate` requests arrive per second for a long time.

        `mix` gives their lengths, `cv` the burstiness of arrivals (coefficient of variation of inter-arrival times).
        """


class EvaluatedFleet(msgspec.Struct, frozen=True):
    """One answer of the evaluator: the attainment of a fleet at a rate, for the mix and burstiness of the moment."""

    fleet: FleetSize
    rate: float
    attainment: float


class AttainmentCache:
    """Caches the evaluator's answers for one mix of lengths, and asks only what cannot be inferred from them."""

    def __init__(self, evaluator: FleetEvaluator) -> None:
        self._evaluator = evaluator
        self._mix: LengthMix | None = None
        self._cv = 1.0
        # All answers so far, by burstiness.
        self._all: dict[float, dict[tuple[FleetSize, float], float]] = {}
        self._answers: dict[tuple[FleetSize, float], float] = {}
        self._fresh: list[EvaluatedFleet] = []

    def set_mix(self, mix: LengthMix, cv: float) -> None:
        """Sets mix and burstiness of the next questions; a new mix clears the cache."""
        if mix != self._mix:
            self._mix, self._all = mix, {}
        self._cv, self._answers = cv, self._all.setdefault(cv, {})

    def reaches_target(self, fleet: FleetSize, rate: float, target: float) -> bool:
        """Whether the fleet's attainment at `rate` is at least `target`."""
        for (other, its_rate), answer in self._answers.items():
            if answer < target and fleet.within(other) and its_rate <= rate:
                return False
        return self.attainment(fleet, rate, target) >= target

    def attainment(self, fleet: FleetSize, rate: float, target: float) -> float:
        """The attainment of the fleet at `rate`.

        If a smaller fleet is known to reach the target with at least as much traffic, its attainment is returned: a
        lower bound that saves a simulation.
        """
        if not fleet.can_serve:
            return 0.0
        if rate <= 0:
            return 1.0
        for (other, its_rate), answer in self._answers.items():
            if answer >= target and other.within(fleet) and its_rate >= rate:
                return answer
        if (fleet, rate) not in self._answers:
            assert self._mix is not None, "set_mix must be called first"
            answer = self._evaluator.attainment(fleet, self._mix, rate, self._cv)
            self._answers[fleet, rate] = answer
            self._fresh.append(EvaluatedFleet(fleet, rate, answer))
        return self._answers[fleet, rate]

    def take_fresh(self) -> tuple[EvaluatedFleet, ...]:
        """The answers that were simulated since the last call of this method."""
        fresh, self._fresh = self._fresh, []
        return tuple(fresh)
