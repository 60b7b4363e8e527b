"""Models the CPU cores that the simulated processes of one machine share, and the queue of the gateway's own work.

A worker is either in a step or idle. How much longer a step takes while another worker is in one comes from
`planner.costs.step.StepVariation`. A gateway uses one core, so it does one thing at a time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf


@dataclass(slots=True)
class SimCores:
    """The cores of one machine. `spans` holds the begin and end (seconds) of each worker's current step."""

    number: int = 1
    spans: dict[Hashable, tuple[float, float]] = field(default_factory=dict)

    def busy(self, at_s: float, but: Hashable) -> bool:
        """Whether a worker other than `but` is in a step at `at_s`."""
        return any(begin <= at_s < end for own, (begin, end) in self.spans.items() if own is not but)

    def stretch(self, at_s: float) -> float:
        """The factor by which work takes longer at `at_s` because workers' steps occupy the cores (at least 1)."""
        steps = sum(begin <= at_s < end for begin, end in self.spans.values())
        return max(1.0, (steps + 1) / self.number)


@dataclass(slots=True)
class GatewayProcessor:
    """The one core that a gateway runs on, as a queue of work."""

    cores: SimCores
    # The time at which all work that has arrived will be done.
    free_s: float = -inf

    def done_s(self, now_s: float, work_s: float) -> float:
        """When work that arrives now will be done, after all earlier work.

        `now_s` is when it would be done on an idle machine: measured delays already contain the work once. `work_s`
        matters only if work queues up; it takes longer while workers' steps occupy all cores.
        """
        self.free_s = max(now_s, self.free_s + work_s * self.cores.stretch(now_s))
        return self.free_s
