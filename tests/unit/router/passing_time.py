"""Time that passes while workers beat or are silent."""

from __future__ import annotations

from diptych.messages import (
    Heartbeat,
    WorkerStats,
)
from router.effects import (
    ClockTick,
)
from tests.unit.router.fake_deployment import (
    FakeDeployment,
)


def wait(world: FakeDeployment, seconds: float, silent: str = "") -> None:
    """Time passes; whoever is alive and not `silent` beats."""
    for _ in range(round(seconds / 0.25)):
        world.now_s += 0.25
        for name, worker in world.workers.items():
            if worker.alive and name != silent and name in world.relay.fleet.workers:
                world.say(name, Heartbeat(name, worker.hello.incarnation, WorkerStats()))
        world.do(ClockTick())
