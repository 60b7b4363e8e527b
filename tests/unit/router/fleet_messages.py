"""A fleet that has met workers, and what it does on a heartbeat."""

from __future__ import annotations

from diptych.messages import (
    Heartbeat,
    WorkerStats,
)
from router.effects import FleetChange
from router.workers.fleet import Fleet
from tests.unit.router.fake_deployment import make_hello


def met(*workers: str) -> Fleet:
    fleet = Fleet()
    for worker in workers:
        fleet.on_message(worker, make_hello(worker), 0.0)
    return fleet


def beat(worker: str, life: int = 1, **stats: float | bool) -> Heartbeat:
    return Heartbeat(worker, f"{worker}/{life}", WorkerStats(**stats))  # type: ignore[arg-type]


def kinds(changes: list[FleetChange]) -> list[str]:
    return [type(change).__name__ for change in changes]
