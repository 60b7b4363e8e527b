"""An evaluator in closed form, for tests: each role has a rate in tokens per second, and overload is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.replan.attainment_cache import FleetSize
from planner.replan.traffic_windows import LengthMix


@dataclass
class Rates:
    """Attainment 1 up to full load, and falling with the square of what is beyond; counts what it is asked."""

    read: float = 1000.0  # prompt tokens per second of a prefill worker
    write: float = 100.0
    asked: list[tuple[FleetSize, float]] = field(default_factory=list)

    def attainment(self, fleet: FleetSize, mix: LengthMix, rate: float, cv: float) -> float:
        self.asked.append((fleet, rate))
        reading, writing = rate * mix.prompt / self.read, rate * mix.output / self.write
        loads = reading / max(fleet.prefill, 1), writing / max(fleet.decode, 1)
        load = (reading + writing) / fleet.both if fleet.both else max(loads)
        return min(1.0, 1.0 / load**2) if load else 1.0

    def describe(self) -> dict[str, object]:
        return {"about": "rates"}
