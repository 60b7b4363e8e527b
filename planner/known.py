"""What a judge has said, and what follows from it: simulations are dear, and most questions are near earlier ones.

More workers of a role never serve less, and more traffic is never served better. So a fleet that reached the target is
enough for less traffic, and any larger one is too; a fleet that missed it is not enough for more, nor is a smaller one.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from planner.terms import BOTH, DECODE, PREFILL
from planner.windows import Mix

ROLES = (PREFILL, DECODE, BOTH)


class Fleet(msgspec.Struct, frozen=True, order=True):
    """How many workers there are of each role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    def __str__(self) -> str:
        counts = (f"{getattr(self, role)} × {role}" for role in ROLES if getattr(self, role))
        return " + ".join(counts) or "nothing"

    @property
    def serves(self) -> bool:
        return bool(self.both or (self.prefill and self.decode))

    def plus(self, role: str, count: int) -> Fleet:
        return msgspec.structs.replace(self, **{role: getattr(self, role) + count})

    def within(self, other: Fleet) -> bool:
        """Whether `other` has at least as many of each role."""
        return self.prefill <= other.prefill and self.decode <= other.decode and self.both <= other.both


class Judge(Protocol):
    """Tells how a fleet would do."""

    def attainment(self, fleet: Fleet, mix: Mix, rate: float, cv: float) -> float:
        """Share of requests that keep their objectives, with `rate` of them per second for long."""


class Judged(msgspec.Struct, frozen=True):
    """A question to the judge, and its answer. The mix and the burstiness are those of the decision at hand."""

    fleet: Fleet
    rate: float
    attainment: float


class Known:
    """A judge's answers, for one mix at a time; asks only what does not follow from them."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._mix: Mix | None = None
        self._cv = 1.0
        self._all: dict[float, dict[tuple[Fleet, float], float]] = {}  # by burstiness
        self._answers: dict[tuple[Fleet, float], float] = {}
        self._fresh: list[Judged] = []

    def about(self, mix: Mix, cv: float) -> None:
        """What the next questions are about; answers about another mix are forgotten."""
        if mix != self._mix:
            self._mix, self._all = mix, {}
        self._cv, self._answers = cv, self._all.setdefault(cv, {})

    def enough(self, fleet: Fleet, rate: float, target: float) -> bool:
        """Whether the fleet reaches the target."""
        for (other, its_rate), answer in self._answers.items():
            if answer < target and fleet.within(other) and its_rate <= rate:
                return False
        return self.attainment(fleet, rate, target) >= target

    def attainment(self, fleet: Fleet, rate: float, target: float) -> float:
        """Of the fleet: exact, unless it is sure to reach the target, and then no more than it has."""
        if not fleet.serves:
            return 0.0
        if rate <= 0:
            return 1.0
        for (other, its_rate), answer in self._answers.items():
            if answer >= target and other.within(fleet) and its_rate >= rate:
                return answer
        if (fleet, rate) not in self._answers:
            assert self._mix is not None, "a question is about a mix"
            answer = self._judge.attainment(fleet, self._mix, rate, self._cv)
            self._answers[fleet, rate] = answer
            self._fresh.append(Judged(fleet, rate, answer))
        return self._answers[fleet, rate]

    def fresh(self) -> tuple[Judged, ...]:
        """What was asked since this was last called."""
        fresh, self._fresh = self._fresh, []
        return tuple(fresh)
