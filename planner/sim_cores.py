"""What the processes of one machine have in common, in virtual time: its cores.

Workers are in their steps or not; how much longer a step takes beside another is in its rhythm (`planner.cost.Rhythm`).
A gateway's processor does one thing after the other.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf


@dataclass(slots=True)
class Cores:
    """From when to when each worker is in its step, without what is beside the model."""

    number: int = 1
    spans: dict[Hashable, tuple[float, float]] = field(default_factory=dict)

    def busy(self, at_s: float, but: Hashable) -> bool:
        """Whether another one is in a step."""
        return any(begin <= at_s < end for own, (begin, end) in self.spans.items() if own is not but)

    def stretch(self, at_s: float) -> float:
        """How many times longer than alone something takes that shares the cores with workers' steps."""
        steps = sum(begin <= at_s < end for begin, end in self.spans.values())
        return max(1.0, (steps + 1) / self.number)


@dataclass(slots=True)
class Processor:
    """A gateway's, on one of the cores."""

    cores: Cores
    free_s: float = -inf  # when it has done all that has come

    def done_s(self, now_s: float, work_s: float) -> float:
        """When it has done what has come, after all that came before.

        `now_s` is when it would be done if there were nothing else: what was measured of a machine at rest contains the
        work. The work takes longer while workers are in steps on all cores.
        """
        self.free_s = max(now_s, self.free_s + work_s * self.cores.stretch(now_s))
        return self.free_s
