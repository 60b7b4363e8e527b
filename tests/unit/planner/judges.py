"""A judge in closed form, for tests of decisions: each role does so many tokens per second, and overload is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.known import Fleet
from planner.windows import Mix


@dataclass
class Rates:
    """Attainment 1 up to full load, and falling with the square of what is beyond; counts what it is asked."""

    read: float = 1000.0  # tokens per second of a worker that reads prompts
    write: float = 100.0
    asked: list[tuple[Fleet, float]] = field(default_factory=list)

    def attainment(self, fleet: Fleet, mix: Mix, rate: float, cv: float) -> float:
        self.asked.append((fleet, rate))
        reading, writing = rate * mix.prompt / self.read, rate * mix.output / self.write
        loads = reading / max(fleet.prefill, 1), writing / max(fleet.decode, 1)
        load = (reading + writing) / fleet.both if fleet.both else max(loads)
        return min(1.0, 1.0 / load**2) if load else 1.0

    def describe(self) -> dict[str, object]:
        return {"about": "rates"}
